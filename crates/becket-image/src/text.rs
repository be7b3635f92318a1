//! Names from inside images, and paths, as text that is safe to show. It never lets a letter through that a
//! terminal obeys or does not show, and never makes two different names look alike.

use std::path::Path;

/// A name or path: backslashes, bytes that are not UTF-8 and all that [`is_hidden`] are escaped.
pub fn shown(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for letter in chunk.valid().chars() {
            if letter == '\\' || is_hidden(letter) {
                text.extend(letter.escape_default());
            } else {
                text.push(letter);
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

/// A web address with its scheme and its host in lower case, as their case says nothing; all else as it is.
pub fn one_case(url: &str) -> String {
    let is_web = |scheme: &str| ["http", "https"].iter().any(|web| scheme.eq_ignore_ascii_case(web));
    let Some((scheme, rest)) = url.split_once("://").filter(|(scheme, _)| is_web(scheme)) else {
        return url.to_owned();
    };
    let (host, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    // What is before the host may be a password.
    let at = host.rfind('@').map_or(0, |at| at + 1);
    let (user, host) = host.split_at(at);
    format!("{}://{user}{}{path}", scheme.to_ascii_lowercase(), host.to_ascii_lowercase())
}

/// A path as a shell would take it.
pub fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+,:@%=".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// Letters that are no sign on a screen: those of control (newlines, too), those that order or join others
/// (format characters, category Cf), ends of lines, and those that are not drawn
/// (Default_Ignorable_Code_Point of Unicode 16).
pub fn is_hidden(letter: char) -> bool {
    letter.is_control()
        || matches!(letter,
            '\u{ad}' | '\u{34f}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}'
            | '\u{890}'..='\u{891}' | '\u{8e2}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}'
            | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn web_addresses_have_one_case_up_to_their_path() {
        for (url, same) in [
            ("HTTP://Example.ORG:80/A?B#C", "http://example.org:80/A?B#C"),
            ("Https://H?A", "https://h?A"),
            ("HTTPS://H#P1", "https://h#P1"),
            ("https://[FD00::A]/X", "https://[fd00::a]/X"),
            ("http://Me:Secret@H/x", "http://Me:Secret@h/x"),
            ("S3://Bucket/Key", "S3://Bucket/Key"),
            ("/Images/http://H", "/Images/http://H"),
            ("file:/Images", "file:/Images"),
        ] {
            assert_eq!(one_case(url), same);
        }
    }

    #[test]
    fn names_are_shown_safely() {
        for (name, text) in [
            (&b"plain name.img"[..], "plain name.img"),
            ("wörk 文".as_bytes(), "wörk 文"),
            (b"a\nb\x1b[2J", "a\\nb\\u{1b}[2J"),
            (b"a\\nb", "a\\\\nb"),
            (b"\xff\xc3", "\\xff\\xc3"),
            ("\u{202e}gpj.exe".as_bytes(), "\\u{202e}gpj.exe"),
            (
                "\u{61c}\u{ad}\u{180e}\u{115f}\u{e0041}\u{2066}\u{feff}".as_bytes(),
                "\\u{61c}\\u{ad}\\u{180e}\\u{115f}\\u{e0041}\\u{2066}\\u{feff}",
            ),
            ("\u{2028}\u{85}\u{fe0f}\u{1d173}".as_bytes(), "\\u{2028}\\u{85}\\u{fe0f}\\u{1d173}"),
            ("é e\u{301} 한글 א ب".as_bytes(), "é e\u{301} 한글 א ب"),
        ] {
            assert_eq!(shown(name), text);
        }
    }
}

//! Names from inside images, as text that is safe to show.
//! It never lets a control character through, and never makes two different names look alike.

/// A name or path: backslashes, control characters and bytes that are no UTF-8 are escaped.
pub fn shown(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for letter in chunk.valid().chars() {
            if letter.is_control() || letter == '\\' || is_invisible(letter) {
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

/// Letters that turn the direction of what follows, or show nothing.
fn is_invisible(letter: char) -> bool {
    matches!(letter, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shown_safely() {
        for (name, text) in [
            (&b"plain name.img"[..], "plain name.img"),
            ("wörk 文".as_bytes(), "wörk 文"),
            (b"a\nb\x1b[2J", "a\\nb\\u{1b}[2J"),
            (b"a\\nb", "a\\\\nb"),
            (b"\xff\xc3", "\\xff\\xc3"),
            ("\u{202e}gpj.exe".as_bytes(), "\\u{202e}gpj.exe"),
        ] {
            assert_eq!(shown(name), text);
        }
    }
}

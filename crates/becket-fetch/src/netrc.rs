//! Passwords for servers, from the user's netrc file (the format of ftp(1) and curl(1)).
//! They are sent to the host that the user named, and never to another.

use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use becket_image::shown;

use crate::home;

/// The largest file that is read, in bytes.
const LARGEST: u64 = 1 << 20;

/// A name and its password.
#[derive(PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) name: String,
    pub(crate) password: String,
}

/// What the user's file says of a host.
pub(crate) enum Netrc {
    /// Nothing says where the file is.
    Nowhere,
    /// There is no such file; safe to show, as all that follow.
    Missing(String),
    /// It is there, and cannot be read for this reason.
    Unread(String, String),
    /// It has no login for the host.
    Silent(String),
    Login(String, Login),
}

impl Netrc {
    /// Looks a host up in `$NETRC`, or else in `~/.netrc`.
    pub(crate) fn of_user(host: &str) -> Netrc {
        let home = || Some(PathBuf::from(home::variable("HOME")?).join(".netrc"));
        match home::variable("NETRC").map(PathBuf::from).or_else(home) {
            Some(path) => Netrc::at(&path, host),
            None => Netrc::Nowhere,
        }
    }

    fn at(path: &Path, host: &str) -> Netrc {
        let file = shown(path.as_os_str().as_bytes());
        let meta = match std::fs::metadata(path) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Netrc::Missing(file);
            }
            meta => meta.map_err(|error| error.to_string()),
        };
        let text = meta.and_then(|meta| match meta.is_file() {
            false => Err("it is not a regular file".to_owned()),
            true if meta.len() > LARGEST => Err(format!("it has more than {LARGEST} bytes")),
            true => std::fs::read_to_string(path).map_err(|error| error.to_string()),
        });
        match text.and_then(|text| find(&text, host)) {
            Ok(Some(login)) => Netrc::Login(file, login),
            Ok(None) => Netrc::Silent(file),
            Err(why) => Netrc::Unread(file, why),
        }
    }
}

/// The entry of a host; that of `default` where there is no other before it.
///
/// # Errors
/// It is not known where a word of the file ends: a sentence.
fn find(text: &str, host: &str) -> Result<Option<Login>, String> {
    // A macro ends at an empty line, and has lines like entries.
    let mut lines = text.lines();
    let mut words: Vec<String> = Vec::new();
    while let Some(line) = lines.next() {
        if line.split_whitespace().next() == Some("macdef") {
            lines.by_ref().find(|line| line.trim().is_empty());
        } else if !line.trim_start().starts_with('#') {
            words.extend(split(line).ok_or("a quoted word in it has no end")?);
        }
    }
    let mut words = words.into_iter();
    let (mut ours, mut name, mut password) = (false, None, None);
    while let Some(word) = words.next() {
        let mut found = || Some(Login { name: name.take()?, password: password.take()? });
        match word.as_str() {
            "machine" | "default" => {
                if ours && let Some(login) = found() {
                    return Ok(Some(login));
                }
                (name, password) = (None, None);
                ours =
                    word == "default" || words.next().is_some_and(|named| named.eq_ignore_ascii_case(host));
            }
            "login" => name = words.next(),
            "password" => password = words.next(),
            "account" => drop(words.next()),
            _ => {}
        }
    }
    let both = name.filter(|_| ours).zip(password);
    Ok(both.map(|(name, password)| Login { name, password }))
}

/// The words of a line. As curl has it, one that begins with `"` goes on to the next `"`, and a backslash in
/// it stands before `"`, itself, `n`, `r` and `t`. None if its end is missing: it may be any password then.
fn split(line: &str) -> Option<Vec<String>> {
    let (mut words, mut rest) = (Vec::new(), line.trim_start());
    while !rest.is_empty() {
        let Some(quoted) = rest.strip_prefix('"') else {
            let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            words.push(word.to_owned());
            rest = after.trim_start();
            continue;
        };
        let (mut word, mut letters) = (String::new(), quoted.chars());
        loop {
            match letters.next()? {
                '"' => break,
                '\\' => word.push(match letters.next()? {
                    'n' => '\n',
                    'r' => '\r',
                    't' => '\t',
                    other => other,
                }),
                letter => word.push(letter),
            }
        }
        words.push(word);
        rest = letters.as_str().trim_start();
    }
    Some(words)
}

impl Login {
    pub(crate) fn basic(&self) -> String {
        basic(&self.name, &self.password)
    }
}

/// The value of an `Authorization` header (RFC 7617).
pub(crate) fn basic(name: &str, password: &str) -> String {
    format!("Basic {}", base64(format!("{name}:{password}").as_bytes()))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let byte = |at: usize| u32::from(three.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let index = (bits >> (18 - 6 * digit)) & 63;
            let there = digit <= three.len();
            let digit = DIGITS.get(index as usize).copied().unwrap_or(b'=');
            text.push(if there { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, host: &str) -> Option<(String, String)> {
        find(text, host).ok()?.map(|login| (login.name, login.password))
    }

    #[test]
    fn a_host_has_its_own_login_and_no_other_hosts() {
        let text = "machine a.example login me password one\nmachine b.example\n login you\n password two\n";
        let pair = |name: &str, password: &str| Some((name.to_owned(), password.to_owned()));
        assert_eq!(of(text, "A.example"), pair("me", "one"));
        assert_eq!(of(text, "b.example"), pair("you", "two"));
        assert_eq!(of(text, "c.example"), None);
        assert_eq!(of(text, "a.example.evil"), None);
        let with =
            format!("macdef init\nmachine c.example login x password y\n\n{text}default login d password e");
        assert_eq!(of(&with, "c.example"), pair("d", "e"));
        assert_eq!(of(&with, "a.example"), pair("me", "one"));
        assert_eq!(of("machine a login", "a"), None);
        assert_eq!(of("machine a login x", "a"), None);
    }

    #[test]
    fn quotes_are_read_as_curl_reads_them() {
        let password = |word: &str| {
            of(&format!("machine a login me password {word}\nmachine b login c password d"), "a")
                .map(|(_, password)| password)
        };
        for (word, read) in [
            (r#""a b""#, "a b"),
            (r#""a\"b\\c\td" "#, "a\"b\\c\td"),
            (r#"a"b"#, "a\"b"),
            (r"a\b", r"a\b"),
            (r##""#x""##, "#x"),
            (r#""""#, ""),
        ] {
            assert_eq!(password(word).as_deref(), Some(read), "{word}");
        }
        assert_eq!(password(r#""a b"#), None, "it has no end");
        assert_eq!(password(r#""a\"#), None);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_not_taken_for_one_that_says_nothing() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| match Netrc::at(&place.path().join(name), "a") {
            Netrc::Nowhere => panic!("it is named"),
            Netrc::Missing(_) => "missing".to_owned(),
            Netrc::Unread(file, why) => {
                assert!(file.ends_with(name), "{file}");
                why
            }
            Netrc::Silent(_) => "silent".to_owned(),
            Netrc::Login(..) => "login".to_owned(),
        };
        let write = |name: &str, bytes: &[u8]| std::fs::write(place.path().join(name), bytes).unwrap();
        write("good", b"machine a login b password c");
        write("other", b"machine b login b password c");
        write("open", b"machine a login b password \"c");
        write("binary", b"machine a login b password \xff");
        std::fs::create_dir(place.path().join("dir")).unwrap();
        std::os::unix::fs::symlink("loop", place.path().join("loop")).unwrap();
        std::fs::File::create(place.path().join("long")).unwrap().set_len(LARGEST + 1).unwrap();
        for (name, what) in [
            ("good", "login"),
            ("other", "silent"),
            ("none", "missing"),
            ("good/none", "missing"),
            ("open", "a quoted word in it has no end"),
            ("binary", "UTF-8"),
            ("dir", "not a regular file"),
            ("loop", "symbolic links"),
            ("long", "more than 1048576 bytes"),
        ] {
            assert!(at(name).contains(what), "{name}: {}", at(name));
        }
    }

    #[test]
    fn basic_is_that_of_the_rfc() {
        let login = Login { name: "Aladdin".to_owned(), password: "open sesame".to_owned() };
        assert_eq!(login.basic(), "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        assert_eq!(base64(b"ab"), "YWI=");
        assert_eq!(base64(b"abc"), "YWJj");
    }
}

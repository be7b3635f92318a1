//! Paths as text, for records, calls and JSON: any path goes there and comes back as the bytes that it is.
//!
//! A path that is UTF-8 is written as it is. Any other is written as `file:` followed by the path, in which
//! every byte but letters, digits and `/._-~` is `%XX` (RFC 8089). A path that itself begins with `file:` is
//! written so, too.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

/// What a path begins with that is not written as it is.
const ESCAPED: &str = "file:";

/// A path as text, without loss.
pub fn path_text(path: &Path) -> Cow<'_, str> {
    if let Some(text) = path.to_str().filter(|text| !text.starts_with(ESCAPED)) {
        return Cow::Borrowed(text);
    }
    let mut text = ESCAPED.to_owned();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' | b'~' => {
                text.push(char::from(byte));
            }
            // Writing to a string cannot fail.
            _ => _ = write!(text, "%{byte:02X}"),
        }
    }
    Cow::Owned(text)
}

/// The path that [`path_text`] wrote; any other text is a path as it is.
pub fn text_path(text: &str) -> PathBuf {
    text.strip_prefix(ESCAPED).and_then(unescaped).map_or_else(|| text.into(), PathBuf::from)
}

fn unescaped(text: &str) -> Option<OsString> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'%' => {
                let (digits, after) = rest.split_at_checked(2)?;
                bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
                rest = after;
            }
            byte => bytes.push(byte),
        }
    }
    Some(OsString::from_vec(bytes))
}

/// For `#[serde(with)]` on a path.
pub(crate) mod one {
    use super::{Path, PathBuf, path_text, text_path};
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&path_text(path))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        String::deserialize(deserializer).map(|text| text_path(&text))
    }
}

/// For `#[serde(with)]` on a path that may be missing.
pub(crate) mod maybe {
    use super::{PathBuf, path_text, text_path};
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
        match path {
            Some(path) => serializer.serialize_some(&path_text(path)),
            None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<PathBuf>, D::Error> {
        Ok(Option::<String>::deserialize(deserializer)?.map(|text| text_path(&text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_text_stays_as_it_is() {
        for path in ["/srv/ä b%20.img", "", "a\nb", "/file:/x"] {
            assert_eq!((path_text(Path::new(path)).as_ref(), text_path(path)), (path, path.into()));
        }
        let path = PathBuf::from(OsString::from_vec(b"/srv/a\xff b%.img".to_vec()));
        assert_eq!(path_text(&path), "file:/srv/a%FF%20b%25.img");
        assert_eq!(text_path("file:%zz"), Path::new("file:%zz"), "it was not written by us");
    }

    #[test]
    fn every_path_comes_back() {
        for one in 0..=255 {
            for two in [0_u8, b'%', b'a', 0x80, 0xff] {
                for head in [&b""[..], b"file:", b"/srv/"] {
                    let path = PathBuf::from(OsString::from_vec([head, &[one, two, one]].concat()));
                    assert_eq!(text_path(&path_text(&path)), path);
                }
            }
        }
    }
}

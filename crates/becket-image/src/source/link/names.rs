//! The parts that all names of exports have in common: percent signs, and a path inside the image.
//! It knows no scheme.

use std::ffi::{OsStr, OsString};
use std::fmt::{self, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

/// Splits a URI into the export's and the names of a path inside the image, which are behind `#`.
pub fn split_inside(uri: &OsStr) -> (OsString, Vec<OsString>) {
    let bytes = uri.as_bytes();
    let end = bytes.iter().position(|byte| *byte == b'#').unwrap_or(bytes.len());
    let (uri, inside) = bytes.split_at_checked(end).unwrap_or((bytes, &[]));
    let names = inside.strip_prefix(b"#").unwrap_or_default().split(|byte| *byte == b'/');
    let names = names.filter(|name| !name.is_empty()).map(|name| OsString::from_vec(name.to_vec()));
    (OsString::from_vec(uri.to_vec()), names.collect())
}

/// The reverse of [`split_inside`].
pub fn with_inside(uri: &Path, inside: &[OsString]) -> PathBuf {
    let mut whole = uri.as_os_str().to_owned();
    for (number, name) in inside.iter().enumerate() {
        whole.push(if number == 0 { "#" } else { "/" });
        whole.push(name);
    }
    whole.into()
}

/// Undoes percent signs. No decoded text has a zero byte.
pub(super) fn decoded(text: &str) -> Result<Vec<u8>, String> {
    let mut bytes = text.bytes();
    let mut plain = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let byte = match byte {
            b'%' => match (digit(bytes.next()), digit(bytes.next())) {
                (Some(high), Some(low)) => u8::try_from(high * 16 + low).unwrap_or(0),
                _ => return Err("a percent sign in it lacks its two digits".to_owned()),
            },
            byte => byte,
        };
        if byte == 0 {
            return Err("it has a zero byte".to_owned());
        }
        plain.push(byte);
    }
    Ok(plain)
}

/// Letters, digits and `plain` stand for themselves.
pub(super) fn encode(f: &mut fmt::Formatter<'_>, bytes: &[u8], plain: &[u8]) -> fmt::Result {
    for byte in bytes {
        match byte {
            byte if byte.is_ascii_alphanumeric() || plain.contains(byte) => {
                f.write_char(char::from(*byte))?
            }
            byte => write!(f, "%{byte:02X}")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_inside_is_behind_the_hash() {
        let (uri, inside) = split_inside(OsStr::new("nbd://host/disk#p1/etc//fstab"));
        assert_eq!((uri.to_str(), inside.len()), (Some("nbd://host/disk"), 3));
        assert_eq!(with_inside(Path::new(&uri), &inside), Path::new("nbd://host/disk#p1/etc/fstab"));
        assert_eq!(split_inside(OsStr::new("nbd://host/disk")).1, [""; 0]);
    }
}

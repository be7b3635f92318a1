//! Names of backing files that only becket understands: paths through images, and parts of images.
//! It opens nothing: such a name is only compared and shown.
//!
//! `becket:PATH`, or `becket:OFFSET+LENGTH:PATH` for LENGTH bytes from OFFSET on (all of them without a
//! LENGTH). PATH begins with `/`, or with `./` and is then relative to the overlay's directory.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

const SCHEME: &[u8] = b"becket:";

/// What such a name says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Spoken {
    /// The first byte, and how many at most.
    pub(crate) part: Option<(u64, Option<u64>)>,
    pub(crate) path: PathBuf,
}

impl Spoken {
    /// The name.
    pub(crate) fn name(&self) -> Vec<u8> {
        let mut name = SCHEME.to_vec();
        if let Some((offset, limit)) = self.part {
            let limit = limit.map_or_else(String::new, |limit| limit.to_string());
            name.extend(format!("{offset}+{limit}:").into_bytes());
        }
        if self.path.is_relative() {
            name.extend(b"./");
        }
        name.extend(self.path.as_os_str().as_bytes());
        name
    }

    /// What a name says; `None` where it is not one of these.
    pub(crate) fn of(name: &[u8]) -> Option<Spoken> {
        let rest = name.strip_prefix(SCHEME)?;
        let (part, path) = match rest.first()? {
            b'/' | b'.' => (None, rest),
            _ => {
                let colon = rest.iter().position(|byte| *byte == b':')?;
                let (numbers, path) = rest.split_at_checked(colon)?;
                let (offset, limit) = std::str::from_utf8(numbers).ok()?.split_once('+')?;
                let limit = if limit.is_empty() { None } else { Some(limit.parse().ok()?) };
                (Some((offset.parse().ok()?, limit)), path.strip_prefix(b":")?)
            }
        };
        let path = match path.strip_prefix(b"./") {
            Some(rest) if !rest.starts_with(b"/") => rest,
            _ if path.starts_with(b"/") => path,
            _ => return None,
        };
        Some(Spoken { part, path: Path::new(OsStr::from_bytes(path)).to_owned() })
    }

    /// The options of `becket attach` that say which part is meant, each with a space behind it.
    pub(crate) fn options(&self) -> String {
        self.part.map_or_else(String::new, |(offset, limit)| {
            let limit = limit.map_or_else(String::new, |limit| format!("--size-limit {limit} "));
            format!("--offset {offset} {limit}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        for (name, part, path, options) in [
            ("becket:/srv/a b.iso/x", None, "/srv/a b.iso/x", ""),
            ("becket:./disk.img/p2", None, "disk.img/p2", ""),
            ("becket:./12+3:x", None, "12+3:x", ""),
            ("becket:512+:/d", Some((512, None)), "/d", "--offset 512 "),
            ("becket:0+4096:./d:e", Some((0, Some(4096))), "d:e", "--offset 0 --size-limit 4096 "),
        ] {
            let spoken = Spoken { part, path: path.into() };
            assert_eq!(Spoken::of(name.as_bytes()).as_ref(), Some(&spoken), "{name}");
            assert_eq!((spoken.name(), spoken.options().as_str()), (name.as_bytes().to_vec(), options));
        }
    }

    #[test]
    fn other_names_are_not() {
        for name in [
            "",
            "becket:",
            "disk.img",
            "nbd:x",
            "becket:x",
            "becket:.",
            "becket:.//x",
            "becket:1:/x",
            "becket:1+x:/x",
        ] {
            assert_eq!(Spoken::of(name.as_bytes()), None, "{name}");
        }
    }
}

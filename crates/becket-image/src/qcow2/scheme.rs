//! Names of backing files that only becket understands: paths through images, parts of images, and images
//! that are fetched or decoded. It opens nothing: such a name is only compared and shown.
//!
//! `becket:PATH`, or `becket:OFFSET+LENGTH:PATH` for LENGTH bytes from OFFSET on (all of them without a
//! LENGTH). PATH begins with `/`, or with `./` and is then relative to the overlay's directory. `=VERSION:`
//! before PATH says which contents are meant; with it, PATH may be a URL. That of an NBD server needs none.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::source::link::is_link;
use crate::text::one_case;

const SCHEME: &[u8] = b"becket:";

/// What such a name says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Spoken {
    /// The first byte, and how many at most.
    pub(crate) part: Option<(u64, Option<u64>)>,
    /// Which contents, where that is said.
    pub(crate) version: Option<String>,
    pub(crate) path: PathBuf,
}

/// Whether it is a URL: a path that was looked up has no two slashes beside each other.
fn is_url(path: &[u8]) -> bool {
    path.windows(3).any(|part| part == b"://")
}

impl Spoken {
    /// The name.
    pub(crate) fn name(&self) -> Vec<u8> {
        let mut name = SCHEME.to_vec();
        if let Some((offset, limit)) = self.part {
            let limit = limit.map_or_else(String::new, |limit| limit.to_string());
            name.extend(format!("{offset}+{limit}:").into_bytes());
        }
        if let Some(version) = &self.version {
            name.extend(format!("={version}:").into_bytes());
        }
        if self.path.is_relative() && !is_url(self.path.as_os_str().as_bytes()) {
            name.extend(b"./");
        }
        name.extend(self.path.as_os_str().as_bytes());
        name
    }

    /// The name, with a web address in one case.
    pub(crate) fn in_one_case(self) -> Vec<u8> {
        let path = match self.path.to_str() {
            Some(url) if self.version.is_some() => PathBuf::from(one_case(url)),
            _ => self.path,
        };
        Spoken { path, ..self }.name()
    }

    /// What a name says; `None` where it is not one of these.
    pub(crate) fn of(name: &[u8]) -> Option<Spoken> {
        let mut rest = name.strip_prefix(SCHEME)?;
        let mut part = None;
        if rest.first()?.is_ascii_digit() {
            let (numbers, more) = up_to_colon(rest)?;
            let (offset, limit) = std::str::from_utf8(numbers).ok()?.split_once('+')?;
            let limit = if limit.is_empty() { None } else { Some(limit.parse().ok()?) };
            (part, rest) = (Some((offset.parse().ok()?, limit)), more);
        }
        let mut version = None;
        if let Some(said) = rest.strip_prefix(b"=") {
            let (said, more) = up_to_colon(said)?;
            version = Some(std::str::from_utf8(said).ok()?.to_owned());
            rest = more;
        }
        let path = match rest.strip_prefix(b"./") {
            Some(rest) if !rest.starts_with(b"/") => rest,
            _ if rest.starts_with(b"/") => rest,
            _ if is_url(rest) && (version.is_some() || is_link(Path::new(OsStr::from_bytes(rest)))) => rest,
            _ => return None,
        };
        Some(Spoken { part, version, path: Path::new(OsStr::from_bytes(path)).to_owned() })
    }

    /// What is named, where an overlay that lies in `dir` says so.
    pub(crate) fn within(&self, dir: &Path) -> PathBuf {
        if is_url(self.path.as_os_str().as_bytes()) { self.path.clone() } else { dir.join(&self.path) }
    }

    /// The options of `becket attach` that say which part is meant, each with a space behind it.
    pub(crate) fn options(&self) -> String {
        self.part.map_or_else(String::new, |(offset, limit)| {
            let limit = limit.map_or_else(String::new, |limit| format!("--size-limit {limit} "));
            format!("--offset {offset} {limit}")
        })
    }
}

/// What is before the first colon, and behind it.
fn up_to_colon(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = text.iter().position(|byte| *byte == b':')?;
    Some((text.get(..colon)?, text.get(colon + 1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        for (name, part, version, path, options) in [
            ("becket:/srv/a b.iso/x", None, None, "/srv/a b.iso/x", ""),
            ("becket:./disk.img/p2", None, None, "disk.img/p2", ""),
            ("becket:./12+3:x", None, None, "12+3:x", ""),
            ("becket:512+:/d", Some((512, None)), None, "/d", "--offset 512 "),
            ("becket:0+4096:./d:e", Some((0, Some(4096))), None, "d:e", "--offset 0 --size-limit 4096 "),
            ("becket:=a7:https://h/d.img#p1", None, Some("a7"), "https://h/d.img#p1", ""),
            ("becket:nbd://h/e#p1", None, None, "nbd://h/e#p1", ""),
            ("becket:512+:=a7:./d.gz", Some((512, None)), Some("a7"), "d.gz", "--offset 512 "),
        ] {
            let spoken = Spoken { part, version: version.map(str::to_owned), path: path.into() };
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
            "becket:http://h/x",
            "becket:=a7:x",
        ] {
            assert_eq!(Spoken::of(name.as_bytes()), None, "{name}");
        }
    }
}

//! What is mounted where, as /proc/self/mountinfo tells.
//! Never mounts anything, and takes every line for what it may be: other people's words.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
};

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    /// Device number; its major part is 0 for file systems that have none of their own (btrfs, overlay).
    pub(crate) dev: (u32, u32),
    /// Which directory of the file system is mounted.
    pub(crate) root: Vec<u8>,
    /// Where.
    pub(crate) point: PathBuf,
    pub(crate) fs_type: Vec<u8>,
    /// What was mounted, a device's path as a rule.
    pub(crate) source: PathBuf,
}

/// All mounts of our namespace, in their order: of two at the same place the later one covers the earlier.
pub(crate) fn all() -> io::Result<Vec<Mount>> {
    Ok(parse(&fs::read("/proc/self/mountinfo")?))
}

/// The mount that is seen at `dir`, exactly there.
pub(crate) fn at(dir: &Path) -> io::Result<Option<Mount>> {
    Ok(all()?.into_iter().rev().find(|mount| mount.point == dir))
}

pub(crate) fn parse(text: &[u8]) -> Vec<Mount> {
    text.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

/// `36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/root rw`
fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut words = line.split(|&byte| byte == b' ').skip(2);
    let dev = std::str::from_utf8(words.next()?).ok()?.split_once(':')?;
    let (root, point) = (words.next()?, words.next()?);
    let mut words = words.skip_while(|word| *word != b"-").skip(1);
    let (fs_type, source) = (words.next()?, words.next()?);
    Some(Mount {
        dev: (dev.0.parse().ok()?, dev.1.parse().ok()?),
        root: unescape(root),
        point: OsString::from_vec(unescape(point)).into(),
        fs_type: unescape(fs_type),
        source: OsString::from_vec(unescape(source)).into(),
    })
}

/// The kernel writes blanks and backslashes as `\040`.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&byte, after)) = rest.split_first() {
        match after.get(..3).filter(|_| byte == b'\\').and_then(octal) {
            Some(value) => {
                out.push(value);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                out.push(byte);
                rest = after;
            }
        }
    }
    out
}

fn octal(digits: &[u8]) -> Option<u8> {
    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_lines_of_every_kind() {
        let text = b"36 35 7:3 / /mnt/a\\040b rw,noatime master:1 shared:2 - ext4 /dev/loop3 rw\n\
            37 35 0:41 /@sub /c rw - btrfs /dev/ublkb0 rw,ssd\n\
            broken\n\
            38 35 x:y / /d rw - ext4 /dev/sda rw\n";
        let mounts = parse(text);
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0].dev, (7, 3));
        assert_eq!(mounts[0].point, Path::new("/mnt/a b"));
        assert_eq!(mounts[0].source, Path::new("/dev/loop3"));
        assert_eq!((mounts[1].dev, mounts[1].fs_type.as_slice()), ((0, 41), &b"btrfs"[..]));
        assert_eq!(mounts[1].root, b"/@sub");
    }

    #[test]
    fn escapes_that_are_none_stay() {
        assert_eq!(unescape(b"a\\134b\\0"), b"a\\b\\0");
        assert_eq!(unescape(b"\\999\\777"), b"\\999\\777");
    }

    #[test]
    fn our_own_root_is_mounted() {
        assert!(at(Path::new("/")).unwrap().is_some());
    }
}

//! Reading attributes of block devices from sysfs.
//! It never writes there and never opens a device; an attribute that is not there is `None`, not an error.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where the kernel shows a disk or partition, by its name in sysfs (`loop3`, `loop3p1`).
pub fn directory(name: &str) -> PathBuf {
    PathBuf::from("/sys/class/block").join(name)
}

/// Whether sysfs is mounted and shows block devices at all.
pub fn is_there() -> bool {
    Path::new("/sys/class/block").is_dir()
}

/// An attribute's text without the line's end.
pub fn text(name: &str, attribute: &str) -> Option<String> {
    let mut text = fs::read_to_string(directory(name).join(attribute)).ok()?;
    if text.ends_with('\n') {
        text.pop();
    }
    Some(text)
}

/// An attribute that is a number.
pub fn number<T: FromStr>(name: &str, attribute: &str) -> Option<T> {
    text(name, attribute)?.trim().parse().ok()
}

/// An attribute that is 0 or 1.
pub fn flag(name: &str, attribute: &str) -> Option<bool> {
    number::<u32>(name, attribute).map(|value| value != 0)
}

/// The device number.
pub fn dev(name: &str) -> Option<u64> {
    dev_at(&directory(name).join("dev"))
}

/// The device number in an attribute anywhere in sysfs.
pub(crate) fn dev_at(attribute: &Path) -> Option<u64> {
    let text = fs::read_to_string(attribute).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// The node's path that belongs to a name in sysfs, where `!` stands for a slash.
pub fn node(name: &str) -> PathBuf {
    PathBuf::from("/dev").join(name.replace('!', "/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_none() {
        assert_eq!(text("no-such-disk", "dev"), None);
        assert_eq!(dev("no-such-disk"), None);
        assert_eq!(number::<u64>("no-such-disk", "size"), None);
    }

    #[test]
    fn an_exclamation_mark_is_a_slash() {
        assert_eq!(node("cciss!c0d0p1"), PathBuf::from("/dev/cciss/c0d0p1"));
        assert_eq!(node("loop0"), PathBuf::from("/dev/loop0"));
    }
}

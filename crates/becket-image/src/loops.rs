//! Loop devices of other people over an image: they take no locks.
//! It only looks, at sysfs.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::io::Errno;

/// Why what lies in a range of a file may be in use although nobody holds a lock: a loop device of somebody else's.
/// What is bound to a file that the kernel does not name counts as one. `disks` is sysfs' directory of them.
pub(crate) fn loop_over(disks: &Path, host: &Path, range: &Range<u64>) -> Option<String> {
    let host = std::fs::canonicalize(host).ok()?;
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let ours = identity(&host);
    std::fs::read_dir(disks).ok()?.flatten().find_map(|disk| {
        let taken = match std::fs::read(disk.path().join("loop/backing_file")) {
            Ok(text) => {
                let path = Path::new(OsStr::from_bytes(text.strip_suffix(b"\n").unwrap_or(&text)));
                // The same file may have other names.
                path == host || ours.is_some() && identity(path) == ours
            }
            // No loop device, or none that is bound (any more).
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => error.raw_os_error() != Some(Errno::NODEV.raw_os_error()),
        };
        (taken && meets(&disk.path().join("loop"), range))
            .then(|| format!("{} shows the image to others, who may write to it", disk.path().display()))
    })
}

/// Whether a loop device shows bytes of a range; one that does not say which it shows may show any.
fn meets(attributes: &Path, range: &Range<u64>) -> bool {
    let number = |name: &str| -> Option<u64> {
        std::fs::read_to_string(attributes.join(name)).ok()?.trim().parse().ok()
    };
    let (Some(start), Some(limit)) = (number("offset"), number("sizelimit")) else { return true };
    let end = if limit == 0 { u64::MAX } else { start.saturating_add(limit) };
    start < range.end && range.start < end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_device_is_seen_whatever_its_file_is_called() {
        let dir = tempfile::tempdir().unwrap();
        let root = std::fs::canonicalize(dir.path()).unwrap();
        let host = root.join(OsStr::from_bytes(b"im\xffage"));
        let link = root.join("other name");
        std::fs::write(&host, "").unwrap();
        std::fs::hard_link(&host, &link).unwrap();
        let disks = root.join("block");
        let backing = disks.join("loop0/loop/backing_file");
        std::fs::create_dir_all(disks.join("sda")).unwrap();
        std::fs::create_dir_all(backing.parent().unwrap()).unwrap();
        let taken = || loop_over(&disks, &host, &(4096..8192)).is_some();
        assert!(!taken(), "nothing is bound");
        for (path, expected) in [(&host, true), (&link, true), (&root.join("another"), false)] {
            let line = [path.as_os_str().as_bytes(), b"\n"].concat();
            std::fs::write(&backing, line).unwrap();
            assert_eq!(taken(), expected, "{}", path.display());
        }
        std::fs::write(&backing, host.as_os_str().as_bytes()).unwrap();
        for (offset, limit, expected) in [
            ("0", "4096", false),
            ("0", "4097", true),
            ("8191", "0", true),
            ("8192", "0", false),
            ("0", "x", true),
        ] {
            let attribute = |name: &str| backing.with_file_name(name);
            std::fs::write(attribute("offset"), format!("{offset}\n")).unwrap();
            std::fs::write(attribute("sizelimit"), format!("{limit}\n")).unwrap();
            assert_eq!(taken(), expected, "{limit} bytes from {offset}");
        }
        std::fs::remove_file(&backing).unwrap();
        std::fs::create_dir(&backing).unwrap();
        assert!(taken(), "what cannot be read may be the image");
    }
}

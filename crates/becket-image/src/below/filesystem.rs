//! Which file system a file lies on, and whether its blocks hold the file's bytes as they are.
//! It never trusts a magic number: several drivers share one. The mount table names the driver.

use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, StatxAttributes, StatxFlags};

/// Says yes only to a plain file on ext4, or on an XFS whose files cannot share blocks.
pub(super) fn check(file: BorrowedFd<'_>, device: u64) -> Result<(), String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")
        .map_err(|error| format!("the mount table cannot be read: {error}"))?;
    match driver_of(&mounts, rustix::fs::major(device), rustix::fs::minor(device)) {
        Some("ext4") => {}
        Some("xfs") => check_xfs(file)?,
        Some(other) => {
            return Err(format!("{other} may move or encode what a file holds, or does not say where"));
        }
        None => return Err("its file system is not in this mount namespace".to_owned()),
    }
    check_inode(file)
}

/// What drives the file system on a device, by the lines of `/proc/PID/mountinfo`.
fn driver_of(mounts: &str, major: u32, minor: u32) -> Option<&str> {
    let number = format!("{major}:{minor}");
    mounts.lines().find_map(|line| {
        let (mount, rest) = line.split_once(" - ")?;
        (mount.split(' ').nth(2) == Some(&number)).then(|| rest.split(' ').next()).flatten()
    })
}

fn check_xfs(file: BorrowedFd<'_>) -> Result<(), String> {
    let unknown = |error| format!("its XFS does not say what it is made for: {error}");
    let facts = becket_uapi::extents::xfs_facts(file).map_err(unknown)?;
    if facts.reflink {
        return Err("its XFS lets files share blocks (reflink), which can move them at any time".to_owned());
    }
    if facts.realtime || becket_uapi::extents::is_realtime(file).map_err(unknown)? {
        return Err("its XFS has a real-time section".to_owned());
    }
    Ok(())
}

/// Refuses what the inode itself says stands in the way.
fn check_inode(file: BorrowedFd<'_>) -> Result<(), String> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .map_err(|errno| format!("its inode: {errno}"))?;
    for (attribute, word) in [
        (StatxAttributes::COMPRESSED, "compressed"),
        (StatxAttributes::ENCRYPTED, "encrypted"),
        (StatxAttributes::VERITY, "verified at each read (fs-verity)"),
        (StatxAttributes::DAX, "mapped straight from memory (DAX)"),
    ] {
        if stat.stx_attributes.contains(attribute) {
            return Err(format!("it is {word}"));
        }
    }
    // Silent for data in the journal or in the inode.
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 || stat.stx_dio_offset_align == 0 {
        return Err("its file system does not report that its blocks can be read directly".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_found_by_the_devices_number() {
        let mounts = "\
22 1 8:1 / / rw,relatime shared:1 master:2 - ext4 /dev/sda1 rw
23 22 0:25 / /sys rw - sysfs sysfs rw
24 22 8:17 /sub /mnt/a\\040- rw - xfs /dev/sdb1 rw,attr2
25 22 8:1 /x /mnt/bound rw - ext4 /dev/sda1 rw
26 22 0:31 / /o rw - overlay overlay rw,lowerdir=/ - ext4
short line
";
        assert_eq!(driver_of(mounts, 8, 1), Some("ext4"));
        assert_eq!(driver_of(mounts, 8, 17), Some("xfs"));
        assert_eq!(driver_of(mounts, 0, 31), Some("overlay"));
        assert_eq!(driver_of(mounts, 8, 7), None);
        assert_eq!(driver_of(mounts, 22, 1), None);
        assert_eq!(driver_of("", 8, 1), None);
    }
}

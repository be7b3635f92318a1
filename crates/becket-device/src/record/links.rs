//! The names under /dev/becket: symbolic links to the nodes of devices and their partitions.
//! A link is a convenience: that one could not be made is a warning, and one that another program made stays.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use tracing::warn;

use crate::contract::DeviceInfo;
use crate::record::runtime::Runtime;
use crate::record::udev;

/// Makes the links of a device; answers with what did not work.
pub(crate) fn make(runtime: &Runtime, info: &DeviceInfo) -> Vec<String> {
    let dir = runtime.links();
    if info.is_file() {
        // Its place is its user's own already.
        return Vec::new();
    }
    let mut warnings = Vec::new();
    for (link, target) in wanted(dir, info) {
        let made = match make_one(&link, &target) {
            // Only the first link of all needs the directory made.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let directory = fs::DirBuilder::new().recursive(true).mode(0o755).create(dir);
                directory.and_then(|()| make_one(&link, &target))
            }
            made => made,
        };
        if let Err(error) = made {
            warnings.push(format!("no link {}: {error}", link.display()));
        }
    }
    // Only now: who waits for udev's word opens the device by its link.
    udev::tell(runtime, info);
    warnings
}

/// Makes the links of a device again where one is missing: who attached it may have died before it was there.
pub(crate) fn restore(runtime: &Runtime, info: &DeviceInfo) {
    let is_there =
        |(link, target): (PathBuf, PathBuf)| fs::read_link(link).is_ok_and(|found| found == target);
    if wanted(runtime.links(), info).into_iter().all(is_there) && udev::knows(runtime, info) {
        return;
    }
    make(runtime, info).iter().for_each(|warning| warn!(device = info.name, "{warning}"));
}

/// Removes the links of a device, where they still point to its nodes.
pub(crate) fn remove(runtime: &Runtime, info: &DeviceInfo) {
    for (link, target) in wanted(runtime.links(), info) {
        if fs::read_link(&link).is_ok_and(|found| found == target) {
            // Another process removed it meanwhile: as wanted.
            let _ = fs::remove_file(&link);
        }
    }
    udev::forget(runtime, info);
}

/// Where the link to a device is, when it is there.
pub(crate) fn path(runtime: &Runtime, name: &str) -> PathBuf {
    runtime.links().join(name)
}

fn wanted(dir: &Path, info: &DeviceInfo) -> Vec<(PathBuf, PathBuf)> {
    let partitions = info
        .partitions
        .iter()
        .map(|partition| (dir.join(format!("{}p{}", info.name, partition.number)), partition.device.clone()));
    std::iter::once((dir.join(&info.name), info.device.clone())).chain(partitions).collect()
}

fn make_one(link: &Path, target: &Path) -> io::Result<()> {
    match std::os::unix::fs::symlink(target, link) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => return other,
    }
    // Left behind by a device that is gone, or by one that was here before. The name is ours (its record
    // says so), thus the link is too, unless a becket with other records made it for a device of its own.
    let meta = fs::symlink_metadata(link)?;
    if !meta.is_symlink() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "something else is there"));
    }
    // Replaced in one step: the name is never missing.
    let new = link.with_file_name(format!(
        ".{}.{}",
        link.file_name().unwrap_or_default().to_string_lossy(),
        std::process::id()
    ));
    std::os::unix::fs::symlink(target, &new)?;
    fs::rename(&new, link).inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::PartitionInfo;
    use crate::record::store::tests::device;

    fn info() -> DeviceInfo {
        let mut info = device("disk", 3).info;
        info.partitions = vec![PartitionInfo {
            number: 2,
            device: "/dev/loop3p2".into(),
            start: 0,
            size: 512,
            label: None,
            uuid: None,
        }];
        info
    }

    #[test]
    fn links_come_and_go_with_the_device() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(temp.path().join("run"), temp.path().join("links")).unwrap();
        assert_eq!(make(&runtime, &info()), Vec::<String>::new());
        assert_eq!(fs::read_link(path(&runtime, "disk")).unwrap(), Path::new("/dev/loop3"));
        assert_eq!(fs::read_link(path(&runtime, "diskp2")).unwrap(), Path::new("/dev/loop3p2"));

        let mut again = info();
        again.device = "/dev/loop9".into();
        assert_eq!(make(&runtime, &again), Vec::<String>::new(), "a link left behind is replaced");
        assert_eq!(fs::read_link(path(&runtime, "disk")).unwrap(), Path::new("/dev/loop9"));

        remove(&runtime, &info());
        assert!(path(&runtime, "disk").is_symlink(), "it points to another device by now");
        assert!(!path(&runtime, "diskp2").is_symlink());
        remove(&runtime, &again);
        assert_eq!(fs::read_dir(runtime.links()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_in_the_way_stays() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(temp.path().join("run"), temp.path().join("links")).unwrap();
        fs::create_dir(runtime.links()).unwrap();
        fs::write(path(&runtime, "disk"), "precious").unwrap();
        assert_eq!(make(&runtime, &info()).len(), 1);
        remove(&runtime, &info());
        assert_eq!(fs::read(path(&runtime, "disk")).unwrap(), b"precious");
    }
}

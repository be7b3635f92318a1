//! The names under /dev/becket: symbolic links to the nodes of devices and their partitions.
//! A link is a convenience: that one could not be made is a warning, and one that another program made stays.
//!
//! Partition 1 of the device `d` is `dp1`, which may also be the name of a device. The link is that of the
//! device whose record has the name; without such a record it is the partition's. No device gets a name that
//! would take a link from another, or a partition's link that another has.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use tracing::warn;

use crate::contract::{DeviceInfo, Error, ErrorKind};
use crate::record::device::Device;
use crate::record::judge::lives;
use crate::record::runtime::Runtime;
use crate::record::store::Store;
use crate::record::udev;
use crate::system::kernel::System;

/// Refuses a name whose link, or that of one of the partitions of these numbers, is another device's.
pub(crate) fn are_free(
    store: &Store,
    name: &str,
    partitions: impl IntoIterator<Item = u32>,
) -> Result<(), Error> {
    if let Some(taken) = taken_by_partition(store, name)? {
        return Err(taken);
    }
    for number in partitions {
        let link = udev::of_partition(name, number);
        if let Some(taken) = store.taken(&link, |device| lives(&System, device))? {
            let message = format!("no device with a partition {number} can be called {name}: {taken}");
            let hint = format!(
                "choose another --name, attach it with --partitions off, or detach the other first: becket \
                 detach {link}"
            );
            return Err(Error::Failed { kind: ErrorKind::NameInUse, message, hint: Some(hint) });
        }
    }
    Ok(())
}

/// Which device's partition has the link of that name, as one who wants it is answered.
fn taken_by_partition(store: &Store, link: &str) -> Result<Option<Error>, Error> {
    let split = link.rsplit_once('p').and_then(|(disk, number)| Some((disk, number.parse().ok()?)));
    let Some((disk, number)) = split.filter(|(disk, number)| udev::of_partition(disk, *number) == link)
    else {
        return Ok(None);
    };
    let has_it = |device: &Device| {
        device.info.partitions.iter().any(|partition| partition.number == number) && lives(&System, device)
    };
    Ok(store.device(disk)?.filter(has_it).map(|device| {
        let node = device.info.device.display();
        Error::Failed {
            kind: ErrorKind::NameInUse,
            message: format!("the name {link} is in use: partition {number} of {disk} has it ({node})"),
            hint: Some(format!("choose another --name, or detach that device first: becket detach {disk}")),
        }
    }))
}

/// That another device has a link that this one or a partition of it would have.
fn of_another(store: &Store, info: &DeviceInfo, link: &str) -> Option<Error> {
    let leads_elsewhere = || {
        let found = fs::read_link(path(store.runtime(), link));
        found.is_ok_and(|found| found != info.device)
    };
    let taken = match link == info.name {
        // It was made while the name was being taken.
        true if leads_elsewhere() => taken_by_partition(store, link),
        true => return None,
        false => store.taken(link, |device| lives(&System, device)),
    };
    // What cannot be read has no link.
    taken.ok().flatten()
}

/// Makes the links of a device; answers with what did not work.
pub(crate) fn make(store: &Store, info: &DeviceInfo) -> Vec<String> {
    let dir = store.runtime().links();
    if info.is_file() {
        // Its place is its user's own already.
        return Vec::new();
    }
    let mut warnings = Vec::new();
    for (name, target) in wanted(info) {
        let link = dir.join(&name);
        if let Some(taken) = of_another(store, info, &name) {
            warnings.push(format!("no link {}: {taken}", link.display()));
            continue;
        }
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
    udev::tell(store.runtime(), info);
    warnings
}

/// Makes the links of a device again where one is missing: who attached it may have died before it was there.
pub(crate) fn restore(store: &Store, info: &DeviceInfo) {
    let runtime = store.runtime();
    let leads = |(name, target): (String, PathBuf)| leads_to(&path(runtime, &name), &target);
    if wanted(info).into_iter().all(leads) && udev::knows(runtime, info) {
        return;
    }
    make(store, info).iter().for_each(|warning| warn!(device = info.name, "{warning}"));
}

/// Removes the links of a device, where they still point to its nodes.
pub(crate) fn remove(runtime: &Runtime, info: &DeviceInfo) {
    for (name, target) in wanted(info) {
        let link = path(runtime, &name);
        if leads_to(&link, &target) {
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

fn wanted(info: &DeviceInfo) -> Vec<(String, PathBuf)> {
    let partitions = info
        .partitions
        .iter()
        .map(|partition| (udev::of_partition(&info.name, partition.number), partition.device.clone()));
    std::iter::once((info.name.clone(), info.device.clone())).chain(partitions).collect()
}

fn leads_to(link: &Path, target: &Path) -> bool {
    fs::read_link(link).is_ok_and(|found| found == target)
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
    use crate::record::store::tests::{device, store};

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
        let (_temp, store) = store();
        let runtime = store.runtime();
        assert_eq!(make(&store, &info()), Vec::<String>::new());
        assert_eq!(fs::read_link(path(runtime, "disk")).unwrap(), Path::new("/dev/loop3"));
        assert_eq!(fs::read_link(path(runtime, "diskp2")).unwrap(), Path::new("/dev/loop3p2"));

        let mut again = info();
        again.device = "/dev/loop9".into();
        assert_eq!(make(&store, &again), Vec::<String>::new(), "a link left behind is replaced");
        assert_eq!(fs::read_link(path(runtime, "disk")).unwrap(), Path::new("/dev/loop9"));

        remove(runtime, &info());
        assert!(path(runtime, "disk").is_symlink(), "it points to another device by now");
        assert!(!path(runtime, "diskp2").is_symlink());
        remove(runtime, &again);
        assert_eq!(fs::read_dir(runtime.links()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_in_the_way_stays() {
        let (_temp, store) = store();
        let runtime = store.runtime();
        fs::create_dir(runtime.links()).unwrap();
        fs::write(path(runtime, "disk"), "precious").unwrap();
        assert_eq!(make(&store, &info()).len(), 1);
        remove(runtime, &info());
        assert_eq!(fs::read(path(runtime, "disk")).unwrap(), b"precious");
    }

    #[test]
    fn a_link_of_another_device_is_neither_taken_nor_removed() {
        let (_temp, store) = store();
        let runtime = store.runtime();
        let other = store.claim("diskp2", Path::new("/other.img"), |_| true).unwrap();
        fs::create_dir(runtime.links()).unwrap();
        std::os::unix::fs::symlink("/dev/loop9", path(runtime, "diskp2")).unwrap();
        let refused = are_free(&store, "disk", [1, 2]).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NameInUse);
        assert!(refused.to_string().contains("/other.img"), "{refused}");
        assert!(refused.hint().unwrap().contains("becket detach diskp2"));
        are_free(&store, "disk", [1, 3]).unwrap();
        let warnings = make(&store, &info());
        assert!(warnings.len() == 1 && warnings[0].contains("/other.img"), "{warnings:?}");
        assert!(path(runtime, "disk").is_symlink());
        remove(runtime, &info());
        assert_eq!(fs::read_link(path(runtime, "diskp2")).unwrap(), Path::new("/dev/loop9"));
        // The other one is gone, and has left its link behind.
        drop(other);
        assert_eq!(make(&store, &info()), Vec::<String>::new());
        assert_eq!(fs::read_link(path(runtime, "diskp2")).unwrap(), Path::new("/dev/loop3p2"));
    }
}

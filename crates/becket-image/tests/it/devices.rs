//! Block devices as backings, and the kernel as the judge of partition tables.
//! It never runs without loop devices, and says so.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use becket_image::{ErrorKind, FileKind, OpenOptions};

use crate::common::{LoopDevice, Mount, dir, file, open, open_read_only, run, skip, source_of};

const MIB: u64 = 1 << 20;

/// A loop device over a fresh file, or `None` after saying why not.
fn device(test: &str, dir: &Path, options: &[&str]) -> Option<LoopDevice> {
    LoopDevice::attach(&file(dir, "disk.img", 16 * MIB), options).map_err(|reason| skip(test, &reason)).ok()
}

#[test]
fn a_block_device_has_the_facts_of_its_queue() {
    let dir = dir();
    let Some(device) = device("a_block_device_has_the_facts_of_its_queue", dir.path(), &[]) else { return };
    let opened = open(&device.0).unwrap();
    assert_eq!((opened.map.len(), opened.block_size, opened.read_only), (16 * MIB, 512, false));
    let facts = &source_of(&opened, 0).facts;
    assert_eq!((facts.kind, facts.size), (FileKind::Block, 16 * MIB));
    assert_eq!(u64::from(facts.physical_block_size), device.sysfs("queue/physical_block_size"));
    assert_eq!(facts.discard, device.sysfs("queue/discard_max_bytes") > 0);
    assert!(facts.discard, "loop over a file system with holes discards");
    assert_eq!(u64::from(facts.discard_granularity), device.sysfs("queue/discard_granularity"));
    assert_eq!(facts.write_zeroes, device.sysfs("queue/write_zeroes_max_bytes") > 0);
    assert_eq!(u64::from(facts.rotational), device.sysfs("queue/rotational"));
    assert_eq!(facts.direct.unwrap().offset, 512);
    assert!(source_of(&opened, 0).direct.is_some());

    drop(opened);
    let opened = open_read_only(&device.0).unwrap();
    assert!(!source_of(&opened, 0).facts.discard && !source_of(&opened, 0).facts.write_zeroes);
}

#[test]
fn blocks_are_as_large_as_the_devices() {
    let dir = dir();
    let Some(device) = device("blocks_are_as_large_as_the_devices", dir.path(), &["--sector-size", "4096"])
    else {
        return;
    };
    let opened = open(&device.0).unwrap();
    assert_eq!(opened.block_size, 4096);
    assert_eq!(source_of(&opened, 0).facts.physical_block_size, 4096);
    assert_eq!(source_of(&opened, 0).facts.direct.unwrap().offset, 4096);
    drop(opened);
    let options = OpenOptions { offset: 512, ..OpenOptions::default() };
    let opened = becket_image::open(&device.0, &options).unwrap();
    let reason = &source_of(&opened, 0).facts.direct_reason;
    assert!(source_of(&opened, 0).direct.is_none() && reason.contains("4096"), "{reason}");
    assert_eq!(opened.map.len(), 16 * MIB - 4096);
    drop(opened);
    let options = OpenOptions { block_size: Some(512), ..OpenOptions::default() };
    let opened = becket_image::open(&device.0, &options).unwrap();
    assert_eq!((opened.block_size, source_of(&opened, 0).facts.physical_block_size), (512, 4096));
}

#[test]
fn a_read_only_device_is_opened_for_reading() {
    let dir = dir();
    let Some(device) = device("a_read_only_device_is_opened_for_reading", dir.path(), &["--read-only"])
    else {
        return;
    };
    let opened = open(&device.0).unwrap();
    assert!(opened.read_only && !source_of(&opened, 0).facts.writable);
    assert!(opened.read_only_reason.unwrap().contains("the device is read-only"));
}

#[test]
fn a_mounted_device_is_in_use() {
    let dir = dir();
    let Some(device) = device("a_mounted_device_is_in_use", dir.path(), &[]) else { return };
    run("mkfs.ext4", &["-q", device.0.to_str().unwrap()]);
    let to = dir.path().join("mnt");
    std::fs::create_dir(&to).unwrap();
    let mount = match Mount::new(&[device.0.to_str().unwrap()], &to) {
        Ok(mount) => mount,
        Err(reason) => return skip("a_mounted_device_is_in_use", &reason),
    };
    let error = open(&device.0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.to_string().contains("mounted"), "{error}");
    assert!(error.hint().unwrap().contains("findmnt"), "{error:?}");
    open_read_only(&device.0).unwrap();
    let shared = OpenOptions { shared: true, ..OpenOptions::default() };
    drop(becket_image::open(&device.0, &shared).unwrap());
    drop(mount);
    open(&device.0).unwrap();
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// What the kernel found: number, first byte and length of each partition.
fn as_the_kernel_reads(device: &LoopDevice) -> Vec<(u32, u64, u64)> {
    let mut found: Vec<_> = std::fs::read_dir(Path::new("/sys/block").join(device.name()))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with(device.name()))
        .map(|name| {
            let number = device.sysfs(&format!("{name}/partition"));
            let start = device.sysfs(&format!("{name}/start")) * 512;
            (u32::try_from(number).unwrap(), start, device.sysfs(&format!("{name}/size")) * 512)
        })
        .collect();
    found.sort_unstable();
    found
}

#[test]
fn tables_mean_the_same_to_the_kernel() {
    const NAME: &str = "tables_mean_the_same_to_the_kernel";
    let _turn = dir();
    for name in ["gpt-512.img", "gpt-4096.img", "mbr-logical.img"] {
        let options = OpenOptions { read_only: true, partitions: true, ..OpenOptions::default() };
        let opened = becket_image::open(&fixture(name), &options).unwrap();
        let ours: Vec<_> = opened.partitions.iter().map(|p| (p.number, p.start, p.len)).collect();
        let size = opened.block_size.to_string();
        let device = match LoopDevice::attach(&fixture(name), &["-r", "--partscan", "--sector-size", &size]) {
            Ok(device) => device,
            Err(reason) => return skip(NAME, &reason),
        };
        assert!(!ours.is_empty());
        match as_the_kernel_reads(&device) {
            // sfdisk made these tables: a kernel that sees nothing at all was built without the parser.
            theirs if theirs.is_empty() => skip(NAME, &format!("this kernel reads no table like {name}")),
            theirs => assert_eq!(ours, theirs, "{name}"),
        }
    }
}

#[test]
fn a_partition_has_the_limits_of_its_disk() {
    const NAME: &str = "a_partition_has_the_limits_of_its_disk";
    let dir = dir();
    let Some(device) = device(NAME, dir.path(), &["--sector-size", "4096"]) else { return };
    let disk = std::fs::File::open(&device.0).unwrap();
    becket_uapi::block::partition_add(disk.as_fd(), 2, 8 * 4096, 20 * 4096).unwrap();
    let node = PathBuf::from(format!("{}p2", device.0.display()));
    if !becket_testkit::wait_until(Duration::from_secs(20), || node.exists()) {
        return skip(NAME, "no partition node appeared");
    }
    let opened = open(&node).unwrap();
    let facts = &source_of(&opened, 0).facts;
    assert_eq!((opened.map.len(), opened.block_size), (20 * 4096, 4096));
    assert!(facts.discard);
    assert_eq!(u64::from(facts.discard_granularity), device.sysfs("queue/discard_granularity"));
}

/// The node of a partition and the path through its disk are the same bytes.
#[test]
fn a_partition_is_its_range_of_the_disk() {
    const NAME: &str = "a_partition_is_its_range_of_the_disk";
    /// First sector and number of sectors of each.
    const PARTS: [[u32; 2]; 2] = [[63, 66], [129, 64]];
    let dir = dir();
    let disk = file(dir.path(), "disk.img", 16 * MIB);
    let mut table = [0; 66];
    for (entry, [first, sectors]) in table.chunks_exact_mut(16).zip(PARTS) {
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry[12..].copy_from_slice(&sectors.to_le_bytes());
    }
    (table[64], table[65]) = (0x55, 0xaa);
    std::fs::File::options().write(true).open(&disk).unwrap().write_all_at(&table, 446).unwrap();
    let device = match LoopDevice::attach(&disk, &[]) {
        Ok(device) => device,
        Err(reason) => return skip(NAME, &reason),
    };
    let disk = std::fs::File::open(&device.0).unwrap();
    // Another test may have left some.
    for number in 1..=2 {
        let _ = becket_uapi::block::partition_del(disk.as_fd(), number);
    }
    for (number, sectors) in (1..).zip(PARTS) {
        let [start, len] = sectors.map(|sectors| u64::from(sectors) * 512);
        becket_uapi::block::partition_add(disk.as_fd(), number, start, len).unwrap();
    }
    let node = |number: u32| PathBuf::from(format!("{}p{number}", device.0.display()));
    if !becket_testkit::wait_until(Duration::from_secs(20), || node(1).exists() && node(2).exists()) {
        return skip(NAME, "no partition nodes appeared");
    }
    let path = |number: u32| device.0.join(format!("p{number}"));
    let in_use = |path: &Path| {
        for opened in [open(path), open_read_only(path)] {
            assert_eq!(opened.unwrap_err().kind(), ErrorKind::InUse, "{}", path.display());
        }
    };

    let mut first = open(&node(1)).unwrap();
    in_use(&path(1));
    in_use(&device.0);
    let neighbour = open(&node(2)).expect("the neighbour shares a page with it, but no byte");
    in_use(&path(2));
    drop(neighbour);
    // What a server gets has all locks.
    first.keep_outer();
    let kept = first.sources;
    in_use(&path(1));
    drop(kept);
    for writer in [path(1), device.0.clone()] {
        let writer = open(&writer).unwrap();
        in_use(&node(1));
        drop(writer);
    }

    let reader = open_read_only(&node(1)).unwrap();
    open(&node(2)).expect("readers of one partition keep nobody from another");
    let other = open_read_only(&path(1)).unwrap();
    assert_eq!(open(&node(1)).unwrap_err().kind(), ErrorKind::InUse);
    drop((reader, other));
    let claimed = becket_image::claim(&node(1), &mut Vec::new()).unwrap();
    in_use(&path(1));
    drop(claimed);
    open(&path(1)).unwrap();

    // A loop device of the kernel's has no lock on the disk.
    let options = ["--offset", "32256", "--sizelimit", "33792"];
    for (over, seen) in [(device.0.clone(), node(1)), (node(1), path(1)), (node(1), device.0.clone())] {
        let options = if over == device.0 { &options[..] } else { &[] };
        let Ok(stacked) = LoopDevice::attach(&over, options) else { return skip(NAME, "no loop device") };
        in_use(&seen);
        if over == device.0 {
            open(&node(2)).expect("it shows the other one");
        }
        drop(stacked);
    }
}

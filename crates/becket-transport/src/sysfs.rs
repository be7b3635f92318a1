//! Reading attributes of block devices from sysfs.
//! It never writes there and never opens a device; an attribute that is not there is `None`, not an error.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use becket_engine::{Activity, Summary};

/// Where the kernel shows a disk or partition, by its name in sysfs (`loop3`, `loop3p1`).
pub fn directory(name: &str) -> PathBuf {
    PathBuf::from("/sys/class/block").join(name)
}

/// Where it is if it is a disk on no bus.
fn virtual_directory(name: &str) -> PathBuf {
    Path::new("/sys/devices/virtual/block").join(name)
}

/// Whether sysfs is mounted and shows block devices at all.
pub fn is_there() -> bool {
    Path::new("/sys/class/block").is_dir()
}

/// An attribute's text without the line's end.
pub fn text(name: &str, attribute: &str) -> Option<String> {
    // Most disks that are asked for are on no bus: without the link it is half the way.
    let text = read(&virtual_directory(name).join(attribute));
    let mut text = text.or_else(|| read(&directory(name).join(attribute)))?;
    if text.ends_with('\n') {
        text.pop();
    }
    Some(text)
}

/// A whole attribute, which one read returns and is never longer than a page: no need to look for its length
/// or end.
fn read(attribute: &Path) -> Option<String> {
    let mut page = [0; 4096];
    let len = File::open(attribute).and_then(|mut file| file.read(&mut page)).ok()?;
    std::str::from_utf8(page.get(..len)?).ok().map(str::to_owned)
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

/// Device number and sequence number (Linux 5.15) of a disk that is on no bus, by one read; `None` if it is
/// not found among such disks.
///
/// Looked up where it is and not by its link among all block devices: names that are as new as the disk are
/// not in the kernel's cache yet, and each lookup makes an inode.
pub fn virtual_disk(name: &str) -> Option<(u64, Option<u64>)> {
    numbers_in(&read(&virtual_directory(name).join("uevent"))?)
}

fn numbers_in(text: &str) -> Option<(u64, Option<u64>)> {
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let dev = rustix::fs::makedev(value("MAJOR")?.parse().ok()?, value("MINOR")?.parse().ok()?);
    Some((dev, value("DISKSEQ").and_then(|number| number.parse().ok())))
}

/// Length in bytes of the block device of that number, a partition or a disk.
pub(crate) fn size_at(major: u32, minor: u32) -> Option<u64> {
    let text = read(Path::new(&format!("/sys/dev/block/{major}:{minor}/size")))?;
    text.trim().parse::<u64>().ok()?.checked_mul(512)
}

/// The device number in an attribute anywhere in sysfs.
pub(crate) fn dev_at(attribute: &Path) -> Option<u64> {
    let text = read(attribute)?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// The node's path that belongs to a name in sysfs, where `!` stands for a slash.
pub fn node(name: &str) -> PathBuf {
    PathBuf::from("/dev").join(name.replace('!', "/"))
}

/// What the kernel has counted of a disk since it made it. It knows no errors, and of latencies only the
/// mean.
pub fn counted(name: &str) -> Option<Summary> {
    counters(&text(name, "stat")?)
}

/// The same of all disks and partitions, by their names: one file has them, which is less than a look at each
/// of many.
pub fn all_counted() -> HashMap<String, Summary> {
    parse_all(&std::fs::read_to_string("/proc/diskstats").unwrap_or_default())
}

fn parse_all(text: &str) -> HashMap<String, Summary> {
    let disk = |line: &str| {
        let (_major, rest) = line.trim_start().split_once(' ')?;
        let (_minor, rest) = rest.trim_start().split_once(' ')?;
        let (name, rest) = rest.split_once(' ')?;
        Some((name.to_owned(), counters(rest)?))
    };
    text.lines().filter_map(disk).collect()
}

/// The disks that have partitions, of those whose names end in a digit.
pub fn partitioned() -> HashSet<String> {
    let names = std::fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
    names.filter_map(|entry| disk_of_partition(entry.file_name().to_str()?).map(str::to_owned)).collect()
}

/// `loop5` of `loop5p1`.
fn disk_of_partition(name: &str) -> Option<&str> {
    let disk = name.trim_end_matches(|c: char| c.is_ascii_digit()).strip_suffix('p')?;
    (name.ends_with(|c: char| c.is_ascii_digit()) && disk.ends_with(|c: char| c.is_ascii_digit()))
        .then_some(disk)
}

/// How many reads and how many other requests of a disk are under way.
///
/// Source: Documentation/ABI/stable/sysfs-block of the kernel, `inflight`.
pub fn in_flight(name: &str) -> Option<(u64, u64)> {
    let text = text(name, "inflight")?;
    let mut fields = text.split_ascii_whitespace().map(str::parse);
    Some((fields.next()?.ok()?, fields.next()?.ok()?))
}

/// Source: Documentation/block/stat.rst of the kernel. A sector there is always 512 bytes, a tick a
/// millisecond.
fn counters(text: &str) -> Option<Summary> {
    let fields: Result<Vec<u64>, _> = text.split_ascii_whitespace().map(str::parse).collect();
    let fields = fields.ok()?;
    let activity = |operations: u64, sectors: u64, ticks: u64| Activity {
        operations,
        bytes: sectors.saturating_mul(512),
        mean_ns: ticks.saturating_mul(1_000_000).checked_div(operations),
        ..Activity::default()
    };
    let moved = |first: usize| match fields.get(first..first + 4) {
        Some(&[operations, _merged, sectors, ticks]) => Some(activity(operations, sectors, ticks)),
        _ => None,
    };
    // Discards came with Linux 4.18, flushes with 5.5; zeroed ranges count as writes.
    let flush = match fields.get(15..17) {
        Some(&[operations, ticks]) => activity(operations, 0, ticks),
        _ => Activity::default(),
    };
    Some(Summary {
        in_flight: *fields.get(8)?,
        read: moved(0)?,
        write: moved(4)?,
        flush,
        discard: moved(11).unwrap_or_default(),
        write_zeroes: None,
        decoded: None,
        fetched: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disks_of_one_file_are_those_of_many() {
        let text = "   7       0 loop0 5 0 16 1 2 0 8 3 0 2 4 0 0 0 0 1 7\n 259       1 nvme0n1p1 1 0 8 0 0 0 0 0 0 0 0\nx\n";
        let all = parse_all(text);
        assert_eq!(all.len(), 2);
        assert_eq!((all["loop0"].read.operations, all["loop0"].write.bytes), (5, 8 * 512));
        assert_eq!(all["nvme0n1p1"].read.bytes, 8 * 512);
        // And of this machine.
        for (name, counted) in all_counted() {
            let alone = super::counted(&name);
            assert!(alone.is_none_or(|alone| alone.read.operations >= counted.read.operations), "{name}");
        }
    }

    #[test]
    fn partitions_name_their_disk() {
        let names = ["loop5p1", "loop5", "nvme0n1p12", "sda1", "ublkb3p2", "p1", "loopp", ""];
        let disks = names.map(disk_of_partition);
        assert_eq!(disks, [Some("loop5"), None, Some("nvme0n1"), None, Some("ublkb3"), None, None, None]);
    }

    #[test]
    fn what_is_not_there_is_none() {
        assert_eq!(text("no-such-disk", "dev"), None);
        assert_eq!(dev("no-such-disk"), None);
        assert_eq!(number::<u64>("no-such-disk", "size"), None);
    }

    #[test]
    fn the_kernels_counters_are_distinguished() {
        let counted = counters("4 1 24 8 5 0 40 20 2 11 12 6 0 48 3 7 14\n").unwrap();
        let seen = [&counted.read, &counted.write, &counted.flush, &counted.discard]
            .map(|kind| (kind.operations, kind.bytes, kind.mean_ns));
        let ms = |ms: u64| Some(ms * 1_000_000);
        let expected =
            [(4, 24 * 512, ms(2)), (5, 40 * 512, ms(4)), (7, 0, ms(2)), (6, 48 * 512, Some(500_000))];
        assert_eq!((seen, counted.in_flight), (expected, 2));
        assert_eq!((counted.read.errors, counted.read.p50_ns, counted.write_zeroes), (None, None, None));
        let old = counters("0 0 0 0 5 0 40 20 2 11 12").unwrap();
        assert_eq!((old.write.operations, old.flush.operations, old.read.mean_ns), (5, 0, None));
        for nonsense in ["", "1 2 3", "a b c d e f g h i j k", "1 2 3 4 5 6 7 8 -1 2 3"] {
            assert_eq!(counters(nonsense), None, "{nonsense:?}");
        }
    }

    #[test]
    fn an_event_tells_the_numbers_of_a_disk() {
        let dev = rustix::fs::makedev(259, 508);
        let new = "MAJOR=259\nMINOR=508\nDEVNAME=ublkb509\nDEVTYPE=disk\nDISKSEQ=824\n";
        assert_eq!(numbers_in(new), Some((dev, Some(824))));
        assert_eq!(numbers_in("MAJOR=259\nMINOR=508\nDEVTYPE=disk\n"), Some((dev, None)));
        for nonsense in ["", "MAJOR=259\n", "MINOR=508\nMAJOR\n", "MAJOR=a\nMINOR=1\n"] {
            assert_eq!(numbers_in(nonsense), None, "{nonsense:?}");
        }
        assert_eq!(virtual_disk("no-such-disk"), None);
    }

    #[test]
    fn a_virtual_disk_is_the_one_of_its_link() {
        let names = std::fs::read_dir("/sys/devices/virtual/block").into_iter().flatten().flatten();
        for name in names.filter_map(|entry| entry.file_name().into_string().ok()) {
            // Others' disks come and go.
            if let Some((dev, diskseq)) = virtual_disk(&name)
                && let (Some(linked), other) = (super::dev(&name), number(&name, "diskseq"))
                && virtual_disk(&name) == Some((dev, diskseq))
            {
                assert_eq!((dev, diskseq), (linked, other), "{name}");
            }
        }
    }

    #[test]
    fn an_exclamation_mark_is_a_slash() {
        assert_eq!(node("cciss!c0d0p1"), PathBuf::from("/dev/cciss/c0d0p1"));
        assert_eq!(node("loop0"), PathBuf::from("/dev/loop0"));
    }
}

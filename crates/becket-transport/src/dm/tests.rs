//! Tables and UUIDs anywhere; devices where there is a device-mapper, on loop devices of their own.
//! Every test removes what it makes, and touches nothing else.

use becket_image::{Extent, Map, OpenOptions, Partition, Place};
use becket_uapi::dm::Target;

use super::control::{name, parse_uuid, uuid, uuid_of_partition};
use super::table::{linear, lines, single};
use super::*;

const BELOW: [table::Below; 2] =
    [table::Below { dev: 0x0702, block: 512 }, table::Below { dev: 0x0703, block: 512 }];

fn extent(start: u64, len: u64, place: Place) -> Extent {
    Extent { start, len, place }
}

fn data(source: u32, offset: u64) -> Place {
    Place::Data { source, offset }
}

fn words(table: &[Target]) -> Vec<String> {
    table.iter().map(|line| format!("{} {} {} {}", line.start, line.len, line.kind, line.params)).collect()
}

#[test]
fn a_map_becomes_a_table_line_by_line() {
    let one = lines(&Map::contiguous(0, 1 << 20, 1 << 21), &BELOW, 512, false).unwrap();
    assert_eq!(words(&one), ["0 4096 linear 7:2 2048"]);
    let extents =
        vec![extent(0, 1024, data(1, 512)), extent(1024, 4096, Place::Zero), extent(5120, 512, data(0, 0))];
    let map = Map::from_extents(extents).unwrap();
    let several = lines(&map, &BELOW, 512, true).unwrap();
    assert_eq!(words(&several), ["0 2 linear 7:3 1", "2 8 zero ", "10 1 linear 7:2 0"]);
}

/// What a zero target is given to write is lost without a word.
#[test]
fn a_hole_is_for_devices_that_refuse_writes() {
    let map = Map::from_extents(vec![extent(0, 4096, Place::Zero)]).unwrap();
    assert!(lines(&map, &BELOW, 512, true).is_ok());
    assert!(lines(&map, &BELOW, 512, false).unwrap_err().contains("forget"));
}

#[test]
fn what_is_no_table_does_not_fit_and_says_why() {
    let large = [BELOW[0], table::Below { block: 4096, ..BELOW[1] }];
    let not = |map: &Map, below: &[table::Below], block| lines(map, below, block, false).unwrap_err();
    let map = |offset, len| Map::contiguous(0, offset, len);
    assert!(not(&map(1000, 512), &BELOW, 512).contains("blocks of 512"), "offset");
    assert!(not(&map(0, 1000), &BELOW, 512).contains("blocks of 512"), "length");
    assert!(not(&map(512, 4096), &large, 4096).contains("blocks of 4096"), "the coarsest device counts");
    assert!(not(&map(0, 4096), &BELOW, 4096).contains("not 4096"));
    assert!(not(&map(0, 4096), &large, 512).contains("4096 bytes, not 512"));
    assert!(not(&map(0, 4096), &[], 512).contains("not there"));
    let encoded = Map::from_extents(vec![extent(0, 512, Place::Encoded { layer: 0, offset: 0 })]).unwrap();
    assert!(not(&encoded, &BELOW, 512).contains("computed"));
    let pieces = (0..257).map(|index| extent(index * 512, 512, data(0, index * 1024))).collect();
    assert!(not(&Map::from_extents(pieces).unwrap(), &BELOW, 512).contains("257 pieces"));
}

#[test]
fn one_range_is_read_back_from_its_table() {
    let dev = rustix::fs::makedev(259, 70_000);
    assert_eq!(single(&linear(dev, 1 << 20, 4096)), Some((dev, 1 << 20, 4096)));
    let line = |params: &str| {
        single(&[Target { start: 0, len: 8, kind: "linear".to_owned(), params: params.to_owned() }])
    };
    assert!(line("7:0 0").is_some());
    for nonsense in ["", "7:0", "7 0", "x:0 0", "7:0 -1", "7:0 18446744073709551615", "7:0 0 0"] {
        assert_eq!(line(nonsense), None, "{nonsense:?}");
    }
    let two = [linear(dev, 0, 512), linear(dev, 512, 512)].concat();
    assert_eq!(single(&two), None);
}

#[test]
fn only_our_own_uuids_are_ours() {
    assert_eq!(parse_uuid(&uuid(0xabc)), Some((0xabc, None)));
    assert_eq!(parse_uuid(&uuid_of_partition(u64::MAX, 12)), Some((u64::MAX, Some(12))));
    for foreign in [
        "",
        "becket-",
        "becket-abc",
        "becket-+000000000000abc",
        "becket-0000000000000ABC",
        "becket-0000000000000abc-part",
        "becket-0000000000000abc-part01",
        "becket-0000000000000abc-part1-part2",
        "part1-becket-0000000000000abc",
        "CRYPT-LUKS2-0000000000000abc",
    ] {
        assert_eq!(parse_uuid(foreign), None, "{foreign:?}");
    }
}

#[test]
fn a_device_mapper_that_is_missing_comes_with_a_way_out() {
    let missing = Error::Unavailable {
        kind: Kind::Dm,
        reason: "the dm driver is not loaded".to_owned(),
        fix: Some("modprobe dm-mod".to_owned()),
    };
    let probe = judge(Err(missing));
    assert!(!probe.works);
    assert_eq!(probe.fix.as_deref(), Some("modprobe dm-mod"));
    assert!(judge(Ok(Vec::new())).works);
}

/// A loop device of 8 MiB of noise, opened as an image; both go when this is dropped.
struct Below {
    directory: tempfile::TempDir,
    loop_: crate::loop_::LoopDevice,
}

impl Below {
    /// `None`, and the test is skipped, where there is no device-mapper.
    fn new(name: &str) -> Option<Below> {
        if !becket_testkit::require_dm(name) {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        becket_testkit::image::random(&image, 8 << 20, 1);
        let opened = becket_image::open(&image, &OpenOptions::default()).unwrap();
        let loop_ = crate::loop_::attach(&opened, &crate::loop_::LoopOptions::default()).unwrap();
        Some(Below { directory, loop_ })
    }

    fn open(&self, read_only: bool) -> Opened {
        becket_image::open(&self.loop_.path, &OpenOptions { read_only, ..OpenOptions::default() }).unwrap()
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.directory.path().join("image")).unwrap()
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        let (number, diskseq) = (self.loop_.number, self.loop_.diskseq);
        let _ = crate::loop_::detach(number, Some(diskseq), None);
    }
}

/// A partition of 1 MiB.
fn partition(number: u32, start: u64) -> Partition {
    Partition { number, start, len: 1 << 20, label: None, uuid: None, type_: "0x83".to_owned() }
}

/// What becomes of a map of several pieces and a hole, in the kernel.
#[test]
fn dm_several_pieces_and_a_hole_are_one_device() {
    let Some(below) = Below::new("dm_several_pieces_and_a_hole_are_one_device") else { return };
    let mut opened = below.open(true);
    let extents = vec![
        extent(0, 4096, data(0, 1 << 20)),
        extent(4096, 8192, Place::Zero),
        extent(12288, 4096, data(0, 512)),
    ];
    opened.map = Map::from_extents(extents).unwrap();
    let device = attach(&opened, &DmOptions::default()).unwrap();
    let found = std::fs::read(&device.path).unwrap();
    assert_eq!(refresh(device.mark, None).unwrap(), 16384, "there is nothing to do");
    assert!(
        matches!(refresh(device.mark, Some(8192)), Err(Error::Fixed { .. })),
        "which piece would shrink?"
    );
    drop(device.fds);
    assert!(detach_unused(device.mark).unwrap());
    let bytes = below.bytes();
    let expected = [&bytes[1 << 20..][..4096], &[0; 8192], &bytes[512..][..4096]].concat();
    assert!(found == expected, "{} bytes, or others", found.len());
    assert!(detach_unused(device.mark).unwrap(), "gone is gone");
}

/// Partitions that were removed for a disk which then turned out to be used.
#[test]
fn dm_what_went_too_early_comes_back_under_its_number() {
    let Some(below) = Below::new("dm_what_went_too_early_comes_back_under_its_number") else { return };
    let mut opened = below.open(false);
    opened.partitions = vec![partition(1, 1 << 20), partition(5, 4 << 20)];
    let device = attach(&opened, &DmOptions { partitions: true, autoclear: false }).unwrap();
    let disk = name(device.number);
    let before = partitions(&disk);
    assert_eq!(before.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 5]);
    drop(device.fds);
    detach::remove_and_restore(device.mark).unwrap();
    assert_eq!(partitions(&disk), before, "the same numbers lead to the same partitions");
    let found = std::fs::read(crate::sysfs::node(&before[1].1)).unwrap();
    assert!(found == below.bytes()[4 << 20..][..1 << 20], "it shows another place");
    assert!(detach_unused(device.mark).unwrap());
    assert!(before.iter().all(|(_, name)| {
        parse_uuid(&crate::sysfs::text(name, "dm/uuid").unwrap_or_default())
            .is_none_or(|(mark, _)| mark != device.mark)
    }));
}

/// A failed attach leaves nothing, whatever step fails.
#[test]
fn dm_a_partition_past_the_end_fails_and_leaves_nothing() {
    let Some(below) = Below::new("dm_a_partition_past_the_end_fails_and_leaves_nothing") else { return };
    let mut opened = below.open(false);
    opened.partitions = vec![partition(1, 1 << 20), partition(2, 1 << 30)];
    for autoclear in [false, true] {
        let error = attach(&opened, &DmOptions { partitions: true, autoclear }).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Unsupported, "{error}");
        let holders = crate::sysfs::directory(&format!("loop{}", below.loop_.number)).join("holders");
        let left = || std::fs::read_dir(&holders).unwrap().count();
        assert!(becket_testkit::wait_until(std::time::Duration::from_secs(5), || left() == 0));
    }
}

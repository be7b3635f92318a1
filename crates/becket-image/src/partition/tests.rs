//! The parsers against tables that sfdisk made, and against invalid ones.
//! It never needs a tool or a device: the tables are checked in.

use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use proptest::sample::Index;

use super::table::NUMBERS_END;
use super::*;
use crate::bytes::{u32_at, u64_at};

const GPT_512: &[u8] = include_bytes!("../../tests/fixtures/gpt-512.img");
const GPT_4096: &[u8] = include_bytes!("../../tests/fixtures/gpt-4096.img");
const MBR_LOGICAL: &[u8] = include_bytes!("../../tests/fixtures/mbr-logical.img");

/// An image whose bytes behind its vector are zeroes, for as long as it is asked; it counts what is read.
struct Bytes {
    bytes: Vec<u8>,
    read: AtomicU64,
}

impl Bytes {
    fn new(bytes: impl Into<Vec<u8>>) -> Bytes {
        Bytes { bytes: bytes.into(), read: AtomicU64::new(0) }
    }
}

impl ReadAt for Bytes {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.read.fetch_add(buf.len() as u64, Ordering::Relaxed);
        buf.fill(0);
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(self.bytes.len());
        let there = &self.bytes[from..];
        let len = there.len().min(buf.len());
        buf[..len].copy_from_slice(&there[..len]);
        Ok(())
    }
}

fn read_bytes(bytes: &[u8], sector: u32) -> Table {
    read(&Bytes::new(bytes), bytes.len() as u64, sector).unwrap()
}

/// Number, start and length in sectors, of each partition.
fn ranges(table: &Table, sector: u64) -> Vec<(u32, u64, u64)> {
    table.partitions.iter().map(|p| (p.number, p.start / sector, p.len / sector)).collect()
}

/// Puts the right checksums into a GPT header at `at`, as far as its numbers make sense.
fn seal(bytes: &mut [u8], at: usize, sector: usize) {
    let array = u64_at(bytes, at + 72).saturating_mul(sector as u64);
    let len = u64::from(u32_at(bytes, at + 80)) * u64::from(u32_at(bytes, at + 84));
    let array = usize::try_from(array).unwrap_or(usize::MAX);
    let end = array.saturating_add(usize::try_from(len).unwrap_or(usize::MAX));
    if let Some(entries) = bytes.get(array..end) {
        let crc = crc32fast::hash(entries);
        bytes[at + 88..at + 92].copy_from_slice(&crc.to_le_bytes());
    }
    bytes[at + 16..at + 20].fill(0);
    let len = (u32_at(bytes, at + 12) as usize).clamp(HEADER_MIN, sector);
    let crc = crc32fast::hash(&bytes[at..at + len]);
    bytes[at + 16..at + 20].copy_from_slice(&crc.to_le_bytes());
}

const HEADER_MIN: usize = 92;

#[test]
fn gpt_as_sfdisk_writes_it() {
    let table = read_bytes(GPT_512, 512);
    assert_eq!(table.sector, Some(512));
    assert_eq!(table.warnings, [""; 0]);
    let [esp, root] = table.partitions.as_slice() else { panic!("{table:?}") };
    assert_eq!(
        *esp,
        Partition {
            number: 1,
            start: 8 * 512,
            len: 8 * 512,
            label: Some("ESP".to_owned()),
            uuid: Some("11111111-2222-3333-4444-555555555555".to_owned()),
            type_: "c12a7328-f81f-11d2-ba4b-00a0c93ec93b".to_owned(),
        }
    );
    assert_eq!((root.number, root.start, root.len), (3, 16 * 512, 24 * 512));
    assert_eq!(root.label.as_deref(), Some("wörk"));
}

#[test]
fn gpt_of_4096_byte_sectors_is_found_whatever_was_expected() {
    for preferred in [512, 1024, 4096] {
        let table = read_bytes(GPT_4096, preferred);
        assert_eq!(table.sector, Some(4096));
        assert_eq!(ranges(&table, 4096), [(1, 4, 3), (2, 8, 20)]);
        assert_eq!(table.partitions[1].label, None);
    }
    assert_eq!(read_bytes(GPT_512, 4096).sector, Some(512));
}

#[test]
fn a_corrupt_primary_gpt_gives_way_to_the_backup_and_says_so() {
    for (fixture, sector) in [(GPT_512, 512_usize), (GPT_4096, 4096)] {
        let whole = read_bytes(fixture, 512);
        // In the header, in the entries, the header gone altogether.
        for damage in [sector + 40..sector + 41, 2 * sector + 130..2 * sector + 131, sector..2 * sector] {
            let mut bytes = fixture.to_vec();
            bytes[damage.clone()].iter_mut().for_each(|byte| *byte ^= 0xff);
            let table = read_bytes(&bytes, 512);
            assert_eq!(table.partitions, whole.partitions, "damage at {damage:?}");
            assert_eq!(table.sector, Some(sector as u32));
            assert!(table.warnings[0].contains("its backup is used"), "{:?}", table.warnings);
        }
    }
}

#[test]
fn without_a_usable_copy_there_are_no_partitions_and_a_reason() {
    let mut bytes = GPT_512.to_vec();
    let backup = bytes.len() - 512;
    bytes[512 + 88] ^= 1;
    bytes[backup + 16] ^= 1;
    let table = read_bytes(&bytes, 512);
    assert_eq!(table.partitions, []);
    assert!(table.warnings[0].contains("checksum is wrong"), "{:?}", table.warnings);

    let table = read_bytes(&GPT_512[..16 << 10], 512);
    assert_eq!(table.partitions, []);
    assert!(table.warnings[0].contains("cut short"), "{:?}", table.warnings);
}

#[test]
fn a_gpt_without_its_protective_record_is_stale() {
    let mut bytes = GPT_512.to_vec();
    bytes[510] = 0;
    assert_eq!(read_bytes(&bytes, 512), Table::default());

    let mut bytes = MBR_LOGICAL.to_vec();
    bytes[512..1024].copy_from_slice(&GPT_512[512..1024]);
    assert_eq!(read_bytes(&bytes, 512).partitions.len(), 5, "the boot record was written later");
}

#[test]
fn gpt_entries_that_cannot_be_are_left_out_alone() {
    let entry = |first: u64, last: u64| {
        let mut bytes = GPT_512.to_vec();
        bytes[1024 + 32..1024 + 40].copy_from_slice(&first.to_le_bytes());
        bytes[1024 + 40..1024 + 48].copy_from_slice(&last.to_le_bytes());
        seal(&mut bytes, 512, 512);
        read_bytes(&bytes, 512)
    };
    for (first, last, why) in [
        (15, 8, "end lies before"),
        (8, 64, "beyond the end"),
        (0, u64::MAX, "beyond the end"),
        (1, u64::MAX, "beyond the end"),
        (u64::MAX, u64::MAX, "beyond the end"),
        (1 << 55, 1 << 55, "beyond the end"),
    ] {
        let table = entry(first, last);
        assert_eq!(ranges(&table, 512), [(3, 16, 24)], "{first}..={last}");
        assert!(table.warnings.iter().any(|w| w.contains("partition 1 is left out")), "{:?}", table.warnings);
        assert!(table.warnings[0].contains(why), "{:?}", table.warnings);
    }
    assert_eq!(ranges(&entry(8, 63), 512), [(1, 8, 56), (3, 16, 24)], "up to the last sector is possible");
}

#[test]
fn gpt_headers_that_ask_for_too_much_are_refused() {
    let header = |at: usize, value: &[u8]| {
        let mut bytes = GPT_512.to_vec();
        bytes[512 + at..512 + at + value.len()].copy_from_slice(value);
        seal(&mut bytes, 512, 512);
        // No backup: what is refused must not be hidden by it.
        let end = bytes.len();
        bytes[end - 512..].fill(0);
        let image = Bytes::new(bytes);
        let table = read(&image, u64::MAX, 512).unwrap();
        assert!(
            image.read.load(Ordering::Relaxed) < 64 << 10,
            "read {} bytes",
            image.read.load(Ordering::Relaxed)
        );
        assert_eq!(table.partitions, [], "field at {at}");
        assert_eq!(table.warnings.len(), 1, "{:?}", table.warnings);
    };
    header(80, &u32::MAX.to_le_bytes());
    header(80, &0_u32.to_le_bytes());
    header(84, &u32::MAX.to_le_bytes());
    header(84, &0_u32.to_le_bytes());
    header(84, &64_u32.to_le_bytes());
    header(84, &136_u32.to_le_bytes());
    header(12, &91_u32.to_le_bytes());
    header(12, &513_u32.to_le_bytes());
    header(24, &2_u64.to_le_bytes());
    header(72, &u64::MAX.to_le_bytes());
    header(72, &(u64::MAX / 512).to_le_bytes());
    header(48, &u64::MAX.to_le_bytes());
}

#[test]
fn gpt_entries_beyond_the_kernels_numbers_are_left_out() {
    let mut bytes = GPT_512.to_vec();
    bytes.resize(256 << 10, 0);
    let used: Vec<u8> = bytes[1024..1024 + 128].to_vec();
    let array = 64 << 10;
    for number in [255, 256] {
        bytes[array + (number - 1) * 128..][..128].copy_from_slice(&used);
    }
    bytes[512 + 72..512 + 80].copy_from_slice(&128_u64.to_le_bytes());
    bytes[512 + 80..512 + 84].copy_from_slice(&300_u32.to_le_bytes());
    seal(&mut bytes, 512, 512);
    let table = read_bytes(&bytes, 512);
    assert_eq!(ranges(&table, 512), [(255, 8, 8)]);
    assert!(table.warnings[0].contains("partition 256 is left out"), "{:?}", table.warnings);
}

#[test]
fn mbr_with_logical_partitions_as_sfdisk_writes_it() {
    let table = read_bytes(MBR_LOGICAL, 512);
    assert_eq!(table.warnings, [""; 0]);
    assert_eq!(table.sector, None);
    let expected = [(1, 1, 7), (2, 8, 2), (5, 10, 6), (6, 20, 4), (7, 30, 10)];
    assert_eq!(ranges(&table, 512), expected, "the container shows 1024 bytes, as the kernel's does");
    assert_eq!(table.partitions[0].uuid.as_deref(), Some("cafe0123-01"));
    assert_eq!(table.partitions[4].uuid.as_deref(), Some("cafe0123-07"));
    assert_eq!(table.partitions[3].type_, "0x82");
    assert_eq!(table.partitions[4].label, None);
}

/// The link (second entry) of the boot record at `sector` of the fixture.
fn set_link(bytes: &mut [u8], sector: usize, kind: u8, first: u32) {
    let link = sector * 512 + 446 + 16;
    bytes[link + 4] = kind;
    bytes[link + 8..link + 12].copy_from_slice(&first.to_le_bytes());
    bytes[link + 12..link + 16].copy_from_slice(&1_u32.to_le_bytes());
}

#[test]
fn a_circle_of_logical_partitions_ends() {
    // The first record of the chain is in sector 8, the start of the container.
    for target in [0, 1] {
        let mut bytes = MBR_LOGICAL.to_vec();
        bytes.copy_within(8 * 512..9 * 512, 9 * 512);
        set_link(&mut bytes, 8, 5, 1);
        set_link(&mut bytes, 9, 5, target);
        let table = read_bytes(&bytes, 512);
        assert!(table.warnings.iter().any(|w| w.contains("circle")), "{:?}", table.warnings);
        assert_eq!(table.partitions.iter().filter(|p| p.number >= 5).count(), 2);
    }
}

#[test]
fn a_chain_that_leaves_the_image_or_leads_to_nothing_ends() {
    for (target, why) in [(u32::MAX, "leaves the image"), (40, "something else")] {
        let mut bytes = MBR_LOGICAL.to_vec();
        set_link(&mut bytes, 8, 5, target);
        let table = read_bytes(&bytes, 512);
        assert_eq!(ranges(&table, 512), [(1, 1, 7), (2, 8, 2), (5, 10, 6)]);
        assert!(table.warnings[0].contains(why), "{:?}", table.warnings);
    }
}

#[test]
fn an_endless_chain_is_followed_as_far_as_the_kernel_counts() {
    // 1000 records, one sector each, each with a partition; and as many without any.
    for (sectors, count, reads) in [(1_u32, 251, 253 * 512), (0, 0, 103 * 512)] {
        let mut bytes = MBR_LOGICAL.to_vec();
        bytes.resize(1100 * 512, 0);
        bytes.copy_within(8 * 512..9 * 512, 9 * 512);
        for link in 0..1000_u32 {
            let at = 8 + link as usize;
            bytes.copy_within(9 * 512..10 * 512, at * 512);
            set_link(&mut bytes, at, 5, link + 1);
            let data = at * 512 + 446;
            bytes[data + 8..data + 12].copy_from_slice(&1_u32.to_le_bytes());
            bytes[data + 12..data + 16].copy_from_slice(&sectors.to_le_bytes());
        }
        let image = Bytes::new(bytes);
        let table = read(&image, 1100 * 512, 512).unwrap();
        assert_eq!(table.partitions.iter().filter(|p| p.number >= 5).count(), count);
        assert!(table.partitions.iter().all(|p| p.number < NUMBERS_END));
        assert!(table.warnings[0].contains("ends early"), "{:?}", table.warnings);
        assert!(
            image.read.load(Ordering::Relaxed) <= reads,
            "read {} bytes",
            image.read.load(Ordering::Relaxed)
        );
    }
}

#[test]
fn a_boot_sector_of_a_file_system_is_no_table() {
    let mut bytes = MBR_LOGICAL.to_vec();
    bytes[446 + 32] = b'N';
    assert_eq!(read_bytes(&bytes, 512), Table::default());
}

#[test]
fn what_is_too_short_for_a_table_has_none() {
    for len in [0, 1, 511] {
        assert_eq!(read_bytes(&GPT_512[..len], 512), Table::default());
    }
    assert_eq!(read_bytes(&GPT_512[..512], 512).partitions, []);
}

/// What holds of any table of an image of `len` bytes.
fn check(table: &Table, len: u64) {
    let mut last = 0;
    for partition in &table.partitions {
        assert!(partition.number > last && partition.number < NUMBERS_END, "numbers rise");
        last = partition.number;
        assert!(partition.len > 0);
        assert!(partition.start.checked_add(partition.len).is_some_and(|end| end <= len), "{partition:?}");
    }
}

/// No table costs more than its two copies at three sector sizes, or the longest chain.
const READ_MAX: u64 = 6 * (4 << 20) + (1 << 20) + 256 * 101 * 512;

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_the_parsers_fail(
        mut bytes in prop::collection::vec(any::<u8>(), 512..8192),
        indicators in any::<bool>(),
        kinds in prop::array::uniform4(prop::sample::select(vec![0_u8, 5, 0x0f, 0x83, 0xee])),
        len in prop_oneof![Just(0_u64), Just(8192), any::<u64>()],
        sector in prop::sample::select(vec![512_u32, 1024, 4096]),
    ) {
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        for (slot, kind) in kinds.into_iter().enumerate() {
            let entry = 446 + 16 * slot;
            if indicators {
                bytes[entry] &= 0x80;
            }
            bytes[entry + 4] = kind;
            if kind == 0xee {
                bytes[entry + 8..entry + 12].copy_from_slice(&1_u32.to_le_bytes());
            }
        }
        let image = Bytes::new(bytes);
        check(&read(&image, len, sector).unwrap(), len);
        prop_assert!(image.read.load(Ordering::Relaxed) <= READ_MAX);
    }

    /// Damage with correct checksums: the author of a hostile image can compute them too.
    #[test]
    fn no_damage_makes_the_parsers_fail(
        fixture in prop::sample::select(vec![(GPT_512, 512_usize), (GPT_4096, 4096), (MBR_LOGICAL, 512)]),
        damage in prop::collection::vec((any::<Index>(), prop_oneof![any::<u8>(), Just(0), Just(0xff)]), 1..12),
        cut in prop::option::of(any::<Index>()),
        huge in any::<bool>(),
    ) {
        let (fixture, sector) = fixture;
        let mut bytes = fixture.to_vec();
        // Only where the table is: boot record, header and entries, or the records of the chain.
        let interesting: Vec<usize> = if fixture == MBR_LOGICAL {
            [0_usize, 8, 16, 17, 18, 19, 29].iter().flat_map(|s| s * 512 + 440..s * 512 + 512).collect()
        } else {
            (446..512).chain(sector..sector + 96).chain(2 * sector..2 * sector + 512).collect()
        };
        for (place, value) in damage {
            bytes[*place.get(&interesting)] = value;
        }
        if fixture != MBR_LOGICAL {
            seal(&mut bytes, sector, sector);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let len = if huge { u64::MAX } else { bytes.len() as u64 };
        let image = Bytes::new(bytes);
        check(&read(&image, len, 512).unwrap(), len);
        prop_assert!(image.read.load(Ordering::Relaxed) <= READ_MAX);
    }
}

#[test]
fn a_length_makes_a_partition_whatever_its_type() {
    // As in the MBR of memtest86+, and in a link of a chain: the kernel and sfdisk show both.
    let mut bytes = vec![0; 64 * 512];
    let mut entry = |record: usize, slot: usize, kind: u8, first: u8, sectors: u8| {
        let at = record * 512 + 446 + 16 * slot;
        bytes[at + 4] = kind;
        (bytes[at + 8], bytes[at + 12]) = (first, sectors);
        bytes[record * 512 + 510..][..2].copy_from_slice(&[0x55, 0xaa]);
    };
    entry(0, 0, 0, 0, 32);
    entry(0, 1, 0x05, 40, 8);
    entry(0, 2, 0, 7, 0);
    entry(40, 0, 0, 1, 4);
    let table = read_bytes(&bytes, 512);
    assert_eq!(ranges(&table, 512), [(1, 0, 32), (2, 40, 2), (5, 41, 4)]);
    assert_eq!(table.partitions[0].type_, "0x00");
}

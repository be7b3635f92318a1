//! Reads a master boot record with its chain of logical partitions.
//! It never follows that chain twice through one place, nor further than the kernel counts.

use std::collections::HashSet;
use std::io;

use super::table::{NUMBERS_END, Partition, Table, byte_range};
use crate::bytes::{ReadAt, field, u32_at};

/// Length of a boot record in bytes, whatever the sector size.
pub(super) const LEN: usize = 512;
/// The type that protects a GPT from tools that do not know it.
const PROTECTIVE: u8 = 0xee;
/// The number of the first logical partition.
const FIRST_LOGICAL: u32 = 5;
/// Records without any partition that the kernel follows in a row.
const EMPTY_LINKS_MAX: u32 = 100;

/// One of the four entries.
#[derive(Debug, Clone, Copy)]
struct Entry {
    kind: u8,
    /// First sector; what it counts from depends on where the entry stands.
    first: u32,
    sectors: u32,
}

impl Entry {
    /// As the kernel and sfdisk have it: a length makes a partition, also of type 0 (the MBR of memtest86+
    /// has one).
    fn is_used(&self) -> bool {
        self.sectors != 0
    }

    fn is_extended(&self) -> bool {
        matches!(self.kind, 0x05 | 0x0f | 0x85)
    }
}

/// The first sector of a disk, or of a link in the chain of logical partitions.
#[derive(Debug)]
pub(super) struct BootRecord {
    entries: [Entry; 4],
    disk_signature: u32,
}

impl BootRecord {
    /// `None` when this is not a boot record with a partition table: the signature is missing, or a boot
    /// indicator is neither 0 nor 0x80 and so belongs to the code of a file system's boot sector.
    pub(super) fn parse(sector: &[u8; LEN]) -> Option<BootRecord> {
        if sector[510..] != [0x55, 0xaa] {
            return None;
        }
        let mut entries = [Entry { kind: 0, first: 0, sectors: 0 }; 4];
        for (entry, bytes) in entries.iter_mut().zip(sector[446..510].chunks_exact(16)) {
            let [indicator, _, _, _, kind] = field(bytes, 0);
            if indicator & 0x7f != 0 {
                return None;
            }
            *entry = Entry { kind, first: u32_at(bytes, 8), sectors: u32_at(bytes, 12) };
        }
        Some(BootRecord { entries, disk_signature: u32_at(sector, 440) })
    }

    /// Whether the real table is a GPT: an entry protects sector 1 and what follows.
    pub(super) fn is_protective(&self) -> bool {
        self.entries.iter().any(|entry| entry.kind == PROTECTIVE && entry.first == 1)
    }
}

/// Reads the partitions of `boot`, counting in sectors of `sector` bytes.
pub(super) fn read(image: &dyn ReadAt, len: u64, sector: u32, boot: &BootRecord) -> io::Result<Table> {
    let mut table = Reader { image, len, sector, signature: boot.disk_signature, table: Table::default() };
    let mut next_logical = FIRST_LOGICAL;
    for (number, entry) in (1..).zip(&boot.entries) {
        if !entry.is_used() {
            continue;
        }
        if entry.is_extended() {
            // As the kernel does: the container has a node, long enough for a boot loader and no longer,
            // so that nothing writes to a logical partition through it.
            let shown = u64::from(entry.sectors).min((1024 / u64::from(sector)).max(1));
            table.add(number, entry.kind, entry.first.into(), shown);
            table.read_chain(entry, &mut next_logical)?;
        } else {
            table.add(number, entry.kind, entry.first.into(), entry.sectors.into());
        }
    }
    let mut table = table.table;
    table.partitions.sort_by_key(|partition| partition.number);
    Ok(table)
}

struct Reader<'a> {
    image: &'a dyn ReadAt,
    len: u64,
    sector: u32,
    signature: u32,
    table: Table,
}

impl Reader<'_> {
    /// Takes over one partition, when it lies within the image.
    fn add(&mut self, number: u32, kind: u8, first: u64, sectors: u64) {
        match byte_range(first, sectors, self.sector, self.len) {
            Ok((start, len)) => self.table.partitions.push(Partition {
                number,
                start,
                len,
                label: None,
                uuid: (self.signature != 0).then(|| format!("{:08x}-{number:02x}", self.signature)),
                type_: format!("{kind:#04x}"),
            }),
            Err(error) => self.table.warnings.push(format!("partition {number} is left out: {error}")),
        }
    }

    /// Follows the chain of boot records in `container`. In each of them the first partition counts from
    /// that record, the link to the next one from the start of the container. Only the first two entries
    /// mean something.
    fn read_chain(&mut self, container: &Entry, next: &mut u32) -> io::Result<()> {
        let base = u64::from(container.first);
        let mut visited = HashSet::new();
        let mut empty = 0;
        let mut at = base;
        loop {
            if !visited.insert(at) {
                self.warn_chain("it runs in a circle");
                return Ok(());
            }
            let Ok((start, _)) = byte_range(at, 1, self.sector, self.len) else {
                self.warn_chain("it leaves the image");
                return Ok(());
            };
            let mut bytes = [0; LEN];
            self.image.read_at(&mut bytes, start)?;
            let Some(record) = BootRecord::parse(&bytes) else {
                // An empty container need not hold a record at all.
                if at != base {
                    self.warn_chain("a link leads to something else");
                }
                return Ok(());
            };
            let mut link = None;
            empty += 1;
            for entry in record.entries.iter().take(2).filter(|entry| entry.is_used()) {
                if entry.is_extended() {
                    link = link.or(Some(entry.first));
                } else if *next >= NUMBERS_END {
                    self.warn_chain("the kernel counts no further");
                    return Ok(());
                } else {
                    self.add(*next, entry.kind, at + u64::from(entry.first), entry.sectors.into());
                    *next += 1;
                    empty = 0;
                }
            }
            let Some(link) = link else { return Ok(()) };
            if empty > EMPTY_LINKS_MAX {
                self.warn_chain("too many of its links hold no partition");
                return Ok(());
            }
            at = base + u64::from(link);
        }
    }

    fn warn_chain(&mut self, why: &str) {
        self.table.warnings.push(format!("the list of logical partitions ends early: {why}"));
    }
}

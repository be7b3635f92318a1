//! The log that device-mapper's log-writes keeps of a device, and what is on the device at each place of it.
//! Its format is the kernel's (Documentation/admin-guide/device-mapper/log-writes.rst): a write is in the log
//! behind the flush that made it last, a durable one at once, so that every flush is a place where the power
//! may have gone.

use std::{fs::File, os::unix::fs::FileExt as _, path::Path};

const MAGIC: u64 = 0x006a_7366_7773_6872;
const FLUSH: u64 = 1;
const FUA: u64 = 1 << 1;
const DISCARD: u64 = 1 << 2;
const MARK: u64 = 1 << 3;

/// What was done to the device, in bytes.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) at: u64,
    pub(crate) len: u64,
    flags: u64,
    /// Where its bytes are in the log.
    data: u64,
    pub(crate) mark: Option<String>,
}

impl Entry {
    /// All that was flushed before is on the disk, and nothing else.
    pub(crate) fn is_a_cut(&self) -> bool {
        self.flags & (FLUSH | FUA | MARK) != 0
    }

    pub(crate) fn has_bytes(&self) -> bool {
        self.len > 0 && self.flags & (DISCARD | MARK) == 0
    }

    /// Does to another file what was done to the device.
    pub(crate) fn replay(&self, log: &File, to: &File) {
        if self.flags & MARK != 0 || self.len == 0 {
            return;
        }
        if self.flags & DISCARD != 0 {
            let mode = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            return rustix::fs::fallocate(to, mode, self.at, self.len).unwrap();
        }
        let mut bytes = vec![0; usize::try_from(self.len).unwrap()];
        log.read_exact_at(&mut bytes, self.data).unwrap();
        to.write_all_at(&bytes, self.at).unwrap();
    }
}

/// All entries of a log.
pub(crate) fn entries(log: &Path) -> (File, Vec<Entry>) {
    let file = File::open(log).unwrap();
    let numbers = |at: u64| {
        let mut bytes = [0; 32];
        file.read_exact_at(&mut bytes, at).unwrap();
        [0, 8, 16, 24].map(|from| u64::from_le_bytes(bytes[from..from + 8].try_into().unwrap()))
    };
    let [magic, version, count, sector] = numbers(0);
    assert_eq!((magic, version), (MAGIC, 1), "it is not a log");
    let sector = sector & 0xffff_ffff;
    let mut at = sector;
    let mut entries = Vec::new();
    for _ in 0..count {
        let [first, sectors, flags, len] = numbers(at);
        let mark = (flags & MARK != 0).then(|| {
            let mut text = vec![0; usize::try_from(len).unwrap()];
            file.read_exact_at(&mut text, at + 32).unwrap();
            String::from_utf8(text).unwrap().trim_end_matches('\0').to_owned()
        });
        at += sector;
        entries.push(Entry { at: first * sector, len: sectors * sector, flags, data: at, mark });
        if flags & DISCARD == 0 {
            at += sectors * sector;
        }
    }
    (file, entries)
}

/// Where behind `begin` the power could have gone: how many such places there are, and so many `points` of
/// them, the last one among these.
pub(crate) fn cuts(entries: &[Entry], begin: usize, points: usize) -> (usize, Vec<usize>) {
    let cuts: Vec<usize> = (begin..entries.len()).filter(|index| entries[*index].is_a_cut()).collect();
    let chosen = (1..=points).map(|point| cuts[(cuts.len() - 1) * point / points]);
    (cuts.len(), chosen.collect())
}

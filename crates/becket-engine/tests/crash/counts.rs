//! Whether a qcow2 counts what it uses: what `qemu-img check` calls corruption, without what it calls leaks.
//! Written from the specification, and never by becket's own reader: that one does not look at counts.

use std::collections::BTreeMap;

use becket_image::ReadAt;

use crate::file::State;

const PLACE: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

struct Reader<'a>(&'a State);

impl Reader<'_> {
    fn number(&self, at: u64, bytes: usize) -> Result<u64, String> {
        let mut buffer = [0; 8];
        let read = self.0.read_at(&mut buffer[8 - bytes..], at);
        read.map_err(|error| format!("{bytes} bytes at {at} of {}: {error}", self.0.len))?;
        Ok(u64::from_be_bytes(buffer))
    }

    fn table(&self, at: u64, count: u64) -> Result<Vec<u64>, String> {
        let mut bytes = vec![0; count as usize * 8];
        let read = self.0.read_at(&mut bytes, at);
        read.map_err(|error| format!("a table of {count} at {at} of {}: {error}", self.0.len))?;
        Ok(bytes.chunks(8).map(|number| u64::from_be_bytes(number.try_into().unwrap())).collect())
    }
}

/// What is wrong with the counts of an image whose counts have 16 bits.
pub(crate) fn check(state: &State) -> Result<(), String> {
    let reader = Reader(state);
    let bits = reader.number(20, 4)?;
    let cluster = 1 << bits;
    let (l1_at, l1_len) = (reader.number(40, 8)?, reader.number(36, 4)?);
    let (counts_at, counts_len) = (reader.number(48, 8)?, reader.number(56, 4)? * cluster);
    // By cluster: how many users it has, and how many of them say that they are alone.
    let mut uses: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let mut uses_of = |at: u64, len: u64, alone: u64| {
        for cluster in at / cluster..(at + len).div_ceil(cluster) {
            let (users, claims) = uses.entry(cluster).or_default();
            *users += 1;
            *claims += alone;
        }
    };
    uses_of(0, 1, 0);
    uses_of(l1_at, l1_len * 8, 0);
    uses_of(counts_at, counts_len, 0);
    let blocks = reader.table(counts_at, counts_len / 8)?;
    for block in blocks.iter().filter(|block| **block != 0) {
        uses_of(*block, cluster, 0);
    }
    for table in reader.table(l1_at, l1_len)?.into_iter().filter(|entry| entry & PLACE != 0) {
        uses_of(table & PLACE, cluster, table >> 63);
        for entry in reader.table(table & PLACE, cluster / 8)? {
            if entry & COMPRESSED != 0 {
                let split = 62 - (bits - 8);
                let (at, more) = (entry & ((1 << split) - 1), (entry & !(COPIED | COMPRESSED)) >> split);
                uses_of(at / 512 * 512, (more + 1) * 512, 0);
            } else if entry & PLACE != 0 {
                uses_of(entry & PLACE, cluster, entry >> 63);
            }
        }
    }
    for (number, (users, claims)) in uses {
        let block = blocks.get((number / (cluster / 2)) as usize).copied().unwrap_or(0);
        let counted = if block == 0 { 0 } else { reader.number(block + number % (cluster / 2) * 2, 2)? };
        if counted < users || claims > 0 && counted != 1 {
            return Err(format!(
                "cluster {number} has {users} users, {claims} of them say that they are alone, and counted are {counted}"
            ));
        }
    }
    Ok(())
}

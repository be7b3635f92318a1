//! A new qcow2 with clusters of its own and without a backing file.
//! It never leaves a header in a file whose clusters and tables are not on the disk.
//!
//! The header's cluster comes first, then the data in any order, then the tables. No cluster has two uses or
//! none, so each reference count is one.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use super::create::{Tables, header};
use super::entry::COPIED;
use super::header::L1_MAX;

/// Bytes of a cluster.
pub const CLUSTER: u64 = 64 << 10;
/// Bytes of an entry of each table, and of a reference count.
const ENTRY: u64 = 8;
const COUNT: u64 = 2;

/// Clusters of the disk, in a row, and where they are in the file: all in clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// The first one, in the disk.
    pub guest: u64,
    /// The first one, in the file: 1 or more.
    pub host: u64,
    /// How many.
    pub count: u64,
}

/// Whether a disk of `size` bytes can be a qcow2.
///
/// # Errors
/// It is too large.
pub fn fits(size: u64) -> io::Result<()> {
    let entries = size.div_ceil(CLUSTER / ENTRY * CLUSTER);
    if entries * ENTRY > L1_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is larger than a qcow2 can be"));
    }
    Ok(())
}

/// Writes the tables and the header of a qcow2 whose data is in `runs`, in the clusters from 1 on without a
/// gap. Everything else of the `size` bytes, a multiple of 512, is zeroes.
///
/// # Errors
/// The file failed, or the disk is too large.
pub fn finish(file: &File, size: u64, mut runs: Vec<Run>) -> io::Result<()> {
    fits(size)?;
    runs.sort_unstable();
    let per_table = CLUSTER / ENTRY;
    let mut l1 = vec![0_u64; usize::try_from(size.div_ceil(per_table * CLUSTER)).map_err(io::Error::other)?];
    let data = runs.iter().map(|run| run.host + run.count).max().unwrap_or(1);
    let mut next = data;
    // The table that is being filled, and which of the first level's entries it is for.
    let mut table: Option<(u64, Vec<u8>)> = None;
    let mut write = |(index, bytes): (u64, Vec<u8>)| {
        file.write_all_at(&bytes, next * CLUSTER)?;
        let entry = usize::try_from(index).ok().and_then(|index| l1.get_mut(index));
        *entry.ok_or(io::ErrorKind::InvalidInput)? = (next * CLUSTER) | COPIED;
        next += 1;
        Ok::<_, io::Error>(())
    };
    for (guest, host) in runs.iter().flat_map(|run| (0..run.count).map(|n| (run.guest + n, run.host + n))) {
        let index = guest / per_table;
        if let Some(full) = table.take_if(|(filled, _)| *filled != index) {
            write(full)?;
        }
        let (_, bytes) = table.get_or_insert_with(|| (index, vec![0; CLUSTER as usize]));
        let at = usize::try_from(guest % per_table * ENTRY).map_err(io::Error::other)?;
        if let Some(entry) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
            *entry = ((host * CLUSTER) | COPIED).to_be_bytes();
        }
    }
    table.map(&mut write).transpose()?;
    let l1_at = next * CLUSTER;
    let l1_bytes: Vec<u8> = l1.iter().flat_map(|entry| entry.to_be_bytes()).collect();
    file.write_all_at(&l1_bytes, l1_at)?;
    next += (l1_bytes.len() as u64).div_ceil(CLUSTER);

    // The blocks of counts, and the table that finds them, are counted, too.
    let (mut blocks, mut tables) = (1, 1);
    loop {
        let total = next + blocks + tables;
        let wanted = total.div_ceil(CLUSTER / COUNT);
        let found_by = (wanted * ENTRY).div_ceil(CLUSTER);
        if (wanted, found_by) == (blocks, tables) {
            break;
        }
        (blocks, tables) = (wanted.max(blocks), found_by.max(tables));
    }
    let total = next + blocks + tables;
    let counts_at = next * CLUSTER;
    for block in 0..blocks {
        let counted = (total - block * (CLUSTER / COUNT)).min(CLUSTER / COUNT);
        let ones = [0, 1].repeat(usize::try_from(counted).map_err(io::Error::other)?);
        file.write_all_at(&ones, counts_at + block * CLUSTER)?;
    }
    let table_at = counts_at + blocks * CLUSTER;
    let pointers: Vec<u8> =
        (0..blocks).flat_map(|block| (counts_at + block * CLUSTER).to_be_bytes()).collect();
    file.write_all_at(&pointers, table_at)?;
    file.set_len(total * CLUSTER)?;
    file.sync_data()?;
    let places = Tables { l1: l1_at, l1_entries: l1.len() as u64, counts: table_at, count_clusters: tables };
    file.write_all_at(&header(size, CLUSTER, &places, None), 0)?;
    file.sync_all()
}

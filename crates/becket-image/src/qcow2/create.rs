//! A new qcow2 without a cluster of its own: all that it shows is its backing file's.
//! It never leaves a header in a file whose tables are not on the disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use super::header::{BACKING_FORMAT, BackingName, L1_MAX, LEN_3, MAGIC, NAME_MAX};

/// Bytes of an entry of the L1 table, and of the table of blocks of reference counts.
const ENTRY: u64 = 8;

/// Writes an empty disk of `size` bytes in clusters of `cluster` into an empty file.
///
/// Four parts follow each other: the header's cluster, the refcount table, its only refcount block, and the
/// L1 table.
///
/// # Errors
/// The name or the disk is longer than a qcow2 can say, or the file failed.
pub(crate) fn write_empty(file: &File, size: u64, cluster: u64, backing: &BackingName) -> io::Result<()> {
    let impossible = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what.to_owned());
    let l1_entries = size.div_ceil(cluster / ENTRY * cluster);
    if l1_entries * ENTRY > L1_MAX {
        return Err(impossible("it is larger than a qcow2 can be"));
    }
    let name = &backing.name;
    if name.is_empty() || name.len() > NAME_MAX as usize {
        return Err(impossible(&format!("a qcow2 has no room for a path of more than {NAME_MAX} bytes")));
    }
    let [counts, block, l1] = [1, 2, 3].map(|part| part * cluster);
    let used = 3 + (l1_entries * ENTRY).div_ceil(cluster);
    file.set_len(used * cluster)?;
    file.write_all_at(&block.to_be_bytes(), counts)?;
    file.write_all_at(&[0, 1].repeat(usize::try_from(used).map_err(io::Error::other)?), block)?;
    file.sync_data()?;

    let tables = Tables { l1, l1_entries, counts, count_clusters: 1 };
    file.write_all_at(&header(size, cluster, &tables, Some(backing)), 0)?;
    file.sync_all()
}

/// Where the tables of a new qcow2 are, in bytes.
pub(super) struct Tables {
    pub(super) l1: u64,
    pub(super) l1_entries: u64,
    /// The table of blocks of reference counts, and its length in clusters.
    pub(super) counts: u64,
    pub(super) count_clusters: u64,
}

/// The header of a disk of `size` bytes in clusters of `cluster`.
pub(super) fn header(size: u64, cluster: u64, tables: &Tables, backing: Option<&BackingName>) -> Vec<u8> {
    let mut header: Vec<u8> = Vec::with_capacity(2048);
    let name = backing.map_or(&[][..], |backing| &backing.name);
    let format = backing.and_then(|backing| backing.format.as_deref()).unwrap_or_default();
    let padded = format.len().next_multiple_of(8);
    // The extension with the format and the one that ends them are before the name.
    let name_place = LEN_3 + 8 + padded + 8;
    let small = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes();
    let count = |number: u64| u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes();
    header.extend(MAGIC.to_be_bytes());
    header.extend(3_u32.to_be_bytes());
    header.extend(if name.is_empty() { 0 } else { name_place as u64 }.to_be_bytes());
    header.extend(small(name.len()));
    header.extend(cluster.trailing_zeros().to_be_bytes());
    header.extend(size.to_be_bytes());
    // Not encrypted.
    header.extend(0_u32.to_be_bytes());
    header.extend(count(tables.l1_entries));
    header.extend(tables.l1.to_be_bytes());
    header.extend(tables.counts.to_be_bytes());
    header.extend(count(tables.count_clusters));
    // No snapshot, at offset 0; no incompatible, compatible or autoclear features.
    header.extend([0; 4 + 8 + 3 * 8]);
    // Counts of 2^4 bits.
    header.extend(4_u32.to_be_bytes());
    header.extend(small(LEN_3));
    if backing.is_some() {
        header.extend(BACKING_FORMAT.to_be_bytes());
        header.extend(small(format.len()));
        header.extend(format);
    }
    header.resize(if backing.is_some() { name_place } else { LEN_3 + 8 }, 0);
    header.extend(name);
    header
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::image::Image;
    use crate::qcow2::{Header, Writing, unpack_for};

    fn backing(name: &[u8]) -> BackingName {
        BackingName { name: name.to_vec(), format: Some(b"raw".to_vec()) }
    }

    #[test]
    fn what_is_written_is_read_again() {
        for (size, cluster) in [(512, 65536), (3 << 30, 65536), ((1 << 40) + 512, 2 << 20)] {
            let file = tempfile::tempfile().unwrap();
            let long = vec![b'n'; 1023];
            write_empty(&file, size, cluster, &backing(&long)).unwrap();
            let len = file.metadata().unwrap().len();
            let image = Image::raw(Arc::new(file), len, 512);
            let header = Header::read(&image).unwrap().unwrap();
            assert_eq!((header.size, header.cluster()), (size, cluster));
            assert_eq!(header.backing, Some(backing(&long)));
            let below = Image::raw(Arc::new(vec![7_u8; 512]), 512, 512);
            let (disk, verdict) = unpack_for(Writing::KeepBitmaps, &image, &header, Some(&below)).unwrap();
            assert_eq!(verdict.unwritable, None);
            let places: Vec<_> =
                disk.map().extents().iter().map(|extent| (extent.len, extent.place)).collect();
            assert_eq!(places[0], (512, crate::Place::Data { source: 1, offset: 0 }));
            assert_eq!(places.get(1), (size > 512).then_some(&(size - 512, crate::Place::Zero)));
        }
    }

    #[test]
    fn what_no_qcow2_can_say_is_refused() {
        let file = tempfile::tempfile().unwrap();
        for (size, name) in [(512, &[b'n'; 1024][..]), (512, b""), (u64::MAX, b"n")] {
            let error = write_empty(&file, size, 65536, &backing(name)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        }
        assert_eq!(file.metadata().unwrap().len(), 0, "nothing is written first");
    }
}

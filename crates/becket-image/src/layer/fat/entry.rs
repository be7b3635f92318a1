//! What directories of FAT and exFAT share: entries of 32 bytes, dates of DOS, what is shown of a file.
//! It never has more than a part of a directory in memory.

use std::ops::ControlFlow;

use crate::bytes::u8_at;
use crate::image::{Image, Layout};
use crate::layer::{Attributes, LayerError, NodeKind, Time, directory_len};

/// The number of the root directory, which has no entry.
pub(super) const ROOT: u64 = 0;
/// Length of an entry in bytes.
pub(super) const ENTRY: usize = 32;
/// Bytes of a directory that are read at once.
const WINDOW: u64 = 4096;

/// Reports each entry of a directory up to the last: where it is, and its bytes.
pub(super) fn entries(
    image: &Image,
    directory: &Layout,
    report: &mut dyn FnMut(u64, &[u8]) -> ControlFlow<()>,
) -> Result<(), LayerError> {
    directory_len(directory.len())?;
    for extent in directory.extents() {
        let crate::Place::Data { offset, .. } = extent.place else { continue };
        for part in (0..extent.len).step_by(WINDOW as usize) {
            let len = usize::try_from((extent.len - part).min(WINDOW)).unwrap_or(0);
            let bytes = image.read_vec(offset + part, len)?;
            for (index, raw) in bytes.chunks_exact(ENTRY).enumerate() {
                let at = offset + part + (index * ENTRY) as u64;
                if u8_at(raw, 0) == 0 || report(at, raw) == ControlFlow::Break(()) {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// What is shown of a file.
pub(super) fn shown(is_dir: bool, size: u64, modified: Option<Time>) -> Attributes {
    let kind = if is_dir { NodeKind::Directory } else { NodeKind::File };
    Attributes { modified, ..Attributes::of(kind, size) }
}

/// A date and a time of day in steps of two seconds, as DOS wrote them.
pub(super) fn time(date: u16, time: u16) -> Option<Time> {
    let bits = |word: u16, from: u32, count: u32| u32::from(word) >> from & ((1 << count) - 1);
    let date = (1980 + i64::from(date >> 9), bits(date, 5, 4), bits(date, 0, 5));
    Time::of_date(date, (bits(time, 11, 5), bits(time, 5, 6), bits(time, 0, 5) * 2))
}

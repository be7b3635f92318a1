//! The entries of a directory: some in its record, others in blocks that a bitmap says are in use.
//! It never follows the tree that they form: it reads each block once, in the order of their places.

use std::ops::ControlFlow;

use super::file::{File, Volume};
use super::record::{DOS, NAMESPACE, Record, kind};
use crate::bytes::{part, u8_at, u16_at, u32_at, u64_at, utf16_le};
use crate::layer::{Entry, LayerError, NAME_MAX, corrupt, directory_len};

/// The name of an index by names, in UTF-16.
const BY_NAME: &[u8] = b"$\0I\x003\x000\0";
/// Where a name begins in a value with what belongs to it.
const NAME: usize = 66;
/// Length of an entry before its name, and of a block's head before the head of its entries.
const ENTRY: usize = 16;
const BLOCK: usize = 24;

/// Reports each name in a directory with the reference of its file.
pub(super) fn list(volume: &Volume, file: &File, entry: &mut Entry<'_>) -> Result<(), LayerError> {
    let Some(root) = file.stream(kind::INDEX_ROOT, BY_NAME)? else {
        return corrupt("a directory without entries");
    };
    let root = root.read(volume, volume.record)?;
    if entries(&root, ENTRY, entry)? == ControlFlow::Break(()) {
        return Ok(());
    }
    let Some(blocks) = file.stream(kind::INDEX_ALLOCATION, BY_NAME)? else { return Ok(()) };
    let size = usize::try_from(u32_at(&root, 8)).unwrap_or(0);
    if !size.is_power_of_two() || !(512..=64 << 10).contains(&size) {
        return corrupt(format!("a directory with blocks of {size} bytes"));
    }
    let len = directory_len(blocks.size())?;
    let used = match file.stream(kind::BITMAP, BY_NAME)? {
        Some(used) => used.read(volume, len / size / 8 + 4096)?,
        None => return corrupt("a directory whose blocks are not known to be in use"),
    };
    let bytes = volume.image.compose(blocks.lay_out(volume)?)?;
    for number in (0..len / size).filter(|number| u8_at(&used, number / 8) >> (number % 8) & 1 != 0) {
        let block = Record::parse(b"INDX", bytes.read_vec((number * size) as u64, size)?)?;
        if entries(&block.bytes, BLOCK, entry)? == ControlFlow::Break(()) {
            break;
        }
    }
    Ok(())
}

/// Reports the entries behind the head at byte `head`.
fn entries(bytes: &[u8], head: usize, entry: &mut Entry<'_>) -> Result<ControlFlow<()>, LayerError> {
    const LAST: u16 = 2;
    let place = |at| usize::try_from(u32_at(bytes, at)).unwrap_or(0);
    let end = head.saturating_add(place(head + 4));
    let mut at = head.saturating_add(place(head));
    while at < end {
        let len = usize::from(u16_at(bytes, at + 8));
        let raw = part(bytes, at, len);
        if raw.len() < len || len < ENTRY {
            return corrupt("an impossible entry of a directory");
        }
        if u16_at(raw, 12) & LAST != 0 {
            return Ok(ControlFlow::Continue(()));
        }
        let key = part(raw, ENTRY, usize::from(u16_at(raw, 10)));
        let units = 2 * usize::from(u8_at(key, NAMESPACE - 1));
        let name = part(key, NAME, units);
        if name.len() < units || units == 0 {
            return corrupt("an impossible name in a directory");
        }
        // A name of 255 units may have more bytes than a kernel takes.
        let name = utf16_le(name);
        let shown = u8_at(key, NAMESPACE) != DOS && name.len() <= 3 * NAME_MAX;
        if shown && entry(name.as_bytes(), u64_at(raw, 0)) == ControlFlow::Break(()) {
            return Ok(ControlFlow::Break(()));
        }
        at += len;
    }
    Ok(ControlFlow::Continue(()))
}

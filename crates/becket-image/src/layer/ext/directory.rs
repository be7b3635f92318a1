//! Directories of ext: a linear scan, which also reads hashed ones.
//! It never follows an entry's length out of its block.

use std::ops::ControlFlow;

use crate::bytes::{part, u8_at, u16_at, u32_at};
use crate::image::Image;
use crate::layer::{Entry, LayerError, corrupt};

/// Length of an entry without its name.
const HEAD: usize = 8;

/// Reports the entries in the first `len` bytes of `bytes`. The nodes of a hashed directory's tree look like
/// blocks with one unused entry.
pub(super) fn list(
    bytes: &Image,
    len: usize,
    block_size: usize,
    entry: &mut Entry<'_>,
) -> Result<(), LayerError> {
    for start in (0..len).step_by(block_size.max(HEAD)) {
        let block = bytes.read_vec(start as u64, block_size.min(len - start))?;
        let mut at = 0;
        while at + HEAD <= block.len() {
            let inode = u32_at(&block, at);
            let step = match usize::from(u16_at(&block, at + 4)) {
                // 64 KiB do not fit the field.
                0 | 0xffff => block_size,
                step => step,
            };
            let name_len = usize::from(u8_at(&block, at + 6));
            if step < HEAD || at + step > block.len() || HEAD + name_len > step {
                return corrupt("an entry of a directory does not fit its block");
            }
            let name = part(&block, at + HEAD, name_len);
            let listed = inode != 0 && !name.is_empty() && name != b"." && name != b"..";
            if listed && entry(name, inode.into()) == ControlFlow::Break(()) {
                return Ok(());
            }
            at += step;
        }
    }
    Ok(())
}

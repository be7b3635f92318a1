//! Blocks of metadata: 8 KiB each, encoded or not, one after another.
//! It never keeps more than a few of them decoded.

use std::sync::{Arc, Mutex, PoisonError};

use crate::bytes::{part, u16_at};
use crate::codec::Codec;
use crate::image::{DECODING, Image};
use crate::layer::{LayerError, corrupt};

/// Decoded length of all blocks but a table's last, in bytes.
const LEN: usize = 8192;
/// The bit of a block's head that says that it is stored as it is.
const STORED: u16 = 0x8000;
/// Blocks that are kept decoded: the inodes and directories that a path goes through lie close together.
const KEPT: usize = 64;

/// A place in a chain of metadata blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursor {
    /// Where the block's head is, in the image.
    pub(super) block: u64,
    /// How far into what the block yields.
    pub(super) offset: u64,
}

impl Cursor {
    /// A place in a table, which is addressed by blocks of metadata.
    pub(super) fn new(table: u64, block: u64, offset: u64) -> Result<Cursor, LayerError> {
        let at = table.checked_add(block);
        let block = at.ok_or_else(|| LayerError::Corrupt("a place beyond 2^64 bytes".to_owned()))?;
        Ok(Cursor { block, offset })
    }
}

/// What a block yields, and where the next one is.
#[derive(Debug)]
struct Decoded {
    at: u64,
    next: u64,
    bytes: Vec<u8>,
}

/// Reads metadata blocks.
#[derive(Debug)]
pub(super) struct Metadata {
    image: Image,
    codec: Codec,
    /// The blocks read last, the newest at the end.
    kept: Mutex<Vec<Arc<Decoded>>>,
}

impl Metadata {
    pub(super) fn new(image: Image, codec: Codec) -> Metadata {
        Metadata { image, codec, kept: Mutex::new(Vec::new()) }
    }

    /// The next `len` bytes at a cursor, which goes on behind them.
    pub(super) fn read(&self, cursor: &mut Cursor, len: usize) -> Result<Vec<u8>, LayerError> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let block = self.block(cursor.block)?;
            let from = usize::try_from(cursor.offset).unwrap_or(usize::MAX);
            let some = part(&block.bytes, from, len - bytes.len());
            if from > LEN || block.bytes.is_empty() {
                return corrupt("a place behind the end of a metadata block");
            }
            bytes.extend_from_slice(some);
            cursor.offset += some.len() as u64;
            if cursor.offset >= block.bytes.len() as u64 {
                cursor.offset -= block.bytes.len() as u64;
                cursor.block = block.next;
            }
        }
        Ok(bytes)
    }

    fn block(&self, at: u64) -> Result<Arc<Decoded>, LayerError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = kept.iter().position(|block| block.at == at) {
            let block = kept.remove(index);
            kept.push(Arc::clone(&block));
            return Ok(block);
        }
        let head = u16_at(&self.image.read_vec(at, 2)?, 0);
        let len = usize::from(head & !STORED);
        if len > LEN {
            return corrupt(format!("a metadata block of {len} bytes"));
        }
        let input = self.image.read_vec(at + 2, len)?;
        let bytes = if head & STORED != 0 {
            input
        } else {
            self.image.budget().bytes(LEN as u64, DECODING)?;
            let mut output = vec![0; LEN];
            let got = self.codec.decoder().decode(&input, &mut output);
            output.truncate(got.map_err(|error| LayerError::Corrupt(error.to_string()))?);
            output
        };
        let block = Arc::new(Decoded { at, next: at + 2 + len as u64, bytes });
        if kept.len() >= KEPT {
            kept.remove(0);
        }
        kept.push(Arc::clone(&block));
        Ok(block)
    }
}

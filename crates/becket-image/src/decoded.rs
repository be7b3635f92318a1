//! Blocks that were decoded last, with their decoders: files of a file system share some.
//! Never locked while anything is read or decoded: each thread has blocks of its own meanwhile.

use std::io;
use std::sync::{Mutex, PoisonError};

use crate::codec::{Codec, Decode};
use crate::encoded::{self, Block};

/// Bytes of the blocks that are kept, if there is more than one.
const KEPT_MAX: usize = 4 << 20;

/// How a block is encoded, where, in how many bytes, and how many it yields at most.
type Key = (Codec, u64, u32, u32);

/// The blocks of one image, the one that was used last behind the others.
#[derive(Default)]
pub(crate) struct Decoded(Mutex<Vec<Kept>>);

#[derive(Default)]
struct Kept {
    block: Option<Key>,
    bytes: Vec<u8>,
    decoder: Option<(Codec, Box<dyn Decode>)>,
}

impl Decoded {
    /// Hands over all that a block yields. `input` reads what is stored of it, which is asked for only if the
    /// block is not here.
    pub(crate) fn block(
        &self,
        codec: Codec,
        block: &Block,
        input: impl FnOnce() -> io::Result<Vec<u8>>,
        take: impl FnOnce(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let key = (codec, block.input, block.input_len, block.yields);
        let here = {
            let mut all = self.lock();
            all.iter().position(|kept| kept.block == Some(key)).map(|at| all.remove(at))
        };
        let kept = match here {
            Some(kept) => kept,
            None => {
                // What lies below may be blocks of the same image.
                let input = input()?;
                let mut kept = self.oldest();
                kept.block = None;
                if kept.decoder.as_ref().is_none_or(|(known, _)| *known != codec) {
                    kept.decoder = Some((codec, codec.decoder()));
                }
                let Some((_, decoder)) = &mut kept.decoder else { return Ok(()) };
                encoded::decode_all(block, &input, decoder.as_mut(), &mut kept.bytes)?;
                kept.block = Some(key);
                kept
            }
        };
        let taken = take(&kept.bytes);
        self.keep(kept);
        taken
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory of the block that was not used for the longest time, if there are enough.
    fn oldest(&self) -> Kept {
        let mut all = self.lock();
        let enough = all.iter().map(|kept| kept.bytes.capacity()).sum::<usize>() >= KEPT_MAX / 2;
        if enough { all.remove(0) } else { Kept::default() }
    }

    fn keep(&self, kept: Kept) {
        let mut all = self.lock();
        all.push(kept);
        while all.len() > 1 && all.iter().map(|kept| kept.bytes.capacity()).sum::<usize>() > KEPT_MAX {
            all.remove(0);
        }
    }
}

//! Blocks that were decoded last, and decoders: files of a file system share some.
//! Never locked while anything is read or decoded, so that threads decode at the same time.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::codec::{Codec, Decode};
use crate::encoded::{self, Block};

/// How many blocks are kept, and bytes of them if there is more than one.
const BLOCKS_MAX: usize = 8;
const BYTES_MAX: usize = 4 << 20;

/// How a block is encoded, where, in how many bytes, and how many it yields at most.
type Key = (Codec, u64, u32, u32);
/// A block with what it yields.
type Known = (Key, Arc<Vec<u8>>);
type Decoder = (Codec, Box<dyn Decode>);

/// What was decoded of one image.
#[derive(Default)]
pub(crate) struct Decoded(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    /// The one that was used last is behind the others.
    blocks: VecDeque<Known>,
    /// As many as there were threads that decoded at the same time: some take megabytes.
    decoders: Vec<Decoder>,
}

impl Decoded {
    /// All that a block yields. `input` reads what is stored of it, which is asked for only if the block is
    /// not here.
    pub(crate) fn block(
        &self,
        codec: Codec,
        block: &Block,
        input: impl FnOnce() -> io::Result<Vec<u8>>,
    ) -> io::Result<Arc<Vec<u8>>> {
        let key = (codec, block.input, block.input_len, block.yields);
        if let Some(bytes) = self.lock().find(key) {
            return Ok(bytes);
        }
        // What lies below may be blocks of the same image.
        let input = input()?;
        let (decoder, mut bytes) = self.lock().take();
        let of_codec = decoder.filter(|(known, _)| *known == codec);
        let (_, mut decoder) = of_codec.unwrap_or_else(|| (codec, codec.decoder()));
        let decoded = encoded::decode_all(block, &input, decoder.as_mut(), &mut bytes);
        let bytes = Arc::new(bytes);
        let mut kept = self.lock();
        kept.decoders.push((codec, decoder));
        decoded?;
        kept.blocks.push_back((key, Arc::clone(&bytes)));
        kept.shrink();
        Ok(bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn find(&mut self, key: Key) -> Option<Arc<Vec<u8>>> {
        let at = self.blocks.iter().rposition(|(known, _)| *known == key)?;
        let block = self.blocks.remove(at)?;
        let bytes = Arc::clone(&block.1);
        self.blocks.push_back(block);
        Some(bytes)
    }

    /// A decoder, and the memory of the oldest block if there are enough.
    fn take(&mut self) -> (Option<Decoder>, Vec<u8>) {
        let oldest = if self.blocks.len() == BLOCKS_MAX { self.blocks.pop_front() } else { None };
        // It may be in use.
        let memory = oldest.and_then(|(_, bytes)| Arc::into_inner(bytes));
        (self.decoders.pop(), memory.unwrap_or_default())
    }

    fn shrink(&mut self) {
        let bytes =
            |blocks: &VecDeque<Known>| blocks.iter().map(|(_, bytes)| bytes.capacity()).sum::<usize>();
        while self.blocks.len() > BLOCKS_MAX || self.blocks.len() > 1 && bytes(&self.blocks) > BYTES_MAX {
            self.blocks.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block that yields so many bytes of `byte`, stored at `input`; and what is stored of it.
    fn block(input: u64, yields: u32, byte: u8) -> (Block, Vec<u8>) {
        let plain = vec![byte; usize::try_from(yields).unwrap()];
        let stored = zstd::bulk::compress(&plain, 1).unwrap();
        let input_len = u32::try_from(stored.len()).unwrap();
        (Block { start: 0, len: yields, input, input_len, yields, skip: 0 }, stored)
    }

    fn sizes(decoded: &Decoded) -> (usize, usize, usize) {
        let kept = decoded.lock();
        let bytes = kept.blocks.iter().map(|(_, bytes)| bytes.capacity()).sum();
        (kept.blocks.len(), bytes, kept.decoders.len())
    }

    #[test]
    fn few_blocks_and_one_decoder_are_kept() {
        let decoded = Decoded::default();
        for round in 0..3 {
            for number in 0..100_u8 {
                let (block, stored) = block(number.into(), 4096, number);
                let bytes = decoded.block(Codec::Zstd, &block, || Ok(stored)).unwrap();
                assert!(bytes.len() == 4096 && bytes.iter().all(|byte| *byte == number), "{round}");
            }
            let (blocks, bytes, decoders) = sizes(&decoded);
            assert!((blocks, decoders) == (BLOCKS_MAX, 1) && bytes <= BLOCKS_MAX * 4096, "{bytes}");
        }
        for number in 0..5 {
            let (block, stored) = block(1000 + number, 3 << 20, 1);
            decoded.block(Codec::Zstd, &block, || Ok(stored)).unwrap();
        }
        assert!(sizes(&decoded).0 == 1, "large ones one by one");
    }

    #[test]
    fn what_is_here_is_not_read_again() {
        let decoded = Decoded::default();
        let (first, stored) = block(0, 4096, 1);
        decoded.block(Codec::Zstd, &first, || Ok(stored)).unwrap();
        let (broken, _) = block(1, 4096, 1);
        assert!(decoded.block(Codec::Zstd, &broken, || Ok(vec![0; 9])).is_err());
        assert!(decoded.block(Codec::Zstd, &broken, || Err(io::ErrorKind::NotFound.into())).is_err());
        let again = decoded.block(Codec::Zstd, &first, || Err(io::ErrorKind::NotFound.into())).unwrap();
        assert_eq!(*again, [1; 4096]);
        assert_eq!(sizes(&decoded).2, 1, "the decoder survives what is broken");
    }

    #[test]
    fn threads_decode_at_the_same_time() {
        let (decoded, both) = (Decoded::default(), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            for number in 0..2_u8 {
                let (decoded, both) = (&decoded, &both);
                scope.spawn(move || {
                    let (block, stored) = block(number.into(), 4096, number);
                    // With a lock held neither would come here while the other is.
                    let input = || {
                        both.wait();
                        Ok(stored)
                    };
                    assert_eq!(*decoded.block(Codec::Zstd, &block, input).unwrap(), [number; 4096]);
                });
            }
        });
        assert!((1..=2).contains(&sizes(&decoded).2));
    }
}

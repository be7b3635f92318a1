//! Decoding one block on the thread that calls: what a decoding thread does all the time, and an I/O thread
//! when it is quick. It never waits, and lets no damaged block harm others.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Instant,
};

use becket_image::{
    Encoded,
    codec::{Codec, Decode},
};
use rustix::io::Errno;

use super::{
    block::{Key, Staging},
    cache::{Cache, Waiter},
    frames::{Decoded, Frame},
    mailbox::{Mailbox, Note},
    pace::Pace,
};

/// A block to be decoded.
pub(crate) struct Job {
    pub(crate) key: Key,
    /// The layers of its image, how quickly the blocks of each are decoded, and which one it is of.
    pub(crate) encoded: Arc<[Encoded]>,
    pub(crate) paces: Arc<[Pace]>,
    pub(crate) layer: u32,
    /// The stored bytes are in it, from `from` on.
    pub(crate) staging: Staging,
    pub(crate) from: usize,
    /// Who gets the memory back.
    pub(crate) loader: Waiter,
}

impl Job {
    /// Bytes that the block yields.
    pub(crate) fn room(&self) -> usize {
        let encoded = self.encoded.get(self.layer as usize);
        let block = encoded.and_then(|encoded| encoded.blocks().get(self.key.block as usize));
        block.map_or(0, |block| block.yields as usize)
    }

    /// Blocks of its layer have lately taken so little time that another thread would cost as much.
    pub(crate) fn is_quick(&self) -> bool {
        self.paces.get(self.layer as usize).is_some_and(|pace| pace.is_quick(self.room()))
    }
}

/// A thread's decoders, one for each codec that it has met.
#[derive(Default)]
pub(crate) struct Hand {
    decoders: Vec<(Codec, Box<dyn Decode>)>,
}

impl Hand {
    /// Decodes a block and tells those who wait. What is wrong with it is its own: each error is EIO for
    /// those who wait for this block. `own`: the mailbox that the calling thread looks into right afterwards.
    pub(crate) fn decode(&mut self, mut job: Job, room: Frame, cache: &Cache, own: Option<&Arc<Mailbox>>) {
        let result = self.yields(&mut job, room);
        let Job { key, staging, loader, .. } = job;
        let yielded = result.as_ref().ok().map(|block| block.bytes().len() as u32);
        cache.finish(key, result, own);
        loader.mailbox.leave(loader.whom, Note::Loaded { staging, yielded }, own);
    }

    fn yields(&mut self, job: &mut Job, mut room: Frame) -> Result<Decoded, Errno> {
        let encoded = job.encoded.get(job.layer as usize).ok_or(Errno::IO)?;
        let block = encoded.blocks().get(job.key.block as usize).ok_or(Errno::IO)?;
        let (yields, from, len) = (block.yields as usize, block.skip as usize, block.len as usize);
        let input = job.staging.bytes().get(job.from..).and_then(|rest| rest.get(..block.input_len as usize));
        let input = input.ok_or(Errno::IO)?;
        let codec = encoded.codec();
        let index = self.decoders.iter().position(|(known, _)| *known == codec).unwrap_or_else(|| {
            self.decoders.push((codec, codec.decoder()));
            self.decoders.len() - 1
        });
        let output = room.bytes().get_mut(..yields).ok_or(Errno::IO)?;
        let decoder = &mut self.decoders.get_mut(index).ok_or(Errno::IO)?.1;
        let begin = Instant::now();
        // A decoder that panics on made-up bytes must not take other devices with it.
        match catch_unwind(AssertUnwindSafe(|| decoder.decode(input, output))) {
            Ok(Ok(got)) if got >= from + len => {
                if let Some(pace) = job.paces.get(job.layer as usize) {
                    pace.took(yields, begin.elapsed());
                }
                Ok(room.filled(from, len))
            }
            Ok(_) => Err(Errno::IO),
            Err(_) => {
                self.decoders.swap_remove(index);
                Err(Errno::IO)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use becket_image::{Map, encoded::Block};
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::{
        LEAST_CACHE,
        decode::{Addressee, Decoding, Layers, Lookup, Quick},
    };

    const SIZE: usize = 4096;
    const KNOWN: &[u8; 7] = b"becket ";

    /// A block, somebody who waits for it, and the bell of that one's mailbox.
    struct Bench {
        layers: Arc<Layers>,
        own: Arc<Mailbox>,
        bell: Arc<std::os::fd::OwnedFd>,
    }

    impl Bench {
        fn new() -> Bench {
            let decoding = Decoding::start(1, 0).unwrap();
            let stored = Bench::stored().len() as u32;
            let block =
                Block { start: 0, len: 4000, input: 0, input_len: stored, skip: 90, yields: SIZE as u32 };
            let below = Map::contiguous(0, 0, stored.into());
            let encoded = Encoded::new(Codec::Lz4, below, vec![block]).unwrap();
            let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
            let own = Arc::new(Mailbox::new(Arc::clone(&bell)));
            Bench { layers: Layers::new(vec![encoded], 1, decoding).unwrap(), own, bell }
        }

        fn plain() -> Vec<u8> {
            KNOWN.iter().copied().cycle().take(SIZE).collect()
        }

        fn stored() -> Vec<u8> {
            lz4_flex::block::compress(&Bench::plain())
        }

        fn waiter(&self, tag: u16) -> Waiter {
            Waiter { mailbox: Arc::clone(&self.own), whom: (0, tag) }
        }

        /// The block's job, with a request that waits.
        fn job(&self) -> Job {
            let key = self.layers.key(0, 0);
            let found = self.layers.decoding().cache().look(key, Some(&self.waiter(1)), true);
            assert!(matches!(found, Lookup::Yours));
            let mut staging = Staging::new(SIZE).unwrap();
            staging.bytes()[3..][..Bench::stored().len()].copy_from_slice(&Bench::stored());
            let (encoded, paces) = (Arc::clone(self.layers.encoded()), Arc::clone(self.layers.paces()));
            Job { key, encoded, paces, layer: 0, staging, from: 3, loader: self.waiter(2) }
        }

        fn decode(&self, job: Job) {
            let decoding = Arc::clone(self.layers.decoding());
            Quick { job, decoding }.decode(&mut Hand::default(), &self.own);
        }

        fn rings(&self) -> bool {
            let mut fds = [rustix::event::PollFd::new(&self.bell, rustix::event::PollFlags::IN)];
            let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&now)).unwrap() == 1
        }

        /// The request gets the block's wanted bytes, and the load its memory.
        fn agrees(&self, notes: &[(Addressee, Note)]) {
            assert_eq!(notes.iter().map(|(whom, _)| *whom).collect::<Vec<_>>(), [(0, 1), (0, 2)]);
            match (&notes[0].1, &notes[1].1) {
                (Note::Block { result: Ok(block), .. }, Note::Loaded { yielded, .. }) => {
                    assert!(block.bytes() == &Bench::plain()[90..4090]);
                    assert_eq!(*yielded, Some(4000));
                }
                _ => panic!("it is there"),
            }
        }
    }

    #[test]
    fn what_is_decoded_here_rings_no_bell() {
        let bench = Bench::new();
        let job = bench.job();
        assert!(!job.is_quick(), "nothing is known of it");
        bench.decode(job);
        assert!(!bench.rings());
        let mut notes = Vec::new();
        bench.own.take(&mut notes);
        bench.agrees(&notes);
        // Two seconds for a whole block would do for that.
        assert!(bench.layers.paces()[0].is_quick(1), "what it took is known");
        let found = bench.layers.decoding().cache().look(bench.layers.key(0, 0), None, false);
        assert!(matches!(found, Lookup::Here(_)));
    }

    #[test]
    fn where_there_is_no_memory_at_once_the_pool_waits_for_it() {
        let bench = Bench::new();
        let all = bench.layers.decoding().frames.take(LEAST_CACHE as usize).unwrap();
        bench.decode(bench.job());
        let mut notes = Vec::new();
        bench.own.take(&mut notes);
        assert!(notes.is_empty() && !bench.rings());
        drop(all);
        while notes.len() < 2 {
            rustix::io::read(&bench.bell, &mut [0; 8]).unwrap();
            let mut more = Vec::new();
            bench.own.take(&mut more);
            notes.extend(more);
        }
        bench.agrees(&notes);
    }

    #[test]
    fn a_damaged_block_is_an_error_for_who_waits() {
        let bench = Bench::new();
        let mut job = bench.job();
        job.staging.bytes().fill(0xff);
        bench.decode(job);
        let mut notes = Vec::new();
        bench.own.take(&mut notes);
        assert!(matches!(notes[0].1, Note::Block { result: Err(Errno::IO), .. }));
        assert!(matches!(notes[1].1, Note::Loaded { yielded: None, .. }));
    }
}

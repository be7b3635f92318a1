//! Loads: where a queue reads the stored bytes of encoded blocks, and which blocks it reads ahead.
//! It never loads a block twice at once, never waits, and leaves queues without encoded extents alone.
//!
//! A *load* is a request of the queue's own, under a tag behind those of the port. It is looked up in the map
//! below its layer, and reads into memory of its own; everything that requests have (short reads, retries,
//! the governor's windows) it has. When it is whole its memory goes to the decoding threads and comes back by
//! a [`Note`](crate::decode::Note). What it needs may be encoded, too: then it waits for a load of a lower
//! layer like any request.
//!
//! Each layer has its own places for loads. So a load never waits for a place that one above it holds, and
//! the lowest always goes on: no circle. A request that finds no free place stands in line for one of its
//! layer.
//!
//! # Reading ahead
//!
//! The blocks that a request reaches into are loaded together. Blocks behind it are loaded when the ones
//! before were wanted one after another, as many as were (at most [`MOST_AHEAD`]), and never more than half
//! of the places at once: those who wait come first. Random access reads nothing ahead.

use std::{collections::VecDeque, sync::Arc};

use becket_image::{DirectIo, Place, encoded::Encoded};
use rustix::io::Errno;

use crate::{
    Data, Error, Op, Request, Serving,
    decode::{Job, Layers, Lookup, Staging},
    memory::Buffers,
    stats::Decodings,
    target::Target as _,
};

/// Memory for stored bytes that a queue takes for each layer, in bytes, within these numbers of loads.
const MEMORY: usize = 1 << 20;
const FEWEST: usize = 2;
const MOST: usize = 8;
/// Blocks that are read ahead of a sequential reader.
const MOST_AHEAD: u32 = 4;
/// Sequential readers that are distinguished.
const STREAMS: usize = 4;

/// What a queue needs to have blocks decoded.
pub(crate) struct Loads {
    pub(super) layers: Arc<Layers>,
    /// The first tag behind the port's.
    pub(super) first: u16,
    /// By tag, from `first` on.
    loads: Box<[Load]>,
    /// Of each layer.
    pub(super) places: Box<[Places]>,
    /// Loads that should begin.
    pub(super) begun: Vec<u16>,
    /// Blocks whose stored bytes are there, for the threads that decode.
    pub(super) jobs: Vec<Job>,
    streams: [Stream; STREAMS],
    /// The stream that makes way for the next.
    oldest: usize,
    pub(super) counted: Decodings,
}

/// A place for a load.
pub(super) struct Load {
    pub(super) layer: u32,
    pub(super) block: u32,
    /// Where in the memory the block's stored bytes begin.
    pub(super) from: usize,
    /// Here, unless a thread decodes from it.
    pub(super) staging: Option<Staging>,
}

#[derive(Default)]
pub(super) struct Places {
    pub(super) free: Vec<u16>,
    all: usize,
    /// Tags that wait for one to be free.
    pub(super) line: VecDeque<u16>,
}

/// A reader that goes from block to block.
#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    layer: u32,
    /// The block behind the last one.
    next: u32,
    /// Blocks in a row.
    run: u32,
    /// The block behind the last one read ahead.
    ahead: u32,
}

impl Loads {
    /// For a queue of `depth` requests; nothing where the image has no encoded layers.
    pub(super) fn new(serving: &Serving, depth: u16) -> Result<Option<Box<Loads>>, Error> {
        let Some(layers) = serving.layers() else { return Ok(None) };
        let page = rustix::param::page_size();
        let mut loads = Vec::new();
        let mut places = Vec::new();
        for (layer, encoded) in (0..).zip(layers.encoded().iter()) {
            let longest = encoded.blocks().iter().map(|block| block.input_len).max().unwrap_or(1) as usize;
            // Aligned reads reach a little further at both ends.
            let size = (longest + 2 * alignment(serving) as usize).next_multiple_of(page);
            let count = (MEMORY / size).clamp(FEWEST, MOST);
            let tags = loads.len()..loads.len() + count;
            for _ in tags.clone() {
                loads.push(Load { layer, block: 0, from: 0, staging: Some(Staging::new(size)?) });
            }
            let free = tags.map(|index| depth + index as u16).collect();
            places.push(Places { free, all: count, line: VecDeque::new() });
        }
        let all = usize::from(depth) + loads.len();
        places.iter_mut().for_each(|places| places.line.reserve(all));
        Ok(Some(Box::new(Loads {
            layers: Arc::clone(layers),
            first: depth,
            begun: Vec::with_capacity(loads.len()),
            jobs: Vec::with_capacity(loads.len()),
            loads: loads.into_boxed_slice(),
            places: places.into_boxed_slice(),
            streams: [Stream::default(); STREAMS],
            oldest: 0,
            counted: Decodings::default(),
        })))
    }

    /// Number of tags behind the port's.
    pub(super) fn count(&self) -> u16 {
        // A few for each of a few layers.
        self.loads.len() as u16
    }

    pub(super) fn load(&mut self, tag: u16) -> Option<&mut Load> {
        self.loads.get_mut(usize::from(tag.checked_sub(self.first)?))
    }

    /// The layer that a tag's request is looked up below; `None` for a request of the port.
    pub(crate) fn layer_of(&self, tag: u16) -> Option<&Encoded> {
        let load = self.loads.get(usize::from(tag.checked_sub(self.first)?))?;
        self.layers.get(load.layer)
    }

    /// The memory of a load; `None` for a request of the port.
    pub(crate) fn memory(&mut self, tag: u16) -> Option<&mut Staging> {
        self.load(tag)?.staging.as_mut()
    }

    /// Which block a byte of a layer is in, and where its wanted bytes begin and end.
    pub(super) fn find(&self, layer: u32, offset: u64) -> Option<(u32, u64, u64)> {
        let (index, block) = self.layers.get(layer)?.block_at(offset)?;
        Some((u32::try_from(index).ok()?, block.start, block.start + u64::from(block.len)))
    }

    /// Notes that a request wants a block, and says how many behind it are worth reading ahead.
    pub(super) fn follow(&mut self, layer: u32, block: u32) -> std::ops::Range<u32> {
        let known = |stream: &&mut Stream| {
            stream.layer == layer
                && stream.run > 0
                && (stream.next == block || Some(stream.next) == block.checked_add(1))
        };
        let Some(stream) = self.streams.iter_mut().find(known) else {
            let begins = Stream { layer, next: block.saturating_add(1), run: 1, ahead: 0 };
            if let Some(oldest) = self.streams.get_mut(self.oldest) {
                *oldest = begins;
            }
            self.oldest = (self.oldest + 1) % STREAMS;
            return 0..0;
        };
        if stream.next == block {
            stream.next = block.saturating_add(1);
            stream.run = stream.run.saturating_add(1);
        }
        if stream.run < 3 {
            return 0..0;
        }
        let from = stream.ahead.max(stream.next);
        let to = stream.next.saturating_add(stream.run.min(MOST_AHEAD)).max(from);
        stream.ahead = to;
        from..to
    }

    /// Reads a block ahead, if it is neither there nor being loaded and there are places enough.
    pub(super) fn load_ahead(&mut self, layer: u32, block: u32) {
        let enough = self.places.get(layer as usize).is_some_and(|places| places.free.len() > places.all / 2);
        let there = self.layers.get(layer).is_some_and(|encoded| (block as usize) < encoded.blocks().len());
        if !enough || !there {
            return;
        }
        let key = self.layers.key(layer, block);
        if matches!(self.layers.decoding().cache().look(key, None, true), Lookup::Yours) {
            self.counted.ahead += 1;
            self.take_place(layer, block);
        }
    }

    /// Gives a block that is ours to load one of its layer's free places.
    pub(super) fn take_place(&mut self, layer: u32, block: u32) {
        let free = self.places.get_mut(layer as usize).and_then(|places| places.free.pop());
        match free.and_then(|tag| Some((tag, self.load(tag)?))) {
            Some((tag, load)) => {
                load.block = block;
                self.begun.push(tag);
            }
            // No block is taken over without a place for it.
            None => {
                self.layers.decoding().cache().finish(self.layers.key(layer, block), Err(Errno::IO), None)
            }
        }
    }

    /// A place is free again.
    pub(super) fn free(&mut self, tag: u16) {
        let layer = self.load(tag).map(|load| load.layer as usize);
        if let Some(places) = layer.and_then(|layer| self.places.get_mut(layer)) {
            places.free.push(tag);
        }
    }

    /// What is to be read for a load: its block's stored bytes, and where they go past the page cache if that
    /// lets them, the bytes around them up to whole units.
    pub(super) fn request(&mut self, tag: u16, serving: &Serving) -> Option<Request> {
        let layers = Arc::clone(&self.layers);
        let load = self.load(tag)?;
        let encoded = layers.get(load.layer)?;
        let block = encoded.blocks().get(load.block as usize)?;
        let around = around(encoded, serving, block.input, block.input_len.into());
        let (before, after) = around.unwrap_or((0, 0));
        load.from = before as usize;
        let (offset, len) = (block.input - before, u64::from(block.input_len) + before + after);
        Some(Request { op: Op::Read, offset, len, data: Data::Buffer })
    }

    /// The next request that waits for a place and can have one.
    pub(super) fn next_in_line(&mut self) -> Option<u16> {
        self.places
            .iter_mut()
            .find(|places| !places.free.is_empty() && !places.line.is_empty())?
            .line
            .pop_front()
    }
}

/// The largest unit in bytes in which a source can have to be read, whatever `direct_io` will be.
fn alignment(serving: &Serving) -> u64 {
    serving.targets().iter().filter_map(|target| target.read_unit(DirectIo::On)).max().unwrap_or(1)
}

/// How many bytes before and behind a range complete it to whole units of its source; `None` where there is
/// no need, or they are not of the same extent.
fn around(encoded: &Encoded, serving: &Serving, input: u64, len: u64) -> Option<(u64, u64)> {
    let extent = encoded.below().extent_at(input)?;
    let Place::Data { source, offset } = extent.place else { return None };
    let unit = serving.target(source)?.read_unit(serving.direct)?;
    let inside = input - extent.start;
    let place = offset.checked_add(inside)?;
    let before = place % unit;
    let after = (unit - place.checked_add(len)? % unit) % unit;
    let end = inside.checked_add(len)?.checked_add(after)?;
    (before <= inside && end <= extent.len).then_some((before, after))
}

/// Where a request's bytes go; empty where we cannot write them.
pub(super) fn memory_of<'a>(
    loads: Option<&'a mut Loads>,
    buffers: Option<&'a mut Buffers>,
    tag: u16,
) -> &'a mut [u8] {
    match (loads.and_then(|loads| loads.memory(tag)), buffers) {
        (Some(staging), _) => staging.bytes(),
        (None, Some(buffers)) => buffers.slice(tag.into()),
        (None, None) => &mut [],
    }
}

#[cfg(test)]
mod tests;

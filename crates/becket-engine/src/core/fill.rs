//! Bytes that come later: a request waits for a decoded block, and the queue loads those that are not being
//! loaded. Never waits and never begins a request: `flow` does that when a note has come.

use std::sync::Arc;

use becket_image::{Encoded, Place};
use rustix::io::Errno;

use super::{loads::memory_of, state::Core};
use crate::{
    Data, Op,
    decode::{Decoded, Job, Key, Lookup, Quick, Staging},
    slot::Way,
};

/// What has become of a request whose next bytes are encoded.
pub(super) enum Copied {
    /// Some were copied, and it goes on.
    More,
    /// It waits for a note about a block, or for a place.
    Waits,
}

impl Core {
    /// Gets a request's next bytes, which are encoded: copies what is there of their block, or makes it wait.
    pub(super) fn decoded(&mut self, tag: u16, layer: u32, offset: u64) -> Result<Copied, Errno> {
        let waiter = self.waiter(tag);
        let slot = self.slab.get_mut(usize::from(tag)).ok_or(Errno::IO)?;
        let loads = self.loads.as_deref_mut().ok_or(Errno::IO)?;
        if slot.request.op != Op::Read || slot.request.data == Data::None {
            return Err(Errno::IO);
        }
        let (block, _, end) = loads.find(layer, offset).ok_or(Errno::IO)?;
        let key = loads.layers.key(layer, block);
        let may_load = loads.places.get(layer as usize).is_some_and(|places| !places.free.is_empty());
        let found = loads.layers.decoding().cache().look(key, Some(&waiter), may_load);
        let copied = match found {
            Lookup::Here(block) => {
                loads.counted.hits += 1;
                self.copy(tag, key, &block)?;
                Copied::More
            }
            Lookup::Coming | Lookup::Yours => {
                loads.counted.waits += 1;
                if matches!(found, Lookup::Yours) {
                    loads.take_place(layer, block);
                }
                // What else of it is encoded together will be wanted next.
                let last = offset.saturating_add(slot.asked - 1);
                if last >= end
                    && let Some((last, _, _)) = loads.find(layer, last)
                {
                    (block + 1..=last).for_each(|block| loads.load_ahead(layer, block));
                }
                self.await_note(tag);
                Copied::Waits
            }
            Lookup::Absent => {
                slot.way = Way::Waiting;
                if let Some(places) = loads.places.get_mut(layer as usize) {
                    places.line.push_back(tag);
                }
                Copied::Waits
            }
        };
        if let Some(loads) = self.loads.as_deref_mut().filter(|loads| tag < loads.first) {
            loads.follow(layer, block).for_each(|block| loads.load_ahead(layer, block));
        }
        Ok(copied)
    }

    /// Copies what a request's next bytes have of a block, or the beginning of it; nothing when they are of
    /// another one.
    pub(super) fn copy(&mut self, tag: u16, key: Key, block: &Decoded) -> Result<(), Errno> {
        let Core { slab, loads, buffers, memory_files, map, guest, .. } = self;
        let slot = slab.get_mut(usize::from(tag)).ok_or(Errno::IO)?;
        let loads = loads.as_deref_mut().ok_or(Errno::IO)?;
        let map = loads.layer_of(tag).map_or(&**map, Encoded::below);
        let extent = map.lookup(slot.request.offset + slot.done).ok_or(Errno::IO)?;
        let Place::Encoded { layer, offset } = extent.place else { return Ok(()) };
        let (index, start, end) = loads.find(layer, offset).ok_or(Errno::IO)?;
        if loads.layers.key(layer, index) != key {
            return Ok(());
        }
        // Behind what was asked for, an image that grows may have other bytes.
        let len = (slot.request.len - slot.done).min(slot.asked).min(extent.len).min(end - offset);
        let from = (offset - start) as usize;
        let stored = |len: u64| block.bytes().get(from..)?.get(..len as usize);
        if let (Data::Guest(_) | Data::Ranges(_), Some(guest)) = (slot.request.data, guest) {
            guest.fill(tag, slot.done, stored(len).ok_or(Errno::IO)?);
            slot.done += len;
            return Ok(());
        }
        let (to, len) = match (slot.request.data, memory_files) {
            (Data::Registered, Some(files)) => {
                let to = files.buffer(tag);
                let len = len.min(to.len() as u64);
                slot.staged = len;
                (to.get_mut(..len as usize), len)
            }
            _ => {
                let to = memory_of(Some(loads), buffers.as_mut(), tag).get_mut(slot.done as usize..);
                slot.done += len;
                (to.and_then(|rest| rest.get_mut(..len as usize)), len)
            }
        };
        to.ok_or(Errno::IO)?.copy_from_slice(stored(len).ok_or(Errno::IO)?);
        Ok(())
    }

    /// The stored bytes of a load are there, or cannot be had.
    #[inline(never)]
    pub(super) fn load_read(&mut self, tag: u16, result: Result<u64, Errno>) {
        let loader = self.waiter(tag);
        let Some(loads) = self.loads.as_deref_mut() else { return };
        let layers = Arc::clone(&loads.layers);
        let Some(load) = loads.load(tag) else { return };
        let (layer, from, key) = (load.layer, load.from, layers.key(load.layer, load.block));
        match result.and_then(|_| load.staging.take().ok_or(Errno::IO)) {
            Ok(staging) => {
                let (encoded, paces) = (Arc::clone(layers.encoded()), Arc::clone(layers.paces()));
                loads.jobs.push(Job { key, encoded, paces, layer, staging, from, loader });
                // Until its memory has come back.
                self.await_note(tag);
            }
            Err(errno) => {
                loads.counted.errors += 1;
                loads.free(tag);
                self.slab[usize::from(tag)].busy = false;
                layers.decoding().cache().finish(key, Err(errno), None);
            }
        }
    }

    /// The memory of a load has come back, with the number of bytes that its block yielded: the load has
    /// ended.
    pub(super) fn load_ended(&mut self, tag: u16, staging: Staging, yielded: Option<u32>) {
        let Some(loads) = self.loads.as_deref_mut() else { return };
        if let Some(load) = loads.load(tag) {
            load.staging = Some(staging);
        }
        loads.free(tag);
        match yielded {
            Some(bytes) => {
                loads.counted.blocks += 1;
                loads.counted.bytes += u64::from(bytes);
            }
            None => loads.counted.errors += 1,
        }
        self.slab[usize::from(tag)].busy = false;
    }

    /// Hands what this turn has read to the threads that decode; of quick ones one comes back where it is to
    /// be `kept`.
    pub(super) fn send_jobs(&mut self, kept: bool) -> Option<Quick> {
        let loads = self.loads.as_deref_mut()?;
        let own = loads.jobs.pop_if(|job| kept && job.is_quick());
        let decoding = loads.layers.decoding();
        let own = own.map(|job| Quick { job, decoding: Arc::clone(decoding) });
        if !loads.jobs.is_empty() {
            loads.layers.decoding().submit(&mut loads.jobs);
        }
        self.tally.decoded(&loads.counted);
        own
    }
}

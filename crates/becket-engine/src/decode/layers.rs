//! What a device's map speaks of when it says "encoded".
//! It believes nothing of what came with the image.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use becket_image::Encoded;

use super::{Decoding, MOST_LAYERS, block::Key};
use crate::Error;

/// A block that takes no longer is quick: requests that come meanwhile wait for it, as they do for a disk that is not the fastest.
const QUICK: Duration = Duration::from_micros(500);
/// A block's time counts for one of so many parts of what is expected of the next.
const MEMORY: u32 = 8;

/// The layers of encoded blocks that a device's map speaks of, and who decodes them.
#[derive(Debug)]
pub(crate) struct Layers {
    encoded: Arc<[Encoded]>,
    decoding: Arc<Decoding>,
    /// The number of the first; the others follow.
    first: u64,
    /// Nanoseconds for each KiB that a layer's blocks have yielded, lately; 0 as long as none has.
    paces: Box<[AtomicU32]>,
}

impl Layers {
    /// The layers of an image with `files` files. What they say is not believed.
    pub(crate) fn new(
        encoded: Vec<Encoded>,
        files: usize,
        decoding: Arc<Decoding>,
    ) -> Result<Arc<Layers>, Error> {
        if encoded.len() > MOST_LAYERS {
            return Err(Error::Layers { why: format!("there are more than {MOST_LAYERS}") });
        }
        for (layer, one) in encoded.iter().enumerate() {
            if !one.speaks_only_of(files, layer) {
                return Err(Error::Layers { why: format!("layer {layer} lies in what is not below it") });
            }
            if u32::try_from(one.blocks().len()).is_err() {
                return Err(Error::Layers { why: format!("layer {layer} has too many blocks") });
            }
        }
        let first = decoding.number(encoded.len());
        let paces = encoded.iter().map(|_| AtomicU32::new(0)).collect();
        Ok(Arc::new(Layers { encoded: encoded.into(), decoding, first, paces }))
    }

    /// A layer's block of so many bytes has been decoded. Who comes between two others loses a figure, no more.
    pub(crate) fn took(&self, layer: u32, yields: usize, time: Duration) {
        let Some(pace) = self.paces.get(layer as usize) else { return };
        let each = time.as_nanos().saturating_mul(1024) / (yields.max(1) as u128);
        let each = u32::try_from(each).unwrap_or(u32::MAX).max(1);
        let before = match pace.load(Ordering::Relaxed) {
            0 => each,
            before => before,
        };
        pace.store(before - before / MEMORY + each / MEMORY, Ordering::Relaxed);
    }

    /// Whether a layer's block of so many bytes is going to be decoded quickly, by all that is known; not as long as nothing is.
    pub(crate) fn is_quick(&self, layer: u32, yields: usize) -> bool {
        let pace = self.paces.get(layer as usize).map_or(0, |pace| pace.load(Ordering::Relaxed));
        pace > 0 && u128::from(pace) * (yields as u128) / 1024 <= QUICK.as_nanos()
    }

    pub(crate) fn encoded(&self) -> &Arc<[Encoded]> {
        &self.encoded
    }

    pub(crate) fn get(&self, layer: u32) -> Option<&Encoded> {
        self.encoded.get(layer as usize)
    }

    pub(crate) fn key(&self, layer: u32, block: u32) -> Key {
        Key { layer: self.first + u64::from(layer), block }
    }

    pub(crate) fn decoding(&self) -> &Arc<Decoding> {
        &self.decoding
    }

    fn numbers(&self) -> Range<u64> {
        self.first..self.first + self.encoded.len() as u64
    }
}

impl Drop for Layers {
    fn drop(&mut self) {
        self.decoding.cache().forget(&self.numbers());
    }
}

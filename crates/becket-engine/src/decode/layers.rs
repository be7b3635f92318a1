//! What a device's map speaks of when it says "encoded".
//! It believes nothing of what came with the image.

use std::{ops::Range, sync::Arc};

use becket_image::Encoded;

use super::{block::Key, decoding::Decoding, pace::Pace};
use crate::Error;

/// The most layers of encoded blocks that an image may have below each other.
pub const MOST_LAYERS: usize = 8;
/// The layers of encoded blocks that a device's map speaks of, and who decodes them.
#[derive(Debug)]
pub(crate) struct Layers {
    encoded: Arc<[Encoded]>,
    decoding: Arc<Decoding>,
    /// The number of the first; the others follow.
    first: u64,
    /// How quickly the blocks of each are decoded.
    paces: Arc<[Pace]>,
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
        let paces = encoded.iter().map(|_| Pace::default()).collect();
        Ok(Arc::new(Layers { encoded: encoded.into(), decoding, first, paces }))
    }

    pub(crate) fn encoded(&self) -> &Arc<[Encoded]> {
        &self.encoded
    }

    pub(crate) fn get(&self, layer: u32) -> Option<&Encoded> {
        self.encoded.get(layer as usize)
    }

    pub(crate) fn paces(&self) -> &Arc<[Pace]> {
        &self.paces
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

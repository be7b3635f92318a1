//! The first and last bytes of an image, by which its container is recognised.
//! It never takes bytes that cannot be read for an error: such a disk may be attached to rescue the rest.
//! Of a stream that is being decoded the last bytes are not looked at: that would take as long as all of it.

use crate::budget::Spent;
use crate::bytes::{Reach, ReadAt, field, u8_at};
use crate::image::Image;
use crate::layer::LayerError;

/// Bytes at the beginning and at the end of an image that are looked at.
pub(crate) const LOOK: usize = 512;

/// The first and the last bytes of an image.
pub(crate) struct Ends {
    pub(crate) head: [u8; LOOK],
    pub(crate) tail: [u8; LOOK],
}

impl Ends {
    /// Those of an image; `None` if it is shorter, or if they cannot be read.
    ///
    /// # Errors
    /// The image's budget is spent.
    pub(crate) fn of(image: &Image) -> Result<Option<Ends>, LayerError> {
        match Ends::read_at(image, image.len(), image.reach() == Reach::InOrder) {
            Ok(ends) => Ok(ends),
            Err(error) if Spent::of(&error).is_some() => Err(error.into()),
            Err(_) => Ok(None),
        }
    }

    /// Those of `len` bytes; `None` if they are fewer.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn read(bytes: &dyn ReadAt, len: u64) -> std::io::Result<Option<Ends>> {
        Ends::read_at(bytes, len, false)
    }

    /// The same; where they end `late`, the last bytes are taken for zeroes.
    fn read_at(bytes: &dyn ReadAt, len: u64, late: bool) -> std::io::Result<Option<Ends>> {
        let mut ends = Ends { head: [0; LOOK], tail: [0; LOOK] };
        let Some(tail) = len.checked_sub(LOOK as u64) else { return Ok(None) };
        bytes.read_at(&mut ends.head, 0)?;
        if !late {
            bytes.read_at(&mut ends.tail, tail)?;
        }
        Ok(Some(ends))
    }

    pub(crate) fn begins(&self, magic: &[u8]) -> bool {
        self.head.starts_with(magic)
    }

    pub(crate) fn byte(&self, at: usize) -> u8 {
        u8_at(&self.head, at)
    }

    pub(crate) fn le32(&self, at: usize) -> u32 {
        u32::from_le_bytes(field(&self.head, at))
    }

    pub(crate) fn le64(&self, at: usize) -> u64 {
        u64::from_le_bytes(field(&self.head, at))
    }
}

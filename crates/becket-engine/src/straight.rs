//! The straight way: one extent whose direct reads and writes need nothing but arithmetic.
//! Knows neither queues nor files, so that everything on the way of a request can use it.

use crate::Request;

/// Longest single operation on a backing file, in bytes (the kernel cuts at 2 GiB less a page).
pub(crate) const MAX_OPERATION: u64 = 1 << 30;

/// An extent whose reads and writes past the page cache need no further thought. Offsets and lengths are
/// bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Straight {
    /// Its first byte in the image, and how many it has.
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// Where the first byte is in the file.
    pub(crate) offset: u64,
    /// Bits that neither a request's place nor its length may have.
    pub(crate) odd: u64,
    pub(crate) file: u32,
    /// The file's direct descriptor in the ring's table.
    pub(crate) target: u32,
    /// Writes need no further thought either: none has to allocate blocks.
    pub(crate) writes: bool,
}

impl Straight {
    /// No request goes here.
    pub(crate) const NOWHERE: Straight =
        Straight { start: 0, len: 0, offset: 0, odd: 0, file: 0, target: 0, writes: false };

    /// Where in the file a request begins that lies in this extent as a whole and is aligned for direct I/O.
    #[inline]
    pub(crate) fn offset_of(&self, request: &Request) -> Option<u64> {
        let from = request.offset.wrapping_sub(self.start);
        // In this order nothing can overflow.
        let inside = from < self.len && request.len <= self.len - from && request.len > 0;
        let place = self.offset.wrapping_add(from);
        (inside && (place | request.len) & self.odd == 0).then_some(place)
    }
}

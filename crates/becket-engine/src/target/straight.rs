//! The straight way: one extent whose reads and writes need nothing but arithmetic.
//! Knows neither queues nor sources: a target says where there is one, and the core goes there.

/// An extent whose reads and writes need no further thought: each is one transfer of a registered descriptor
/// without flags. Offsets and lengths are bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Straight {
    /// Its first byte in the image, and how many it has.
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// Where the first byte is in the source.
    pub(crate) offset: u64,
    /// Bits that neither a request's place nor its length may have.
    pub(crate) odd: u64,
    pub(crate) source: u32,
    /// The descriptor in the ring's table.
    pub(crate) target: u32,
    /// Writes need no further thought either: none has to allocate blocks.
    pub(crate) writes: bool,
}

impl Straight {
    /// The whole of a source.
    pub(crate) const ALL: Straight = Straight { len: u64::MAX, ..Straight::NOWHERE };

    /// No request goes here.
    pub(crate) const NOWHERE: Straight =
        Straight { start: 0, len: 0, offset: 0, odd: 0, source: 0, target: 0, writes: false };
}

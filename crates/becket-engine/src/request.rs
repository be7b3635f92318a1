//! A request as a port hands it to the engine.
//! Knows nothing of how it is carried out (see `slot`).

/// What a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Bytes from the image.
    Read,
    /// Bytes to the image; with `durable` they are on stable storage before the request finishes (FUA).
    Write {
        /// Force unit access.
        durable: bool,
    },
    /// Everything that was written and finished before is on stable storage.
    Flush,
    /// The range's contents are no longer wanted; it reads as zeroes afterwards.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// The blocks stay allocated.
        keep_allocated: bool,
    },
}

impl Op {
    /// Changes the image.
    pub(crate) fn modifies(self) -> bool {
        !matches!(self, Op::Read | Op::Flush)
    }
}

/// Where the bytes of a read or write are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// Nowhere: the request moves none.
    None,
    /// In the queue's own buffer for the request's tag.
    Buffer,
    /// In the requester's pages, registered with the ring under the queue's index for the request's tag.
    Registered,
    /// In one range of a virtual machine's memory, aligned as the queue's own buffers are; see
    /// [`Io::begin_in_guest`](crate::Io::begin_in_guest).
    Guest(InGuest),
    /// In any ranges of it.
    Ranges(InGuest),
}

/// The engine has looked the ranges up; it alone says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InGuest(());

impl InGuest {
    pub(crate) const CHECKED: InGuest = InGuest(());
}

/// A request as a port hands it to the engine. Offsets and lengths are bytes of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What is wanted.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Number of bytes; 0 for [`Op::Flush`].
    pub len: u64,
    /// Where the bytes are.
    pub data: Data,
}

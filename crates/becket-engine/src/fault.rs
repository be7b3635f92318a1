//! What may stand between a queue and its backing files: something that sees each operation, and may spoil
//! it. Costs nothing where it is absent: a queue without one never asks, and one with it has no straight way.
//!
//! The engine serves on whatever becomes of an operation: a short one is continued, a failed one is its
//! request's error, one that waits holds no other up, since the waiting is the ring's (a timeout, or a poll)
//! and not a thread's.

mod plan;

use std::{fmt, os::fd::RawFd, time::Duration};

use rustix::io::Errno;

use crate::Op;

pub use plan::{Affected, Faults, Rule, Struck};

/// Sees a device's operations on their way to its backing files.
///
/// It is called on the I/O threads: it must not block, and only its own tests may have it allocate or lock.
pub trait Interceptor: Send + Sync + fmt::Debug {
    /// What is to become of an operation that is about to go to its file.
    fn fate(&self, operation: &Operation<'_>) -> Fate;

    /// An operation that went to its file has ended with this result (a count, 0 or a negative errno).
    fn ended(&self, _operation: &Operation<'_>, _result: i32) {}
}

/// One operation on a backing file. Offsets and lengths are bytes.
#[derive(Debug, Clone, Copy)]
pub struct Operation<'a> {
    /// Which queue of the device it belongs to.
    pub queue: usize,
    /// Whose request it carries further. A tag has one operation at a time.
    pub tag: u16,
    /// What that request wants; a flush's operation is a sync of one file.
    pub op: Op,
    /// The first byte in the image.
    pub at: u64,
    /// How many; 0 for a sync.
    pub len: u64,
    /// Which of the backing's files.
    pub file: u32,
    /// The first byte in that file.
    pub offset: u64,
    /// What a shortened operation must be a multiple of: the alignment of direct I/O, or 1.
    pub unit: u64,
    /// The bytes of a write, before it and after it. Empty where they are not in the queue's memory.
    pub bytes: &'a [u8],
    /// It was asked about before, and has waited since.
    pub waited: bool,
}

/// What becomes of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It goes to its file.
    Pass,
    /// Only its first bytes do, where it is a read or a write: a number from 1 to its length.
    Short(u64),
    /// It does not reach its file, and fails.
    Fail(Errno),
    /// The first bytes of a write reach its file, as for [`Fate::Short`], and it fails.
    Torn(u64, Errno),
    /// It waits for so long, and is asked about again.
    Wait(Duration),
    /// It waits until this descriptor can be read from, and is asked about again. The descriptor must stay
    /// open until then.
    Until(RawFd),
}

//! What can go wrong while I/O threads are set up.
//! Errors of single requests are errno values and travel with the request, never here.

use std::io;

/// A failure of the engine itself, outside any request.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a ring.
    #[error("cannot set up io_uring for I/O thread {thread}: {source}")]
    Ring {
        /// Index of the thread.
        thread: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start I/O thread {thread}: {source}")]
    Spawn {
        /// Index of the thread.
        thread: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// Descriptors or buffers could not be registered with a ring.
    #[error("cannot register {what} with the ring: {source}")]
    Register {
        /// What was registered.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// A ring's table has no room for another device.
    #[error("I/O thread {thread} has no room for {wanted} more {what}")]
    Full {
        /// Index of the thread.
        thread: usize,
        /// Which table.
        what: &'static str,
        /// How many entries were wanted.
        wanted: usize,
    },
    /// Memory for requests or their data could not be mapped.
    #[error("cannot map {bytes} bytes of {what}: {source}")]
    Map {
        /// What the memory is for.
        what: &'static str,
        /// How much was wanted.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The port could not begin.
    #[error("cannot start serving the queue: {source}")]
    Start {
        /// What the port said.
        source: io::Error,
    },
    /// What makes room in an image could not be had, or comes too late.
    #[error("the image cannot be made to grow: {source}")]
    Grow {
        /// Why.
        source: io::Error,
    },
    /// Layers of encoded blocks that cannot be.
    #[error("the image's encoded layers make no sense: {why}")]
    Layers {
        /// What is wrong with them.
        why: String,
    },
    /// Requests under way do not end, so the device could not change.
    #[error("requests under way do not end within {seconds} s; everything goes on as before")]
    Busy {
        /// How long they were waited for.
        seconds: u64,
    },
    /// What was written before a change does not reach the disk, so there was none.
    #[error(
        "what was written is not synced after {seconds} s: the file system of its image may not answer; everything goes on as before"
    )]
    Syncing {
        /// How long it was waited for.
        seconds: u64,
    },
    /// What was written before a change could not be synced, so there was none.
    #[error("what was written could not be synced: {source}; everything goes on as before")]
    Unsynced {
        /// What the kernel said.
        source: io::Error,
    },
    /// The thread is no longer there.
    #[error("I/O thread {thread} has ended")]
    Gone {
        /// Index of the thread.
        thread: usize,
    },
}

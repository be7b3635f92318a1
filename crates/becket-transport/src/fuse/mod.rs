//! The image as a file of a small FUSE file system that becket serves, with a loop device over it where
//! possible.
//! Knows nothing of image formats: it serves a map and the descriptors it was given.
//!
//! [`Connection`] makes a connection and negotiates its terms, in a process that may mount; [`serve`] makes
//! the engine answer its requests, in the worker, for which it makes no difference whether others answered
//! before it.

mod connection;
mod disk;
mod mount;
mod port;
mod probe;
mod tree;

pub use connection::{Connection, MAX_IO, max_io};
pub use disk::{attach_disk, find_disk};
pub use mount::off as unmount;
pub use probe::{FuseTransport, examine};
pub use tree::IMAGE_NAME;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use becket_engine::{IoThreads, Memory};

use crate::serve::{Finally, ServeError, Served, Setup};
use port::{FusePort, HEAD};
use tree::Tree;

/// Serves a connection on the I/O threads; answers when each queue waits for requests. `devices` are its
/// descriptors, one for each queue; `tether` stays open as long as anything may still reach the backing (see
/// [`becket_engine::Port::tether`]); `partitions` get files of their own: number, first byte and length.
/// `on_closed` runs once the last queue has ended, as all do when the file system is gone.
///
/// # Errors
/// A queue could not be set up; `on_closed` still runs.
pub fn serve(
    threads: &IoThreads,
    setup: Setup,
    devices: Vec<OwnedFd>,
    tether: OwnedFd,
    partitions: Vec<(u32, u64, u64)>,
    on_closed: Box<dyn FnOnce() + Send>,
) -> Result<Served, ServeError> {
    let (geometry, depth) = (setup.geometry.clone(), setup.depth);
    let finally = Finally::new(on_closed);
    let tree = Tree::new(partitions.into_iter(), geometry.logical_block, geometry.discard_granularity);
    let (tether, tree) = (Arc::new(tether), Arc::new(tree));
    let memory = Memory::Framed { head: HEAD, size: geometry.max_io as usize };
    let mut devices = devices.into_iter().map(Arc::new);
    // A user's device is a file, which may be written at any byte.
    setup.serve(threads, (memory, None), 1, finally, |_| {
        let gone = || becket_engine::Error::Start { source: std::io::ErrorKind::NotFound.into() };
        let device = devices.next().ok_or_else(gone)?;
        let (tether, tree) = (Arc::clone(&tether), Arc::clone(&tree));
        Ok(Box::new(FusePort::new(device, tether, tree, depth, geometry.discard)))
    })
}

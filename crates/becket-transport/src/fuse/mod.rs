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

pub use connection::{Connection, MAX_IO};
pub use disk::{attach_disk, find_disk};
pub use mount::off as unmount;
pub use probe::{FuseTransport, examine};
pub use tree::IMAGE_NAME;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use becket_engine::{Geometry, IoThreads, Memory};

use crate::serve::{Common, Content, Finally, ServeError, Served};
use port::{FusePort, HEAD};
use tree::Tree;

/// What it takes to serve a connection.
#[derive(Debug)]
pub struct Setup {
    /// Its number.
    pub id: u32,
    /// Requests under way through each descriptor.
    pub depth: u16,
    /// What the image looks like.
    pub geometry: Geometry,
    /// The connection's descriptors: one for each queue.
    pub devices: Vec<OwnedFd>,
    /// Open as long as anything may still reach the backing; see [`becket_engine::Port::tether`].
    pub tether: OwnedFd,
    /// What is behind it.
    pub content: Content,
    /// Partitions that get files of their own: number, first byte and length.
    pub partitions: Vec<(u32, u64, u64)>,
}

/// Serves a connection on the I/O threads; answers when each queue waits for requests.
/// `on_closed` runs once the last queue has ended, as all do when the file system is gone.
///
/// # Errors
/// A queue could not be set up; `on_closed` still runs.
pub fn serve(
    threads: &IoThreads,
    setup: Setup,
    on_closed: Box<dyn FnOnce() + Send>,
) -> Result<Served, ServeError> {
    let Setup { id, depth, geometry, devices, tether, content, partitions } = setup;
    let finally = Finally::new(on_closed);
    let tree = Tree::new(
        partitions.into_iter(),
        geometry.logical_block,
        geometry.read_only,
        geometry.discard_granularity,
    );
    let (tether, tree) = (Arc::new(tether), Arc::new(tree));
    let devices: Vec<Arc<OwnedFd>> = devices.into_iter().map(Arc::new).collect();
    let common = Common {
        id,
        first: id,
        queues: u16::try_from(devices.len()).unwrap_or(u16::MAX),
        depth,
        content,
        read_only: geometry.read_only,
        memory: Memory::Framed { head: HEAD, size: geometry.max_io as usize },
        batch: None,
        finally,
    };
    let mut devices = devices.into_iter();
    common.serve(threads, |_| {
        let gone = || becket_engine::Error::Start { source: std::io::ErrorKind::NotFound.into() };
        let device = devices.next().ok_or_else(gone)?;
        let (tether, tree) = (Arc::clone(&tether), Arc::clone(&tree));
        Ok(Box::new(FusePort::new(device, tether, tree, depth, geometry.discard)))
    })
}

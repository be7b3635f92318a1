//! What every kind of source says of itself.
//! Knows no kind.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::file::facts::Facts;
use crate::ReadAt;

/// Device and inode of the file; of a block device, those of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// Number of the device that the file is on (`st_dev`).
    pub dev: u64,
    /// Number of the inode.
    pub ino: u64,
}

/// What every kind of source says of itself. None of it waits for a file system or for another host, except
/// the reader when it reads.
pub(super) trait SourceKind {
    /// See `Source::facts`.
    fn facts(&self) -> &Facts;
    /// See `Source::len`.
    fn len(&self) -> u64;
    /// See `Source::identity`.
    fn identity(&self) -> Option<Identity>;
    /// See `Source::descriptors`.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;
    /// See `Source::is_writable`.
    fn is_writable(&self) -> bool;
    /// See `Source::reader`.
    fn reader(&self) -> io::Result<Arc<dyn ReadAt>>;
    /// See `Source::unlock`.
    fn unlock(&self);
}

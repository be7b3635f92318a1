//! What every file system answers, and what their readers share.
//! It never follows what it reads without a bound.

use std::fmt::Debug;
use std::ops::ControlFlow;

use super::error::{LayerError, corrupt};
use super::format::About;
use crate::bytes::ReadAt as _;
use crate::image::{Image, Layout};

/// The most bytes that a directory may have.
const DIRECTORY_MAX: u64 = 64 << 20;
/// The longest name in a directory, in bytes: what the kernel takes.
pub(super) const NAME_MAX: usize = 255;
/// The longest target of a symbolic link, in bytes.
pub(super) const LINK_MAX: u64 = 4096;

/// What kind of thing a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, FIFO or socket.
    Other,
}

impl NodeKind {
    /// Of the mode bits that Unix file systems keep.
    pub(super) fn of_mode(mode: u16) -> NodeKind {
        match mode & 0xf000 {
            0x8000 => NodeKind::File,
            0x4000 => NodeKind::Directory,
            0xa000 => NodeKind::Symlink,
            _ => NodeKind::Other,
        }
    }
}

/// What a file system says of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// What it is.
    pub kind: NodeKind,
    /// Length in bytes; of no meaning for directories.
    pub size: u64,
}

/// What [`FileSystem::list`] reports of each entry: its name, and its number for the other methods. The
/// callback may end the list.
pub type Entry<'a> = dyn FnMut(&[u8], u64) -> ControlFlow<()> + 'a;

/// A layer with directories. Files are known by numbers that are the layer's own.
pub trait FileSystem: Debug + Send + Sync {
    /// What it says of itself.
    fn about(&self) -> &About;

    /// The number of the root directory.
    fn root(&self) -> u64;

    /// What a file is.
    ///
    /// # Errors
    /// The layer is damaged or uses what is not supported; the same for the other methods.
    fn stat(&self, node: u64) -> Result<Stat, LayerError>;

    /// Reports each entry of a directory, in the order in which they are stored, without `.` and `..`.
    ///
    /// # Errors
    /// As [`FileSystem::stat`]; or the node is no directory.
    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError>;

    /// Whether two names are the same to this file system.
    fn same_name(&self, one: &[u8], other: &[u8]) -> bool {
        one == other
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// As [`FileSystem::stat`]; or the node is no symbolic link.
    fn read_link(&self, node: u64) -> Result<Vec<u8>, LayerError>;

    /// Where the bytes of a regular file are.
    ///
    /// # Errors
    /// As [`FileSystem::stat`]; or the file has no such place.
    fn lay_out(&self, node: u64) -> Result<Layout, LayerError>;

    /// Whether the bytes of a file may be written where they are, without the file system's knowing; why not.
    ///
    /// # Errors
    /// One sentence for people.
    fn writable(&self, node: u64) -> Result<(), String>;
}

/// The entry of a directory that has this name.
///
/// # Errors
/// As [`FileSystem::list`].
pub(crate) fn find(fs: &dyn FileSystem, dir: u64, name: &[u8]) -> Result<Option<u64>, LayerError> {
    let (mut exact, mut alike) = (None, None);
    fs.list(dir, &mut |found, node| {
        if found == name {
            exact = Some(node);
            return ControlFlow::Break(());
        }
        if alike.is_none() && fs.same_name(found, name) {
            alike = Some(node);
        }
        ControlFlow::Continue(())
    })?;
    Ok(exact.or(alike))
}

/// The target of a symbolic link whose bytes are laid out as a file's.
pub(super) fn link_target(image: &Image, size: u64, layout: Layout) -> Result<Vec<u8>, LayerError> {
    let mut target = vec![0; usize::try_from(size).unwrap_or(0)];
    image.compose(layout)?.read_at(&mut target, 0)?;
    Ok(target)
}

/// That a symbolic link is no longer than any kernel follows, asked before its bytes are looked for.
pub(super) fn link_is_short(size: u64) -> Result<(), LayerError> {
    if size > LINK_MAX {
        return corrupt(format!("a symbolic link of {size} bytes"));
    }
    Ok(())
}

/// A directory's length, when it is one that is read.
pub(super) fn directory_len(len: u64) -> Result<usize, LayerError> {
    let fits = usize::try_from(len).ok().filter(|_| len <= DIRECTORY_MAX);
    fits.ok_or_else(|| LayerError::Limit(format!("a directory of {len} bytes")))
}

/// Whether two names differ at most in the case of their ASCII letters.
pub(super) fn same_but_for_case(one: &[u8], other: &[u8]) -> bool {
    one.eq_ignore_ascii_case(other)
}

//! The layers: what an image can hold, and how it is recognised.
//! It never guesses beyond a magic number that is checked, and never follows what it reads without a bound.
//!
//! A layer with directories is a [`FileSystem`]. Its answers about a file are a [`Layout`]: where the file's
//! bytes are in the image that holds the file system. What that means for the file on the host is
//! [`crate::Image::compose`]'s business.
//!
//! Images are untrusted. What all of their parsing may cost is bounded by one [`crate::Budget`], so readers
//! have no limits of their own but those of their formats. What a reader does must be in proportion to what
//! it reads, lists and pushes, for that is counted. A directory has at most 64 MiB, a file lies in at most
//! [`crate::image::PIECES_MAX`] pieces, and no length that was read becomes memory before it was compared
//! with the image's.

mod counted;
mod detect;
mod erofs;
mod ext;
mod fat;
pub(crate) mod foreign;
mod iso9660;
pub(crate) mod packed;
mod squashfs;

use std::fmt::Debug;
use std::io;
use std::ops::ControlFlow;

pub use detect::{Contents, Format, detect};
pub use foreign::{Foreign, find as find_foreign};
pub use packed::Packed;

use crate::budget::Spent;
use crate::bytes::ReadAt as _;
use crate::image::{Image, Layout};

/// The most bytes that a directory may have.
const DIRECTORY_MAX: u64 = 64 << 20;
/// The longest name in a directory, in bytes: what the kernel takes.
const NAME_MAX: usize = 255;
/// The longest target of a symbolic link, in bytes.
const LINK_MAX: u64 = 4096;

/// Why a layer could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// It says something that cannot be.
    #[error("it is damaged: {0}")]
    Corrupt(String),
    /// It uses something that becket does not know.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// It is compressed in a way that cannot be read from the middle.
    #[error("it is compressed by {packer} and can only be read from its start: {why}")]
    Sequential {
        /// The program that compressed it.
        packer: &'static str,
        /// Why it can be read in no other way.
        why: String,
    },
    /// It is a container that becket does not read, and another program does.
    #[error("it is {}, which becket does not read{}", format.what, because(why.as_deref()))]
    Foreign {
        /// Which.
        format: &'static Foreign,
        /// What of it becket does not read, where that is less than all such files.
        why: Option<String>,
    },
    /// It may be sound, but is larger than what becket reads.
    #[error("too large: {0}")]
    Limit(String),
    /// It may be sound, but takes more to be parsed than it may.
    #[error(transparent)]
    Spent(#[from] Spent),
    /// The bytes could not be read.
    #[error("it cannot be read: {0}")]
    Io(#[source] io::Error),
}

/// Parsers read by [`crate::ReadAt`], whose errors are those of the system: a spent budget comes that way,
/// too.
impl From<io::Error> for LayerError {
    fn from(error: io::Error) -> LayerError {
        Spent::of(&error).map_or(LayerError::Io(error), LayerError::Spent)
    }
}

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
    fn of_mode(mode: u16) -> NodeKind {
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

/// What a layer says of itself, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct About {
    /// Name of the format: `ext4`, `squashfs`.
    pub format: &'static str,
    /// The label, where it has one.
    pub label: Option<String>,
    /// The UUID or serial number, as blkid(8) writes it.
    pub uuid: Option<String>,
    /// How its contents are compressed, where they are.
    pub compression: Option<&'static str>,
    /// What else is worth a word: `blocks of 4096`, `was not unmounted`.
    pub notes: Vec<String>,
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

/// The end of a sentence.
fn because(why: Option<&str>) -> String {
    why.map_or_else(String::new, |why| format!(": {why}"))
}

/// A [`LayerError::Corrupt`].
fn corrupt<T>(what: impl Into<String>) -> Result<T, LayerError> {
    Err(LayerError::Corrupt(what.into()))
}

/// A [`LayerError::Unsupported`].
fn unsupported<T>(what: impl Into<String>) -> Result<T, LayerError> {
    Err(LayerError::Unsupported(what.into()))
}

/// The target of a symbolic link whose bytes are laid out as a file's.
fn link_target(image: &Image, size: u64, layout: Layout) -> Result<Vec<u8>, LayerError> {
    let mut target = vec![0; usize::try_from(size).unwrap_or(0)];
    image.compose(layout)?.read_at(&mut target, 0)?;
    Ok(target)
}

/// That a symbolic link is no longer than any kernel follows, asked before its bytes are looked for.
fn link_is_short(size: u64) -> Result<(), LayerError> {
    if size > LINK_MAX {
        return corrupt(format!("a symbolic link of {size} bytes"));
    }
    Ok(())
}

/// A directory's length, when it is one that is read.
fn directory_len(len: u64) -> Result<usize, LayerError> {
    let fits = usize::try_from(len).ok().filter(|_| len <= DIRECTORY_MAX);
    fits.ok_or_else(|| LayerError::Limit(format!("a directory of {len} bytes")))
}

/// Whether two names differ at most in the case of their ASCII letters.
fn same_but_for_case(one: &[u8], other: &[u8]) -> bool {
    one.eq_ignore_ascii_case(other)
}

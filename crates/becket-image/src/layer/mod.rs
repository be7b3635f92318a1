//! The layers: what an image can hold, and how it is recognised.
//! It never guesses beyond a magic number that is checked, and never follows what it reads without a bound.
//!
//! A layer with directories is a [`FileSystem`]. Its answers about a file are a [`crate::Layout`]: where
//! the file's bytes are in the image that holds the file system. What that means for the file on the host
//! is [`crate::Image::compose`]'s business.
//!
//! Images are untrusted. What all of their parsing may cost is bounded by one [`crate::Budget`], so readers
//! have no limits of their own but those of their formats. What a reader does must be in proportion to what
//! it reads, lists and pushes, for that is counted. A directory has at most 64 MiB, a file lies in at most
//! [`crate::image::PIECES_MAX`] pieces, and no length that was read becomes memory before it was compared
//! with the image's.

mod attributes;
mod btrfs;
mod counted;
mod detect;
mod erofs;
mod error;
mod ext;
mod fat;
mod filesystem;
pub(crate) mod foreign;
mod format;
mod iso9660;
pub(crate) mod known;
mod lvm2;
mod ntfs;
pub(crate) mod packed;
mod squashfs;
mod xfs;

pub use detect::{Contents, detect, recognise};
pub use error::{Foreign, LayerError};
pub(crate) use error::{corrupt, unsupported};
pub use filesystem::{Attributes, Entry, FileSystem, NodeKind, Stat, Time, Xattrs, find};
use filesystem::{LINK_MAX, NAME_MAX, directory_len, link_is_short, link_target, same_but_for_case};
pub use foreign::find as find_foreign;
pub use format::{About, Format};
pub use packed::Packed;

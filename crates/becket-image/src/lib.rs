//! Resolves an image: opens it once, says which bytes of it live where, and what its backing can do.
//! It never moves data and knows nothing of devices or transports; what it reads is untrusted.
//!
//! [`open()`] is the door. What comes out ([`Opened`]) is all that later rooms need: descriptors that are
//! open and locked, a [`Map`] from the image's bytes to theirs, and the [`Facts`] of each backing.
#![forbid(unsafe_code)]

mod backing;
mod backing_url;
pub mod budget;
mod bytes;
pub mod codec;
mod connected;
mod cow;
mod decoded;
mod disk;
pub mod encoded;
mod error;
mod geometry;
mod grow;
pub mod image;
mod inspect;
pub mod layer;
mod layout;
mod map;
mod open;
mod opened;
mod options;
mod partition;
mod qcow2;
mod remote;
mod resolve;
mod source;
mod suffix;
mod text;
mod through;
mod varint;
pub mod zeroes;

pub use backing_url::{BackingUrl, WantedUrl, check_prefix, is_within};
pub use budget::Budget;
pub use bytes::{Reach, ReadAt};
pub use connected::is_remote;
pub use cow::Overlay;
pub use disk::unpack_disk;
pub use disk::vmdk::is_descriptor as is_vmdk_descriptor;
pub use encoded::Encoded;
pub use error::{Error, ErrorKind, quoted};
pub use grow::{Grow, Wanted};
pub use image::{Image, Layout};
pub use inspect::{Inspected, inspect};
pub use layer::{FileSystem, Format, LayerError, NodeKind};
pub use map::{Extent, Map, MapError, Place};
pub use open::{Claimed, claim, locate, look, look_by, open, open_partly, open_to_serve, wanted_url};
pub use opened::{Location, Opened};
pub use options::{Below, OpenOptions, Tail};
pub use partition::Partition;
pub use qcow2::export;
pub use qcow2::{Grower, Storage, unpack_alone, unpack_over, unpack_writable};
pub use remote::{goes_by, holds, open_to_write};
pub use resolve::{Split, split};
pub use source::file::facts::{Alignment, DirectIo, Facts, FileKind};
pub use source::file::outer::OuterDisk;
pub use source::file::place::disk_of;
pub use source::file::{FileFacts, FileSource, heard};
pub use source::filled;
pub use source::link;
pub use source::syncs;
pub use source::{Filler, Fillers, Identity, Source, SourceFacts};
pub use text::{is_hidden, one_case, shown};
pub use through::{End, Level, Reached, Walk};

//! qcow2: QEMU's images, versions 2 and 3, with what they say of their clusters as a map.
//! It never opens a file by itself: whose word about a backing file counts is [`chain`]'s to say, and nobody else's.
//!
//! A disk in a qcow2 is cut into clusters. A table of tables (L1, then L2) says of each where it lies: in the file as it
//! is, in the file compressed, nowhere (zeroes), or not here, which means in the backing file. All of that is a
//! [`Layout`](crate::Layout), so a qcow2 with its chain is an [`Image`] like any other: clusters that continue each
//! other are one extent, compressed ones are blocks of an encoded layer, and no reader knows that there was a qcow2.
//!
//! The whole map is made when the image is opened, and not table by table as it is used. An L2 table of the usual size
//! stands for 512 MiB, so a sound image of 1 TiB has at most 128 MiB of tables, one without data has none, and the map of
//! what a program wrote from front to back is a handful of extents. What would be more than
//! [`PIECES_MAX`](crate::image::PIECES_MAX) pieces is refused with the command that puts it in order.
//!
//! Written from the specification, QEMU's docs/interop/qcow2.rst.

pub(crate) mod chain;
pub(crate) mod create;
pub(crate) mod header;
pub(crate) mod scheme;
mod storage;
mod tables;
mod writer;

use crate::image::Image;
use crate::layer::{About, LayerError};

pub(crate) use header::Header;
pub use storage::Storage;
pub use writer::Grower;
pub(crate) use writer::unwritable;

/// Of an entry: what it points to has no other user.
const COPIED: u64 = 1 << 63;

/// The disk in `image`, if that is a qcow2, which must need no other file.
///
/// # Errors
/// It is damaged, uses what is not known here, or has a backing file, which a file inside another image cannot have.
pub fn unpack_alone(image: &Image) -> Result<Option<Image>, LayerError> {
    let Some(header) = Header::read(image)? else { return Ok(None) };
    match &header.backing {
        None => unpack(image, &header, None).map(Some),
        Some(backing) => Err(LayerError::Unsupported(format!(
            "a qcow2 inside another image with a backing file ({}); copy it out first",
            backing.shown()
        ))),
    }
}

/// The disk in `image` over what its backing file holds, whichever the image names; `None` where it is no qcow2.
///
/// # Errors
/// It is damaged, or uses what is not known here.
pub fn unpack_over(image: &Image, backing: &Image) -> Result<Option<Image>, LayerError> {
    Header::read(image)?.map(|header| unpack(image, &header, Some(backing))).transpose()
}

/// The disk in a qcow2, over what its backing file holds.
pub(crate) fn unpack(image: &Image, header: &Header, backing: Option<&Image>) -> Result<Image, LayerError> {
    let layout = tables::lay_out(image, header, backing.map_or(0, Image::len))?;
    Ok(image.compose_over(layout, backing)?.stored_as(header.about()))
}

impl Header {
    /// What it says of itself, for people.
    fn about(&self) -> About {
        let mut notes = vec![format!("version {}", self.version), format!("clusters of {}", self.cluster())];
        notes.extend(self.backing.as_ref().map(|backing| format!("over {}", backing.shown())));
        if self.snapshots > 0 {
            notes.push(format!("{} snapshots", self.snapshots));
        }
        notes.extend(self.distrusted().map(str::to_owned));
        About { format: "qcow2", notes, ..About::default() }
    }
}

//! qcow2: QEMU's images, versions 2 and 3, with their cluster tables read into a map.
//! It never opens a file by itself: only [`chain`] decides whether a reference to a backing file is followed.
//!
//! A disk in a qcow2 is cut into clusters. A two-level table (L1, then L2) says of each where it lies: in the
//! file as it is, in the file compressed, nowhere (zeroes), or not here, which means in the backing file.
//! All of that is a [`Layout`](crate::Layout), so a qcow2 with its chain is an [`Image`] like any other:
//! clusters that continue each other are one extent, compressed ones are blocks of an encoded layer, and no
//! reader needs to know the format.
//!
//! The whole map is made when the image is opened, not table by table as it is used. An L2 table of the usual
//! size covers 512 MiB, so a valid image of 1 TiB has at most 128 MiB of tables; one without data has none,
//! and the map of what a program wrote from front to back is a handful of extents. An image of more than
//! [`PIECES_MAX`](crate::image::PIECES_MAX) pieces is refused with the command that defragments it.
//!
//! Written from the specification, QEMU's docs/interop/qcow2.rst.

pub(crate) mod chain;
pub(crate) mod create;
pub(crate) mod dirs;
mod entry;
pub mod export;
pub(crate) mod header;
pub(crate) mod scheme;
mod snapshots;
mod storage;
mod tables;
mod uses;
mod writer;

use crate::image::Image;
use crate::layer::{About, LayerError, unsupported};

use crate::text::shown;
pub(crate) use header::{Header, mark_corrupt};
pub use storage::Storage;
use uses::{Clash, Use, Uses};
pub use writer::Grower;
use writer::unfit;

/// The disk in `image`, if that is a qcow2, which must need no other file.
///
/// # Errors
/// It is damaged, uses an unknown feature, or has a backing file, which a file inside another image cannot
/// have.
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

/// The disk in `image`, if that is a writable qcow2 without a backing file; its persistent bitmaps may be
/// lost.
///
/// # Errors
/// It is damaged, or uses what is not known here.
pub fn unpack_writable(image: &Image) -> Result<Option<Image>, LayerError> {
    let Some(header) = Header::read(image)?.filter(|header| header.backing.is_none()) else {
        return Ok(None);
    };
    let (disk, verdict) = unpack_for(Writing::DropBitmaps, image, &header, None)?;
    Ok(verdict.unwritable.is_none().then_some(disk))
}

/// The disk in `image` over the contents of its backing file, whichever the image names; `None` if it is no
/// qcow2.
///
/// # Errors
/// It is damaged, or uses what is not known here.
pub fn unpack_over(image: &Image, backing: &Image) -> Result<Option<Image>, LayerError> {
    Header::read(image)?.map(|header| unpack(image, &header, Some(backing))).transpose()
}

/// The disk in a qcow2, over what its backing file holds.
pub(crate) fn unpack(image: &Image, header: &Header, backing: Option<&Image>) -> Result<Image, LayerError> {
    compose(image, header, None, backing, None)
}

/// The same, and its data may be in another file.
pub(crate) fn unpack_beside(
    image: &Image,
    header: &Header,
    data: Option<&Image>,
    backing: Option<&Image>,
) -> Result<Image, LayerError> {
    compose(image, header, data, backing, None)
}

fn compose(
    image: &Image,
    header: &Header,
    data: Option<&Image>,
    backing: Option<&Image>,
    uses: Option<&mut Uses>,
) -> Result<Image, LayerError> {
    if header.data.is_some() && data.is_none() {
        return unsupported(
            "a qcow2 whose data are in another file, here; `qemu-img convert -O qcow2` puts them into one",
        );
    }
    let lens = (data.unwrap_or(image).len(), backing.map_or(0, Image::len));
    let layout = tables::lay_out(image, header, lens, uses)?;
    Ok(image.compose_over(layout, data, backing)?.stored_as(header.about(image)))
}

/// How to open an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Writing {
    /// For reading only.
    Never,
    /// For writing, but read-only where that would make its persistent bitmaps invalid.
    KeepBitmaps,
    /// For writing; the first write removes its persistent bitmaps.
    DropBitmaps,
}

impl Writing {
    pub(crate) fn new(read_only: bool, drop_bitmaps: bool) -> Writing {
        match (read_only, drop_bitmaps) {
            (true, _) => Writing::Never,
            (false, false) => Writing::KeepBitmaps,
            (false, true) => Writing::DropBitmaps,
        }
    }
}

/// What people should know about an image before something is written to it.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    /// Why nothing may be written.
    pub(crate) unwritable: Option<String>,
    /// That is because a write in place would change the image's tables: see [`mark_corrupt`].
    pub(crate) corrupt: bool,
    /// What a write destroys.
    pub(crate) warning: Option<String>,
}

/// The disk in a qcow2, over the contents of its backing file, and whether it may be written. The file is not
/// changed.
pub(crate) fn unpack_for(
    writing: Writing,
    image: &Image,
    header: &Header,
    backing: Option<&Image>,
) -> Result<(Image, Verdict), LayerError> {
    let mut verdict = Verdict::default();
    if writing == Writing::Never {
        return Ok((compose(image, header, None, backing, None)?, verdict));
    }
    verdict.unwritable = unfit(image, header)?;
    let bitmaps = header.valid_bitmaps();
    let named =
        if bitmaps == 1 { "a persistent bitmap".to_owned() } else { format!("{bitmaps} persistent bitmaps") };
    if bitmaps > 0 && verdict.unwritable.is_none() {
        match writing {
            Writing::DropBitmaps => {
                verdict.warning = Some(format!("the first write will remove {named} from the image"));
            }
            _ => {
                verdict.unwritable = Some(format!(
                    "it has {named}, which a write would make invalid; `becket attach --drop-bitmaps` makes it writable and removes them"
                ));
            }
        }
    }
    if verdict.unwritable.is_some() {
        return Ok((compose(image, header, None, backing, None)?, verdict));
    }
    let mut uses = Uses::of(header, uses::RUNS_MAX);
    let disk = compose(image, header, None, backing, Some(&mut uses))?;
    writer::blocks(image, header, &mut |_, block| uses.table(block, Use::Block))?;
    if let Some(Clash { why, on_metadata }) = uses.clash(image.len().div_ceil(header.cluster())) {
        // Version 2 has no features.
        verdict.corrupt = on_metadata && header.version >= 3;
        verdict.unwritable = Some(why);
    }
    Ok((disk, verdict))
}

impl Header {
    /// What it says of itself, for people.
    fn about(&self, image: &Image) -> About {
        let mut notes = vec![format!("version {}", self.version), format!("clusters of {}", self.cluster())];
        notes.extend(self.backing.as_ref().map(|backing| format!("over {}", backing.shown())));
        notes.extend(self.data.as_ref().map(|data| format!("data in {}", shown(data))));
        if self.snapshots > 0 {
            // What names them does not matter for the rest.
            let named = snapshots::names(image, self).map_or(String::new(), |names| format!(": {names}"));
            let many = if self.snapshots == 1 { "" } else { "s" };
            notes.push(format!("{} snapshot{many}{named}", self.snapshots));
        }
        match self.valid_bitmaps() {
            0 => {}
            1 => notes.push("1 persistent bitmap".to_owned()),
            count => notes.push(format!("{count} persistent bitmaps")),
        }
        notes.extend(self.distrusted().map(str::to_owned));
        About { format: "qcow2", notes, ..About::default() }
    }
}

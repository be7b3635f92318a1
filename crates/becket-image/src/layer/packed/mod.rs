//! Images packed in one compressed file: `disk.img.xz`.
//! It never decodes what it does not know the place of: a file that must be read from its start is refused.
//!
//! A file can be read from the middle if it has an index, or if each of its pieces states its length. Each
//! piece becomes an encoded block, so a reader decodes only what is asked for.
//!
//! | file | pieces | known by |
//! | --- | --- | --- |
//! | .xz | blocks | the index of each stream |
//! | .zst | frames | the seek table of the seekable format, or the frames' own headers |
//! | .gz | members, at most 64 KiB each | BGZF's field in each header (bgzip makes such) |
//!
//! A piece has at most [`STORED_MAX`](crate::encoded::STORED_MAX) bytes, packed or not.

mod bgzf;
mod pieces;
mod xz;
mod zstd;

pub(crate) use pieces::Packing;
use pieces::Pieces;

use super::{About, Format, LayerError};
use crate::bytes::{ReadAt, field, u8_at, u32_at};
use crate::image::{Image, Layout, Role};

/// Another image as a whole, packed.
#[derive(Debug)]
pub struct Packed {
    /// What is packed.
    pub image: Image,
    /// From where to where its bytes are in the file.
    pub(crate) span: Option<(u64, u64)>,
    about: About,
}

impl Packed {
    /// What the packing says of itself.
    pub fn about(&self) -> &About {
        &self.about
    }
}

const KINDS: [Packing; 3] = [Packing::Xz, Packing::Zstd, Packing::Gzip];

/// How a file seems to be packed, by its first few bytes, when `format` lets it be. A disk never is.
pub(crate) fn kind_of(image: &Image, format: Format) -> Option<Packing> {
    let mut head = [0; 8];
    let wanted = |kind: &Packing| format == Format::Auto || format == kind.format();
    let can_be = image.role() == Role::File && KINDS.iter().any(wanted);
    if !can_be || image.read_at(&mut head, 0).is_err() {
        return None;
    }
    kind_of_head(head, format)
}

/// The same, by their first few bytes.
pub(crate) fn kind_of_head(head: [u8; 8], format: Format) -> Option<Packing> {
    let wanted = |kind: &Packing| format == Format::Auto || format == kind.format();
    KINDS.into_iter().find(|kind| wanted(kind) && has_magic(*kind, head))
}

fn has_magic(kind: Packing, head: [u8; 8]) -> bool {
    match kind {
        Packing::Xz => head.starts_with(xz::MAGIC),
        Packing::Zstd => matches!(u32_at(&head, 0), zstd::MAGIC | zstd::SKIPPABLE..=zstd::SKIPPABLE_LAST),
        // Deflate is the only method there is; flags that mean nothing are zero.
        Packing::Gzip => field(&head, 0) == bgzf::MAGIC && u8_at(&head, 3) & 0xe0 == 0,
    }
}

/// Finds the image that is packed in `image`, when there is one.
///
/// # Errors
/// It is damaged, or cannot be read from the middle.
pub(super) fn open(image: &Image, format: Format) -> Result<Option<Packed>, LayerError> {
    let Some(kind) = kind_of(image, format) else { return Ok(None) };
    let mut pieces = Pieces::new(kind, Layout::of(image)?);
    match kind {
        Packing::Xz => xz::read(image, &mut pieces)?,
        Packing::Zstd => zstd::read(image, &mut pieces)?,
        Packing::Gzip => bgzf::read(image, &mut pieces)?,
    }
    pieces.end()?;
    let Pieces { layout, count, longest, .. } = pieces;
    if layout.is_empty() {
        return Err(LayerError::Corrupt("nothing is packed in it".to_owned()));
    }
    let about = About {
        format: kind.name(),
        notes: vec![format!("{count} blocks of {longest} bytes at most")],
        ..About::default()
    };
    let span = layout.span();
    Ok(Some(Packed { image: image.compose(layout)?, span, about }))
}

//! The one range of one file that the loop driver takes.
//! Never looks into the file.

use becket_image::{FileSource, Opened};

use crate::{Error, Kind};

/// Why an image does not fit that is no range of one file, or grows.
pub(super) fn not_one(opened: &Opened) -> String {
    match opened.sources.iter().any(|source| source.link().is_some()) {
        true => "the image is on a server, which the loop driver cannot ask: that takes ublk or fuse",
        false => {
            "the image is not one contiguous range of one file: that takes ublk or fuse, or a raw copy \
             (`qemu-img convert -O raw`)"
        }
    }
    .to_owned()
}

/// The one range of one file that an image is.
pub(super) struct Range<'a> {
    pub(super) file: &'a FileSource,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// The range of an image.
///
/// # Errors
/// It is not one range of one file.
pub(super) fn range_of(opened: &Opened) -> Result<Range<'_>, Error> {
    let range = opened.map.single_range().and_then(|(source, offset, len)| {
        let file = opened.sources.get(usize::try_from(source).ok()?)?.file()?;
        Some(Range { file, offset, len })
    });
    range.ok_or_else(|| Error::DoesNotFit {
        kind: Kind::Loop,
        image: opened.path.clone(),
        reason: not_one(opened),
    })
}

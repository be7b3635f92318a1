//! VMDK, VMware's disks: a text that says in which files the pieces of a disk lie, or one file with tables.
//! It never opens a file by itself: the rules of [`crate::qcow2::chain`] for backing files apply to these
//! files, too.

mod descriptor;
pub(super) mod sparse;

use std::path::Path;
use std::sync::Arc;

use descriptor::{From, LONGEST, Piece, foreign, parse};

use crate::backing::Linked;
use crate::image::Image;
use crate::layer::foreign::VMDK_TITLE;
use crate::layer::{About, LayerError};
use crate::qcow2::Verdict;
use crate::qcow2::chain::{First, Unpacked};
use crate::qcow2::dirs::Dirs;
use crate::resolve::HostInode;
use crate::source::file::host::HostFile;
use crate::text::shown;
use crate::{Error, Format, ReadAt as _};

/// Why it is not written, for people.
pub(crate) const ONLY_READ: &str = "becket only reads VMDK images";
/// The most files: with two descriptors each they pass through one message.
const FILES_MAX: usize = 32;

/// The disk that a descriptor describes; `None` if the file is not a descriptor. `open` opens what was found,
/// for reading.
pub(crate) fn unpack(
    first: &First<'_>,
    open: &mut dyn FnMut(&Path, HostInode) -> Result<HostFile, Error>,
) -> Result<Option<Unpacked>, Error> {
    let of = |source| Error::Layer { image: shown(first.file.path.as_os_str().as_encoded_bytes()), source };
    let Some(text) = text(first.image).map_err(of)? else { return Ok(None) };
    first.may_refer(Format::Vmdk, || "the files of its pieces".to_owned())?;
    let pieces = parse(&text).map_err(of)?;
    let dirs = Dirs::new(first.file, first.is_far(), first.allowed.dirs)?;
    let mut names: Vec<(&[u8], bool)> = Vec::new();
    let (mut referenced, mut files) = (Vec::new(), Vec::new());
    let mut places = Vec::new();
    for Piece { len, from } in &pieces {
        let (name, offset) = match from {
            From::Zero => {
                places.push((*len, None));
                continue;
            }
            From::Flat(name, offset) => (name, *offset),
            From::Sparse(name) => (name, 0),
        };
        let is_sparse = matches!(from, From::Sparse(_));
        let known = names.iter().position(|known| *known == (name, is_sparse));
        if known.is_none() {
            if names.len() == FILES_MAX {
                return Err(of(foreign(format!("it lies in more than {FILES_MAX} files"))));
            }
            let found = dirs.find(&first.file.path, false, "data file", name)?;
            let link = open(&first.file.path, found)?;
            let reader = link.fd.try_clone().map_err(|error| of(error.into()))?;
            let file = Image::raw(Arc::new(reader), link.size, 512).within(first.image.budget());
            files.push(if is_sparse { sparse::piece(&file).map_err(of)? } else { file });
            referenced.push(Linked::File(link));
            names.push((name, is_sparse));
        }
        places.push((*len, Some((known.unwrap_or(names.len() - 1), offset))));
    }
    let image = first.image.in_pieces(&files, &places).map_err(of)?;
    let sparse = names.iter().any(|(_, is_sparse)| *is_sparse);
    let how = if sparse { "sparse" } else { "flat" };
    let notes = vec![format!("{how}, in {} files", referenced.len())];
    let about = About { format: "vmdk", notes, ..About::default() };
    Ok(Some(Unpacked {
        image: image.stored_as(about),
        referenced,
        cluster: 0,
        verdict: Verdict { unwritable: Some(ONLY_READ.to_owned()), ..Verdict::default() },
    }))
}

/// The text of a descriptor; `None` where there is none.
///
/// # Errors
/// It is longer than any, or cannot be read.
fn text(image: &Image) -> Result<Option<Vec<u8>>, LayerError> {
    let mut head = [0; VMDK_TITLE.len()];
    // A disk whose first sectors cannot be read may be attached just to rescue the rest.
    if image.len() < head.len() as u64 || image.read_at(&mut head, 0).is_err() {
        return Ok(None);
    }
    if !head.eq_ignore_ascii_case(VMDK_TITLE) {
        return Ok(None);
    }
    if image.len() > LONGEST {
        return Err(LayerError::Limit(format!("a descriptor of {} bytes", image.len())));
    }
    image.read_some(0, usize::try_from(LONGEST).unwrap_or(0)).map(Some)
}

/// Whether any bytes are a descriptor that makes sense: for fuzzers.
pub fn is_descriptor(bytes: &[u8]) -> bool {
    parse(bytes).is_ok()
}

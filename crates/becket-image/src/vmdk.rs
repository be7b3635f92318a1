//! VMDK, flat: a text that says in which files the bytes of a disk lie unchanged.
//! It never opens a file by itself: the rules of [`crate::qcow2::chain`] for backing files apply to these
//! files, too.
//!
//! Pieces are `FLAT` (bytes of a file; `VMFS` on ESX) or `ZERO`. Every other kind keeps tables of its own,
//! and qemu-img knows how to convert it.
//!
//! Followed: VMware's Virtual Disk Format 5.0.

use std::path::Path;
use std::sync::Arc;

use crate::image::Image;
use crate::layer::foreign::{VMDK, VMDK_TITLE};
use crate::layer::{About, LayerError};
use crate::qcow2::Verdict;
use crate::qcow2::chain::{Dirs, First, Unpacked};
use crate::qcow2::header::BackingName;
use crate::resolve::HostInode;
use crate::source::file::host::HostFile;
use crate::text::shown;
use crate::{Error, Format, ReadAt as _};

/// Why it is not written, for people.
pub(crate) const ONLY_READ: &str = "becket only reads VMDK images";
/// The longest descriptor, in bytes, and the most pieces.
const LONGEST: u64 = 64 << 10;
const PIECES_MAX: usize = 1024;
/// The most files: with two descriptors each they pass through one message.
const FILES_MAX: usize = 32;
const SECTOR: u64 = 512;

/// A piece of the disk: its length, and the file and first byte there; of none it is zeroes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    len: u64,
    from: Option<(Vec<u8>, u64)>,
}

/// The disk that a descriptor describes; `None` if the file is no descriptor. `open` opens what was found,
/// for reading.
pub(crate) fn unpack(
    first: &First<'_>,
    open: &mut dyn FnMut(&Path, HostInode) -> Result<HostFile, Error>,
) -> Result<Option<Unpacked>, Error> {
    let of = |source| Error::Layer { image: shown(first.file.path.as_os_str().as_encoded_bytes()), source };
    let Some(text) = text(first.image).map_err(of)? else { return Ok(None) };
    first.may_refer(Format::Vmdk, || "the files of its pieces".to_owned())?;
    let pieces = parse(&text).map_err(of)?;
    let dirs = Dirs::new(first)?;
    let mut names: Vec<&[u8]> = Vec::new();
    let (mut referenced, mut files) = (Vec::new(), Vec::new());
    let mut places = Vec::new();
    for Piece { len, from } in &pieces {
        let Some((name, offset)) = from else {
            places.push((*len, None));
            continue;
        };
        let known = names.iter().position(|known| known == name);
        if known.is_none() {
            if names.len() == FILES_MAX {
                return Err(of(foreign(format!("it lies in more than {FILES_MAX} files"))));
            }
            let found = dirs.find(&first.file.path, &BackingName { name: name.clone(), format: None })?;
            let link = open(&first.file.path, found)?;
            let reader = link.fd.try_clone().map_err(|error| of(error.into()))?;
            files.push(Image::raw(Arc::new(reader), link.size, 512).within(first.image.budget()));
            referenced.push(link);
            names.push(name);
        }
        places.push((*len, Some((known.unwrap_or(names.len() - 1), *offset))));
    }
    let image = first.image.in_pieces(&files, &places).map_err(of)?;
    let notes = vec![format!("flat, in {} files", referenced.len())];
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

fn foreign(why: String) -> LayerError {
    LayerError::Foreign { format: &VMDK, why: Some(why) }
}

/// Reads a descriptor.
fn parse(text: &[u8]) -> Result<Vec<Piece>, LayerError> {
    let mut pieces = Vec::new();
    let mut total = 0_u64;
    for line in text.split(|byte| matches!(byte, b'\n' | b'\r' | 0)).map(<[u8]>::trim_ascii) {
        if let Some((key, value)) = split(line, b'=') {
            let value = value.trim_ascii().strip_prefix(b"\"").unwrap_or(value.trim_ascii());
            let value = value.strip_suffix(b"\"").unwrap_or(value);
            // What its parent holds is not here.
            if key.trim_ascii().eq_ignore_ascii_case(b"parentCID") && !value.eq_ignore_ascii_case(b"ffffffff")
            {
                return Err(foreign("it is a snapshot over another disk".to_owned()));
            }
        }
        let Some(piece) = piece(line)? else { continue };
        if pieces.len() == PIECES_MAX {
            return Err(LayerError::Limit(format!("it lies in more than {PIECES_MAX} pieces")));
        }
        total = total.checked_add(piece.len).ok_or_else(|| wrong(line))?;
        pieces.push(piece);
    }
    if total == 0 {
        return Err(LayerError::Corrupt("it names no piece of a disk".to_owned()));
    }
    Ok(pieces)
}

/// `RW 4192256 FLAT "disk-flat.vmdk" 0`; `None` for other lines.
fn piece(line: &[u8]) -> Result<Option<Piece>, LayerError> {
    let Some((access, rest)) = split(line, b' ') else { return Ok(None) };
    match access {
        b"RW" | b"RDONLY" => {}
        b"NOACCESS" => return Err(foreign("a piece of it may not be accessed".to_owned())),
        _ => return Ok(None),
    }
    let (count, rest) = split(rest.trim_ascii(), b' ').ok_or_else(|| wrong(line))?;
    let sectors = |number: &[u8]| {
        let number = std::str::from_utf8(number).ok()?.parse::<u64>().ok()?;
        number.checked_mul(SECTOR)
    };
    let len = sectors(count).filter(|len| *len > 0).ok_or_else(|| wrong(line))?;
    let rest = rest.trim_ascii();
    let (kind, rest) = split(rest, b' ').unwrap_or((rest, &[]));
    let from = match kind {
        b"ZERO" => None,
        b"FLAT" | b"VMFS" => {
            let quoted = rest.trim_ascii().strip_prefix(b"\"").ok_or_else(|| wrong(line))?;
            let (name, rest) = split(quoted, b'"').ok_or_else(|| wrong(line))?;
            let offset = match rest.trim_ascii() {
                b"" => 0,
                number => sectors(number).ok_or_else(|| wrong(line))?,
            };
            Some((name.to_vec(), offset))
        }
        other => return Err(foreign(format!("a piece of it is {}; FLAT and ZERO are read", shown(other)))),
    };
    Ok(Some(Piece { len, from }))
}

fn wrong(line: &[u8]) -> LayerError {
    LayerError::Corrupt(format!("its descriptor says: {}", shown(line)))
}

/// What is before and behind the first `at`.
fn split(line: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let index = line.iter().position(|byte| *byte == at)?;
    Some((line.get(..index)?, line.get(index + 1..)?))
}

/// Whether any bytes are a descriptor that makes sense: for fuzzers.
pub fn is_descriptor(bytes: &[u8]) -> bool {
    parse(bytes).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_read_as_it_is_meant() {
        let text = b"# Disk DescriptorFile\nversion=1\nparentCID = ffffffff\r\ncreateType=\"twoGbMaxExtentFlat\"\n\n\
            RW 8 FLAT \"a b-f001.vmdk\" 0\nRDONLY 2 ZERO\n RW 4 VMFS \"x\"\nRW 1 FLAT \"x\" 7 \nddb.x = \"RW 1 ZERO\"\n";
        let file = |name: &str, offset| Some((name.as_bytes().to_vec(), offset));
        assert_eq!(
            parse(text).unwrap(),
            [
                Piece { len: 4096, from: file("a b-f001.vmdk", 0) },
                Piece { len: 1024, from: None },
                Piece { len: 2048, from: file("x", 0) },
                Piece { len: 512, from: file("x", 3584) },
            ]
        );
    }

    #[test]
    fn what_is_not_flat_or_makes_no_sense_is_refused() {
        for (line, why) in [
            ("RW 8 SPARSE \"a.vmdk\"", "a piece of it is SPARSE"),
            ("RW 8 VMFSRDM \"a\"", "VMFSRDM"),
            ("NOACCESS 8 ZERO", "may not be accessed"),
            ("parentCID=1a2b3c4d\nRW 8 ZERO", "a snapshot"),
            ("RW 0 ZERO", "its descriptor says: RW 0 ZERO"),
            ("RW 99999999999999999999 ZERO", "its descriptor says"),
            ("RW 36028797018963968 ZERO", "its descriptor says"),
            ("RW 36028797018963967 ZERO\nRW 2 ZERO", "its descriptor says"),
            ("RW 8 FLAT a 0", "its descriptor says"),
            ("RW 8 FLAT \"a\" x", "its descriptor says"),
            ("RW 8", "its descriptor says"),
            ("version=1", "names no piece"),
        ] {
            let error = parse(line.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(why), "{line}: {error}");
        }
        let many = "RW 1 ZERO\n".repeat(PIECES_MAX + 1);
        assert!(parse(many.as_bytes()).unwrap_err().to_string().contains("pieces"));
    }
}

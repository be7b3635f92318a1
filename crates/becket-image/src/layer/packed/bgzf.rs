//! BGZF: gzip members of at most 64 KiB, each of which says how long it is. bgzip(1) makes such files.
//! It never takes another gzip file: where its bytes are shows only when all before them is decoded.
//!
//! Followed: RFC 1952, and section 4.1 of the SAM format's specification.

use super::pieces::Pieces;
use crate::bytes::{part, u8_at, u16_at, u32_at};
use crate::image::Image;
use crate::layer::{LayerError, corrupt};

/// The magic number and the only method.
pub(super) const MAGIC: [u8; 3] = [0x1f, 0x8b, 8];
/// The flag that says that there are extra fields, and where they begin.
const EXTRA: u8 = 4;
const FIELDS_AT: usize = 12;
/// What a member ends with: checksum and length.
const TRAILER: u64 = 8;
/// The longest member that yields something.
const YIELDS_MAX: u32 = 1 << 16;
/// As many bytes of a header as nearly all have.
const HEADER: usize = 18;

/// Reports the members.
pub(super) fn read(image: &Image, pieces: &mut Pieces) -> Result<(), LayerError> {
    let mut at = 0;
    let mut header = image.read_some(0, HEADER)?;
    loop {
        let Some(len) = member_len(image, at, &header)? else {
            if at == 0 {
                return pieces
                    .sequential("it has no index (bgzip makes gzip files that can be read anywhere)", None);
            }
            return corrupt("between its members there is something else");
        };
        let end = at + len;
        let trailer_at = end - 4;
        if end > image.len() {
            return corrupt("its last member is cut short");
        }
        // The end of this member and the start of the next are one look.
        let mut both = image.read_some(trailer_at, 4 + HEADER)?;
        let yields = u32_at(&both, 0);
        if yields > YIELDS_MAX {
            return corrupt(format!("a member of it yields {yields} bytes"));
        }
        pieces.push(at, len, yields.into())?;
        if end == image.len() {
            // An empty member is how a file ends that is whole.
            return if yields == 0 { Ok(()) } else { corrupt("its end is missing (is it cut short?)") };
        }
        at = end;
        header = both.split_off(4);
    }
}

/// The length of the member at `at`, as its header says; `None` where it says nothing of it.
fn member_len(image: &Image, at: u64, header: &[u8]) -> Result<Option<u64>, LayerError> {
    if !header.starts_with(&MAGIC) || u8_at(header, 3) & EXTRA == 0 || header.len() < FIELDS_AT {
        return Ok(None);
    }
    let fields_len = usize::from(u16_at(header, 10));
    let read;
    let mut rest = part(header, FIELDS_AT, fields_len);
    if rest.len() < fields_len {
        read = image.read_some(at + FIELDS_AT as u64, fields_len)?;
        rest = &read;
    }
    while let [b1, b2, l1, l2, behind @ ..] = rest {
        let len = usize::from(u16::from_le_bytes([*l1, *l2]));
        if (b1, b2, len) == (&b'B', &b'C', 2) {
            let len = u64::from(u16_at(part(behind, 0, 2), 0)) + 1;
            let least = FIELDS_AT as u64 + fields_len as u64 + TRAILER;
            return if len < least {
                corrupt("a member of it is shorter than its header")
            } else {
                Ok(Some(len))
            };
        }
        rest = behind.get(len..).unwrap_or_default();
    }
    Ok(None)
}

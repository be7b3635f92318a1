//! The text of a VMDK, which says in which pieces a disk lies.
//! It never opens a file, and takes no line for a piece that it does not know.
//!
//! Pieces are `FLAT` (bytes of a file; `VMFS` on ESX), `SPARSE` (a file with tables of its own, see
//! [`super::sparse`]) or `ZERO`.
//!
//! Followed: VMware's Virtual Disk Format 5.0.

use crate::layer::LayerError;
use crate::layer::foreign::VMDK;
use crate::text::shown;

/// The longest descriptor, in bytes, and the most pieces.
pub(super) const LONGEST: u64 = 64 << 10;
const PIECES_MAX: usize = 1024;
const SECTOR: u64 = 512;

/// A piece of the disk: its length in bytes, and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) len: u64,
    pub(super) from: From,
}

/// Where the bytes of a piece are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum From {
    /// Nowhere: zeroes.
    Zero,
    /// From this byte of a file on.
    Flat(Vec<u8>, u64),
    /// In a file with tables of its own.
    Sparse(Vec<u8>),
}

pub(super) fn foreign(why: String) -> LayerError {
    LayerError::Foreign { format: &VMDK, why: Some(why) }
}

/// Reads a descriptor.
pub(super) fn parse(text: &[u8]) -> Result<Vec<Piece>, LayerError> {
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
        b"ZERO" => From::Zero,
        b"FLAT" | b"VMFS" | b"SPARSE" => {
            let quoted = rest.trim_ascii().strip_prefix(b"\"").ok_or_else(|| wrong(line))?;
            let (name, rest) = split(quoted, b'"').ok_or_else(|| wrong(line))?;
            let offset = match rest.trim_ascii() {
                b"" => 0,
                number => sectors(number).ok_or_else(|| wrong(line))?,
            };
            match kind {
                b"SPARSE" => From::Sparse(name.to_vec()),
                _ => From::Flat(name.to_vec(), offset),
            }
        }
        other => {
            return Err(foreign(format!(
                "a piece of it is {}; FLAT, SPARSE and ZERO are read",
                shown(other)
            )));
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_read_as_it_is_meant() {
        let text = b"# Disk DescriptorFile\nversion=1\nparentCID = ffffffff\r\ncreateType=\"twoGbMaxExtentFlat\"\n\n\
            RW 8 FLAT \"a b-f001.vmdk\" 0\nRDONLY 2 ZERO\n RW 4 VMFS \"x\"\nRW 1 FLAT \"x\" 7 \nRW 3 SPARSE \"y\"\nddb.x = \"RW 1 ZERO\"\n";
        let file = |name: &str, offset| From::Flat(name.as_bytes().to_vec(), offset);
        assert_eq!(
            parse(text).unwrap(),
            [
                Piece { len: 4096, from: file("a b-f001.vmdk", 0) },
                Piece { len: 1024, from: From::Zero },
                Piece { len: 2048, from: file("x", 0) },
                Piece { len: 512, from: file("x", 3584) },
                Piece { len: 1536, from: From::Sparse(b"y".to_vec()) },
            ]
        );
    }

    #[test]
    fn what_is_unknown_or_makes_no_sense_is_refused() {
        for (line, why) in [
            ("RW 8 VMFSSPARSE \"a.vmdk\"", "a piece of it is VMFSSPARSE"),
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

//! Files that stand for something else: symbolic links, devices, and what other programs keep elsewhere.
//! It never shows the bytes of a file for what another program would make of them.
//!
//! Followed: [MS-FSCC] for links of Windows; ntfs-3g for those of Interix, which it makes itself, and of WSL.

use super::file::{File, Volume};
use super::record::kind;
use crate::bytes::{part, u16_at, u32_at, u64_at, utf16_le};
use crate::layer::{LayerError, NodeKind, corrupt, link_is_short, unsupported};

/// Flags of a file.
const SYSTEM: u32 = 4;
const REPARSE: u32 = 0x400;
/// The longest value that stands for something else, in bytes.
const VALUE_MAX: usize = 16 << 10;
/// What a reparse point is.
const JUNCTION: u32 = 0xa000_0003;
const SYMLINK: u32 = 0xa000_000c;
const WSL_SYMLINK: u32 = 0xa000_001d;
const WSL_OTHERS: std::ops::RangeInclusive<u32> = 0x8000_0023..=0x8000_0026;
const COMPACT: u32 = 0x8000_0017;
const DEDUPLICATED: u32 = 0x8000_0013;
/// How the bytes of Interix's files begin.
const INTERIX_LINK: &[u8] = b"IntxLNK\x01";
const INTERIX_CHARACTERS: &[u8] = b"IntxCHR\0";
const INTERIX_BLOCKS: &[u8] = b"IntxBLK\0";

/// What a file stands for.
pub(super) enum Meant {
    /// Its own bytes.
    Itself,
    /// What its reparse point says: which kind, and all of it.
    Reparse(u32, Vec<u8>),
    /// The bytes of one of Interix's files.
    Interix(Vec<u8>),
}

/// Finds out what a file stands for.
pub(super) fn meant(volume: &Volume, file: &File) -> Result<Meant, LayerError> {
    let flags = u32_at(&file.standard(volume)?, 32);
    if flags & REPARSE != 0 {
        let Some(value) = file.value(volume, kind::REPARSE, VALUE_MAX)? else {
            return corrupt("a file without the reparse point that it should have");
        };
        return Ok(Meant::Reparse(u32_at(&value, 0), value));
    }
    let Some(data) = file.stream(kind::DATA, &[])? else { return Ok(Meant::Itself) };
    if flags & SYSTEM == 0 || file.is_directory() || data.size() > VALUE_MAX as u64 {
        return Ok(Meant::Itself);
    }
    let known = [INTERIX_LINK, INTERIX_CHARACTERS, INTERIX_BLOCKS];
    let value = data.read(volume, VALUE_MAX)?;
    // FIFOs and sockets are empty, or have one byte that is zero.
    let known = known.iter().any(|known| value.starts_with(known)) || matches!(*value, [] | [0]);
    Ok(if known { Meant::Interix(value) } else { Meant::Itself })
}

impl Meant {
    /// What a file is that stands for something else.
    pub(super) fn kind(&self) -> Option<NodeKind> {
        match self {
            Meant::Reparse(JUNCTION | SYMLINK | WSL_SYMLINK, _) => Some(NodeKind::Symlink),
            Meant::Reparse(tag, _) if WSL_OTHERS.contains(tag) => Some(NodeKind::Other),
            Meant::Interix(value) if value.starts_with(INTERIX_LINK) => Some(NodeKind::Symlink),
            Meant::Interix(_) => Some(NodeKind::Other),
            Meant::Reparse(..) | Meant::Itself => None,
        }
    }

    /// Major and minor number, of a device.
    pub(super) fn device(&self) -> Option<(u32, u32)> {
        let number = |value: &[u8], at| u32::try_from(u64_at(value, at)).unwrap_or(0);
        match self {
            Meant::Interix(value) if value.len() >= 24 && !value.starts_with(INTERIX_LINK) => {
                Some((number(value, 8), number(value, 16)))
            }
            _ => None,
        }
    }

    /// The target of a symbolic link.
    pub(super) fn target(&self) -> Result<Vec<u8>, LayerError> {
        let text = match self {
            Meant::Interix(value) if value.starts_with(INTERIX_LINK) => {
                utf16_le(value.get(INTERIX_LINK.len()..).unwrap_or_default())
            }
            // A number comes before the text.
            Meant::Reparse(WSL_SYMLINK, value) => {
                String::from_utf8_lossy(value.get(12..).unwrap_or_default()).into_owned()
            }
            Meant::Reparse(tag @ (JUNCTION | SYMLINK), value) => {
                let names = if *tag == SYMLINK { 20 } else { 16 };
                let name = |at| {
                    let (from, len) = (usize::from(u16_at(value, at)), usize::from(u16_at(value, at + 2)));
                    utf16_le(part(value, names + from, len))
                };
                // The name for people, or else the one for the kernel.
                let shown = name(12);
                of_windows(if shown.is_empty() { name(8) } else { shown })
            }
            _ => return corrupt("this is not a symbolic link"),
        };
        link_is_short(text.len() as u64)?;
        Ok(text.into_bytes())
    }

    /// Whether the bytes of a file are what its reader would see; why not.
    pub(super) fn is_read(&self) -> Result<(), LayerError> {
        match self {
            Meant::Reparse(COMPACT, _) => unsupported("files that Windows has compacted (compact /exe)"),
            Meant::Reparse(DEDUPLICATED, _) => unsupported("files that Windows has deduplicated"),
            Meant::Reparse(tag, _) => {
                unsupported(format!("files that are kept elsewhere (reparse point {tag:#x})"))
            }
            Meant::Itself | Meant::Interix(_) => Ok(()),
        }
    }
}

/// A path of Windows as one of this file system: `C:\\Users` is `/Users`.
fn of_windows(path: String) -> String {
    let path = path.strip_prefix(r"\??\").or_else(|| path.strip_prefix(r"\\?\")).unwrap_or(&path);
    let drive = path.as_bytes().first().is_some_and(u8::is_ascii_alphabetic) && path.get(1..2) == Some(":");
    let path = if drive { path.get(2..).unwrap_or_default() } else { path };
    path.replace('\\', "/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_windows_are_paths() {
        for (path, meant) in [
            (r"C:\Users\Public", "/Users/Public"),
            (r"\??\D:\data", "/data"),
            (r"..\other", "../other"),
            (r"\\?\C:\", "/"),
            ("", ""),
        ] {
            assert_eq!(of_windows(path.to_owned()), meant);
        }
    }
}

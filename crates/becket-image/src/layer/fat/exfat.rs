//! exFAT: FAT with long names in UTF-16, lengths of 64 bits, and files that need no chain.
//! It never takes a file's bytes behind what was written for anything but zeroes.
//!
//! Our own, because the crates that read exFAT do not report where a file's clusters are.
//! A file is known by where the first entry of its set is, in bytes; the root directory has none and is 0.
//!
//! Followed: Microsoft's exFAT specification of 2019, and the kernel where it is laxer.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::entry::{self, ENTRY, ROOT};
use super::table::{Table, Width};
use crate::bytes::{part, u8_at, u16_at, u32_at, u64_at, utf16_le};
use crate::image::{Image, Layout};
use crate::layer::{About, Attributes, Entry, FileSystem, LayerError, Stat, Time, corrupt, unsupported};

/// In the number of a file: its directory is contiguous, so that its entries say nothing of the next cluster.
const CONTIGUOUS: u64 = 1 << 63;
/// The longest directory that exFAT has, in bytes.
const DIRECTORY_MAX: u64 = 256 << 20;
/// Kinds of entries.
const LABEL: u8 = 0x83;
const FILE: u8 = 0x85;
const STREAM: u8 = 0xc0;
const NAME: u8 = 0xc1;
/// UTF-16 units of a name in one entry.
const UNITS: usize = 15;

/// An open exFAT file system.
#[derive(Debug)]
struct ExFat {
    about: About,
    table: Table,
    root_cluster: u32,
    unclean: Option<&'static str>,
}

/// What is needed of a set of entries.
#[derive(Debug, Clone, Copy)]
struct Node {
    is_dir: bool,
    /// Its clusters follow each other, and the table says nothing of them.
    contiguous: bool,
    cluster: u32,
    size: u64,
    /// Bytes that were written; those behind them read as zeroes.
    valid: u64,
    modified: Option<Time>,
}

/// Opens the file system in `image`, when there is one.
pub(in crate::layer) fn open(image: &Image) -> Result<Option<Arc<dyn FileSystem>>, LayerError> {
    let boot = image.read_some(0, 512)?;
    if boot.len() < 512 || part(&boot, 3, 8) != b"EXFAT   " || part(&boot, 510, 2) != b"\x55\xaa" {
        return Ok(None);
    }
    let version = u16_at(&boot, 104);
    if version >> 8 != 1 {
        return unsupported(format!("exFAT {}.{}", version >> 8, version & 0xff));
    }
    let (sector, cluster) = (u32::from(u8_at(&boot, 108)), u32::from(u8_at(&boot, 109)));
    if !(9..=12).contains(&sector) || sector + cluster > 25 {
        return corrupt(format!("exFAT with clusters of 2^{cluster} sectors of 2^{sector} bytes"));
    }
    let bytes = |at| u64::from(u32_at(&boot, at)) << sector;
    let flags = u16_at(&boot, 106);
    // Where there are two tables, a flag says which one is in use.
    let second = if u8_at(&boot, 110) == 2 && flags & 1 != 0 { bytes(84) } else { 0 };
    let mut fs = ExFat {
        about: About::default(),
        table: Table {
            image: image.clone(),
            width: Width::ThirtyTwo,
            at: bytes(80) + second,
            data: bytes(88),
            cluster_size: 1 << (sector + cluster),
            clusters: u32_at(&boot, 92).min(u32::MAX - 10),
        },
        root_cluster: u32_at(&boot, 96),
        unclean: (flags & 2 != 0).then_some("the exFAT file system is mounted or was not unmounted"),
    };
    let serial = u32_at(&boot, 100);
    let notes = [format!("clusters of {}", fs.table.cluster_size)].into_iter();
    fs.about = About {
        format: "exfat",
        label: fs.label()?,
        uuid: Some(format!("{:04X}-{:04X}", serial >> 16, serial & 0xffff)),
        compression: None,
        notes: notes.chain(fs.unclean.map(str::to_owned)).collect(),
    };
    Ok(Some(Arc::new(fs)))
}

impl ExFat {
    /// The set of entries of a file: what its first two say.
    fn node(&self, node: u64) -> Result<Node, LayerError> {
        let at = node & !CONTIGUOUS;
        let file = self.table.image.read_vec(at, ENTRY)?;
        let stream = self.table.image.read_vec(self.behind(at, node & CONTIGUOUS != 0)?, ENTRY)?;
        if u8_at(&file, 0) != FILE || u8_at(&stream, 0) != STREAM {
            return corrupt("a file's entries are not where they should be");
        }
        let (size, valid) = (u64_at(&stream, 24), u64_at(&stream, 8));
        if valid > size {
            return corrupt("more of a file was written than it has");
        }
        Ok(Node {
            is_dir: u16_at(&file, 4) & 0x10 != 0,
            contiguous: u8_at(&stream, 1) & 2 != 0,
            cluster: u32_at(&stream, 20),
            size,
            valid,
            modified: modified(&file),
        })
    }

    /// Where the entry behind the one at a byte is: perhaps in the directory's next cluster.
    fn behind(&self, at: u64, contiguous: bool) -> Result<u64, LayerError> {
        let Table { data, cluster_size, .. } = self.table;
        let next = at + ENTRY as u64;
        let Some(within) = next.checked_sub(data) else { return corrupt("an entry outside of all clusters") };
        if contiguous || !within.is_multiple_of(cluster_size) {
            return Ok(next);
        }
        let cluster = u32::try_from(within / cluster_size + 1).unwrap_or(u32::MAX);
        self.table.place(self.table.entry(cluster, &mut None)?, 1)
    }

    /// Where the bytes of a file or directory are.
    fn bytes_of(&self, node: Node) -> Result<Layout, LayerError> {
        let Node { cluster, size, valid, .. } = node;
        let mut layout = if node.contiguous && valid > 0 {
            let mut layout = Layout::of(&self.table.image)?;
            layout.data(self.table.place(cluster, valid.div_ceil(self.table.cluster_size))?, valid)?;
            layout
        } else {
            self.table.chain(cluster, Some(valid), valid)?
        };
        layout.zero(size - valid)?;
        Ok(layout)
    }

    /// Where the entries of a directory are, and whether its clusters follow each other.
    fn directory(&self, node: u64) -> Result<(Layout, bool), LayerError> {
        if node == ROOT {
            return Ok((self.table.chain(self.root_cluster, None, DIRECTORY_MAX)?, false));
        }
        match self.node(node)? {
            node @ Node { is_dir: true, .. } => Ok((self.bytes_of(node)?, node.contiguous)),
            _ => corrupt("this is not a directory"),
        }
    }

    fn label(&self) -> Result<Option<String>, LayerError> {
        let mut label = None;
        let (layout, _) = self.directory(ROOT)?;
        entry::entries(&self.table.image, &layout, &mut |_, raw| {
            if u8_at(raw, 0) != LABEL {
                return ControlFlow::Continue(());
            }
            let text = utf16_le(part(raw, 2, 2 * usize::from(u8_at(raw, 1)).min(11)));
            label = (!text.is_empty()).then_some(text);
            ControlFlow::Break(())
        })?;
        Ok(label)
    }
}

/// The name of a file as its entries spell it.
struct Name {
    /// Where its first entry is.
    at: u64,
    /// Units that it has, once that is known, and their bytes so far.
    len: Option<usize>,
    units: Vec<u8>,
}

impl FileSystem for ExFat {
    fn about(&self) -> &About {
        &self.about
    }

    fn root(&self) -> u64 {
        ROOT
    }

    fn stat(&self, node: u64) -> Result<Stat, LayerError> {
        let Attributes { kind, size, .. } = self.attributes(node)?;
        Ok(Stat { kind, size })
    }

    fn attributes(&self, node: u64) -> Result<Attributes, LayerError> {
        if node == ROOT {
            return Ok(entry::shown(true, 0, None));
        }
        let Node { size, is_dir, modified, .. } = self.node(node)?;
        Ok(entry::shown(is_dir, size, modified))
    }

    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
        let (layout, contiguous) = self.directory(dir)?;
        let mark = if contiguous { CONTIGUOUS } else { 0 };
        let mut name: Option<Name> = None;
        entry::entries(&self.table.image, &layout, &mut |at, raw| {
            match (u8_at(raw, 0), &mut name) {
                (FILE, _) => name = Some(Name { at, len: None, units: Vec::new() }),
                (STREAM, Some(name)) => name.len = Some(usize::from(u8_at(raw, 3))),
                (NAME, Some(Name { at, len: Some(len), units })) => {
                    let missing = (2 * *len).saturating_sub(units.len());
                    units.extend_from_slice(part(raw, 2, missing.min(2 * UNITS)));
                    if missing <= 2 * UNITS {
                        let (text, node) = (utf16_le(units), *at | mark);
                        name = None;
                        return entry(text.as_bytes(), node);
                    }
                }
                // What vendors put beside a file is no part of its name.
                (0xe0.., Some(_)) => {}
                _ => name = None,
            }
            ControlFlow::Continue(())
        })
    }

    fn same_name(&self, one: &[u8], other: &[u8]) -> bool {
        crate::layer::same_but_for_case(one, other)
    }

    fn read_link(&self, _: u64) -> Result<Vec<u8>, LayerError> {
        corrupt("exFAT has no symbolic links")
    }

    fn lay_out(&self, node: u64) -> Result<Layout, LayerError> {
        match self.node(node)? {
            Node { is_dir: true, .. } => corrupt("this is not a regular file"),
            node => self.bytes_of(node),
        }
    }

    fn writable(&self, node: u64) -> Result<(), String> {
        if let Some(reason) = self.unclean {
            return Err(reason.to_owned());
        }
        match self.node(node) {
            Ok(Node { size, valid, .. }) if valid < size => {
                Err("the end of the file was never written, and the file system would have to know"
                    .to_owned())
            }
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// When the bytes of a file were changed last, from its first entry.
fn modified(file: &[u8]) -> Option<Time> {
    let local = entry::time(u16_at(file, 14), u16_at(file, 12))?;
    // Up to two seconds in hundredths, and how far the clock is from UTC, in quarters of an hour.
    let (hundredths, zone) = (u32::from(u8_at(file, 21)).min(199), u8_at(file, 23));
    let quarters = if zone & 0x80 == 0 { 0 } else { i64::from((zone << 1).cast_signed() >> 1) };
    Some(Time {
        seconds: local.seconds + i64::from(hundredths / 100) - quarters * 900,
        nanoseconds: hundredths % 100 * 10_000_000,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_of_utc() {
        let mut file = [0; ENTRY];
        // 1 January 2000, 12:00:02, in a zone two hours ahead.
        file[12..16].copy_from_slice(&(((20_u32 << 9 | 1 << 5 | 1) << 16) | 12 << 11 | 1).to_le_bytes());
        (file[21], file[23]) = (150, 0x80 | 8);
        let time = modified(&file).unwrap();
        assert_eq!((time.seconds, time.nanoseconds), (946_728_003 - 7200, 500_000_000));
        file[23] = 0x80 | 0x7c;
        assert_eq!(modified(&file).unwrap().seconds, 946_728_003 + 3600);
        file[23] = 8;
        assert_eq!(modified(&file).unwrap().seconds, 946_728_003);
        file[14..16].fill(0);
        assert_eq!(modified(&file), None);
    }
}

//! FAT12, FAT16 and FAT32, with long names. exFAT is beside it, for the table of clusters is the same.
//! It never follows a chain of clusters further than there are clusters.
//!
//! Our own, because the crate fatfs reads files and does not report where their clusters are.
//! A file is known by where its directory entry is, in bytes; the root directory has none and is 0.
//!
//! Followed: Microsoft's FAT specification of 2000 (fatgen103), and the kernel where it is laxer.

mod entry;
pub(super) mod exfat;
mod table;

use std::ops::ControlFlow;
use std::sync::Arc;

use entry::{ENTRY, ROOT};
use table::{Table, Width};

use super::{About, Attributes, Entry, FileSystem, LayerError, Stat, Time, corrupt};
use crate::bytes::{field, padded_text, part, u8_at, u16_at, u32_at, utf16};
use crate::image::{Image, Layout};

const LONG_NAME: u8 = 0x0f;
const VOLUME: u8 = 0x08;
const DIRECTORY: u8 = 0x10;
const DELETED: u8 = 0xe5;
/// What a directory can have: 65,536 entries.
const DIRECTORY_MAX: u64 = 65_536 * ENTRY as u64;

/// An open FAT file system.
#[derive(Debug)]
struct Fat {
    about: About,
    table: Table,
    /// The root directory of FAT12 and FAT16: first byte and length.
    fixed_root: (u64, u64),
    /// Its first cluster on FAT32.
    root_cluster: u32,
    unclean: Option<&'static str>,
}

/// What is needed of a directory entry.
#[derive(Debug, Clone, Copy)]
struct Node {
    cluster: u32,
    size: u64,
    is_dir: bool,
    /// Taken as UTC, as by the kernel unless it is mounted with a time zone: FAT stores local time.
    modified: Option<Time>,
}

/// Opens the file system in `image`, when there is one. There is no magic number: the boot sector must make
/// sense.
pub(super) fn open(image: &Image) -> Result<Option<Arc<dyn FileSystem>>, LayerError> {
    let boot = image.read_some(0, 512)?;
    let jump = matches!((u8_at(&boot, 0), u8_at(&boot, 2)), (0xeb, 0x90) | (0xe9, _));
    let (sector, per_cluster) = (u64::from(u16_at(&boot, 11)), u64::from(u8_at(&boot, 13)));
    let (reserved, tables) = (u64::from(u16_at(&boot, 14)), u64::from(u8_at(&boot, 16)));
    let sound = boot.len() == 512
        && jump
        && part(&boot, 510, 2) == b"\x55\xaa"
        && sector.is_power_of_two()
        && (512..=4096).contains(&sector)
        && per_cluster.is_power_of_two()
        && reserved > 0
        && (1..=2).contains(&tables)
        && matches!(u8_at(&boot, 21), 0xf0 | 0xf8..);
    if !sound {
        return Ok(None);
    }
    let either = |short: u16, long: u32| if short == 0 { u64::from(long) } else { u64::from(short) };
    let table_len = either(u16_at(&boot, 22), u32_at(&boot, 36));
    let total = either(u16_at(&boot, 19), u32_at(&boot, 32));
    let root_len = u64::from(u16_at(&boot, 17)) * ENTRY as u64;
    let root = reserved + tables * table_len;
    let data = root + root_len.div_ceil(sector);
    if table_len == 0 || data >= total {
        return Ok(None);
    }
    let clusters = u32::try_from((total - data) / per_cluster).unwrap_or(u32::MAX);
    let width = match clusters {
        0 => return Ok(None),
        _ if u16_at(&boot, 22) == 0 => Width::TwentyEight,
        1..4085 => Width::Twelve,
        _ => Width::Sixteen,
    };
    // As in the kernel: what the table has no entry for is not a cluster, though there may be sectors for it.
    let bits = match width {
        Width::Twelve => 12,
        Width::Sixteen => 16,
        Width::TwentyEight | Width::ThirtyTwo => 32,
    };
    let counted = (table_len.saturating_mul(sector * 8) / bits).saturating_sub(2);
    let clusters = clusters.min(u32::try_from(counted).unwrap_or(u32::MAX));
    let fat = Fat {
        about: About::default(),
        table: Table {
            image: image.clone(),
            width,
            at: reserved * sector,
            data: data * sector,
            cluster_size: per_cluster * sector,
            clusters,
        },
        fixed_root: (root * sector, root_len),
        root_cluster: u32_at(&boot, 44),
        unclean: None,
    };
    Ok(Some(Arc::new(fat.introduced(&boot)?)))
}

impl Fat {
    /// Completes what it says of itself.
    fn introduced(mut self, boot: &[u8]) -> Result<Fat, LayerError> {
        let (format, at) = match self.table.width {
            Width::Twelve => ("fat12", 38),
            Width::Sixteen => ("fat16", 38),
            Width::TwentyEight | Width::ThirtyTwo => ("fat32", 66),
        };
        // Bit 0 of a reserved byte before the signature is Linux's and Windows' mark of a mounted volume.
        let marked = u8_at(boot, at - 1) & 1 != 0;
        let mut window = None;
        let clean = match self.table.width {
            Width::Twelve => true,
            Width::Sixteen => self.table.entry(1, &mut window)? & 0x8000 != 0,
            Width::TwentyEight | Width::ThirtyTwo => self.table.entry(1, &mut window)? & 0x0800_0000 != 0,
        };
        self.unclean = (marked || !clean).then_some("the FAT file system is mounted or was not unmounted");
        let extended = matches!(u8_at(boot, at), 0x28 | 0x29);
        let serial = u32_at(boot, at + 1);
        self.about = About {
            format,
            label: self.volume_label()?,
            uuid: extended.then(|| format!("{:04X}-{:04X}", serial >> 16, serial & 0xffff)),
            compression: None,
            notes: [format!("clusters of {}", self.table.cluster_size)]
                .into_iter()
                .chain(self.unclean.map(str::to_owned))
                .collect(),
        };
        Ok(self)
    }

    /// Where the entries of a directory are.
    fn directory(&self, node: u64) -> Result<Layout, LayerError> {
        let chain = |first| self.table.chain(first, None, DIRECTORY_MAX);
        let mut fixed = Layout::of(&self.table.image)?;
        match (node, self.table.width) {
            (ROOT, Width::TwentyEight) => chain(self.root_cluster),
            (ROOT, _) => {
                fixed.data(self.fixed_root.0, self.fixed_root.1)?;
                Ok(fixed)
            }
            _ => match self.node(node)? {
                Node { is_dir: true, cluster, .. } => chain(cluster),
                _ => corrupt("this is not a directory"),
            },
        }
    }

    /// The directory entry at a byte of the image.
    fn node(&self, node: u64) -> Result<Node, LayerError> {
        let raw = self.table.image.read_vec(node, ENTRY)?;
        let high = if self.table.width == Width::TwentyEight { u32::from(u16_at(&raw, 20)) << 16 } else { 0 };
        Ok(Node {
            cluster: high | u32::from(u16_at(&raw, 26)),
            size: u32_at(&raw, 28).into(),
            is_dir: u8_at(&raw, 11) & DIRECTORY != 0,
            modified: entry::time(u16_at(&raw, 24), u16_at(&raw, 22)),
        })
    }

    /// Reports each entry of 32 bytes that is in use: where it is, and its bytes.
    fn entries(
        &self,
        dir: u64,
        report: &mut dyn FnMut(u64, &[u8]) -> ControlFlow<()>,
    ) -> Result<(), LayerError> {
        entry::entries(&self.table.image, &self.directory(dir)?, &mut |at, raw| {
            if u8_at(raw, 0) == DELETED { ControlFlow::Continue(()) } else { report(at, raw) }
        })
    }

    /// The label in the root directory, as blkid reads it. The one in the boot sector is not changed with it,
    /// and counts for nothing.
    fn volume_label(&self) -> Result<Option<String>, LayerError> {
        let mut label = None;
        self.entries(ROOT, &mut |_, raw| {
            let attributes = u8_at(raw, 11);
            let cluster = u16_at(raw, 20) | u16_at(raw, 26);
            if attributes & (VOLUME | DIRECTORY) != VOLUME || attributes & 0x3f == LONG_NAME || cluster != 0 {
                return ControlFlow::Continue(());
            }
            label = padded_text(&first_letter(field::<11>(raw, 0)));
            ControlFlow::Break(())
        })?;
        Ok(label)
    }
}

impl FileSystem for Fat {
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
        let mut long = LongName::default();
        self.entries(dir, &mut |at, raw| {
            let attributes = u8_at(raw, 11);
            if attributes & 0x3f == LONG_NAME {
                long.add(raw);
                return ControlFlow::Continue(());
            }
            let name = long.take(raw).unwrap_or_else(|| short_name(raw));
            if attributes & VOLUME != 0 || name == b"." || name == b".." {
                return ControlFlow::Continue(());
            }
            entry(&name, at)
        })
    }

    fn same_name(&self, one: &[u8], other: &[u8]) -> bool {
        super::same_but_for_case(one, other)
    }

    fn read_link(&self, _: u64) -> Result<Vec<u8>, LayerError> {
        corrupt("FAT has no symbolic links")
    }

    fn lay_out(&self, node: u64) -> Result<Layout, LayerError> {
        match self.node(node)? {
            Node { is_dir: true, .. } => corrupt("this is not a regular file"),
            Node { size: 0, .. } => Layout::of(&self.table.image),
            Node { cluster, size, .. } => self.table.chain(cluster, Some(size), size),
        }
    }

    fn writable(&self, _: u64) -> Result<(), String> {
        self.unclean.map_or(Ok(()), |reason| Err(reason.to_owned()))
    }
}

/// The long name that entries before a short one spell, the last part first.
#[derive(Debug, Default)]
struct LongName {
    units: Vec<u16>,
    /// Which part comes next; 0 when all are there.
    next: u8,
    checksum: u8,
}

impl LongName {
    fn add(&mut self, raw: &[u8]) {
        let (order, checksum) = (u8_at(raw, 0), u8_at(raw, 13));
        if order & 0x40 != 0 {
            *self = LongName { units: Vec::new(), next: order & 0x1f, checksum };
        }
        if self.next == 0 || order & 0x1f != self.next || checksum != self.checksum {
            *self = LongName::default();
            return;
        }
        self.next -= 1;
        let ranges = [(1, 5), (14, 6), (28, 2)];
        let units =
            ranges.into_iter().flat_map(|(at, count)| (0..count).map(move |n| u16_at(raw, at + 2 * n)));
        let mut whole: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
        whole.append(&mut self.units);
        self.units = whole;
    }

    /// The name, when it is whole and belongs to this short entry.
    fn take(&mut self, short: &[u8]) -> Option<Vec<u8>> {
        let LongName { units, next, checksum } = std::mem::take(self);
        let sum = part(short, 0, 11).iter().fold(0_u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
        if units.is_empty() || next != 0 || sum != checksum {
            return None;
        }
        Some(utf16(units.into_iter()).into_bytes())
    }
}

/// A name as it is meant: the first letter of one that would look deleted is stored as another.
fn first_letter(mut name: [u8; 11]) -> [u8; 11] {
    if let Some(first) = name.first_mut().filter(|first| **first == 0x05) {
        *first = DELETED;
    }
    name
}

/// The name in a short entry, in lower case where the entry asks for it.
fn short_name(raw: &[u8]) -> Vec<u8> {
    let whole = first_letter(field(raw, 0));
    let case = u8_at(raw, 12);
    let (base, extension) = whole.split_at(8);
    let text = |part: &[u8], lower: bool| {
        let part = part.trim_ascii_end();
        if lower { part.to_ascii_lowercase() } else { part.to_vec() }
    };
    let (base, extension) = (text(base, case & 0x08 != 0), text(extension, case & 0x10 != 0));
    if extension.is_empty() { base } else { [base, extension].join(&b'.') }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_that_the_table_has_no_entry_for_is_none() {
        // FAT12 of 3000 sectors: a boot sector, one sector of table (341 entries), one of root directory.
        let mut bytes = vec![0; 3000 * 512];
        bytes[..3].copy_from_slice(&[0xeb, 0x3c, 0x90]);
        bytes[11..24].copy_from_slice(&[0, 2, 1, 1, 0, 1, 16, 0, 0xb8, 0x0b, 0xf8, 1, 0]);
        bytes[510..512].copy_from_slice(b"\x55\xaa");
        bytes[512 + 510..512 + 512].copy_from_slice(&[0xff, 0x0f]);
        let lay_out = |cluster: u16| {
            let mut bytes = bytes.clone();
            let entry = &mut bytes[1024..1024 + ENTRY];
            entry[..11].copy_from_slice(b"FILE    IMG");
            entry[26..28].copy_from_slice(&cluster.to_le_bytes());
            entry[28] = 100;
            let len = bytes.len() as u64;
            let fs = open(&Image::raw(Arc::new(bytes), len, 512)).unwrap().unwrap();
            fs.lay_out(1024)
        };
        assert_eq!(lay_out(340).unwrap().len(), 100);
        assert!(matches!(lay_out(341), Err(LayerError::Corrupt(_))));
    }
}

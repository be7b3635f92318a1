//! The header of a qcow2 and its extensions.
//! It never believes a number before it was held against the file's length and the format's own limits.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;

use crate::bytes::{ReadAt as _, be32_at, be64_at};
use crate::codec::Codec;
use crate::image::Image;
use crate::layer::{LayerError, corrupt, unsupported};
use crate::text::shown;

pub(super) const MAGIC: u32 = 0x5146_49fb;
/// Length of the header of version 2, and the least of version 3.
const LEN_2: usize = 72;
pub(super) const LEN_3: usize = 104;
/// What QEMU takes at most, in bytes.
pub(super) const NAME_MAX: u32 = 1023;
pub(super) const L1_MAX: u64 = 32 << 20;
/// Extensions that are looked at.
const EXTENSIONS_MAX: usize = 64;

const END: u32 = 0;
pub(super) const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const BITMAPS: u32 = 0x2385_2875;
const DATA_FILE: u32 = 0x4441_5441;

/// Of the autoclear features: the bitmaps that the header names are consistent.
const HAS_BITMAPS: u64 = 1;
/// A compatible feature: a crash may leave the reference counts behind. It matters only to writers that use
/// it.
const LAZY_COUNTS: u64 = 1;

/// Where a header has its incompatible features.
const INCOMPATIBLE: u64 = 72;

const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const SUBCLUSTERS: u64 = 1 << 4;
/// The shortest clusters that have some: none is shorter than a sector.
const SUBCLUSTERS_LEAST: u32 = 14;

/// What a header says, as far as it matters here. Offsets are bytes of the file.
#[derive(Debug, Clone)]
pub(crate) struct Header {
    pub(super) version: u32,
    pub(super) cluster_bits: u32,
    /// Length of the disk in bytes.
    pub(super) size: u64,
    pub(super) l1_offset: u64,
    pub(super) l1_entries: u32,
    pub(super) snapshots: u32,
    pub(super) snapshots_offset: u64,
    pub(super) compression: Codec,
    pub(super) backing: Option<BackingName>,
    /// The name of the file that its clusters are in, where that is another one.
    pub(super) data: Option<Vec<u8>>,
    pub(super) counts: Counts,
    /// Autoclear features: a writer that does not know them clears them.
    pub(super) autoclear: u64,
    incompatible: u64,
    pub(super) bitmaps: Option<Bitmaps>,
    /// Features or extensions that are not known here and may own clusters.
    pub(super) has_unknown: bool,
}

/// The extension that says where persistent bitmaps are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bitmaps {
    pub(super) count: u32,
    /// Where the extension begins.
    pub(super) at: u64,
    /// No other extension follows.
    pub(super) is_last: bool,
}

/// Where it is counted how many users each cluster has.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counts {
    /// Of the table of blocks.
    pub(super) offset: u64,
    pub(super) clusters: u32,
    /// A count has two to this power bits.
    pub(super) order: u32,
}

/// What a qcow2 says of the file below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackingName {
    pub(crate) name: Vec<u8>,
    /// What that file is, where it says so.
    pub(crate) format: Option<Vec<u8>>,
}

impl BackingName {
    /// Its name, safe to show.
    pub(super) fn shown(&self) -> String {
        shown(&self.name)
    }
}

impl Header {
    /// Reads the header; `None` where there is none.
    ///
    /// # Errors
    /// It says what cannot be, or asks for what is not known here.
    pub(crate) fn read(image: &Image) -> Result<Option<Header>, LayerError> {
        if image.len() < LEN_2 as u64 {
            return Ok(None);
        }
        let mut first = [0; LEN_2];
        image.read_at(&mut first, 0)?;
        if be32_at(&first, 0) != MAGIC {
            return Ok(None);
        }
        let version = be32_at(&first, 4);
        let cluster_bits = be32_at(&first, 20);
        if !matches!(version, 2 | 3) {
            return unsupported(format!(
                "version {version} of qcow; `qemu-img convert -O qcow2` makes it version 3"
            ));
        }
        if !(9..=21).contains(&cluster_bits) {
            return corrupt(format!("clusters of 2^{cluster_bits} bytes; 2^9 to 2^21 are possible"));
        }
        if be32_at(&first, 32) != 0 {
            return unsupported("an encrypted qcow2; `qemu-img convert` can decrypt it");
        }
        // All of it that may be there: extensions and the name are in the first cluster.
        let bytes = image.read_some(0, 1 << cluster_bits)?;
        let (mut incompatible, mut compatible, mut autoclear, mut order, mut len) = (0, 0, 0, 4, LEN_2);
        let mut compression = Codec::Deflate;
        if version == 3 {
            incompatible = be64_at(&bytes, 72);
            compatible = be64_at(&bytes, 80);
            autoclear = be64_at(&bytes, 88);
            order = be32_at(&bytes, 96);
            if order > 6 {
                return corrupt(format!("reference counts of 2^{order} bits"));
            }
            len = be32_at(&bytes, 100) as usize;
            if len < LEN_3 || len > bytes.len() || !len.is_multiple_of(8) {
                return corrupt(format!("a header of {len} bytes"));
            }
            check_features(incompatible, cluster_bits)?;
            // Without the bit the field means nothing.
            let kind = bytes
                .get(LEN_3)
                .filter(|_| len > LEN_3 && incompatible & COMPRESSION != 0)
                .copied()
                .unwrap_or(0);
            compression = match kind {
                0 => Codec::Deflate,
                1 => Codec::Zstd,
                kind => return unsupported(format!("compression of type {kind}")),
            };
        }
        let mut header = Header {
            version,
            cluster_bits,
            size: be64_at(&bytes, 24),
            l1_offset: be64_at(&bytes, 40),
            l1_entries: be32_at(&bytes, 36),
            snapshots: be32_at(&bytes, 60),
            snapshots_offset: be64_at(&bytes, 64),
            compression,
            backing: None,
            data: None,
            counts: Counts { offset: be64_at(&bytes, 48), clusters: be32_at(&bytes, 56), order },
            autoclear,
            incompatible,
            bitmaps: None,
            has_unknown: compatible & !LAZY_COUNTS != 0,
        };
        header.check_tables(image.len())?;
        let extensions = Extensions::read(&bytes, len)?;
        header.backing = backing(&bytes, extensions.backing_format)?;
        if incompatible & EXTERNAL_DATA != 0 {
            let Some(name) = extensions.data_file.filter(|name| !name.is_empty()) else {
                return unsupported("a qcow2 that does not name the file in which its data are");
            };
            header.data = Some(name);
        }
        header.bitmaps = extensions.bitmaps;
        header.has_unknown |= extensions.has_unknown;
        Ok(Some(header))
    }

    /// Length of a cluster in bytes.
    pub(crate) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// What it says of the file below it, where it says that there is one.
    pub(crate) fn backing(&self) -> Option<&BackingName> {
        self.backing.as_ref()
    }

    /// Whether an entry of an L2 table has a second word, which says of each part of its cluster what it is.
    pub(super) fn has_parts(&self) -> bool {
        self.incompatible & SUBCLUSTERS != 0
    }

    /// Length of an entry of an L2 table in bytes.
    pub(super) fn l2_entry(&self) -> u64 {
        if self.has_parts() { 16 } else { 8 }
    }

    /// How much of the disk one L2 table stands for, in bytes.
    pub(super) fn span(&self) -> u64 {
        self.cluster() / self.l2_entry() * self.cluster()
    }

    /// How many entries of the L1 table the disk needs.
    pub(super) fn l1_needed(&self) -> u64 {
        self.size.div_ceil(self.span())
    }

    /// Why it may be read but had better not be written, for people.
    pub(super) fn distrusted(&self) -> Option<&'static str> {
        if self.incompatible & CORRUPT != 0 {
            Some("it is marked as corrupt")
        } else if self.incompatible & DIRTY != 0 {
            Some("it was not closed cleanly")
        } else {
            None
        }
    }

    /// How many persistent bitmaps a write would make invalid.
    pub(super) fn valid_bitmaps(&self) -> u32 {
        self.bitmaps.filter(|_| self.autoclear & HAS_BITMAPS != 0).map_or(0, |bitmaps| bitmaps.count)
    }

    pub(super) fn check_tables(&self, file: u64) -> Result<(), LayerError> {
        let l1_entries = self.l1_entries;
        if self.size == 0 {
            return corrupt("a disk of 0 bytes");
        }
        let l1_len = u64::from(l1_entries) * 8;
        if l1_len > L1_MAX {
            return Err(LayerError::Limit(format!("an L1 table of {l1_entries} entries")));
        }
        if u64::from(l1_entries) < self.l1_needed() {
            return corrupt(format!(
                "an L1 table of {l1_entries} entries is too short for {} bytes",
                self.size
            ));
        }
        if !self.l1_offset.is_multiple_of(self.cluster()) || self.l1_offset == 0 {
            return corrupt(format!("an L1 table at byte {}, which begins no cluster", self.l1_offset));
        }
        if self.l1_offset.checked_add(l1_len).is_none_or(|end| end > file) {
            return corrupt(format!(
                "its L1 table reaches beyond the file's end at byte {file} (is the image cut short?)"
            ));
        }
        Ok(())
    }
}

/// Marks an image as corrupt, durably, so that no program opens it for writing until it is repaired. The
/// caller holds its lock for writing. The answer is `why`, which says what was found, and what was done.
pub(crate) fn mark_corrupt(file: &OwnedFd, why: &str) -> String {
    let mark = || {
        let file = File::from(file.try_clone()?);
        let mut features = [0; 8];
        file.read_exact_at(&mut features, INCOMPATIBLE)?;
        let marked = u64::from_be_bytes(features) | CORRUPT;
        file.write_all_at(&marked.to_be_bytes(), INCOMPATIBLE)?;
        file.sync_data()
    };
    match mark() {
        Ok(()) => format!("{why}; it is marked as corrupt now, and `qemu-img check -r all` clears that"),
        Err::<(), std::io::Error>(error) => format!("{why}; it could not be marked as corrupt: {error}"),
    }
}

/// Refuses what changes the meaning of everything else.
fn check_features(incompatible: u64, cluster_bits: u32) -> Result<(), LayerError> {
    if incompatible & SUBCLUSTERS != 0 && cluster_bits < SUBCLUSTERS_LEAST {
        return corrupt(format!("subclusters in clusters of 2^{cluster_bits} bytes"));
    }
    let unknown = incompatible & !(DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION | SUBCLUSTERS);
    if unknown != 0 {
        return unsupported(format!("a qcow2 with features that are not known here (bits {unknown:#x})"));
    }
    Ok(())
}

/// The backing file that the header names, which is of this format where an extension says so.
fn backing(bytes: &[u8], format: Option<Vec<u8>>) -> Result<Option<BackingName>, LayerError> {
    let (offset, name_len) = (be64_at(bytes, 8), be32_at(bytes, 16));
    if offset == 0 {
        return Ok(None);
    }
    let there = usize::try_from(offset).ok().and_then(|at| bytes.get(at..)?.get(..name_len as usize));
    let Some(name) = there.filter(|name| !name.is_empty() && name_len <= NAME_MAX) else {
        return corrupt(format!("the name of its backing file, {name_len} bytes at byte {offset}"));
    };
    Ok(Some(BackingName { name: name.to_vec(), format }))
}

/// What the extensions of a header say.
#[derive(Debug, Default)]
struct Extensions {
    backing_format: Option<Vec<u8>>,
    data_file: Option<Vec<u8>>,
    bitmaps: Option<Bitmaps>,
    has_unknown: bool,
}

impl Extensions {
    /// Reads the extensions that begin at `at`. They end where the backing file's name begins, if there is
    /// one.
    fn read(bytes: &[u8], mut at: usize) -> Result<Extensions, LayerError> {
        let mut found = Extensions::default();
        let name = usize::try_from(be64_at(bytes, 8)).unwrap_or(usize::MAX);
        let end = if name == 0 { bytes.len() } else { bytes.len().min(name) };
        for _ in 0..EXTENSIONS_MAX {
            if end < at.saturating_add(8) {
                return Ok(found);
            }
            let (kind, len) = (be32_at(bytes, at), be32_at(bytes, at + 4) as usize);
            if kind == END {
                return Ok(found);
            }
            if let Some(bitmaps) = &mut found.bitmaps {
                bitmaps.is_last = false;
            }
            let Some(contents) = bytes.get(at + 8..).and_then(|rest| rest.get(..len)) else {
                return corrupt(format!("a header extension of {len} bytes reaches beyond its cluster"));
            };
            match kind {
                BACKING_FORMAT if found.backing_format.is_none() => {
                    found.backing_format = Some(contents.to_vec());
                }
                DATA_FILE if found.data_file.is_none() => found.data_file = Some(contents.to_vec()),
                BITMAPS => {
                    let count = if len < 4 { 0 } else { be32_at(contents, 0) };
                    found.bitmaps = Some(Bitmaps { count, at: at as u64, is_last: true });
                }
                BACKING_FORMAT | DATA_FILE | FEATURE_NAMES => {}
                _ => found.has_unknown = true,
            }
            at += 8 + len.next_multiple_of(8);
        }
        corrupt(format!("more than {EXTENSIONS_MAX} header extensions"))
    }
}

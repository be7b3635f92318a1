//! A qcow2 that is open for writing: what its writer knows of it, and how that reaches the file.
//! Allocates nothing.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::image::Image;
use crate::layer::LayerError;
use crate::qcow2::entry::{COPIED, PLACE, entries};
use crate::qcow2::header::Header;
use crate::qcow2::storage::{Storage, Twofold};
use crate::qcow2::uses::Uses;

/// A qcow2 that is written.
#[derive(Debug)]
pub struct Grower {
    pub(super) file: Arc<dyn Storage>,
    pub(super) header: Header,
    /// The disk as it was when the map was made: what a cluster holds that was not placed since.
    pub(super) old: Image,
    /// Entries of the L1 table that are not 0, by number.
    pub(super) l1: BTreeMap<u64, u64>,
    /// Where each block of reference counts is, and which clusters the table of them lies in.
    pub(super) blocks: BTreeMap<u64, u64>,
    pub(super) table: Range<u64>,
    /// Clusters at the file's end that are counted as used and are nobody's yet.
    pub(super) reserve: Range<u64>,
    /// The first cluster behind the file.
    pub(super) end: u64,
    /// Clusters that lost a user.
    pub(super) freed: Vec<u64>,
    /// A sync has failed.
    pub(super) lost: bool,
    /// The file may be written in place: there is nothing to do before the first write.
    pub(super) prepared: bool,
    /// This writer or one before it, for the same map, has placed something.
    pub(super) wrote: bool,
    /// What used the first so many clusters when this writer began.
    pub(super) uses: Option<Uses>,
    pub(super) known: u64,
}

impl Grower {
    /// Takes over a qcow2, open for reading and writing, whose disk was `old`. `for_syncs` is the same file,
    /// opened once more ([`crate::syncs`]): then no sync or durable write of anybody else takes the errors of
    /// the writer's. Of a copy of a descriptor that others sync through that does not hold.
    ///
    /// # Errors
    /// It cannot be written. The code that opened it has checked that already.
    pub fn open(file: OwnedFd, for_syncs: Option<OwnedFd>, old: Image) -> Result<Grower, LayerError> {
        let file = File::from(file);
        match for_syncs {
            Some(for_syncs) => Grower::over(Arc::new(Twofold { file, for_syncs: for_syncs.into() }), old),
            None => Grower::over(Arc::new(file), old),
        }
    }

    /// The same over something that stands for the file.
    ///
    /// # Errors
    /// As [`Grower::open`].
    pub fn over(file: Arc<dyn Storage>, old: Image) -> Result<Grower, LayerError> {
        let len = file.size()?;
        let image = Image::raw(Arc::<dyn Storage>::clone(&file), len, 512);
        let header =
            Header::read(&image)?.ok_or_else(|| LayerError::Corrupt("it is not a qcow2".to_owned()))?;
        if let Some(why) = unfit(&image, &header)? {
            return Err(LayerError::Unsupported(why));
        }
        let cluster = header.cluster();
        let mut l1 = BTreeMap::new();
        entries(&image, header.l1_offset, header.l1_entries.into(), &mut |index, entry| {
            l1.insert(index, entry);
            Ok(())
        })?;
        let counts = header.counts;
        let mut blocks = BTreeMap::new();
        self::blocks(&image, &header, &mut |index, block| _ = blocks.insert(index, block))?;
        let first = counts.offset / cluster;
        let end = len.div_ceil(cluster);
        // The last cluster may be cut where its bytes end, and features may have to be cleared.
        let prepared = len == end * cluster && header.autoclear == 0;
        Ok(Grower {
            file,
            table: first..first + u64::from(counts.clusters),
            header,
            old,
            l1,
            blocks,
            reserve: end..end,
            end,
            freed: Vec::new(),
            lost: false,
            prepared,
            wrote: false,
            uses: None,
            known: end,
        })
    }

    pub(super) fn cluster(&self) -> u64 {
        self.header.cluster()
    }

    pub(super) fn write(&self, bytes: &[u8], place: u64) -> io::Result<()> {
        self.file.write_at(bytes, place)
    }

    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.check()?;
        self.file.sync().inspect_err(|_| self.lost = true)
    }

    /// Nothing that later writes rely on was lost.
    pub(super) fn check(&self) -> io::Result<()> {
        if self.lost { Err(io::Error::other("a sync of the image has failed")) } else { Ok(()) }
    }
}

/// Why a qcow2 is only read although its tables may be sound, for people.
///
/// # Errors
/// It cannot be read.
pub(in crate::qcow2) fn unfit(image: &Image, header: &Header) -> Result<Option<String>, LayerError> {
    if let Some(why) = header.distrusted() {
        return Ok(Some(format!("{why}: qemu-img check -r all repairs it")));
    }
    if header.snapshots > 0 {
        return Ok(Some("it has internal snapshots, which becket does not preserve".to_owned()));
    }
    if header.has_parts() {
        return Ok(Some("it has subclusters, which becket does not write".to_owned()));
    }
    let counts = header.counts;
    if counts.order != 4 {
        return Ok(Some(format!("its reference counts have {} bits; 16 are written", 1_u64 << counts.order)));
    }
    let cluster = header.cluster();
    let len = u64::from(counts.clusters).saturating_mul(cluster);
    let there = counts.offset.checked_add(len).is_some_and(|end| end <= image.len());
    if len == 0 || len > COUNTS_MAX || !counts.offset.is_multiple_of(cluster) || !there {
        return Ok(Some("its refcount table has an impossible place or length".to_owned()));
    }
    let mut shared = false;
    entries(image, header.l1_offset, header.l1_entries.into(), &mut |_, entry| {
        shared |= entry & PLACE != 0 && entry & COPIED == 0;
        Ok(())
    })?;
    Ok(shared.then(|| "its tables have other users: qemu-img check -r all repairs it".to_owned()))
}

/// The longest table of reference counts, in bytes, as QEMU has it.
pub(super) const COUNTS_MAX: u64 = 8 << 20;

/// Calls `each` with the number and the place of each block of reference counts.
///
/// # Errors
/// The table of them cannot be read.
pub(in crate::qcow2) fn blocks(
    image: &Image,
    header: &Header,
    each: &mut dyn FnMut(u64, u64),
) -> Result<(), LayerError> {
    let counts = header.counts;
    entries(image, counts.offset, u64::from(counts.clusters) * header.cluster() / 8, &mut |index, block| {
        // The lower bits are reserved. One that is set leaves a place that begins no cluster.
        each(index, block);
        Ok(())
    })
}

pub(super) fn small(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

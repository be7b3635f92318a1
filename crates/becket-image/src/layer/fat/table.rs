//! The table that gives each file its next cluster: of FAT and of exFAT.
//! It never follows a chain of clusters further than there are clusters.

use crate::bytes::{u16_at, u32_at};
use crate::image::{Image, Layout};
use crate::layer::{LayerError, corrupt};

/// Bytes of the table that are read at once.
const WINDOW: u64 = 4096;

/// How wide the table's entries are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// 12 bits.
    Twelve,
    /// 16 bits.
    Sixteen,
    /// 32 bits, of which the upper four mean nothing.
    TwentyEight,
    /// 32 bits, of exFAT.
    ThirtyTwo,
}

/// Clusters, and which follows which.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) image: Image,
    pub(super) width: Width,
    /// Where it is, in bytes.
    pub(super) at: u64,
    /// Where cluster 2 is, in bytes.
    pub(super) data: u64,
    /// Bytes.
    pub(super) cluster_size: u64,
    /// How many there are.
    pub(super) clusters: u32,
}

/// The part of a table that was read last.
pub(super) type Window = Option<(u64, Vec<u8>)>;

impl Table {
    /// What it says of a cluster. The part of the table that was read last is kept in `window`.
    pub(super) fn entry(&self, cluster: u32, window: &mut Window) -> Result<u32, LayerError> {
        let cluster = u64::from(cluster);
        let at = match self.width {
            Width::Twelve => cluster + cluster / 2,
            Width::Sixteen => cluster * 2,
            Width::TwentyEight | Width::ThirtyTwo => cluster * 4,
        };
        let start = at - at % WINDOW;
        if window.as_ref().is_none_or(|(kept, _)| *kept != start) {
            // An entry of twelve bits may reach one byte into the next part.
            *window = Some((start, self.image.read_some(self.at + start, WINDOW as usize + 4)?));
        }
        let bytes = window.as_ref().map_or(&[][..], |(_, bytes)| bytes);
        let within = usize::try_from(at - start).unwrap_or(0);
        Ok(match self.width {
            Width::Twelve if cluster.is_multiple_of(2) => (u16_at(bytes, within) & 0xfff).into(),
            Width::Twelve => (u16_at(bytes, within) >> 4).into(),
            Width::Sixteen => u16_at(bytes, within).into(),
            Width::TwentyEight => u32_at(bytes, within) & 0x0fff_ffff,
            Width::ThirtyTwo => u32_at(bytes, within),
        })
    }

    /// The first byte of a cluster, when there are `count` of them from there on.
    pub(super) fn place(&self, cluster: u32, count: u64) -> Result<u64, LayerError> {
        let index = cluster.checked_sub(2).map(u64::from);
        match index.filter(|index| index.checked_add(count).is_some_and(|end| end <= self.clusters.into())) {
            Some(index) => Ok(self.data + index * self.cluster_size),
            None => corrupt(format!("a chain of clusters leads to cluster {cluster} of {}", self.clusters)),
        }
    }

    /// The first `size` bytes of a chain of clusters; where the size is not known, as of directories, all of
    /// it, and an error if that is more than `most`.
    pub(super) fn chain(&self, first: u32, size: Option<u64>, most: u64) -> Result<Layout, LayerError> {
        let mut layout = Layout::of(&self.image)?;
        let mut window = None;
        let mut cluster = first;
        let limit = size.unwrap_or(most);
        let end = match self.width {
            Width::Twelve => 0xff8,
            Width::Sixteen => 0xfff8,
            Width::TwentyEight => 0x0fff_fff8,
            Width::ThirtyTwo => 0xffff_fff8,
        };
        for _ in 0..=self.clusters {
            let ended = if size.is_some() { layout.len() >= limit } else { cluster >= end };
            if ended {
                return Ok(layout);
            }
            if layout.len() >= limit {
                return corrupt("a directory is longer than FAT allows");
            }
            let at = self.place(cluster, 1)?;
            layout.data(at, self.cluster_size.min(limit - layout.len()))?;
            cluster = self.entry(cluster, &mut window)?;
        }
        corrupt("a chain of clusters runs in a circle")
    }
}

//! What a device has of an export of an NBD server. No lock of such a server keeps two writers apart: the
//! supervisor of their devices does.
//! Images of Ceph have a lock of their cluster, and files those of the kernel.

use std::path::Path;

use becket_image::link::{LinkSource, split_inside};
use becket_image::{Map, Source};
use serde::{Deserialize, Serialize};

/// A range of an export, and whether it is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Portion {
    /// What its URI hashes to, in decimal digits: varlink's numbers are too short.
    pub(crate) export: String,
    /// The first byte.
    pub(crate) start: u64,
    /// Behind the last one, if that is known.
    pub(crate) end: Option<u64>,
    pub(crate) writes: bool,
}

impl Portion {
    /// What a device has whose image is on an NBD server. One that is not a single range may be anywhere, and
    /// so may one that is not inside another image: its limit can be changed.
    pub(crate) fn of(sources: &[Source], map: &Map, image: &Path) -> Option<Portion> {
        let linked = |(index, source): (usize, &'_ Source)| Some((index, Portion::export(source.link()?)?));
        let (index, (export, writes)) = sources.iter().enumerate().find_map(linked)?;
        let inside = !split_inside(image.as_os_str()).1.is_empty();
        let single = map.single_range().filter(|(source, ..)| inside && *source as usize == index);
        let (start, end) = match single {
            Some((_, offset, len)) => (offset, Some(offset.saturating_add(len))),
            None => (0, None),
        };
        Some(Portion { export, start, end, writes })
    }

    fn export(link: &LinkSource) -> Option<(String, bool)> {
        (!link.is_durable()).then(|| (link.identity().ino.to_string(), link.may_write()))
    }

    /// Whether one of them writes what the other has.
    pub(crate) fn clashes(&self, other: &Portion) -> bool {
        let end = |portion: &Portion| portion.end.unwrap_or(u64::MAX);
        self.export == other.export
            && (self.writes || other.writes)
            && self.start < end(other)
            && other.start < end(self)
    }
}

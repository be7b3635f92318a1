//! Which parts of exports of NBD servers devices have. No lock of such a server keeps two writers apart, so
//! their supervisor does, by what is known here.
//! Images of Ceph have a lock of their cluster, and files those of the kernel.

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use becket_image::link::LinkSource;
use becket_image::{Identity, Map, Source};

use crate::system::sync::lock;

/// The parts that devices have.
#[derive(Debug, Default)]
pub(super) struct Exports(Mutex<Vec<Weak<Part>>>);

/// What a device has of an export, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Part {
    export: Identity,
    range: Range<u64>,
    writes: bool,
    /// The mark of the device.
    mark: u64,
}

impl Part {
    /// What a device has whose image is on an NBD server. One that is not a single range may be anywhere, and
    /// so may one that is not `inside` another image: its limit can be changed.
    pub(super) fn of(sources: &[Source], map: &Map, inside: bool, mark: u64) -> Option<Part> {
        let linked = |(index, source): (usize, &'_ Source)| Some((index, Part::export(source.link()?)?));
        let (index, (export, writes)) = sources.iter().enumerate().find_map(linked)?;
        let single = map.single_range().filter(|(source, ..)| inside && *source as usize == index);
        let range = single.map_or(0..u64::MAX, |(_, offset, len)| offset..offset.saturating_add(len));
        Some(Part { export, range, writes, mark })
    }

    fn export(link: &LinkSource) -> Option<(Identity, bool)> {
        (!link.is_durable()).then(|| (link.identity(), link.may_write()))
    }

    fn clashes(&self, other: &Part) -> bool {
        self.export == other.export
            && (self.writes || other.writes)
            && self.range.start < other.range.end
            && other.range.start < self.range.end
    }
}

impl Exports {
    /// Notes what a device has. If it must be `alone` with what it writes, or reads, an error is the mark of
    /// another one that has a part of that.
    pub(super) fn take(&self, part: Part, alone: bool) -> Result<Arc<Part>, u64> {
        let mut all = lock(&self.0);
        all.retain(|other| other.strong_count() > 0);
        let clash = all.iter().filter_map(Weak::upgrade).find(|other| alone && part.clashes(other));
        if let Some(other) = clash {
            return Err(other.mark);
        }
        let part = Arc::new(part);
        all.push(Arc::downgrade(&part));
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(ino: u64, range: Range<u64>, writes: bool, mark: u64) -> Part {
        Part { export: Identity { dev: u64::MAX, ino }, range, writes, mark }
    }

    #[test]
    fn one_who_writes_is_alone_with_its_part_as_long_as_it_lives() {
        let exports = Exports::default();
        let reader = exports.take(part(1, 0..100, false, 1), true).unwrap();
        let other = exports.take(part(1, 0..100, false, 2), true).unwrap();
        assert_eq!(exports.take(part(1, 50..60, true, 3), true).unwrap_err(), 1);
        drop(reader);
        assert_eq!(exports.take(part(1, 50..60, true, 3), true).unwrap_err(), 2);
        drop(other);
        let writer = exports.take(part(1, 50..60, true, 3), true).unwrap();
        for taken in [part(1, 0..51, false, 4), part(1, 59..100, true, 4)] {
            assert_eq!(exports.take(taken, true).unwrap_err(), 3);
        }
        for free in [part(1, 0..50, true, 5), part(1, 60..100, true, 5), part(2, 50..60, true, 5)] {
            exports.take(free, true).unwrap();
        }
        exports.take(part(1, 50..60, true, 6), false).unwrap();
        drop(writer);
        exports.take(part(1, 0..100, true, 7), true).unwrap();
    }
}

//! Which portions of exports of NBD servers devices have.

use std::sync::{Arc, Mutex, Weak};

use crate::contract::portion::Portion;
use crate::system::sync::lock;

/// The portions that devices have.
#[derive(Debug, Default)]
pub(super) struct Exports(Mutex<Vec<Weak<Part>>>);

/// What a device has of an export, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Part {
    portion: Portion,
    /// The mark of the device.
    mark: u64,
}

impl Part {
    pub(super) fn new(portion: Portion, mark: u64) -> Part {
        Part { portion, mark }
    }
}

impl Exports {
    /// Notes what a device has. If it must be `alone` with what it writes, or reads, an error is the mark of
    /// another one that has a part of that.
    pub(super) fn take(&self, part: Part, alone: bool) -> Result<Arc<Part>, u64> {
        let mut all = lock(&self.0);
        all.retain(|other| other.strong_count() > 0);
        if let Some(mark) = clash(&all, &part.portion).filter(|_| alone) {
            return Err(mark);
        }
        let part = Arc::new(part);
        all.push(Arc::downgrade(&part));
        Ok(part)
    }

    /// The mark of a device with which one that has this portion would not be alone.
    pub(super) fn clash(&self, portion: &Portion) -> Option<u64> {
        clash(&lock(&self.0), portion)
    }
}

fn clash(all: &[Weak<Part>], portion: &Portion) -> Option<u64> {
    let mut others = all.iter().filter_map(Weak::upgrade);
    others.find(|other| portion.clashes(&other.portion)).map(|other| other.mark)
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    fn part(ino: u64, range: Range<u64>, writes: bool, mark: u64) -> Part {
        let (export, start, end) = (ino.to_string(), range.start, Some(range.end));
        Part { portion: Portion { export, start, end, writes }, mark }
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
            assert_eq!(exports.clash(&taken.portion), Some(3));
            assert_eq!(exports.take(taken, true).unwrap_err(), 3);
        }
        for free in [part(1, 0..50, true, 5), part(1, 60..100, true, 5), part(2, 50..60, true, 5)] {
            assert_eq!(exports.clash(&free.portion), None);
            exports.take(free, true).unwrap();
        }
        exports.take(part(1, 50..60, true, 6), false).unwrap();
        drop(writer);
        let anywhere = Portion { end: None, ..part(1, 0..0, true, 7).portion };
        let whole = exports.take(Part::new(anywhere, 7), true).unwrap();
        assert_eq!(exports.clash(&part(1, 99..100, false, 8).portion), Some(7));
        drop(whole);
        exports.take(part(1, 0..100, true, 7), true).unwrap();
    }
}

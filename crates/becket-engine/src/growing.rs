//! Images that get room while they are written: which of their units have a place, and the thread that makes
//! places. An I/O thread only looks up and asks; it never waits, and no byte of the image's format is known
//! here.
//!
//! A unit that has no place of its own is read by the map, which never changes, and is written only once it
//! has one ([`becket_image::Grow`]). A place, once there, stays: from then on its unit is read and written
//! there as in any file. Placing changes no byte, so a read that runs beside it may go either way. Requests
//! that wait for the same or other units gather while the thread is busy, and are placed together.

use std::collections::VecDeque;
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use becket_image::{Extent, Grow, Map, Place, Wanted};
use rustix::io::Errno;

use crate::Error;
use crate::decode::{Note, Waiter};
use crate::places::Places;
use crate::slot::errno_of;

/// Units that are placed at once: a sync may be needed for each time.
const AT_ONCE: usize = 64;

/// A device's units.
pub(crate) struct Growing {
    unit: u64,
    places: Places,
    orders: Mutex<Orders>,
    arrived: Condvar,
    /// See [`Grow::has_lost`].
    lost: AtomicBool,
}

#[derive(Default)]
struct Orders {
    line: VecDeque<(Wanted, Waiter)>,
    ends: bool,
}

/// Ends the thread when the last queue lets go.
pub(crate) struct Handle(Arc<Growing>);

impl Handle {
    /// Takes over an image of `len` bytes and starts the thread, which drops `keep` when the image is closed.
    pub(crate) fn start(
        mut grow: Box<dyn Grow>,
        len: u64,
        keep: Box<dyn std::any::Any + Send>,
    ) -> Result<Handle, Error> {
        let unit = grow.unit().max(512);
        let growing = Arc::new(Growing {
            unit,
            places: Places::new(len.div_ceil(unit), unit),
            orders: Mutex::default(),
            arrived: Condvar::new(),
            lost: AtomicBool::new(false),
        });
        grow.placed(&mut |unit, place| growing.places.set(unit, place))
            .map_err(|source| Error::Grow { source })?;
        let thread = Arc::clone(&growing);
        std::thread::Builder::new()
            .name("becket-grow".to_owned())
            .spawn(move || {
                thread.work(grow.as_mut());
                drop(grow);
                drop(keep);
            })
            .map_err(|source| Error::Spawn { thread: 0, source })?;
        Ok(Handle(growing))
    }
}

impl std::ops::Deref for Handle {
    type Target = Growing;

    fn deref(&self) -> &Growing {
        &self.0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.orders().ends = true;
        self.0.arrived.notify_one();
    }
}

impl Growing {
    /// Where `len` bytes from byte `pos` on are, as far as that is one place; with whether it is a place of
    /// their own.
    pub(crate) fn lookup(&self, map: &Map, pos: u64, len: u64) -> Option<(Extent, bool)> {
        let unit = pos / self.unit;
        let inside = pos % self.unit;
        let end = pos.saturating_add(len).min(map.len());
        let mut reach = (unit + 1) * self.unit;
        match self.places.get(unit) {
            Some(first) => {
                // As far as the units behind it lie behind it in the file.
                let mut next = unit + 1;
                while reach < end && self.places.get(next) == Some(first + (next - unit) * self.unit) {
                    next += 1;
                    reach += self.unit;
                }
                let place = Place::Data { source: 0, offset: first + inside };
                Some((Extent { start: pos, len: end.min(reach).checked_sub(pos)?, place }, true))
            }
            None => {
                let extent = map.lookup(pos)?;
                let end = end.min(extent.end());
                while reach < end && self.places.get(reach / self.unit).is_none() {
                    reach += self.unit;
                }
                Some((Extent { len: end.min(reach) - pos, ..extent }, false))
            }
        }
    }

    /// Whether a range holds the whole unit that it begins in, in an image of `end` bytes.
    pub(crate) fn is_whole(&self, pos: u64, len: u64, end: u64) -> bool {
        pos.is_multiple_of(self.unit) && len >= self.unit.min(end.saturating_sub(pos))
    }

    /// Has the unit of byte `pos` placed, which may read as zeroes then where it is `zeroed`; `waiter` hears
    /// of it.
    pub(crate) fn ask(&self, pos: u64, zeroed: bool, waiter: Waiter) {
        let wanted = Wanted { unit: pos / self.unit, zeroed };
        self.orders().line.push_back((wanted, waiter));
        self.arrived.notify_one();
    }

    /// Whether what was written to source 0 may be lost, by what the allocating thread has seen.
    pub(crate) fn has_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_places(&self, grow: &mut dyn Grow, units: &[Wanted]) -> std::io::Result<()> {
        let mut set = |unit, place| self.places.set(unit, place);
        let first = grow.is_untouched();
        let places = grow.place(units)?;
        units.iter().zip(places).for_each(|(wanted, place)| set(wanted.unit, place));
        if first {
            // The others may be written in place from now on.
            grow.placed(&mut set)?;
        }
        Ok(())
    }

    /// Places what is asked for until the device has ended, then closes the image.
    fn work(&self, grow: &mut dyn Grow) {
        loop {
            let idle = |orders: &mut Orders| orders.line.is_empty() && !orders.ends;
            let mut orders =
                self.arrived.wait_while(self.orders(), idle).unwrap_or_else(PoisonError::into_inner);
            let count = orders.line.len().min(AT_ONCE);
            let asked: Vec<(Wanted, Waiter)> = orders.line.drain(..count).collect();
            drop(orders);
            if asked.is_empty() {
                break;
            }
            let units: Vec<Wanted> = asked.iter().map(|(wanted, _)| *wanted).collect();
            let result = self.give_places(grow, &units).map_err(|error| {
                self.lost.store(grow.has_lost(), Ordering::Release);
                match error.kind() {
                    std::io::ErrorKind::StorageFull => Errno::NOSPC,
                    _ => error.raw_os_error().map_or(Errno::IO, |errno| errno_of(-errno)),
                }
            });
            for (_, waiter) in asked {
                waiter.mailbox.leave(waiter.whom, Note::There(result), None);
            }
        }
        if let Err(error) = grow.close() {
            tracing::warn!("what an image does not need stays counted in it: {error}");
        }
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Growing").field("unit", &self.0.unit).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;
    use crate::decode::unheard;

    /// Gives units places from a mebibyte on, in the order in which they are asked for; unit 7 gets none.
    #[derive(Debug)]
    struct Double {
        next: u64,
        closed: Sender<u64>,
    }

    impl Grow for Double {
        fn unit(&self) -> u64 {
            4096
        }
        fn placed(&mut self, tell: &mut dyn FnMut(u64, u64)) -> std::io::Result<()> {
            tell(1, 0);
            Ok(())
        }
        fn place(&mut self, units: &[Wanted]) -> std::io::Result<Vec<u64>> {
            if units.iter().any(|wanted| wanted.unit == 7) {
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            let first = self.next;
            self.next += 4096 * units.len() as u64;
            Ok((0..units.len() as u64).map(|n| first + n * 4096).collect())
        }
        fn has_lost(&self) -> bool {
            false
        }
        fn close(&mut self) -> std::io::Result<()> {
            self.closed.send(self.next).map_err(std::io::Error::other)
        }
    }

    fn start() -> (Handle, Receiver<u64>, Receiver<()>) {
        let (closed, is_closed) = channel();
        let (keep, kept) = channel::<()>();
        let double = Double { next: 1 << 20, closed };
        let handle = Handle::start(Box::new(double), 10 * 4096 - 512, Box::new(Mutex::new(keep))).unwrap();
        (handle, is_closed, kept)
    }

    fn ask(growing: &Growing, pos: u64) -> Result<(), Errno> {
        let mailbox = unheard();
        growing.ask(pos, false, Waiter { mailbox: Arc::clone(&mailbox), whom: (0, 3) });
        let mut notes = Vec::new();
        while notes.is_empty() {
            std::thread::sleep(Duration::from_millis(1));
            mailbox.take(&mut notes);
        }
        match notes.pop() {
            Some(((0, 3), Note::There(result))) => result,
            _ => panic!("word about something else"),
        }
    }

    #[test]
    fn units_are_found_where_they_are_placed_and_elsewhere_by_the_map() {
        let (growing, ..) = start();
        let map = Map::contiguous(2, 1 << 30, 10 * 4096 - 512);
        let look = |pos, len| {
            let (extent, own) = growing.lookup(&map, pos, len).unwrap();
            assert_eq!(extent.start, pos);
            let Place::Data { source, offset } = extent.place else { panic!("{extent:?}") };
            (source, offset, extent.len, own)
        };
        assert_eq!(look(4096 + 512, 1024), (0, 512, 1024, true), "placed before, at byte 0");
        assert_eq!(look(0, 1 << 20), (2, 1 << 30, 4096, false), "up to the next that has a place");
        assert_eq!(look(8192, 1 << 20), (2, (1 << 30) + 8192, 8 * 4096 - 512, false));
        for unit in [3, 4, 6] {
            ask(&growing, unit * 4096 + 512).unwrap();
        }
        assert_eq!(look(3 * 4096 + 512, 1 << 20), (0, (1 << 20) + 512, 2 * 4096 - 512, true), "as one");
        assert_eq!(look(5 * 4096, 1 << 20), (2, (1 << 30) + 5 * 4096, 4096, false));
        assert_eq!(look(6 * 4096, 1 << 20), (0, (1 << 20) + 2 * 4096, 4096, true));
        assert!(growing.lookup(&map, 10 * 4096, 1).is_none());
        assert_eq!(ask(&growing, 7 * 4096), Err(Errno::NOSPC));
        assert_eq!(look(7 * 4096, 512), (2, (1 << 30) + 7 * 4096, 512, false), "it goes on by the map");
    }

    #[test]
    fn an_image_is_closed_before_what_is_kept_goes() {
        let (growing, closed, kept) = start();
        ask(&growing, 0).unwrap();
        assert!(kept.try_recv().is_err());
        drop(growing);
        assert_eq!(closed.recv().unwrap(), (1 << 20) + 4096);
        assert!(kept.recv().is_err(), "it is dropped");
    }
}

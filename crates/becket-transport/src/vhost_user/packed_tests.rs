//! A packed ring between a driver that is a model and back-ends that die at any moment.

use std::collections::BTreeMap;

use becket_engine::GuestPart;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;

const DRIVER: u64 = 1 << 15;
const DEVICE: u64 = DRIVER + 64;
const NOTES: u64 = 1 << 16;
const SIZE: u64 = 1 << 18;

/// A driver, which has the memory of the back-end's notes, too.
struct Driver {
    memory: Arc<GuestMemory>,
    ring: Area,
    count: u16,
    /// Where the next request is made available, and where one is awaited.
    next: Place,
    seen: Place,
    room: u16,
    /// Requests under way by their numbers: how many descriptors each has.
    under_way: BTreeMap<u16, u16>,
    ended: u64,
}

impl Driver {
    fn new(count: u16) -> Driver {
        let file = memfd_create("machine", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, SIZE).unwrap();
        let part = GuestPart { guest: 0, user: 0, len: SIZE, offset: 0 };
        let memory = Arc::new(GuestMemory::map(&[(part, &file)]).unwrap());
        let ring = memory.area(0, DESCRIPTOR * usize::from(count), 16, true).unwrap();
        let first = Place(Place::WRAP);
        Driver {
            memory,
            ring,
            count,
            next: first,
            seen: first,
            room: count,
            under_way: BTreeMap::new(),
            ended: 0,
        }
    }

    fn back_end(&self, base: u32, noted: bool) -> Result<Packed, Broken> {
        let address = VringAddress { descriptors: 0, available: DRIVER, used: DEVICE };
        let notes = self.memory.area(NOTES, super::super::packed_notes::size(self.count), 8, true);
        Packed::new(Arc::clone(&self.memory), (self.count, &address), base, true, notes.filter(|_| noted))
    }

    /// Makes a request of so many descriptors available, if there is room.
    fn post(&mut self, descriptors: u16) {
        let id = (0..self.count).find(|id| !self.under_way.contains_key(id));
        let Some(id) = id.filter(|_| descriptors <= self.room) else { return };
        for index in (0..descriptors).rev() {
            let place = self.next.on(index, self.count);
            let turn = if place.wraps() { AVAILABLE } else { USED };
            let flags = WRITE | turn | if index + 1 < descriptors { NEXT } else { 0 };
            let at = DESCRIPTOR * usize::from(place.index());
            self.ring.set_u64(at, u64::from(id) << 16 | u64::from(index), Relaxed);
            let rest = 512 | u64::from(id) << 32 | u64::from(flags) << 48;
            self.ring.set_u64(at + REST_AT, rest, Relaxed);
        }
        self.next = self.next.on(descriptors, self.count);
        self.room -= descriptors;
        self.under_way.insert(id, descriptors);
    }

    /// Takes what has ended.
    fn reap(&mut self) {
        loop {
            let at = DESCRIPTOR * usize::from(self.seen.index());
            let flags = self.ring.u16(at + FLAGS_AT, Relaxed) & (AVAILABLE | USED);
            if flags != if self.seen.wraps() { AVAILABLE | USED } else { 0 } {
                return;
            }
            let id = self.ring.u16(at + ID_AT, Relaxed);
            let descriptors = self.under_way.remove(&id).expect("it ends once");
            self.seen = self.seen.on(descriptors, self.count);
            self.room += descriptors;
            self.ended += 1;
        }
    }

    /// Checks that a chain is what the driver has posted: its number.
    fn check(&self, chain: &Chain) -> u16 {
        let id = (chain.writable[0].address >> 16) as u16;
        assert_eq!(chain.writable.len(), usize::from(self.under_way[&id]), "request {id}");
        let are_its = |(index, range): (usize, &becket_engine::GuestRange)| {
            range.address == u64::from(id) << 16 | index as u64
        };
        assert!(chain.writable.iter().enumerate().all(are_its), "{chain:?}");
        id
    }
}

#[test]
fn a_request_ends_once_whenever_its_back_end_dies() {
    let mut moments = [0; 4];
    for seed in 0..400 {
        let mut random = SmallRng::seed_from_u64(seed);
        let count = [1, 2, 3, 4, 7, 16][seed as usize % 6];
        let mut driver = Driver::new(count);
        let base = u32::from(Place::WRAP) * 0x1_0001;
        let mut ring = driver.back_end(base, true).unwrap();
        let mut chain = Chain::with_room(8);
        let mut taken = Vec::new();
        for _ in 0..300 {
            match random.random_range(0..10) {
                0..3 => driver.post(random.random_range(1..=3)),
                3..6 if ring.take(&mut chain).unwrap() => {
                    driver.check(&chain);
                    assert!(!taken.contains(&chain.head));
                    taken.push(chain.head);
                }
                6..8 if !taken.is_empty() => {
                    ring.give(taken.swap_remove(random.random_range(0..taken.len())), 1);
                }
                8 => driver.reap(),
                9 if random.random_bool(0.3) => {
                    // It dies, perhaps while it gives a request back.
                    let moment = random.random_range(0..4);
                    if moment > 0 && !taken.is_empty() {
                        let head = taken[random.random_range(0..taken.len())];
                        let notes = ring.notes.as_ref().unwrap();
                        notes.gives_back(head, ring.used);
                        if moment > 1 {
                            ring.write_used(ring.entries[usize::from(head)].id, 1);
                        }
                        if moment > 2 {
                            notes.mark(head, false);
                        }
                        moments[moment] += 1;
                    }
                    if random.random_bool(0.5) {
                        driver.reap();
                        driver.post(random.random_range(1..=3));
                    }
                    taken.clear();
                    // What the front-end believes is of no account.
                    ring = driver.back_end(base, true).unwrap();
                    moments[0] += 1;
                }
                _ => {}
            }
        }
        let ended = driver.ended;
        for _ in 0..2 {
            while ring.take(&mut chain).unwrap() {
                driver.check(&chain);
                taken.push(chain.head);
            }
            taken.drain(..).for_each(|head| ring.give(head, 1));
            driver.reap();
        }
        assert!(driver.under_way.is_empty() && driver.ended > ended.min(1), "{:?}", driver.under_way);
        assert_eq!(ring.base(), u32::from(driver.next.0) * 0x1_0001, "nothing is left between");
        // Without notes another one goes on where this one says.
        let base = ring.base();
        let mut ring = driver.back_end(base, false).unwrap();
        driver.post(1);
        assert!(ring.take(&mut chain).unwrap());
        driver.check(&chain);
    }
    assert!(moments.iter().all(|times| *times > 100), "{moments:?}");
}

#[test]
fn a_driver_is_notified_when_it_asked_for_it() {
    let notified = |used: (u16, bool), unheard: u32, event: (u16, bool), when: u16| {
        let driver = Driver::new(8);
        let place = |(index, wraps): (u16, bool)| Place(index | if wraps { Place::WRAP } else { 0 });
        let mut ring = driver.back_end(u32::from(place(used).0) * 0x1_0001, false).unwrap();
        ring.unheard = unheard;
        ring.driver.set_u16(0, place(event).0, Relaxed);
        ring.driver.set_u16(WHEN_AT, when, Relaxed);
        ring.publish()
    };
    assert!(!notified((3, true), 0, (2, true), 0), "nothing was given back");
    assert!(notified((3, true), 1, (7, true), 0) && !notified((3, true), 3, (2, true), NEVER));
    // The descriptors 0, 1 and 2 were given back.
    for (event, wanted) in [(0, true), (2, true), (3, false), (7, false)] {
        assert_eq!(notified((3, true), 3, (event, true), AT_PLACE), wanted, "{event}");
    }
    // 6, 7, and 0 of the next lap.
    for (event, wanted) in [((5, true), false), ((6, true), true), ((0, false), true), ((1, false), false)] {
        assert_eq!(notified((1, false), 3, event, AT_PLACE), wanted, "{event:?}");
    }
}

#[test]
fn notes_and_places_that_make_no_sense_are_refused() {
    let driver = Driver::new(4);
    assert!(driver.back_end(4, false).is_err() && driver.back_end(4 << 16, false).is_err());
    let base = u32::from(Place::WRAP) * 0x1_0001;
    let notes = driver.memory.area(NOTES, super::super::packed_notes::size(4), 8, true).unwrap();
    let entry = |entry: usize, words: [u16; 4]| {
        words
            .iter()
            .enumerate()
            .for_each(|(at, word)| notes.set_u16(16 + 32 * entry + 2 * at, *word, Relaxed));
    };
    // Under way, the next entry, how many, the request's number.
    let wrong: [[(usize, [u16; 4]); 2]; 5] = [
        [(0, [1, 0, 0, 7]), (1, [0; 4])],
        [(0, [1, 0, 5, 7]), (1, [0; 4])],
        [(0, [1, 4, 2, 7]), (1, [0; 4])],
        [(0, [1, 0, 2, 7]), (1, [0; 4])],
        [(0, [1, 2, 2, 7]), (2, [1, 0, 1, 8])],
    ];
    for entries in wrong {
        assert!(driver.back_end(base, true).is_ok());
        entries.iter().for_each(|(at, words)| entry(*at, *words));
        assert!(driver.back_end(base, true).is_err(), "{entries:?}");
        (0..4).for_each(|at| entry(at, [0; 4]));
    }
    // Of another layout: they are begun anew.
    notes.set_u16(8, 1, Relaxed);
    entry(0, [1, 0, 0, 7]);
    assert!(driver.back_end(base, true).unwrap().again.is_empty());
}

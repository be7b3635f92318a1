//! A file on its way to the disk, and the states that a power cut could leave it in.
//! It knows no format, and nothing of who may rely on what.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    sync::Arc,
};

use becket_image::ReadAt;

use crate::SECTOR;
use crate::record::Event;
use crate::script::Random;

type Sector = Arc<[u8; SECTOR]>;

/// Something that is written repeatedly: each of its versions; the disk has one, no older than the oldest
/// here.
#[derive(Debug)]
struct History<T> {
    versions: Vec<T>,
    /// By version, whether the write has ended.
    ended: Vec<bool>,
    /// The oldest version that the disk may have.
    oldest: usize,
    /// A sync that should have brought this version to the disk has failed: a later success proves nothing
    /// for it.
    doubtful: Option<usize>,
}

impl<T: Clone> History<T> {
    fn new(first: T) -> History<T> {
        History { versions: vec![first], ended: vec![true], oldest: 0, doubtful: None }
    }

    fn push(&mut self, version: T) -> usize {
        self.versions.push(version);
        self.ended.push(false);
        self.newest()
    }

    fn newest(&self) -> usize {
        self.versions.len() - 1
    }

    fn latest_ended(&self) -> usize {
        self.ended.iter().rposition(|ended| *ended).unwrap_or(0)
    }

    fn synced(&mut self, version: usize) {
        if self.doubtful.is_none_or(|doubtful| version > doubtful) {
            self.oldest = self.oldest.max(version);
        }
    }

    fn failed(&mut self, version: usize) {
        if version > self.oldest {
            self.doubtful = self.doubtful.max(Some(version));
        }
    }

    /// One that the disk may have.
    fn pick(&self, keep: Keep, random: &mut Random) -> usize {
        match keep {
            Keep::Safe | Keep::Last => self.oldest,
            Keep::All | Keep::AllButOne => self.newest(),
            Keep::Chance => self.oldest + random.below((self.newest() - self.oldest + 1) as u64) as usize,
        }
    }
}

/// Which of what is not safe is on the disk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Keep {
    /// Nothing.
    Safe,
    /// All of it.
    All,
    /// Only what was begun last: what a disk does that writes in the wrong order.
    Last,
    /// All but one write.
    AllButOne,
    /// Each sector by chance.
    Chance,
}

/// Where something is on its way.
#[derive(Debug, Clone, Copy)]
enum Part {
    Sector(u64),
    Len,
}

/// A file of which all is known that was ever written to it.
pub(crate) struct Recorded {
    before: Arc<Vec<u8>>,
    sectors: BTreeMap<u64, History<Sector>>,
    len: History<u64>,
    /// By who has begun it: versions that are safe when it has ended well, and whether it is a sync.
    under_way: BTreeMap<u16, (Vec<(Part, usize)>, What)>,
    /// Every write and length, of which the oldest may be safe.
    begun: VecDeque<Vec<(Part, usize)>>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum What {
    Write,
    DurableWrite,
    Sync,
}

impl Recorded {
    pub(crate) fn new(before: &[u8]) -> Recorded {
        assert!(before.len().is_multiple_of(SECTOR));
        Recorded {
            before: Arc::new(before.to_vec()),
            sectors: BTreeMap::new(),
            len: History::new(before.len() as u64),
            under_way: BTreeMap::new(),
            begun: VecDeque::new(),
        }
    }

    pub(crate) fn take(&mut self, event: &Event) {
        match event {
            Event::Writes(who, durable, at, bytes) => {
                let parts = self.write(*at, bytes);
                self.begun.push_back(parts.clone());
                let what = if *durable { What::DurableWrite } else { What::Write };
                self.under_way.insert(*who, (parts, what));
            }
            Event::Lengthens(who, len) => {
                let parts = vec![(Part::Len, self.len.push(*len))];
                self.begun.push_back(parts.clone());
                self.under_way.insert(*who, (parts, What::Write));
            }
            Event::Syncs(who) => {
                let sectors = self.sectors.iter();
                let mut covered: Vec<_> = sectors
                    .map(|(sector, history)| (Part::Sector(*sector), history.latest_ended()))
                    .collect();
                covered.push((Part::Len, self.len.latest_ended()));
                self.under_way.insert(*who, (covered, What::Sync));
            }
            Event::Ended(who, well) => {
                let (parts, what) = self.under_way.remove(who).unwrap();
                for (part, version) in parts {
                    match part {
                        Part::Sector(sector) => {
                            ended(self.sectors.get_mut(&sector).unwrap(), version, what, *well)
                        }
                        Part::Len => ended(&mut self.len, version, what, *well),
                    }
                }
            }
            Event::Asked(..) | Event::Answered(..) => {}
        }
    }

    /// A write to part of a sector is one of the sector: the page that it goes through has the rest.
    fn write(&mut self, at: u64, bytes: &[u8]) -> Vec<(Part, usize)> {
        let mut parts = Vec::new();
        let (mut at, mut bytes) = (at, bytes);
        while !bytes.is_empty() {
            let (number, inside) = (at / SECTOR as u64, (at % SECTOR as u64) as usize);
            let (now, rest) = bytes.split_at(bytes.len().min(SECTOR - inside));
            let before = || History::new(Arc::new(sector_of(&self.before, number)));
            let history = self.sectors.entry(number).or_insert_with(before);
            let mut sector = history.versions[history.newest()].clone();
            Arc::make_mut(&mut sector)[inside..inside + now.len()].copy_from_slice(now);
            parts.push((Part::Sector(number), history.push(sector)));
            at += now.len() as u64;
            bytes = rest;
        }
        parts
    }

    fn is_safe(&self, (part, version): (Part, usize)) -> bool {
        match part {
            Part::Sector(sector) => self.sectors[&sector].oldest >= version,
            Part::Len => self.len.oldest >= version,
        }
    }

    /// A state that a power cut could leave now.
    pub(crate) fn state(&mut self, keep: Keep, random: &mut Random) -> State {
        let mut len = self.len.versions[self.len.pick(keep, random)];
        let each = self.sectors.iter();
        let mut over: BTreeMap<u64, Sector> = each
            .map(|(sector, history)| (*sector, history.versions[history.pick(keep, random)].clone()))
            .collect();
        while self.begun.front().is_some_and(|parts| parts.iter().all(|part| self.is_safe(*part))) {
            self.begun.pop_front();
        }
        let chosen = match keep {
            Keep::Last => self.begun.back(),
            Keep::AllButOne if !self.begun.is_empty() => {
                self.begun.get(random.below(self.begun.len() as u64) as usize)
            }
            _ => None,
        };
        for (part, version) in chosen.into_iter().flatten() {
            // One that is to be missing may have been safe, or written again, since.
            let missing = |history_oldest: usize| (version - 1).max(history_oldest);
            match part {
                Part::Len if keep == Keep::Last => len = self.len.versions[*version],
                Part::Len => len = self.len.versions[missing(self.len.oldest)],
                Part::Sector(sector) => {
                    let history = &self.sectors[sector];
                    let kept = if keep == Keep::Last { *version } else { missing(history.oldest) };
                    over.insert(*sector, history.versions[kept].clone());
                    if keep == Keep::Last {
                        // What lies behind the end is not there without a longer file.
                        len = len.max(self.len.versions[self.len.newest()].min((sector + 1) * SECTOR as u64));
                    }
                }
            }
        }
        State { before: Arc::clone(&self.before), over, len }
    }
}

fn ended<T: Clone>(history: &mut History<T>, version: usize, what: What, well: bool) {
    history.ended[version] = true;
    match (what, well) {
        (What::Write, _) | (What::DurableWrite, false) => {}
        (What::Sync | What::DurableWrite, true) => history.synced(version),
        (What::Sync, false) => history.failed(version),
    }
}

fn sector_of(bytes: &[u8], number: u64) -> [u8; SECTOR] {
    let at = number as usize * SECTOR;
    bytes.get(at..at + SECTOR).map_or([0; SECTOR], |bytes| bytes.try_into().unwrap())
}

/// A file as a power cut has left it.
#[derive(Debug, Clone)]
pub(crate) struct State {
    before: Arc<Vec<u8>>,
    over: BTreeMap<u64, Sector>,
    pub(crate) len: u64,
}

impl State {
    /// All of it.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.before.as_ref().clone();
        bytes.resize(self.len as usize, 0);
        for (sector, content) in &self.over {
            if let Some(place) = bytes.get_mut(*sector as usize * SECTOR..) {
                let len = place.len().min(SECTOR);
                place[..len].copy_from_slice(&content[..len]);
            }
        }
        bytes
    }
}

impl ReadAt for State {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        if offset + buf.len() as u64 > self.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (mut at, mut left) = (offset, buf);
        while !left.is_empty() {
            let (number, inside) = (at / SECTOR as u64, (at % SECTOR as u64) as usize);
            let (now, rest) = left.split_at_mut(left.len().min(SECTOR - inside));
            let there = || sector_of(&self.before, number);
            let sector = self.over.get(&number).map_or_else(there, |sector| **sector);
            now.copy_from_slice(&sector[inside..inside + now.len()]);
            at += now.len() as u64;
            left = rest;
        }
        Ok(())
    }
}

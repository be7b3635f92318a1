//! What a client may rely on, by what it has asked for and was answered.
//! It never looks at how any of that was done.

use std::collections::BTreeMap;

use becket_engine::Op;

use crate::SECTOR;
use crate::record::Event;

/// What is asked for; for a flush, with the sectors and turns that it promises.
struct Asking {
    op: Op,
    at: u64,
    len: usize,
    /// By sector.
    promises: BTreeMap<u64, usize>,
}

/// By sector of the lanes: each content that it was given, in turn, and which of them is the oldest that may
/// be there. The first is what it was before.
pub(crate) struct Rights {
    contents: Vec<Vec<Vec<u8>>>,
    promised: Vec<usize>,
    /// By sector, the latest that was acknowledged.
    acknowledged: BTreeMap<u64, usize>,
    /// By tag.
    asked: BTreeMap<u16, Asking>,
}

impl Rights {
    /// Of lanes that hold this.
    pub(crate) fn new(lanes: Vec<u8>) -> Rights {
        let contents: Vec<_> = lanes.chunks(SECTOR).map(|sector| vec![sector.to_vec()]).collect();
        Rights {
            promised: vec![0; contents.len()],
            contents,
            acknowledged: BTreeMap::new(),
            asked: BTreeMap::new(),
        }
    }

    /// Whether anything is promised by it.
    pub(crate) fn take(&mut self, event: &Event) -> bool {
        match event {
            Event::Asked(tag, op, at, bytes) => {
                let promises = if *op == Op::Flush { self.acknowledged.clone() } else { BTreeMap::new() };
                for (sector, bytes) in (at / SECTOR as u64..).zip(bytes.chunks(SECTOR)) {
                    self.contents[sector as usize].push(bytes.to_vec());
                }
                self.asked.insert(*tag, Asking { op: *op, at: *at, len: bytes.len(), promises });
            }
            Event::Answered(tag, well) => {
                let Asking { op, at, len, mut promises } = self.asked.remove(tag).unwrap();
                if !well {
                    return false;
                }
                // A lane is its tag's alone, so the newest is the one that is answered.
                let range = at / SECTOR as u64..(at + len as u64) / SECTOR as u64;
                let newest = |sector: u64| (sector, self.contents[sector as usize].len() - 1);
                let written: Vec<_> = range.map(newest).collect();
                self.acknowledged.extend(&written.iter().copied().collect::<BTreeMap<_, _>>());
                if op == (Op::Write { durable: true }) {
                    promises = written.into_iter().collect();
                }
                let any = !promises.is_empty();
                for (sector, turn) in promises {
                    let promised = &mut self.promised[sector as usize];
                    *promised = turn.max(*promised);
                }
                return any;
            }
            _ => {}
        }
        false
    }

    /// What is missing of what was promised, or was never anybody's.
    pub(crate) fn missing(&self, lanes: &[u8]) -> Option<String> {
        let each = lanes.chunks(SECTOR).zip(&self.contents).zip(&self.promised).enumerate();
        for (sector, ((there, contents), promised)) in each {
            if !is_of(there, &contents[*promised..]) {
                let found = contents.iter().rposition(|content| content == there);
                return Some(format!(
                    "sector {sector} holds {}; {promised} was promised of {} writes",
                    found.map_or("what nobody wrote".to_owned(), |turn| format!("write {turn}")),
                    contents.len() - 1
                ));
            }
        }
        None
    }
}

/// Whether a sector consists of these contents alone: a write through the page cache that has not come far,
/// or was torn, leaves a part of itself.
fn is_of(there: &[u8], contents: &[Vec<u8>]) -> bool {
    let mut known = 0;
    while known < there.len() {
        let same = |content: &Vec<u8>| {
            there[known..].iter().zip(&content[known..]).take_while(|(a, b)| a == b).count()
        };
        match contents.iter().map(same).max() {
            None | Some(0) => return false,
            Some(more) => known += more,
        }
    }
    true
}

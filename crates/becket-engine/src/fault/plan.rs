//! Faults by rules and chance: which operations fail, come short, are torn or late, and when there is no room
//! left. The same rules, seed and order of operations give the same faults; no clock and no address has a
//! say.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{Fate, Interceptor, Operation};
use crate::Op;

/// Chances are counted in millionths.
const CERTAIN: u32 = 1_000_000;
/// Disks tear writes between sectors.
const SECTOR: u64 = 512;
/// The most rules of a device.
const MOST_RULES: usize = 64;

/// What goes wrong with a device's backing, on purpose.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Faults {
    /// Errors and delays. Of the errors that strike an operation the first counts, of the delays their sum.
    pub rules: Vec<Rule>,
    /// How many in a million writes reach the file in part only, and fail with EIO.
    pub torn: u32,
    /// How many in a million reads and writes move a part only; the engine continues them.
    pub short: u32,
    /// After so many written bytes there is no room left (ENOSPC), whatever is discarded.
    pub enospc_after: Option<u64>,
    /// Decides which operations are struck.
    pub seed: u64,
}

/// One thing that goes wrong with operations of a kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Which operations.
    pub kind: Affected,
    /// What becomes of them.
    pub struck: Struck,
    /// How many in a million.
    pub chance: u32,
    /// Only those that touch these bytes of the image: the first, and how many. Syncs touch none.
    pub range: Option<(u64, u64)>,
}

/// Which operations a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Affected {
    /// Those that read.
    Read,
    /// Those that write.
    Write,
    /// Those that sync.
    Flush,
    /// Those that discard or zero.
    Discard,
    /// All of them.
    All,
}

/// What becomes of an operation that a rule strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Struck {
    /// It fails with this errno.
    Error(u16),
    /// It waits for so many milliseconds first.
    Delay(u32),
}

impl Faults {
    /// Whether these can be followed; else why not. They may come from another process.
    ///
    /// # Errors
    /// A chance above one, an errno that is none, or too many rules.
    pub fn check(&self) -> Result<(), String> {
        let chances = self.rules.iter().map(|rule| rule.chance).chain([self.torn, self.short]);
        if chances.max() > Some(CERTAIN) {
            return Err("a chance is above one".to_owned());
        }
        if self.rules.len() > MOST_RULES {
            return Err(format!("{} rules are more than {MOST_RULES}", self.rules.len()));
        }
        match self.rules.iter().find(|rule| matches!(rule.struck, Struck::Error(0 | 4096..))) {
            Some(rule) => Err(format!("{:?} is not an error number", rule.struck)),
            None => Ok(()),
        }
    }

    /// These faults for a device of so many queues.
    ///
    /// # Errors
    /// As [`Faults::check`].
    pub fn of_queues(self, queues: usize) -> Result<impl Interceptor, String> {
        self.check()?;
        let drawn = (0..queues.max(1)).map(|_| AtomicU64::new(0)).collect();
        Ok(Plan { faults: self, drawn, written: AtomicU64::new(0) })
    }
}

impl Affected {
    fn takes(self, op: Op) -> bool {
        match self {
            Affected::Read => op == Op::Read,
            Affected::Write => matches!(op, Op::Write { .. }),
            Affected::Flush => op == Op::Flush,
            Affected::Discard => matches!(op, Op::Discard | Op::WriteZeroes { .. }),
            Affected::All => true,
        }
    }
}

/// Faults at work.
#[derive(Debug)]
struct Plan {
    faults: Faults,
    /// How often chance was asked by each queue, whose thread alone asks.
    drawn: Box<[AtomicU64]>,
    written: AtomicU64,
}

impl Plan {
    /// The next number of a queue's own sequence.
    fn draw(&self, queue: usize) -> u64 {
        let drawn = self.drawn.get(queue).map_or(0, |drawn| drawn.fetch_add(1, Ordering::Relaxed));
        // splitmix64: each number of its sequence can be had without those before it.
        let mut bits = (self.faults.seed ^ (queue as u64) << 48)
            .wrapping_add((drawn + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ bits >> 31
    }

    /// Chance is asked only where it has a choice, so that a rule that is certain moves no other's numbers.
    fn strikes(&self, queue: usize, chance: u32) -> bool {
        match chance {
            0 => false,
            CERTAIN.. => true,
            chance => self.draw(queue) % u64::from(CERTAIN) < u64::from(chance),
        }
    }

    fn hits(&self, rule: &Rule, operation: &Operation<'_>) -> bool {
        let touches = |(start, len): (u64, u64)| {
            operation.at < start.saturating_add(len) && start < operation.at.saturating_add(operation.len)
        };
        rule.kind.takes(operation.op)
            && rule.range.is_none_or(touches)
            && self.strikes(operation.queue, rule.chance)
    }

    /// A part of an operation in units of `unit`, from none of it to all but one of them.
    fn part(&self, operation: &Operation<'_>, unit: u64) -> u64 {
        let units = operation.len.div_ceil(unit.max(1));
        if units == 0 { 0 } else { self.draw(operation.queue) % units * unit.max(1) }
    }

    /// What is left of the room for a write; it counts as used.
    fn room(&self, operation: &Operation<'_>) -> Fate {
        let Some(room) = self.faults.enospc_after else { return Fate::Pass };
        let before = self.written.fetch_add(operation.len, Ordering::Relaxed);
        let left = room.saturating_sub(before).min(operation.len);
        match left / operation.unit.max(1) * operation.unit.max(1) {
            left if left == operation.len => Fate::Pass,
            0 => Fate::Fail(Errno::NOSPC),
            left => Fate::Short(left),
        }
    }
}

impl Interceptor for Plan {
    fn fate(&self, operation: &Operation<'_>) -> Fate {
        let rules = || self.faults.rules.iter();
        if !operation.waited {
            let mut delay = Duration::ZERO;
            for rule in rules() {
                if let Struck::Delay(millis) = rule.struck
                    && self.hits(rule, operation)
                {
                    delay += Duration::from_millis(millis.into());
                }
            }
            if !delay.is_zero() {
                return Fate::Wait(delay);
            }
        }
        for rule in rules() {
            if let Struck::Error(errno) = rule.struck
                && self.hits(rule, operation)
            {
                return Fate::Fail(Errno::from_raw_os_error(errno.into()));
            }
        }
        let (reads, writes) = (Affected::Read.takes(operation.op), Affected::Write.takes(operation.op));
        if writes && self.strikes(operation.queue, self.faults.torn) {
            return match self.part(operation, operation.unit.max(SECTOR)) {
                0 => Fate::Fail(Errno::IO),
                part => Fate::Torn(part, Errno::IO),
            };
        }
        let fate = if writes { self.room(operation) } else { Fate::Pass };
        if fate == Fate::Pass && (reads || writes) && self.strikes(operation.queue, self.faults.short) {
            let part = self.part(operation, operation.unit);
            // An operation that moves nothing is an end, and not a short one.
            return if part == 0 { Fate::Pass } else { Fate::Short(part) };
        }
        fate
    }
}

#[cfg(test)]
mod tests;

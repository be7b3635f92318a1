//! What it may cost to find out what is in an image: bytes, steps, memory and processor time.
//! It never limits a device that is attached: only the parsing of an image has a budget.
//!
//! Each command opens each image with its own [`Budget`], which all images inside that image share. (With one
//! budget for all images of `attach *.img`, the first images would decide whether the last can be attached.)
//! All costs are counted in four places, so that no format's reader has to count: [`crate::Image`] counts
//! each read, each block that is decoded, and the memory of each map; [`crate::Layout`] counts the pieces of
//! a file; [`crate::layer::detect`] counts directory entries.
//! The counts are bounded, so all work must be in proportion to what is counted. Where it is not, the limit
//! on processor time holds: the clock is read after every thousand steps and every MiB.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// How much of everything there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes that are read, decoded, or written into tables in memory.
    pub bytes: u64,
    /// Reads, entries of directories, questions about files.
    pub steps: u64,
    /// Bytes of maps, tables and lists that are kept at the same time.
    pub memory: u64,
    /// Processor time of the thread that opens the image.
    pub time: Duration,
}

/// Honest images need less than a quarter of this: docs/SECURITY.md says which, with figures. No image makes
/// a command use more than 512 MiB and 5 s: the rest is for what the command does with the answer.
impl Default for Limits {
    fn default() -> Limits {
        Limits { bytes: 1 << 30, steps: 4 << 20, memory: 256 << 20, time: Duration::from_secs(4) }
    }
}

/// What can be used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// See [`Limits::bytes`].
    Bytes,
    /// See [`Limits::steps`].
    Steps,
    /// See [`Limits::memory`].
    Memory,
    /// See [`Limits::time`].
    Time,
}

/// A limit was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub struct Spent {
    /// Which.
    pub resource: Resource,
    /// How much there was of it: a number, bytes, or milliseconds.
    pub limit: u64,
    /// What took the last of it, for people.
    pub by: &'static str,
}

impl fmt::Display for Spent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spent { resource, limit, by } = self;
        let mib = limit >> 20;
        write!(f, "what its parsing may cost is used up: ")?;
        match resource {
            Resource::Bytes => write!(f, "{mib} MiB read and decoded"),
            Resource::Steps => write!(f, "{limit} reads and directory entries"),
            Resource::Memory => write!(f, "{mib} MiB of memory"),
            Resource::Time => write!(f, "{} s of processor time", *limit as f64 / 1000.0),
        }?;
        write!(f, ", the last for {by}")
    }
}

impl From<Spent> for io::Error {
    fn from(spent: Spent) -> io::Error {
        io::Error::other(spent)
    }
}

impl Spent {
    /// What an error of a read stands for, if it is this.
    pub(crate) fn of(error: &io::Error) -> Option<Spent> {
        error.get_ref()?.downcast_ref().copied()
    }
}

/// What is left for an image and all that is in it. Clones share it. Once a limit is reached, everything is
/// refused.
#[derive(Clone)]
pub struct Budget(Option<Arc<Inner>>);

struct Inner {
    limits: Limits,
    bytes: AtomicU64,
    steps: AtomicU64,
    memory: AtomicU64,
    /// Counts both, to know when to look at the clock.
    work: AtomicU64,
    clock: Mutex<Clock>,
    spent: OnceLock<Spent>,
}

/// The processor time so far, of whichever thread asked.
struct Clock {
    thread: ThreadId,
    last: Duration,
    used: Duration,
}

/// What a file may cost that is handed over, on slow machines, too: an honest one costs a tenth of it. Its
/// memory is given back when it is dropped.
const FILE: Limits = Limits { bytes: 64 << 10, steps: 64, memory: 0, time: Duration::from_micros(100) };

/// The work of a step, and the work between two looks at the clock.
const STEP: u64 = 1 << 10;
const LOOK: u64 = 1 << 20;

impl Default for Budget {
    fn default() -> Budget {
        Budget::new(Limits::default())
    }
}

impl Budget {
    /// A budget of so much.
    pub fn new(limits: Limits) -> Budget {
        let clock = Clock { thread: thread::current().id(), last: now(), used: Duration::ZERO };
        let count = || AtomicU64::new(0);
        Budget(Some(Arc::new(Inner {
            limits,
            bytes: count(),
            steps: count(),
            memory: count(),
            work: count(),
            clock: Mutex::new(clock),
            spent: OnceLock::new(),
        })))
    }

    /// A budget without limits: for trusted images, and for images that are parsed already.
    pub fn unlimited() -> Budget {
        Budget(None)
    }

    /// Takes so many steps.
    ///
    /// # Errors
    /// A limit was reached, now or before; the same for the other methods.
    pub fn steps(&self, steps: u64, by: &'static str) -> Result<(), Spent> {
        let Some(inner) = &self.0 else { return Ok(()) };
        inner.count(&inner.steps, steps, (Resource::Steps, inner.limits.steps), by)?;
        inner.work(steps.saturating_mul(STEP), by)
    }

    /// Does work of which the time is not counted: it is not parsing.
    pub fn outside<T>(&self, work: impl FnOnce() -> T) -> T {
        let Some(inner) = &self.0 else { return work() };
        inner.stop();
        let done = work();
        inner.start();
        done
    }

    /// Gives back what it cost to look at a file that was handed over: however many an image has, its reader
    /// has something for the work.
    pub fn earn(&self) {
        let Some(inner) = &self.0 else { return };
        let less = |counter: &AtomicU64, each: u64| {
            let rest = |used: u64| Some(used.saturating_sub(each));
            // It always has a rest.
            let _ = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest);
        };
        less(&inner.bytes, FILE.bytes);
        less(&inner.steps, FILE.steps);
        let mut clock = inner.clock.lock().unwrap_or_else(PoisonError::into_inner);
        clock.used = clock.used.saturating_sub(FILE.time);
    }

    /// Takes so many bytes.
    pub(crate) fn bytes(&self, bytes: u64, by: &'static str) -> Result<(), Spent> {
        let Some(inner) = &self.0 else { return Ok(()) };
        inner.count(&inner.bytes, bytes, (Resource::Bytes, inner.limits.bytes), by)?;
        inner.work(bytes, by)
    }

    /// Takes memory, until the answer is dropped.
    pub fn hold(&self, bytes: u64, by: &'static str) -> Result<Held, Spent> {
        let mut held = self.held();
        held.grow(bytes, by)?;
        Ok(held)
    }

    /// None of its memory, to begin with.
    pub(crate) fn held(&self) -> Held {
        Held { budget: self.clone(), bytes: 0 }
    }

    /// Whether there is still something of everything.
    pub fn check(&self) -> Result<(), Spent> {
        let spent = self.0.as_ref().and_then(|inner| inner.spent.get());
        spent.map_or(Ok(()), |spent| Err(*spent))
    }

    /// What was used so far: bytes, steps, bytes of memory that are held now, and time.
    pub fn used(&self) -> Option<Limits> {
        let inner = self.0.as_ref()?;
        let clock = inner.clock.lock().unwrap_or_else(PoisonError::into_inner);
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let (bytes, steps, memory) = (count(&inner.bytes), count(&inner.steps), count(&inner.memory));
        Some(Limits { bytes, steps, memory, time: clock.used })
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Budget").field(&self.used()).finish()
    }
}

impl Inner {
    fn count(
        &self,
        counter: &AtomicU64,
        more: u64,
        (resource, limit): (Resource, u64),
        by: &'static str,
    ) -> Result<(), Spent> {
        let before = counter.fetch_add(more, Ordering::Relaxed);
        if before.saturating_add(more) > limit {
            return Err(*self.spent.get_or_init(|| Spent { resource, limit, by }));
        }
        self.spent.get().map_or(Ok(()), |spent| Err(*spent))
    }

    /// Adds the time since the last look at the clock; how much was used so far.
    fn stop(&self) -> Duration {
        let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, thread) = (now(), thread::current().id());
        // The first time of another thread says nothing of what was done for this image.
        if clock.thread == thread {
            clock.used = clock.used.saturating_add(now.saturating_sub(clock.last));
        }
        (clock.thread, clock.last) = (thread, now);
        clock.used
    }

    /// Counts time from now on.
    fn start(&self) {
        let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        (clock.thread, clock.last) = (thread::current().id(), now());
    }

    /// Looks at the clock when it is time to.
    fn work(&self, more: u64, by: &'static str) -> Result<(), Spent> {
        let before = self.work.fetch_add(more, Ordering::Relaxed);
        if before / LOOK == before.wrapping_add(more) / LOOK {
            return Ok(());
        }
        if self.stop() <= self.limits.time {
            return Ok(());
        }
        let limit = u64::try_from(self.limits.time.as_millis()).unwrap_or(u64::MAX);
        Err(*self.spent.get_or_init(|| Spent { resource: Resource::Time, limit, by }))
    }
}

/// The processor time of this thread.
fn now() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Memory that is in use; it is given back when this is dropped.
#[derive(Debug)]
pub struct Held {
    budget: Budget,
    bytes: u64,
}

impl Held {
    /// Takes more. It also counts as bytes, because it has to be filled.
    ///
    /// # Errors
    /// As [`Budget::steps`].
    pub fn grow(&mut self, bytes: u64, by: &'static str) -> Result<(), Spent> {
        let Some(inner) = &self.budget.0 else { return Ok(()) };
        self.bytes = self.bytes.saturating_add(bytes);
        inner.count(&inner.memory, bytes, (Resource::Memory, inner.limits.memory), by)?;
        self.budget.bytes(bytes, by)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(inner) = &self.budget.0 {
            inner.memory.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Budget {
        Budget::new(Limits { bytes: 100, steps: 3, memory: 50, time: Duration::from_secs(3600) })
    }

    #[test]
    fn what_is_used_up_is_refused_from_then_on() {
        let budget = small();
        let clone = budget.clone();
        assert_eq!(budget.steps(2, "a"), Ok(()));
        assert_eq!(clone.steps(1, "b"), Ok(()));
        let spent = Spent { resource: Resource::Steps, limit: 3, by: "c" };
        assert_eq!(budget.steps(1, "c"), Err(spent));
        assert_eq!(clone.bytes(1, "d"), Err(spent), "all of it is over");
        assert_eq!(clone.hold(1, "d").err(), Some(spent));
        assert_eq!(budget.check(), Err(spent));
        assert_eq!(Spent::of(&spent.into()), Some(spent), "it passes through errors of reads");
        assert_eq!(small().bytes(101, "x").unwrap_err().resource, Resource::Bytes);
    }

    #[test]
    fn files_that_were_handed_over_are_not_counted() {
        let budget = Budget::new(Limits { bytes: 100 << 10, steps: 100, ..Limits::default() });
        for _ in 0..10 {
            assert_eq!((budget.steps(60, "a"), budget.bytes(60 << 10, "a")), (Ok(()), Ok(())));
            budget.earn();
        }
        assert_eq!(budget.used().map(|used| (used.bytes, used.steps)), Some((0, 0)), "no more than was used");
        assert_eq!(budget.steps(101, "b").unwrap_err().resource, Resource::Steps);
        budget.earn();
        assert!(budget.check().is_err(), "what is over stays so");
    }

    #[test]
    fn memory_comes_back_and_bytes_do_not() {
        let budget = small();
        drop(budget.hold(50, "a").unwrap());
        let held = budget.hold(40, "a").unwrap();
        assert_eq!(budget.used().map(|used| (used.memory, used.bytes)), Some((40, 90)));
        assert_eq!(budget.hold(20, "b").unwrap_err().resource, Resource::Memory);
        drop(held);
        assert_eq!(budget.used().map(|used| used.memory), Some(0));
    }

    #[test]
    fn time_is_that_of_the_thread() {
        let limits = Limits { time: Duration::from_millis(20), ..Limits::default() };
        let budget = Budget::new(limits);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(budget.bytes(LOOK, "sleep"), Ok(()), "who waits uses nothing");
        let mut sum = 0_u64;
        let spent = loop {
            (0..100_000_u64).for_each(|number| sum = std::hint::black_box(sum ^ number));
            if let Err(spent) = budget.bytes(LOOK, "sums") {
                break spent;
            }
        };
        assert_eq!((spent.resource, spent.limit, spent.by), (Resource::Time, 20, "sums"));
        assert!(spent.to_string().contains("0.02 s of processor time"), "{spent}");
    }

    #[test]
    fn time_outside_is_not_counted() {
        let limits = Limits { time: Duration::from_millis(20), ..Limits::default() };
        let budget = Budget::new(limits);
        let begun = now();
        budget.outside(|| while now() < begun + Duration::from_millis(60) {});
        assert_eq!(budget.bytes(LOOK, "inside"), Ok(()));
        assert!(budget.used().is_some_and(|used| used.time < Duration::from_millis(20)));
    }

    #[test]
    fn an_unlimited_one_counts_nothing() {
        let budget = Budget::unlimited();
        assert_eq!(budget.steps(u64::MAX, "a"), Ok(()));
        assert!(budget.hold(u64::MAX, "a").is_ok() && budget.used().is_none());
    }
}

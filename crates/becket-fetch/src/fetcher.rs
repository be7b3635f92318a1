//! Brings the chunks of one object that readers in other processes ask for, as long as its process lives.
//! It never ends because a server is away: what was asked is tried again.
//!
//! Threads take turns: one looks for work while the others fetch. Chunks that a reader waits for come first,
//! with their neighbours in one request. Behind a reader that goes on where it ended, more and more is
//! fetched ahead, by several requests at a time. What is wanted later comes when nothing else is.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use becket_image::filled::{Condition, Fetching, Presence};

use crate::Error;
use crate::client::Client;
use crate::in_order::InOrder;
use crate::limit::Limit;
use crate::object::{Object, Supply, UNIT};
use crate::order::{Order, PackedAt, Unpack};
use crate::steps::Steps;
use crate::store::Held;
use crate::stream::{Packed, PackedFile, Stream};
use crate::table::Table;
use crate::version::Known;

/// How many requests are in flight at most: as many as the tools of large stores have.
const LINES: usize = 10;
/// How many bytes one request asks for at most: of what is waited for, and of what is not.
const RUN: u64 = 4 << 20;
const PART: u64 = 2 << 20;
/// How far a sequential reader is fetched ahead at most, in bytes; and up to where that doubles each time
/// that it goes on. Beyond that it is a quarter of what it has read: its end costs no more than that.
const AHEAD: u64 = 16 << 20;
const SOON: u64 = 4 << 20;
/// Readers that are distinguished.
const SEQUENCES: usize = 8;
/// How long a server may not answer until that is reported.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long one request is waited for at most, where the time until requests fail is longer.
const REQUEST: Duration = Duration::from_secs(20);
/// How long is waited between two attempts at a server that is away.
const PAUSE: Duration = Duration::from_millis(500);
/// How long nothing is asked until what was brought is synced.
const IDLE: Duration = Duration::from_secs(2);
/// Each thread's stack in bytes: the process's memory is locked.
const STACK: usize = 512 << 10;
/// The longest order in bytes: certificates are long.
const ORDER_MAX: u64 = 8 << 20;

/// Brings what is asked for in the table of `fetching`, in the calling process, which lets nothing else in.
/// Returns only if it cannot begin.
///
/// # Errors
/// The order cannot be understood, or no thread can be had.
pub fn fetch(fetching: Fetching) -> io::Result<()> {
    let Fetching { data, table, order, presence, packed, timeout, tell } = fetching;
    let mut order: Order = serde_json::from_slice(&text_of(&File::from(order))?)?;
    let foreseen = order.foreseen.clone();
    let how = Arc::new(How { timeout, tell, state: Mutex::default(), presence: presence.again()? });
    // What a predecessor has brought and not reported.
    presence.set_fails(false);
    let chunks = presence.chunks();
    let supply = match order.unpack.take() {
        None => Supply::Server(client(&order, timeout)?),
        Some(unpack) => Supply::Stream(Steps::new(stream(unpack, packed, &how)?)),
    };
    let object = object(order, data, table, presence, supply, true)?;
    let ahead = foreseen.iter().map(|run| run.start.min(chunks)..run.end.min(chunks)).collect();
    let plan = Plan { ahead, ..Plan::default() };
    let fetcher = Fetcher { object, how, chair: Mutex::new(plan), fetching: AtomicUsize::new(0) };
    std::thread::scope(|scope| {
        let spawn = |work: fn(&Fetcher)| {
            let fetcher = &fetcher;
            std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, move || work(fetcher))
        };
        if fetcher.object.steps().is_some() {
            spawn(Fetcher::decode)?;
        } else {
            (1..LINES).try_for_each(|_| spawn(|fetcher| fetcher.work()).map(drop))?;
        }
        fetcher.work()
    })
}

fn client(order: &Order, timeout: Option<Duration>) -> io::Result<Client> {
    let access = order.access.as_ref().ok_or(io::ErrorKind::InvalidData)?;
    Ok(Client::new(&order.meta.url, access, PATIENCE, timeout.map_or(Duration::MAX, part_of))?)
}

/// What one request may take of the time until requests fail, so that it is not the last of them that is
/// begun too late.
fn part_of(timeout: Duration) -> Duration {
    let parts = timeout.as_secs().div_ceil(REQUEST.as_secs()).max(1);
    timeout / u32::try_from(parts).unwrap_or(u32::MAX)
}

/// An object as it was ordered.
fn object(
    order: Order,
    data: OwnedFd,
    table: OwnedFd,
    presence: Presence,
    supply: Supply,
    predecessor: bool,
) -> io::Result<Object> {
    let Order { meta, boot, record, memory_only, limit, foreseen, .. } = order;
    if !meta.is_sound() || (presence.size(), presence.chunk()) != (meta.size, meta.chunk) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the table is one of another object"));
    }
    let known = Known { version: meta.version.clone(), size: meta.size };
    let (path, data) = (PathBuf::from("the store"), File::from(data));
    let held = Held { meta, path, data, table: Table::of_boot(File::from(table), boot), _temporary: None };
    let limit = limit.map(|most| Limit::of_object(most, held.meta.stored(&held.table)));
    let mut object = Object::new(held, supply, known, presence, predecessor);
    object.limit = limit.unwrap_or_default();
    (object.record, object.memory_only) = (record, memory_only);
    object.exact = record || !foreseen.is_empty();
    Ok(object)
}

/// A stream as it was ordered, with the files that it is in.
fn stream(unpack: Unpack, packed: Vec<OwnedFd>, how: &Arc<How>) -> io::Result<Stream> {
    let Unpack { packing, called, len, limit, from } = unpack;
    let mut fds = packed.into_iter();
    let mut next = || fds.next().ok_or_else(|| io::Error::other("a file is missing"));
    let packed: Arc<dyn Packed> = match from {
        PackedAt::File { state } => {
            Arc::new(PackedFile { file: next()?.into(), state, called: called.clone() })
        }
        PackedAt::Object(order) => {
            let (data, table) = (next()?, next()?);
            let presence = Presence::new(order.meta.size, order.meta.chunk)?;
            let supply = Supply::Server(client(&order, how.timeout)?);
            let object = object(*order, data, table, presence, supply, false)?;
            let how = Arc::clone(how);
            // It is asked until it answers, as for a device that reads from it.
            let heard = move |heard: Result<(), &Error>| match heard {
                Ok(()) => {
                    how.succeeded();
                    true
                }
                Err(error) => how.failed(error),
            };
            Arc::new(InOrder::new(Arc::new(object), Box::new(heard)))
        }
    };
    Ok(Stream { packing, called, len, packed, limit, progress: None })
}

/// The order's text, read from its beginning: a predecessor has read it, too, by the same descriptor.
fn text_of(order: &File) -> io::Result<Vec<u8>> {
    let len = order.metadata()?.len().min(ORDER_MAX);
    let mut text = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    order.read_exact_at(&mut text, 0)?;
    Ok(text)
}

struct Fetcher {
    object: Object,
    how: Arc<How>,
    /// Held by the thread that looks for work.
    chair: Mutex<Plan>,
    /// How many threads fetch.
    fetching: AtomicUsize,
}

/// How it goes, for those who wait.
struct How {
    timeout: Option<Duration>,
    tell: Box<dyn Fn(Condition) + Send + Sync>,
    state: Mutex<State>,
    presence: Presence,
}

#[derive(Default)]
struct State {
    /// Something has come since this process began: what a predecessor has said of the server holds no more.
    heard: bool,
    /// Since when the server is away.
    away: Option<Instant>,
    said: Option<String>,
    /// The object is another one now, or damaged: nothing is fetched any more.
    changed: bool,
}

/// What is to be fetched besides what is asked for.
#[derive(Default)]
struct Plan {
    /// Where the look for work goes on.
    next: u64,
    sequences: VecDeque<Sequence>,
    ahead: VecDeque<Range<u64>>,
}

/// A reader that goes on where it ended; in chunks.
#[derive(Default)]
struct Sequence {
    next: u64,
    /// How often it did.
    run: u32,
    /// How much it has read, with what is ahead of it.
    read: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Plan {
    /// A reader waits for the chunks of a run: how many behind it are worth fetching, at most `most`, and at
    /// first no more than `soon`; `beside` it where nothing is known of the reader. The least is `unit`.
    fn follow(&mut self, run: &Range<u64>, unit: u64, beside: u64, soon: u64, most: u64) -> u64 {
        let known = self.sequences.iter().position(|sequence| sequence.next == run.start);
        let mut sequence = known.and_then(|at| self.sequences.remove(at)).unwrap_or_default();
        // One that goes on once is no sequence yet; but what is next to each other is often wanted together.
        let ahead = if sequence.run < 2 { beside } else { unit << sequence.run.min(30) };
        let ahead = ahead.min(soon.max(sequence.read / 4)).min(most);
        sequence.read += run.end - run.start + ahead;
        sequence.next = run.end + ahead;
        sequence.run = sequence.run.saturating_add(1);
        self.sequences.push_front(sequence);
        self.sequences.truncate(SEQUENCES);
        ahead
    }
}

impl Fetcher {
    fn work(&self) -> ! {
        loop {
            let brought = match self.next() {
                Some((run, later)) => {
                    let brought = self.object.bring_run(run, later);
                    self.fetching.fetch_sub(1, Ordering::SeqCst);
                    brought
                }
                None => match self.object.compare_whole() {
                    Ok(()) => continue,
                    compared => compared,
                },
            };
            match brought {
                Ok(()) if self.object.steps().is_none() => self.how.succeeded(),
                // What nobody waits for rests.
                Ok(()) | Err(Error::Full { .. } | Error::Limit { .. }) => {}
                Err(error) => _ = self.how.failed(&error),
            }
        }
    }

    /// Decodes all that is not there.
    fn decode(&self) {
        let all = 0..self.object.presence.chunks();
        self.object.take_over();
        while !self.object.chunks.are_good(&all) {
            match self.object.step() {
                Ok(()) => self.how.succeeded(),
                Err(error) if self.how.failed(&error) => {}
                // It is reported, and requests fail.
                Err(_) => return,
            }
        }
        self.how.succeeded();
    }

    /// Waits for a run to bring, which may be one that nobody waits for; none where nothing is asked, and all
    /// may be there that a digest names.
    fn next(&self) -> Option<(Range<u64>, bool)> {
        let mut plan = lock(&self.chair);
        loop {
            let asked = self.object.presence.asked();
            if let Some(run) = self.find(&mut plan) {
                self.fetching.fetch_add(1, Ordering::SeqCst);
                return Some(run);
            }
            // What others are fetching is to be synced, too, when it is there.
            let more = self.fetching.load(Ordering::SeqCst) > 0 || self.object.presence.rests();
            let rests = !more && !self.object.has_unsynced() && !self.object.may_be_whole();
            self.object.presence.await_ask(asked, (!rests).then_some(IDLE));
            if self.object.presence.asked() == asked {
                // A full disk is reported with the next chunk.
                let _ = self.object.sync();
                if self.object.take_may_be_whole() {
                    return None;
                }
            }
        }
    }

    /// What is to be brought next, which is busy from then on; and whether it is for later.
    fn find(&self, plan: &mut Plan) -> Option<(Range<u64>, bool)> {
        if lock(&self.how.state).changed {
            return None;
        }
        let chunk = self.object.presence.chunk();
        let in_chunks = |bytes: u64| (bytes / chunk).max(1);
        let wanted = |at| self.object.presence.is_wanted(at);
        if let Some(mut run) = self.object.claim(plan.next, false, in_chunks(RUN), &wanted) {
            if self.object.steps().is_some() {
                return Some((run, false));
            }
            let most = if self.object.wanted(&run) { 0 } else { AHEAD / chunk };
            run = self.object.widen(run);
            // What is in the store was fetched with what is beside it, and a trace names that.
            let unit = in_chunks(UNIT);
            let beside = if !self.object.exact && self.object.lacks(&run) { unit } else { 0 };
            let ahead = plan.follow(&run, unit, beside, SOON / chunk, most);
            let end = (run.end + ahead).min(self.object.presence.chunks());
            // The first part comes with what is waited for.
            run.end = self.object.chunks.take_up_to(run.end, end.min(run.end + in_chunks(PART)));
            if run.end < end {
                plan.ahead.push_back(run.end..end);
            }
            plan.next = run.end;
            return Some((run, false));
        }
        while let Some(part) = plan.ahead.pop_front() {
            let run = self.object.chunks.take_in(part.clone(), in_chunks(PART));
            if run.end < part.end {
                plan.ahead.push_front(run.end..part.end);
            }
            if !run.is_empty() {
                return Some((run, false));
            }
        }
        let (presence, limit) = (&self.object.presence, &self.object.limit);
        // A chunk that no reader waits for would evict one that is being read.
        let full = self.object.memory_only || limit.is_full(&self.object.held.data, PART);
        let rests = full && presence.next_wanted(0, true, &mut |at| !presence.has(at)).is_some();
        if presence.set_rests(rests && !self.object.memory_only) && rests {
            (self.how.tell)(Condition::Full);
        }
        if full {
            return None;
        }
        let run = self.object.claim(0, true, in_chunks(PART), &|at| presence.is_later(at));
        run.map(|run| (run, true))
    }
}

impl How {
    fn succeeded(&self) {
        let mut state = lock(&self.state);
        let news = !std::mem::replace(&mut state.heard, true) || state.away.is_some();
        state.away = None;
        if news && !state.changed {
            state.said = None;
            drop(state);
            self.presence.set_fails(false);
            (self.tell)(Condition::Fine);
        }
    }

    /// Reports a failure, and says whether it can help to try again, after a pause.
    fn failed(&self, error: &Error) -> bool {
        let why = match error {
            // Who hears it knows since when, and how long that is by now.
            Error::Away { url, why, .. } => format!("{url}: {why}"),
            error => error.to_string(),
        };
        let mut state = lock(&self.state);
        let ends = match error {
            Error::Changed { .. } => Some(Condition::Changed(why.clone())),
            Error::Digest { .. } | Error::Stream { .. } => Some(Condition::Damaged(why.clone())),
            _ => None,
        };
        if let Some(ends) = ends {
            if !std::mem::replace(&mut state.changed, true) {
                self.presence.set_fails(true);
                (self.tell)(ends);
            }
            return false;
        }
        let now = Instant::now();
        // It was tried for that long already.
        let tried = match error {
            Error::Away { seconds, .. } => PATIENCE.max(Duration::from_secs(*seconds)),
            _ => PATIENCE,
        };
        let since = *state.away.get_or_insert(now.checked_sub(tried).unwrap_or(now));
        if self.timeout.is_some_and(|timeout| since.elapsed() >= timeout) {
            self.presence.set_fails(true);
        }
        if state.said.is_none() {
            state.said = Some(why.clone());
            (self.tell)(Condition::Away(why));
        }
        drop(state);
        std::thread::sleep(PAUSE);
        // The chunks are free again, which the thread that looks for work cannot know.
        self.presence.look_again();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_reader_that_goes_on_is_fetched_ahead() {
        let mut plan = Plan::default();
        let mut follow = |run: Range<u64>, most| plan.follow(&run, 1, 1, 16, most);
        assert_eq!(follow(5..6, 64), 1);
        assert_eq!(follow(90..92, 64), 1);
        assert_eq!(follow(7..8, 64), 1, "once is no sequence");
        assert_eq!(follow(9..10, 64), 4);
        assert_eq!(follow(14..15, 64), 8);
        assert_eq!(follow(23..24, 64), 16);
        assert_eq!(follow(93..94, 64), 1, "the other one goes on, too");
        assert_eq!(follow(40..41, 64), 16, "it has not read much yet");
        assert_eq!(follow(57..157, 64), 16);
        assert_eq!(follow(173..174, 64), 42, "a quarter of what it has read");
        assert_eq!(follow(216..217, 20), 20, "no further than that");
        assert_eq!(follow(500..501, 0), 0, "nothing is fetched ahead");
        assert_eq!(plan.follow(&(700..701), 1, 0, 16, 64), 0, "nothing beside it");
    }

    #[test]
    fn a_server_that_is_away_is_reported_without_a_time_that_grows() {
        let (heard, presence) = (Arc::new(Mutex::new(Vec::new())), Presence::new(1 << 20, 8 << 10).unwrap());
        let tell = {
            let heard = Arc::clone(&heard);
            Box::new(move |condition: Condition| lock(&heard).push(condition))
        };
        let how = How { timeout: None, tell, state: Mutex::default(), presence };
        let (url, why) = ("http://h/x".to_owned(), "it takes no connection".to_owned());
        assert!(how.failed(&Error::Away { url, seconds: 2, why }));
        assert_eq!(*lock(&heard), [Condition::Away("http://h/x: it takes no connection".to_owned())]);
    }
}

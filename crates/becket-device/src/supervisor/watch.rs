//! Watches devices that may have to be removed after their last use: one thread for all of them, however many
//! there are.
//! It never waits for a device: other threads, which it starts, look at devices and remove them.

use std::collections::BTreeMap;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use tracing::warn;

use super::owned::Owned;
use super::uses::{Nodes, Uses, udev_at_work};
use crate::system::sync::{lock, spawn};

/// How long nothing may happen before a use is taken to be over.
const QUIET: Duration = Duration::from_millis(200);
/// The same for the first use: mount(8) and others open a device, look, close it, and only then use it.
const QUIET_AT_FIRST: Duration = Duration::from_secs(3);
/// How often all are looked at of whom nothing is heard; and where the users of some cannot be heard.
const NOW_AND_THEN: Duration = Duration::from_secs(1);
const OFTEN: Duration = QUIET;
/// How many of those one is sent to.
const TOGETHER: usize = 64;
/// How long udev is waited for when it looks at a device.
const UDEV: Duration = Duration::from_secs(5);

/// A device that is watched over.
pub(super) struct Watched {
    pub(super) owned: Arc<Owned>,
    pub(super) why: Why,
    /// What was said of it last.
    pub(super) complaint: String,
}

/// Why a device may have to go.
pub(super) enum Why {
    /// Removed with its last user, who is seen by these nodes. `used`: it has had one, or must not wait for
    /// the first.
    LastUser { nodes: Vec<PathBuf>, used: bool },
    /// With the one who keeps it: this is closed at the other end then.
    Lease(OwnedFd),
    /// The other end is closed.
    Kept,
    /// Others could end what it stands on behind our back.
    EndedByOthers,
    /// Its server is away: readers that die meanwhile would keep the disk locked for everyone. The users are
    /// searched for once this number of seconds has become 0; `pause` is what it begins with next.
    Away { left: u32, pause: u32 },
}

impl Watched {
    pub(super) fn new(owned: &Arc<Owned>, why: Why) -> Watched {
        Watched { owned: Arc::clone(owned), why, complaint: String::new() }
    }

    fn used(&self) -> Option<bool> {
        match &self.why {
            Why::LastUser { used, .. } => Some(*used),
            _ => None,
        }
    }

    fn lease(&self) -> Option<BorrowedFd<'_>> {
        match &self.why {
            Why::Lease(lease) => Some(lease.as_fd()),
            _ => None,
        }
    }
}

/// Looks at a device, and removes it if it must go. Returns it while it must be watched further.
pub(super) type Look = Arc<dyn Fn(Watched) -> Option<Watched> + Send + Sync>;

/// Where devices are left to be watched over, and where the threads that were sent come back to.
#[derive(Default)]
pub(super) struct Watch(Arc<Mutex<Desk>>);

#[derive(Default)]
struct Desk {
    coming: Vec<(u64, Entry)>,
    back: Vec<(u64, Option<Watched>)>,
    next: u64,
    nodes: Nodes,
    /// Rung for the listener; without it there is none.
    bell: Option<Arc<OwnedFd>>,
}

impl Watch {
    /// Watches over a device from now on: its nodes are heard when this returns, however long it takes until
    /// a thread listens.
    pub(super) fn over(&self, watched: Watched, look: impl FnOnce() -> Look) {
        let mut desk = lock(&*self.0);
        let nobody = desk.bell.is_none();
        let bell = match desk.bell.clone() {
            Some(bell) => bell,
            None => match eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) {
                Ok(bell) => Arc::clone(desk.bell.insert(Arc::new(bell))),
                Err(error) => {
                    let what = "a device will not go by itself: could not make an event";
                    return warn!("{what}: {error}");
                }
            },
        };
        if nobody {
            desk.nodes = Nodes::new();
        }
        let key = desk.next;
        desk.next += 1;
        let deaf = match &watched.why {
            Why::LastUser { nodes, .. } => !desk.nodes.watch(key, nodes),
            _ => false,
        };
        let used = watched.used();
        desk.coming.push((key, Entry { watched: Some(watched), pace: Pace::default(), used, deaf }));
        if !nobody {
            return ring(&bell);
        }
        let listener = Listener::new(Arc::clone(&self.0), bell, look(), Uses::new(&desk.nodes));
        spawn(move || listener.listen());
    }
}

fn ring(bell: &OwnedFd) {
    // It fails only when it has been rung 2^64 times.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

/// What is known of one device.
struct Entry {
    /// `None` while a thread looks at it.
    watched: Option<Watched>,
    pace: Pace,
    /// Whether it goes with its last user, and has had one.
    used: Option<bool>,
    /// Its users cannot be heard.
    deaf: bool,
}

/// When to look at a device about which something was heard.
#[derive(Debug, Default, PartialEq, Eq)]
struct Pace {
    /// Its own node was opened or closed.
    own: bool,
    opened: bool,
    /// udev was at work: it looks at new devices, which is no use.
    udev: bool,
    first: Option<Instant>,
    due: Option<Instant>,
}

/// What comes of a pace: it is time to look.
#[derive(Debug, PartialEq, Eq)]
struct Over {
    used: bool,
    own: bool,
}

impl Pace {
    /// Something has happened. Someone who opens it again and again does not keep us from looking.
    fn happened(&mut self, now: Instant, used: bool) {
        let quiet = if used { QUIET } else { QUIET_AT_FIRST };
        let first = *self.first.get_or_insert(now);
        self.due = Some((now + quiet).min(first + quiet * 5));
    }

    fn over(&mut self, now: Instant, udev: impl FnOnce() -> bool) -> Option<Over> {
        let (first, due) = self.first.zip(self.due)?;
        if now < due {
            return None;
        }
        // A user that has opened it meanwhile, and still uses it then, is found by looking.
        if self.udev && now < first + UDEV && udev() {
            self.due = Some(now + QUIET);
            return None;
        }
        let over = Over { used: self.opened && !self.udev, own: self.own };
        *self = Pace::default();
        Some(over)
    }
}

struct Listener {
    desk: Arc<Mutex<Desk>>,
    bell: Arc<OwnedFd>,
    look: Look,
    uses: Uses,
    entries: BTreeMap<u64, Entry>,
    /// When all are looked at of whom nothing was heard.
    round: Instant,
}

impl Listener {
    fn new(desk: Arc<Mutex<Desk>>, bell: Arc<OwnedFd>, look: Look, uses: Uses) -> Listener {
        Listener { desk, bell, look, uses, entries: BTreeMap::new(), round: Instant::now() }
    }

    fn listen(mut self) {
        while self.greet() {
            self.send();
            self.hear();
        }
    }

    /// Takes in who has come, and who has come back; `false` when there is none to watch.
    fn greet(&mut self) -> bool {
        let (coming, back) = {
            let mut desk = lock(&*self.desk);
            let (coming, back) = (mem::take(&mut desk.coming), mem::take(&mut desk.back));
            let done = back.iter().filter(|(_, watched)| watched.is_none());
            if coming.is_empty() && done.clone().count() == self.entries.len() {
                // The next one who comes finds no watcher, and starts another.
                *desk = Desk { next: desk.next, ..Desk::default() };
                return false;
            }
            done.for_each(|(key, _)| desk.nodes.forget(*key));
            (coming, back)
        };
        for (key, watched) in back {
            let (Some(watched), Some(entry)) = (watched, self.entries.get_mut(&key)) else {
                self.entries.remove(&key);
                continue;
            };
            entry.used = watched.used();
            if entry.used == Some(true) {
                // The look opened it, too.
                entry.pace = Pace::default();
            }
            entry.watched = Some(watched);
        }
        self.welcome(coming);
        true
    }

    /// Takes in who has come, and has each looked at: what has happened before was not heard.
    fn welcome(&mut self, coming: Vec<(u64, Entry)>) {
        for (key, mut entry) in coming {
            let watched = entry.watched.take();
            self.entries.insert(key, entry);
            watched.into_iter().for_each(|watched| self.dispatch(vec![(key, watched)]));
        }
    }

    /// Sends a thread to each device of which an event was heard, and to all others now and then.
    fn send(&mut self) {
        let now = Instant::now();
        let round = now >= self.round;
        if round {
            let deaf = self.entries.values().any(|entry| entry.deaf);
            self.round = now + if deaf { OFTEN } else { NOW_AND_THEN };
        }
        let (mut alone, mut together) = (Vec::new(), Vec::new());
        for (key, entry) in &mut self.entries {
            let Some(watched) = &mut entry.watched else { continue };
            let over = entry.pace.over(now, udev_at_work);
            if let (Why::LastUser { used, .. }, Some(over)) = (&mut watched.why, &over) {
                *used |= over.used;
            }
            let whither = match over {
                Some(over) if over.own => &mut alone,
                None if !round || entry.pace.due.is_some() => continue,
                _ => &mut together,
            };
            whither.extend(entry.watched.take().map(|watched| (*key, watched)));
        }
        alone.into_iter().for_each(|one| self.dispatch(vec![one]));
        while !together.is_empty() {
            self.dispatch(together.split_off(together.len().saturating_sub(TOGETHER)));
        }
    }

    fn dispatch(&self, some: Vec<(u64, Watched)>) {
        let (desk, bell, look) = (Arc::clone(&self.desk), Arc::clone(&self.bell), Arc::clone(&self.look));
        spawn(move || {
            for (key, watched) in some {
                let watched = look(watched);
                lock(&*desk).back.push((key, watched));
                ring(&bell);
            }
        });
    }

    /// Waits until something happens or it is time to look.
    fn hear(&mut self) {
        let here = |entry: &&Entry| entry.watched.is_some();
        let due = self.entries.values().filter(here).filter_map(|entry| entry.pace.due);
        let patience = due.fold(self.round, Instant::min).saturating_duration_since(Instant::now());
        let leases: Vec<(u64, BorrowedFd<'_>)> = self
            .entries
            .iter()
            .filter_map(|(key, entry)| Some((*key, entry.watched.as_ref()?.lease()?)))
            .collect();
        let others: Vec<BorrowedFd<'_>> =
            leases.iter().map(|(_, lease)| *lease).chain([self.bell.as_fd()]).collect();
        let heard = self.uses.hear(patience, &others);
        let closed: Vec<u64> =
            leases.iter().zip(&heard.others).filter(|(_, heard)| **heard).map(|((key, _), _)| *key).collect();
        // It has nothing to report when it was not rung.
        let _ = rustix::io::read(&*self.bell, &mut [0; 8]);
        for key in closed {
            if let Some(watched) = self.entries.get_mut(&key).and_then(|entry| entry.watched.take()) {
                self.dispatch(vec![(key, Watched { why: Why::Kept, ..watched })]);
            }
        }
        let now = Instant::now();
        // What was heard may be of a device that has come meanwhile.
        let (nodes, coming) = {
            let mut desk = lock(&*self.desk);
            (desk.nodes.whose(&heard), mem::take(&mut desk.coming))
        };
        self.welcome(coming);
        // Asked at once: it is quicker than the time that we wait for quiet.
        let udev = nodes.values().any(|opened| *opened) && udev_at_work();
        for (key, entry) in &mut self.entries {
            let (Some(used), own) = (entry.used, nodes.get(key)) else { continue };
            if own.is_none() && !heard.mounts && !heard.missed {
                continue;
            }
            let opened = heard.missed || own == Some(&true);
            entry.pace.own |= own.is_some();
            entry.pace.opened |= opened;
            entry.pace.udev |= opened && udev;
            entry.pace.happened(now, used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::server::Service;
    use crate::supervisor::doubles::Stage;

    const MS: Duration = Duration::from_millis(1);

    /// A client may use the device as soon as it is attached, and be done before a thread listens.
    #[test]
    fn a_use_at_once_is_heard() {
        let stage = Stage::new();
        stage.supervisor.attach(stage.bench.request(Some("a")), vec![stage.bench.fd(true, 0)]).unwrap();
        let owned = Arc::clone(&lock(&stage.supervisor.devices)["a"]);
        let node = stage.bench.image.clone();
        let (said, reported) = std::sync::mpsc::channel();
        let look = move |watched: Watched| {
            let used = watched.used();
            said.send(used).unwrap();
            (used == Some(false)).then_some(watched)
        };
        let why = Why::LastUser { nodes: vec![node.clone()], used: false };
        Watch::default().over(Watched::new(&owned, why), || Arc::new(look));
        drop(std::fs::File::open(node).unwrap());
        // Who is sent at first finds no user; who is sent when all is quiet knows that there was one.
        assert!(reported.recv_timeout(Duration::from_secs(60)) == Ok(Some(false)));
        // One is sent each second in any case.
        let mut later = std::iter::from_fn(|| reported.recv_timeout(Duration::from_secs(60)).ok()).take(30);
        let used = later.any(|used| used == Some(true));
        assert!(used);
    }

    #[test]
    fn a_use_is_over_when_all_is_quiet() {
        let begin = Instant::now();
        let mut pace = Pace { opened: true, own: true, ..Pace::default() };
        pace.happened(begin, true);
        pace.happened(begin + 150 * MS, true);
        assert_eq!(pace.over(begin + 349 * MS, || false), None);
        assert_eq!(pace.over(begin + 350 * MS, || false), Some(Over { used: true, own: true }));
        assert_eq!(pace, Pace::default());
        assert_eq!(pace.over(begin + 9999 * MS, || false), None, "once");
    }

    #[test]
    fn one_who_opens_it_again_and_again_does_not_keep_us_from_looking() {
        let begin = Instant::now();
        let mut pace = Pace::default();
        let over = (0..100).find(|tenth| {
            let now = begin + *tenth * 100 * MS;
            let over = pace.over(now, || false).is_some();
            pace.happened(now, true);
            over
        });
        assert_eq!(over, Some(10), "five times the quiet time, and no longer");
    }

    #[test]
    fn a_look_of_udev_s_is_no_use_and_is_waited_for_but_not_for_ever() {
        let begin = Instant::now();
        let mut pace = Pace { opened: true, udev: true, ..Pace::default() };
        pace.happened(begin, false);
        assert_eq!(pace.over(begin + 3000 * MS, || true), None);
        assert_eq!(pace.over(begin + 3200 * MS, || false), Some(Over { used: false, own: false }));
        let mut pace = Pace { opened: true, udev: true, ..Pace::default() };
        pace.happened(begin, false);
        assert!(pace.over(begin + UDEV, || true).is_some());
    }
}

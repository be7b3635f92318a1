//! What transports whose bytes becket moves have in common: a device's queues on the I/O threads, and
//! operations on all of them together. Knows of no transport: a queue's front is its port.

mod change;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use becket_engine::{
    Batch, Decoding, Ending, Faults, Geometry, IoThreads, MOST_LAYERS, Memory, NewQueue, Port, QueueId,
    QueueStats, Serving, Summary,
};
use becket_image::{DirectIo, Encoded, Grow, Map, Opened, Source};

use crate::aside;

/// Whether the engine can serve an image.
pub(crate) fn fits(opened: &Opened) -> Result<(), String> {
    match opened.encoded.len() {
        0..=MOST_LAYERS => Ok(()),
        layers => {
            Err(format!("the image is compressed {layers} times over; {MOST_LAYERS} times are the most"))
        }
    }
}

pub use change::Change;

/// The layers of encoded blocks that a device's map speaks of, and who decodes them.
#[derive(Debug)]
pub struct Decoded {
    /// Shared by all devices of the process.
    pub decoding: Arc<Decoding>,
    /// In the order in which maps speak of them.
    pub encoded: Vec<Encoded>,
}

/// What is behind a device: where its bytes are, and how they are moved.
#[derive(Debug)]
pub struct Content {
    /// Where the bytes are.
    pub map: Map,
    /// The sources that the map speaks of.
    pub sources: Vec<Source>,
    /// The encoded layers that the map speaks of.
    pub decoded: Option<Decoded>,
    /// What makes room in the first source, where the image grows.
    pub grow: Option<Box<dyn Grow>>,
    /// What goes past the page cache where that is possible; see [`Served::change`].
    pub direct_io: DirectIo,
    /// What goes wrong with the sources on purpose.
    pub faults: Option<Faults>,
}

impl Content {
    /// Bytes that are stored as they are read, in sources that stay as they are.
    pub fn plain(map: Map, sources: Vec<Source>, direct_io: DirectIo) -> Content {
        Content { map, sources, decoded: None, grow: None, direct_io, faults: None }
    }
}

/// What can go wrong while a device's queues are set up.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The kernel or the image does not allow the wanted way of carrying data.
    #[error("mode {mode} is not possible: {why}")]
    NoMode {
        /// The wanted mode.
        mode: String,
        /// Why it cannot be.
        why: String,
    },
    /// The engine could not take a queue.
    #[error("cannot serve device {id}: {source}")]
    Engine {
        /// Its number.
        id: u32,
        /// What the engine said.
        source: becket_engine::Error,
    },
    /// The faults that it is to have cannot be.
    #[error("the faults of device {id} make no sense: {why}")]
    Faults {
        /// Its number.
        id: u32,
        /// What is wrong with them.
        why: String,
    },
    /// The rings' tables of registered buffers have no room for the device as it was added.
    #[error("the I/O threads have room for {room} requests in each queue of device {id}, not for {depth}")]
    Full {
        /// Its number.
        id: u32,
        /// How deep its queues are.
        depth: u16,
        /// How deep they could be; 0 when it must copy.
        room: u16,
    },
    /// It could not be served otherwise.
    #[error("cannot change device {id}: {source}")]
    Change {
        /// Its number.
        id: u32,
        /// What the engine said.
        source: becket_engine::Error,
    },
}

/// A device that is being served.
#[derive(Debug)]
pub struct Served {
    id: u32,
    first: u32,
    stats: Vec<Arc<QueueStats>>,
    /// Held while queues are added or the device changes, so that every queue serves by the same value.
    changing: Mutex<()>,
    live: Mutex<Live>,
}

/// What of a served device changes.
#[derive(Debug)]
struct Live {
    /// By their numbers. A queue that comes takes the place of the one before it.
    queues: BTreeMap<usize, QueueId>,
    /// For those who change it and those who ask; the queues have shares of their own.
    serving: Weak<Serving>,
    /// Keeps a device alive whose queues come and go, until it is left.
    kept: Option<(Arc<Serving>, Arc<Finally>)>,
}

impl Live {
    fn all(&self) -> Vec<QueueId> {
        self.queues.values().copied().collect()
    }
}

impl Served {
    /// Where its queues begin; see [`Setup::first`].
    pub fn first(&self) -> u32 {
        self.first
    }

    /// How it is served; `None` once its queues have ended. They keep the files open, not this.
    pub fn serving(&self) -> Option<Arc<Serving>> {
        self.live().serving.upgrade()
    }

    /// Whether it is about to end for good, and how that went; `None` once its queues have ended.
    pub fn ending(&self) -> Option<Arc<Ending>> {
        self.serving().map(|serving| Arc::clone(serving.ending()))
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its queues serve by another one.
    fn serves(&self, serving: &Arc<Serving>) {
        let mut live = self.live();
        live.serving = Arc::downgrade(serving);
        if let Some((kept, _)) = &mut live.kept {
            *kept = Arc::clone(serving);
        }
    }

    /// Adds a queue to a device whose queues come and go, in the place of queue `number`, which must have
    /// ended. `ended` runs when it has.
    ///
    /// # Errors
    /// The device was left, or the queue could not be set up; `ended` has run then, or will.
    pub(crate) fn add(
        &self,
        threads: &IoThreads,
        number: u16,
        (depth, memory): (u16, Memory),
        port: Box<dyn Port>,
        ended: Box<dyn FnOnce() + Send>,
    ) -> Result<QueueId, ServeError> {
        let failed = |source| ServeError::Engine { id: self.id, source };
        let gone = || failed(becket_engine::Error::Start { source: std::io::ErrorKind::NotFound.into() });
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let (serving, share) = self.live().kept.clone().ok_or_else(gone)?;
        let stats = Arc::clone(self.stats.get(usize::from(number)).ok_or_else(gone)?);
        let on_closed = Box::new(move || {
            ended();
            drop(share);
        });
        let number = number.into();
        let queue = NewQueue { port, depth, number, serving, memory, batch: None, stats, on_closed };
        let thread = thread_of(self.first, number as u16, threads);
        let added = threads.add(thread, queue).map_err(failed)?;
        self.live().queues.insert(number, added);
        Ok(added)
    }

    /// Has one of its queues take no more requests, and end once those that it has are finished; returns
    /// before that.
    ///
    /// # Errors
    /// The I/O thread has ended.
    pub(crate) fn remove(&self, threads: &IoThreads, queue: QueueId) -> Result<(), ServeError> {
        self.live().queues.retain(|_, other| *other != queue);
        threads.leave(queue).map_err(|source| ServeError::Engine { id: self.id, source })
    }

    /// What its queues have done by now. They are not disturbed.
    pub fn stats(&self) -> Summary {
        Summary::of(self.stats.iter().map(|stats| &**stats))
    }

    /// Makes all queues take no more requests, and end once those that they have are finished; returns before
    /// that. For a transport whose kernel side keeps later requests for the next server.
    ///
    /// # Errors
    /// An I/O thread has ended.
    pub fn leave(&self, threads: &IoThreads) -> Result<(), ServeError> {
        let (queues, kept) = {
            let mut live = self.live();
            (live.all(), live.kept.take())
        };
        if let Some(kept) = kept {
            // Without a queue this is its end, which may wait for a server.
            drop(aside::begun(move || drop(kept)));
        }
        self.each(queues, |queue| threads.leave(queue))
    }

    /// Has the reads fail that began before a moment and wait for the server of a source: nobody wants their
    /// bytes any more.
    ///
    /// # Errors
    /// An I/O thread has ended.
    pub fn give_up_reads(&self, threads: &IoThreads, before: Instant) -> Result<(), ServeError> {
        let queues = self.live().all();
        self.each(queues, |queue| threads.give_up_reads(queue, before))
    }

    fn each(
        &self,
        queues: Vec<QueueId>,
        order: impl Fn(QueueId) -> Result<(), becket_engine::Error>,
    ) -> Result<(), ServeError> {
        let failed = |source| ServeError::Engine { id: self.id, source };
        queues.into_iter().try_for_each(|queue| order(queue).map_err(failed))
    }
}

/// A device that is to be served, by whichever transport.
#[derive(Debug)]
pub struct Setup {
    /// Its number, among those of its transport.
    pub id: u32,
    /// Where its queues should begin if there is room: the number of an I/O thread, counted on from the first
    /// after the last. For a device that was served before: where it was, so that all find room again in any
    /// order.
    pub first: u32,
    /// Number of queues.
    pub queues: u16,
    /// Requests of each queue.
    pub depth: u16,
    /// What was announced.
    pub geometry: Geometry,
    /// What is behind it.
    pub content: Content,
}

impl Setup {
    /// Gives each queue, with the front that `port` makes for its number, to an I/O thread. Requests begin
    /// and end at multiples of `unit` bytes. `finally` goes once the last queue has ended and every
    /// descriptor of the device is closed.
    ///
    /// # Errors
    /// A queue could not be set up; those that were end with what they serve.
    pub(crate) fn serve(
        self,
        threads: &IoThreads,
        (memory, batch): (Memory, Option<Batch>),
        unit: u32,
        finally: Finally,
        mut port: impl FnMut(u16) -> Result<Box<dyn Port>, becket_engine::Error>,
    ) -> Result<Served, ServeError> {
        let (count, depth) = (self.queues, self.depth);
        let (serving, share, mut served) = self.prepare(unit, finally)?;
        // Declared in this order, so that it is dropped after our own shares of the descriptors.
        let (finally, serving) = (share, serving);
        let failed = |id| move |source| ServeError::Engine { id, source };
        let failed = failed(served.id);
        let mut queues = Vec::with_capacity(count.into());
        for number in 0..count {
            let port = port(number).map_err(failed)?;
            let share = Arc::clone(&finally);
            let queue = NewQueue {
                port,
                depth,
                number: number.into(),
                serving: Arc::clone(&serving),
                memory,
                batch,
                stats: Arc::clone(&served.stats[usize::from(number)]),
                on_closed: Box::new(move || drop(share)),
            };
            queues.push((thread_of(served.first, number, threads), queue));
        }
        let queues = threads.add_all(queues).map_err(failed)?;
        served.live.get_mut().unwrap_or_else(PoisonError::into_inner).queues = (0..).zip(queues).collect();
        Ok(served)
    }

    /// Makes a device that has no queues yet: [`Served::add`] adds them, `self.queues` at a time. It ends
    /// once it is [left](Served::leave) and its last queue has ended.
    ///
    /// # Errors
    /// What is behind it cannot be served.
    pub(crate) fn serve_none(self, unit: u32, finally: Finally) -> Result<Served, ServeError> {
        let (serving, share, mut served) = self.prepare(unit, finally)?;
        served.live.get_mut().unwrap_or_else(PoisonError::into_inner).kept = Some((serving, share));
        Ok(served)
    }

    /// What queues serve by, and the device without any.
    fn prepare(
        self,
        unit: u32,
        finally: Finally,
    ) -> Result<(Arc<Serving>, Arc<Finally>, Served), ServeError> {
        // Declared first, dropped last: after our own shares of the descriptors.
        let finally = Arc::new(finally);
        let failed = |source| ServeError::Engine { id: self.id, source };
        let Content { map, sources, decoded, grow, direct_io, faults } = self.content;
        let serving = Serving::new(map, sources, self.geometry.read_only, self.queues.into()).with_unit(unit);
        let serving = match decoded {
            Some(Decoded { decoding, encoded }) => serving.decoded_by(&decoding, encoded).map_err(failed)?,
            None => serving,
        };
        let serving = match grow {
            Some(grow) => serving.growing_by(grow, Box::new(Arc::clone(&finally))).map_err(failed)?,
            None => serving,
        };
        let serving = match faults {
            Some(faults) => {
                let plan = faults.of_queues(self.queues.into());
                serving.intercepted_by(Arc::new(plan.map_err(|why| ServeError::Faults { id: self.id, why })?))
            }
            None => serving,
        };
        let serving = Arc::new(serving.with_direct_io(direct_io));
        let live = Live { queues: BTreeMap::new(), serving: Arc::downgrade(&serving), kept: None };
        let served = Served {
            id: self.id,
            first: self.first,
            stats: (0..self.queues).map(|_| Arc::default()).collect(),
            changing: Mutex::default(),
            live: Mutex::new(live),
        };
        Ok((serving, finally, served))
    }
}

/// Runs a closure when the last share of it is dropped.
pub(crate) struct Finally(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl std::fmt::Debug for Finally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Finally")
    }
}

impl Finally {
    pub(crate) fn new(closure: Box<dyn FnOnce() + Send>) -> Finally {
        Finally(Mutex::new(Some(closure)))
    }
}

impl Drop for Finally {
    fn drop(&mut self) {
        if let Ok(closure) = self.0.get_mut()
            && let Some(closure) = closure.take()
        {
            closure();
        }
    }
}

/// The I/O thread of a queue of a device whose queues begin at `first`. That is the device's number unless
/// there is a reason for another place, so that many devices with few queues use all threads.
pub(crate) fn thread_of(first: u32, number: u16, threads: &IoThreads) -> usize {
    (first as usize).wrapping_add(number.into()) % threads.count()
}

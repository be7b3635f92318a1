//! What transports whose bytes becket moves have in common: a device's queues on the I/O threads, and
//! operations on all of them together. Knows of no transport: a queue's front is its port.

mod change;

use std::sync::{Arc, Mutex, PoisonError, Weak};

use becket_engine::{
    Batch, Decoding, Faults, Geometry, IoThreads, MOST_LAYERS, Memory, NewQueue, Port, QueueId, QueueStats,
    Serving, Summary,
};
use becket_image::{DirectIo, Encoded, Grow, Map, Opened, Source};

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
    queues: Vec<QueueId>,
    stats: Vec<Arc<QueueStats>>,
    /// For those who change it and those who ask; the queues have shares of their own.
    serving: Mutex<Weak<Serving>>,
}

impl Served {
    /// Where its queues begin; see [`Setup::first`].
    pub fn first(&self) -> u32 {
        self.first
    }

    /// How it is served; `None` once its queues have ended. They keep the files open, not this.
    pub fn serving(&self) -> Option<Arc<Serving>> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// Its queues serve by another one.
    fn serves(&self, serving: &Arc<Serving>) {
        *self.serving.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(serving);
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
        for queue in &self.queues {
            threads.leave(*queue).map_err(|source| ServeError::Engine { id: self.id, source })?;
        }
        Ok(())
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
    /// Gives each queue, with the front that `port` makes for its number, to an I/O thread. `finally` goes
    /// once the last queue has ended and every descriptor of the device is closed.
    ///
    /// # Errors
    /// A queue could not be set up; those that were end with what they serve.
    pub(crate) fn serve(
        self,
        threads: &IoThreads,
        (memory, batch): (Memory, Option<Batch>),
        finally: Finally,
        mut port: impl FnMut(u16) -> Result<Box<dyn Port>, becket_engine::Error>,
    ) -> Result<Served, ServeError> {
        // Declared first, dropped last: after our own shares of the descriptors.
        let finally = Arc::new(finally);
        let failed = |source| ServeError::Engine { id: self.id, source };
        let Content { map, sources, decoded, grow, direct_io, faults } = self.content;
        let serving = Serving::new(map, sources, self.geometry.read_only, self.queues.into());
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
        let mut served = Served {
            id: self.id,
            first: self.first,
            queues: Vec::new(),
            stats: Vec::with_capacity(self.queues.into()),
            serving: Mutex::new(Arc::downgrade(&serving)),
        };
        let mut queues = Vec::with_capacity(self.queues.into());
        for number in 0..self.queues {
            let port = port(number).map_err(failed)?;
            let share = Arc::clone(&finally);
            let stats = Arc::<QueueStats>::default();
            served.stats.push(Arc::clone(&stats));
            let queue = NewQueue {
                port,
                depth: self.depth,
                number: number.into(),
                serving: Arc::clone(&serving),
                memory,
                batch,
                stats,
                on_closed: Box::new(move || drop(share)),
            };
            queues.push((thread_of(self.first, number, threads), queue));
        }
        served.queues = threads.add_all(queues).map_err(failed)?;
        Ok(served)
    }
}

/// Runs a closure when the last share of it is dropped.
pub(crate) struct Finally(Mutex<Option<Box<dyn FnOnce() + Send>>>);

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

//! How a device is served: the sources of its bytes, shared by its queues, and what of them is not yet on
//! stable storage.
//! Never opens or closes a path; descriptors come from outside and go when the last queue lets go.

use std::{os::fd::BorrowedFd, sync::Arc, time::Duration};

use becket_image::{DirectIo, Encoded, Grow, Map, Source};
use rustix::io::Errno;

use crate::growing::{Growing, Handle};
use crate::target::{AnyTarget, SLOTS, Target};
use crate::{Decoding, Ending, Error, Interceptor, decode::Layers};

/// How long it takes until a thread that may wait looks again whether its sync has its turn.
const PAUSE: Duration = Duration::from_micros(200);

/// How requests of a device are served: the map of its image, the sources that it speaks of, and what may be
/// done with them.
///
/// It never changes. A device whose serving changes gets another one; see
/// [`IoThreads::change`](crate::IoThreads::change).
#[derive(Debug)]
pub struct Serving {
    pub(crate) map: Arc<Map>,
    pub(crate) read_only: bool,
    /// What goes past the page cache, where it can.
    pub(crate) direct: DirectIo,
    /// What offsets and lengths of requests are multiples of, in bytes.
    pub(crate) unit: u32,
    sources: Arc<Sources>,
    pub(crate) interceptor: Option<Arc<dyn Interceptor>>,
}

/// The targets of sources, with what of them still has to reach stable storage: that outlives a change of
/// everything else.
#[derive(Debug)]
struct Sources {
    targets: Vec<AnyTarget>,
    /// The layers of encoded blocks that the map speaks of.
    layers: Option<Arc<Layers>>,
    /// What makes room in source 0.
    growing: Option<Handle>,
    ending: Arc<Ending>,
}

/// With the last queue, or who keeps a device without one.
impl Drop for Sources {
    fn drop(&mut self) {
        if self.ending.is_expected() {
            let lost = self.targets.iter().filter_map(|target| target.farewell().err());
            lost.for_each(|why| self.ending.loses(why));
        }
    }
}

impl Serving {
    /// For `queues` queues, which go past the page cache where they can and it serves
    /// ([`DirectIo::Auto`]).
    pub fn new(map: Map, sources: Vec<Source>, read_only: bool, queues: usize) -> Serving {
        let targets = sources.into_iter().map(|source| AnyTarget::of(source, queues)).collect();
        Serving::with_targets(map, targets, read_only)
    }

    /// The same with targets of any kind.
    pub(crate) fn with_targets(map: Map, targets: Vec<AnyTarget>, read_only: bool) -> Serving {
        let sources = Arc::new(Sources { targets, layers: None, growing: None, ending: Arc::default() });
        Serving { map: Arc::new(map), read_only, direct: DirectIo::Auto, unit: 1, sources, interceptor: None }
    }

    /// What offsets and lengths of requests are multiples of, in bytes.
    pub fn unit(&self) -> u32 {
        self.unit
    }

    /// The same for a port whose requests begin and end at multiples of so many bytes.
    #[must_use]
    pub fn with_unit(self, unit: u32) -> Serving {
        Serving { unit, ..self }
    }

    /// The same with another choice of what goes past the page cache: nothing, or also the stored bytes of
    /// encoded blocks, which otherwise go through it where that [serves](becket_image::Facts::caches_stored).
    #[must_use]
    pub fn with_direct_io(self, direct: DirectIo) -> Serving {
        Serving { direct, ..self }
    }

    /// The same with an interceptor, which sees each operation on its way to the files. Whether there is one
    /// is settled when a queue is made: those of [`IoThreads::change`](crate::IoThreads::change) that come
    /// later have no say.
    #[must_use]
    pub fn intercepted_by(self, interceptor: Arc<dyn Interceptor>) -> Serving {
        Serving { interceptor: Some(interceptor), ..self }
    }

    /// The same with the interceptor of another one.
    #[must_use]
    pub fn intercepted_as(self, other: &Serving) -> Serving {
        Serving { interceptor: other.interceptor.clone(), ..self }
    }

    /// The same with a map whose encoded extents are of these layers, which `decoding` decodes.
    ///
    /// # Errors
    /// [`Error::Layers`] with what is wrong with them.
    pub fn decoded_by(self, decoding: &Arc<Decoding>, encoded: Vec<Encoded>) -> Result<Serving, Error> {
        let layers = Some(Layers::new(encoded, self.sources.targets.len(), Arc::clone(decoding))?);
        match Arc::try_unwrap(self.sources) {
            Ok(mut sources) => {
                sources.layers = layers;
                Ok(Serving { sources: Arc::new(sources), ..self })
            }
            Err(_) => {
                Err(Error::Layers { why: "they come too late: the files are served already".to_owned() })
            }
        }
    }

    /// The same where units that have no place of their own get one when they are written; `keep` is dropped
    /// once the image is closed, after the last queue has ended.
    ///
    /// # Errors
    /// [`Error::Grow`], or no thread can be had.
    pub fn growing_by(
        self,
        grow: Box<dyn Grow>,
        keep: Box<dyn std::any::Any + Send>,
    ) -> Result<Serving, Error> {
        let late = || Error::Grow { source: std::io::Error::other("its files are served already") };
        let growing = Some(Handle::start(grow, self.map.len(), keep)?);
        let mut sources = Arc::try_unwrap(self.sources).map_err(|_| late())?;
        sources.growing = growing;
        Ok(Serving { sources: Arc::new(sources), ..self })
    }

    /// Whether it is about to end for good, and how that went.
    pub fn ending(&self) -> &Arc<Ending> {
        &self.sources.ending
    }

    #[inline]
    pub(crate) fn growing(&self) -> Option<&Growing> {
        self.sources.growing.as_deref()
    }

    pub(crate) fn layers(&self) -> Option<&Arc<Layers>> {
        self.sources.layers.as_ref()
    }

    /// The same sources otherwise: `map` may only speak of these.
    #[must_use]
    pub fn otherwise(&self, map: Map, read_only: bool, direct: DirectIo) -> Serving {
        let (sources, interceptor) = (Arc::clone(&self.sources), self.interceptor.clone());
        Serving { map: Arc::new(map), read_only, direct, unit: self.unit, sources, interceptor }
    }

    /// The descriptors of the first sources that cross to another process, in the order in which maps speak
    /// of the sources.
    pub fn crossing(&self, sources: usize) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.targets().iter().take(sources).flat_map(Target::crossing)
    }

    /// The descriptors of each source for the table of a ring.
    pub fn descriptors(&self) -> impl Iterator<Item = [Option<BorrowedFd<'_>>; SLOTS]> {
        self.targets().iter().map(Target::descriptors)
    }

    pub(crate) fn targets(&self) -> &[AnyTarget] {
        &self.sources.targets
    }

    #[inline]
    pub(crate) fn target(&self, source: u32) -> Option<&AnyTarget> {
        self.sources.targets.get(source as usize)
    }

    pub(crate) fn has_sources_of(&self, other: &Serving) -> bool {
        Arc::ptr_eq(&self.sources, &other.sources)
    }

    /// Syncs what was written and is not known to be on stable storage. The caller waits for it.
    pub(crate) fn sync_now(&self) -> Result<(), Errno> {
        let mut from = 0;
        while let Some((source, target, covers)) = self.next_to_sync(from)? {
            while !target.syncs().takes_turn() {
                std::thread::sleep(PAUSE);
            }
            let synced = match target.sync_now() {
                // Nothing is known by that. What may be lost, a flush reports.
                Err(Errno::NOTCONN) => Err(Errno::NOTCONN),
                outcome => target.syncs().synced(covers, outcome),
            };
            target.syncs().ends_turn();
            synced?;
            from = source + 1;
        }
        Ok(())
    }

    /// The source that a flush has to sync next, from `source` on, with what the sync will cover.
    pub(crate) fn next_to_sync(&self, source: u32) -> Result<Option<(u32, &AnyTarget, u64)>, Errno> {
        let writable = |target: &AnyTarget| target.is_writable() && !self.read_only;
        for (source, target) in (0..).zip(self.targets()).skip(source as usize) {
            if writable(target)
                && let Some(covers) = target.syncs().due()?
            {
                return Ok(Some((source, target, covers)));
            }
        }
        Ok(None)
    }
}

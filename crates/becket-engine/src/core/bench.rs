//! A queue for tests of the core, on a ring of its own, and images of every kind of source.

use std::{
    collections::BTreeMap,
    io::Write as _,
    os::fd::AsFd,
    sync::{
        Arc,
        mpsc::{Receiver, sync_channel},
    },
};

use becket_image::{Extent, Facts, FileKind, FileSource, Map, Place};
use rustix::io::Errno;

use super::{Core, Memory, Parts};
use crate::{
    Data, Op, Request, Serving,
    ring::Ring,
    target::{
        AnyTarget,
        double::{Double, Script},
    },
    user_data::{Source, source_of},
};

pub(super) const PAGE: u64 = 4096;
pub(super) const WRITE: Op = Op::Write { durable: false };

/// Kinds of sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Double,
}

pub(super) const KINDS: [Kind; 2] = [Kind::File, Kind::Double];

/// An image of two pages, each of which is an extent of its own and lies in the other's place.
pub(super) struct Image {
    kind: Kind,
    pub(super) script: Arc<Script>,
}

impl Image {
    pub(super) fn new(kind: Kind, byte: u8) -> Image {
        let mut file = match kind {
            Kind::File => tempfile::tempfile().unwrap(),
            Kind::Double => {
                rustix::fs::memfd_create("double", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into()
            }
        };
        file.write_all(&[byte; 2 * PAGE as usize]).unwrap();
        Image { kind, script: Script::new(file) }
    }

    pub(super) fn map() -> Map {
        let page = |at| Extent { start: at, len: PAGE, place: Place::Data { source: 0, offset: PAGE - at } };
        Map::from_extents(vec![page(0), page(PAGE)]).unwrap()
    }

    pub(super) fn target(&self) -> AnyTarget {
        match self.kind {
            Kind::File => {
                let facts = Facts { nowait: true, ..Facts::unasked(FileKind::Regular, 2 * PAGE, true) };
                let buffered = self.script.bytes.try_clone().unwrap().into();
                AnyTarget::of(FileSource::of(buffered, None, facts).into(), 1)
            }
            Kind::Double => AnyTarget::Double(Double::new(Arc::clone(&self.script), 1)),
        }
    }

    pub(super) fn serving(&self, read_only: bool) -> Arc<Serving> {
        Arc::new(Serving::with_targets(Image::map(), vec![self.target()], read_only))
    }

    /// The same, whose script happens to files, too.
    pub(super) fn scripted(&self) -> Arc<Serving> {
        let serving = Serving::with_targets(Image::map(), vec![self.target()], false);
        Arc::new(match self.kind {
            Kind::File => serving.intercepted_by(Arc::clone(&self.script) as Arc<dyn crate::Interceptor>),
            Kind::Double => serving,
        })
    }

    pub(super) fn holds(&self, byte: u8) -> bool {
        self.script.now() == [byte; 2 * PAGE as usize]
    }
}

pub(super) struct Bench {
    pub(super) core: Core,
    pub(super) ring: Ring,
}

impl Bench {
    pub(super) fn new(serving: &Arc<Serving>) -> Bench {
        let (port, _writer) = rustix::pipe::pipe().unwrap();
        let parts = Parts {
            descriptor: port.as_fd(),
            tether: None,
            bell: None,
            guest: None,
            mailbox: &crate::decode::unheard(),
            depth: 4,
            number: 0,
            serving,
            memory: Memory::Buffers(2 * PAGE as usize),
            batch: None,
            stats: &Arc::default(),
        };
        let mut ring = Ring::new(0).unwrap();
        let core = Core::new(&mut ring, 0, &parts).unwrap();
        Bench { core, ring }
    }

    /// Begins to fill the image.
    pub(super) fn fill(&mut self, tag: u16, byte: u8) {
        self.core.buffer(tag).fill(byte);
        self.begin(tag, WRITE);
    }

    /// Begins a request for all of it.
    pub(super) fn begin(&mut self, tag: u16, op: Op) {
        let (len, data) = match op {
            Op::Flush => (0, Data::None),
            Op::Read | Op::Write { .. } => (2 * PAGE, Data::Buffer),
            _ => (2 * PAGE, Data::None),
        };
        self.core.begin(&mut self.ring, tag, Request { op, offset: 0, len, data });
    }

    pub(super) fn hold(&mut self) -> Receiver<bool> {
        let (drained, is_drained) = sync_channel(1);
        self.core.hold(drained);
        is_drained
    }

    /// Waits for completions and takes them in.
    pub(super) fn turn(&mut self) {
        for index in 0..self.ring.wait().unwrap() {
            let completion = self.ring.taken(index);
            match source_of(completion.user_data) {
                (_, Source::Serving { tag }) => self.core.operated(&mut self.ring, tag, completion.result),
                (_, Source::Intercepted { tag }) => {
                    self.core.intercepted(&mut self.ring, tag, completion.result);
                }
                (_, Source::Link { line, way }) => {
                    self.core.linked(&mut self.ring, line, way, completion.result);
                }
                (_, Source::Port(_)) => unreachable!(),
            }
        }
    }

    /// Turns until these have finished, and returns what came of them.
    pub(super) fn await_all(&mut self, tags: &[u16]) -> Vec<Result<u64, Errno>> {
        let mut results = BTreeMap::new();
        while !tags.iter().all(|tag| results.contains_key(tag)) {
            if !self.core.has_finished() {
                self.turn();
            }
            let finished = self.core.take_finished();
            for (tag, result) in &finished {
                assert_eq!(results.insert(*tag, *result), None, "tag {tag} finishes once");
            }
            self.core.give_list_back(finished);
            self.core.turn_ended(false);
        }
        tags.iter().map(|tag| results[tag]).collect()
    }

    /// Does one thing and returns what came of it.
    pub(super) fn does(&mut self, op: Op) -> Result<u64, Errno> {
        self.begin(0, op);
        self.await_all(&[0])[0]
    }
}

//! What a range of the image holds, for ports whose clients ask: data, or nothing that takes room.
//! It asks the file system where the holes of a file are (`lseek`), and moves no byte. No read or write does
//! so. What lies on a server has to be asked for (`questions`).

use becket_image::{Extent, Place};

use super::state::Core;
use crate::target::Target as _;

impl Core {
    /// How far the bytes from byte `offset` on are of one state, up to `len`: the number of bytes, and
    /// whether they take no room and whether they read as zeroes. `None`: only their server knows. It was
    /// `asked` for the request of that tag, or was not.
    pub(crate) fn status(
        &mut self,
        tag: u16,
        asked: bool,
        offset: u64,
        len: u64,
    ) -> (u64, Option<(bool, bool)>) {
        const DATA: Option<(bool, bool)> = Some((false, false));
        if !asked {
            self.lines.iter_mut().flat_map(|linked| &mut linked.questions).for_each(|it| it.forget(tag));
        }
        let Some(extent) = self.extent(offset, len) else { return (len, DATA) };
        let run = extent.len.min(len);
        let (source, offset) = match extent.place {
            Place::Zero => return (run, Some((true, true))),
            Place::Encoded { .. } => return (run, DATA),
            Place::Data { source, offset } => (source, offset),
        };
        let Some(target) = self.serving.target(source) else { return (run, DATA) };
        if !target.link().is_some_and(|link| link.answers_questions()) {
            let (run, hole) = target.hole(offset, run);
            return (run, Some((hole, hole)));
        }
        let linked = self.lines.iter_mut().find(|linked| linked.source == source);
        let answer = linked.and_then(|linked| linked.questions.as_mut()?.status_at(tag, offset));
        match answer {
            Some(Some((len, hole, zero))) => (run.min(len), Some((hole, zero))),
            Some(None) => (run, None),
            None => (run, asked.then_some((false, false))),
        }
    }

    /// Where the bytes from byte `offset` on are.
    pub(super) fn extent(&self, offset: u64, len: u64) -> Option<Extent> {
        match self.serving.growing() {
            Some(growing) => growing.lookup(&self.map, offset, len).map(|(extent, _)| extent),
            None => self.map.lookup(offset),
        }
    }
}

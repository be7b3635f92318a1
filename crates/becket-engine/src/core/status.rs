//! What a range of the image holds, for ports whose clients ask: data, or nothing that takes room.
//! It asks the file system where the holes of a file are (`lseek`), and moves no byte. No read or write does
//! so.

use becket_image::Place;

use super::state::Core;
use crate::target::Target as _;

impl Core {
    /// How far the bytes from byte `offset` on are of one state, up to `len`: the number of bytes, whether
    /// they take no room, and whether they read as zeroes.
    pub(crate) fn status(&self, offset: u64, len: u64) -> (u64, bool, bool) {
        let found = match self.serving.growing() {
            Some(growing) => growing.lookup(&self.map, offset, len).map(|(extent, _)| extent),
            None => self.map.lookup(offset),
        };
        let Some(extent) = found else { return (len, false, false) };
        let run = extent.len.min(len);
        match extent.place {
            Place::Zero => (run, true, true),
            Place::Encoded { .. } => (run, false, false),
            Place::Data { source, offset } => match self.serving.target(source) {
                Some(target) => {
                    let (run, hole) = target.hole(offset, run);
                    (run, hole, hole)
                }
                None => (run, false, false),
            },
        }
    }
}

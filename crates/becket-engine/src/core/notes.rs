//! What others say to a queue: what a request waits for is there, or something is to be done on a line.
//! Decides nothing: each note goes to the file that it concerns.

use super::state::Core;
use crate::{decode::Note, ring::Ring};

impl Core {
    /// Takes in a note.
    pub(crate) fn note_came(&mut self, ring: &mut Ring, tag: u16, note: Note) {
        match note {
            Note::Block { key, result } => self.block_came(ring, tag, key, result),
            Note::There(result) => self.room_came(ring, tag, result),
            Note::Linked(given) => self.link_came(ring, tag, given),
            Note::Flush(reply) => self.flush_asked(tag, reply),
            Note::Look => self.look(ring, tag),
            // Its line looks at the end of this turn.
            Note::Regrouped => {}
            Note::Loaded { staging, yielded } => {
                self.landed();
                self.load_ended(tag, staging, yielded);
            }
        }
    }
}

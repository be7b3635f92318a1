//! What the server of a source is asked about ranges, for ports whose clients ask
//! (`target::link::questions`).
//! Never waits, and neither reads nor writes wait for it.

use super::state::Core;
use crate::{
    ring::Ring,
    target::link::{LineWay, Questions},
};
use becket_image::Place;

impl Core {
    /// Has the server asked about the bytes of the image from byte `offset` on, up to `len`. The tag finishes
    /// once there is an answer, or if there will be none.
    pub(crate) fn ask_status(&mut self, tag: u16, offset: u64, len: u64) {
        let place = self.extent(offset, len).map(|extent| extent.place);
        if let Some(Place::Data { source, offset }) = place
            && let Some(linked) = self.lines.iter_mut().find(|linked| linked.source == source)
        {
            if linked.questions.is_none() {
                linked.questions = Questions::new().ok().map(Box::new);
            }
            if let Some(questions) = &mut linked.questions {
                // Ranges of the image that follow one another mostly do so on the server.
                return questions.queue(tag, offset, len);
            }
        }
        self.finished.push((tag, Ok(0)));
    }

    /// Asks the next question, if there is one. Says whether requests have finished by that.
    #[cold]
    pub(super) fn drive_questions(&mut self, ring: &mut Ring, number: usize) -> bool {
        let Core { lines, serving, closing, .. } = self;
        let Some(linked) = lines.get_mut(number) else { return false };
        let Some(questions) = &mut linked.questions else { return false };
        if *closing {
            questions.ends();
        }
        if questions.receives() {
            return false;
        }
        let target = serving.target(linked.source).and_then(|target| target.link());
        let entry = target.filter(|_| !*closing).and_then(|target| questions.next(target, ring.now()));
        if let Some(entry) = entry {
            let pushed = self.push_of_line(ring, number, LineWay::Answered, entry);
            return pushed.is_err() && self.status_answered(ring, number, -1);
        }
        let mut finished = false;
        let now = ring.now();
        while let Some(tag) = self.questions(number).and_then(|questions| questions.take_back(now)) {
            self.finished.push((tag, Ok(0)));
            finished = true;
        }
        finished
    }

    /// An answer has come, or never will.
    #[cold]
    pub(super) fn status_answered(&mut self, ring: &Ring, number: usize, result: i32) -> bool {
        let tag = self.questions(number).and_then(|questions| questions.received(result, ring.now()));
        self.finished.extend(tag.map(|tag| (tag, Ok(0))));
        tag.is_some()
    }

    fn questions(&mut self, number: usize) -> Option<&mut Questions> {
        self.lines.get_mut(number)?.questions.as_deref_mut()
    }
}

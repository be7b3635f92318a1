//! What one queue asks about the ranges of an export: the process that reaches the server answers
//! (`becket_image::link::states`). One question at a time; the others wait for it, and nothing else does.
//! Makes system calls that do not wait, and only when something is asked.

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::time::Duration;

use becket_image::link::{
    channel,
    states::{self, Cursor, Question},
};
use io_uring::{opcode, squeue, types::Fd};

use super::LinkTarget;
use crate::{Error, memory::Buffers};

/// How long nothing is asked after an answer could not be had, in nanoseconds.
const REST: u64 = Duration::from_secs(10).as_nanos() as u64;

/// See the module. Questions belong to requests, by their tags.
pub(crate) struct Questions {
    socket: Option<OwnedFd>,
    /// The first is with the kernel where `receives` says so.
    waiting: VecDeque<(u16, Question)>,
    receives: bool,
    number: u64,
    answer: Buffers,
    /// Whose answer that is, to what, and its bytes.
    answered: Option<(u16, Question, usize)>,
    /// Where among its ranges was looked last.
    cursor: Cursor,
    /// When something may be asked again, by the ring's clock.
    rests: u64,
}

impl Questions {
    pub(crate) fn new() -> Result<Questions, Error> {
        let answer = Buffers::small(1, states::LONGEST)?;
        let (socket, waiting) = Default::default();
        Ok(Questions {
            socket,
            waiting,
            receives: false,
            number: 0,
            answer,
            answered: None,
            cursor: Cursor::default(),
            rests: 0,
        })
    }

    /// Has a range of the source asked about.
    pub(crate) fn queue(&mut self, tag: u16, offset: u64, len: u64) {
        self.number += 1;
        self.waiting.push_back((tag, Question { number: self.number, offset, len }));
    }

    /// The operation that receives the next answer, if one is due. The answer before it is forgotten.
    pub(crate) fn next(&mut self, target: &LinkTarget, now: u64) -> Option<squeue::Entry> {
        let (_, question) = self.waiting.front().filter(|_| !self.receives && now >= self.rests)?;
        self.answered = None;
        // The process that has answered before may be gone.
        self.socket.take_if(|socket| question.ask(socket).is_err());
        if self.socket.is_none() {
            let (ours, theirs) = channel::pair().ok()?;
            channel::ask_status(target.source.asks(), theirs.as_fd()).ok()?;
            question.ask(&ours).ok()?;
            self.socket = Some(ours);
        }
        let socket = self.socket.as_ref()?;
        let (address, len) = self.answer.part(0, 0, states::LONGEST)?;
        self.receives = true;
        Some(opcode::Recv::new(Fd(socket.as_raw_fd()), address, len).build())
    }

    /// Whether an answer is being received.
    pub(crate) fn receives(&self) -> bool {
        self.receives
    }

    /// It has come, or never will. Without one, nothing is asked for a while.
    pub(crate) fn received(&mut self, result: i32, now: u64) -> Option<u16> {
        (self.receives, self.cursor) = (false, Cursor::default());
        let (tag, question) = self.waiting.pop_front()?;
        let len = usize::try_from(result).unwrap_or(0);
        let ranges = self.answer.slice(0).get(..len).and_then(|answer| question.ranges(answer));
        match ranges {
            Some(ranges) => self.answered = (!ranges.is_empty()).then_some((tag, question, len)),
            None => self.fails(now),
        }
        Some(tag)
    }

    /// Nobody answers.
    fn fails(&mut self, now: u64) {
        (self.socket, self.answered) = (None, None);
        if now >= self.rests {
            self.rests = now.saturating_add(REST);
        }
    }

    /// Whose question gets no answer, because none can be asked.
    pub(crate) fn take_back(&mut self, now: u64) -> Option<u16> {
        let (tag, _) = self.waiting.pop_front()?;
        self.fails(now);
        Some(tag)
    }

    /// Another request has that tag now.
    pub(crate) fn forget(&mut self, tag: u16) {
        self.answered.take_if(|(whose, ..)| *whose == tag);
    }

    /// What the answer to a request says of the byte at `offset` of the source, by `states::state_at`; `None`
    /// where there is no such answer.
    pub(crate) fn status_at(&mut self, tag: u16, offset: u64) -> Option<Option<(u64, bool, bool)>> {
        let (_, question, len) = self.answered.filter(|(whose, ..)| *whose == tag)?;
        let ranges = self.answer.slice(0).get(..len).and_then(|answer| question.ranges(answer))?;
        Some(
            offset.checked_sub(question.offset).and_then(|at| states::state_at(ranges, at, &mut self.cursor)),
        )
    }

    /// The queue ends, and waits for no answer.
    pub(crate) fn ends(&self) {
        if let Some(socket) = &self.socket {
            // Nothing can go wrong with a socket of ours.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer to the first question: one hole of that length.
    fn answered(questions: &mut Questions, number: u64, len: u32, now: u64) -> Option<u16> {
        let bytes = [&number.to_le_bytes()[..], &len.to_le_bytes(), &3u32.to_le_bytes()].concat();
        questions.answer.slice(0)[..bytes.len()].copy_from_slice(&bytes);
        questions.receives = true;
        questions.received(bytes.len() as i32, now)
    }

    #[test]
    fn an_answer_is_for_its_request_alone() {
        let mut questions = Questions::new().unwrap();
        questions.queue(7, 4096, 1 << 20);
        questions.queue(8, 0, 512);
        assert_eq!(answered(&mut questions, 1, 512, 0), Some(7));
        assert_eq!(questions.status_at(7, 4097), Some(Some((511, true, true))));
        assert_eq!([4095, 4608].map(|at| questions.status_at(7, at)), [Some(None); 2], "nothing beyond it");
        assert_eq!(questions.status_at(8, 0), None);
        // The next request of that tag knows nothing.
        questions.forget(8);
        assert!(questions.status_at(7, 4096).is_some());
        questions.forget(7);
        assert_eq!(questions.status_at(7, 4096), None);
    }

    #[test]
    fn without_an_answer_nothing_is_known_and_nothing_is_asked_for_a_while() {
        let mut questions = Questions::new().unwrap();
        for number in 1..=3 {
            questions.queue(number, 0, 512);
        }
        assert_eq!(answered(&mut questions, 1, 512, 5), Some(1));
        // The answer to another question is none.
        assert_eq!(answered(&mut questions, 1, 512, 5), Some(2));
        assert_eq!((questions.status_at(1, 0), questions.status_at(2, 0)), (None, None));
        assert_eq!(questions.rests, 5 + REST);
        assert_eq!((questions.take_back(6), questions.take_back(6)), (Some(3), None));
        assert_eq!(questions.rests, 5 + REST, "no longer for it");
    }
}

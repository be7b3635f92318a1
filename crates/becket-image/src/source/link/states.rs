//! What ranges of an export hold, asked of the process that reaches its server. Who asks hears none of the
//! server's own words, and does not wait: a question and its answer are a message each, over a pair of
//! sockets of which the other end was sent along ([`channel::ask_status`](super::channel)).
//!
//! A question is a number, an offset and a length. An answer has the number of its question, and length and
//! state (`becket_uapi::nbd::STATE_*`) of each range from that offset on; none where nothing is known.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use becket_uapi::nbd;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, sendmsg};

pub use super::conn::State;
use super::pool;
use super::reader::LinkReader;
use super::{Endpoint, Trust, Wanted};

/// The most ranges of an answer: as many as one reply to a client of an export has.
const MOST: usize = 1024;
/// Bytes of the longest answer.
pub const LONGEST: usize = NUMBER + MOST * RANGE;
/// Bytes of a question's number, and of the description of a range.
const NUMBER: usize = 8;
const RANGE: usize = 8;
/// How long a server that has not answered is not asked again.
const REST: Duration = Duration::from_secs(10);

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    /// Comes back with the answer.
    pub number: u64,
    /// First byte in the export.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Question {
    /// Asks it, by a call that a worker may make. Never waits.
    ///
    /// # Errors
    /// Nobody is there, or has heard the questions before this one.
    pub fn ask(&self, socket: impl AsFd) -> io::Result<()> {
        let bytes = [self.number, self.offset, self.len].map(u64::to_le_bytes).concat();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(socket, &[IoSlice::new(&bytes)], &mut SendAncillaryBuffer::default(), flags)?;
        Ok(())
    }

    /// `None` where these bytes are none.
    fn read(bytes: &[u8]) -> Option<Question> {
        let bytes: &[u8; 24] = bytes.try_into().ok()?;
        let at = |at: usize| bytes.get(at..)?.first_chunk().map(|number| u64::from_le_bytes(*number));
        Some(Question { number: at(0)?, offset: at(8)?, len: at(16)? })
    }

    /// The ranges of its answer; `None` where these bytes are none.
    pub fn ranges<'a>(&self, answer: &'a [u8]) -> Option<&'a [u8]> {
        let (number, ranges) = answer.split_first_chunk()?;
        (u64::from_le_bytes(*number) == self.number).then_some(ranges)
    }
}

/// A place among such ranges: the number of a range, and how many bytes the ranges before it have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cursor {
    range: usize,
    before: u64,
}

/// What such ranges say of the byte that is `at` bytes behind the first: how many bytes from there on are so,
/// whether they take no room, and whether they read as zeroes. `None` behind the last range. It is looked for
/// from the cursor on, which stays at it: those who ask for one byte after another pass each range once.
pub fn state_at(ranges: &[u8], at: u64, cursor: &mut Cursor) -> Option<(u64, bool, bool)> {
    if at < cursor.before {
        *cursor = Cursor::default();
    }
    for range in ranges.chunks_exact(RANGE).skip(cursor.range) {
        let (len, state) = range.split_first_chunk()?;
        let (len, state) = (u64::from(u32::from_le_bytes(*len)), u32::from_le_bytes(*state.first_chunk()?));
        let end = cursor.before + len;
        if at < end {
            return Some((end - at, state & nbd::STATE_HOLE != 0, state & nbd::STATE_ZERO != 0));
        }
        *cursor = Cursor { range: cursor.range + 1, before: end };
    }
    None
}

/// Answers questions, one after another, until nobody asks any more.
pub fn answer(socket: &OwnedFd, mut states: impl FnMut(u64, u64) -> Vec<State>) {
    let mut bytes = [0; 32];
    while let Ok((got, _)) =
        rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut bytes, RecvFlags::empty()))
    {
        let Some(question) = bytes.get(..got).and_then(Question::read) else { return };
        let mut answer = question.number.to_le_bytes().to_vec();
        for (len, state) in states(question.offset, question.len).into_iter().take(MOST) {
            answer.extend(len.to_le_bytes().into_iter().chain(state.to_le_bytes()));
        }
        if rustix::net::send(socket, &answer, SendFlags::NOSIGNAL).is_err() {
            return;
        }
    }
}

/// Asks a server for all who ask this process, over a connection of its own: no read waits for an answer.
#[derive(Debug)]
pub struct Describer {
    endpoint: Endpoint,
    trust: Option<Trust>,
    patience: Duration,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    reader: Option<LinkReader>,
    /// The server has not answered, and is not asked before.
    rests: Option<Instant>,
}

impl Describer {
    /// Of the export of a server which may take that long for an answer. It is not connected to before the
    /// first question.
    pub fn new(endpoint: Endpoint, trust: Option<Trust>, patience: Duration) -> Describer {
        Describer { endpoint, trust, patience: patience.min(pool::PATIENCE), inner: Mutex::default() }
    }

    /// What the server says of a range, or of its beginning; nothing where it cannot be asked.
    pub fn states(&self, offset: u64, len: u64) -> Vec<State> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.rests.is_some_and(|until| Instant::now() < until) {
            return Vec::new();
        }
        let reader = inner.reader.take().map_or_else(|| self.connect(), Some);
        let said = reader.and_then(|reader| Some((reader.states(offset, len).ok()?, reader)));
        let Some((states, reader)) = said else {
            inner.rests = Some(Instant::now() + REST);
            return Vec::new();
        };
        inner.reader = Some(reader);
        states
    }

    fn connect(&self) -> Option<LinkReader> {
        let wanted = Wanted { structured: true, ..Wanted::default() };
        let reader = LinkReader::connect(&self.endpoint, wanted, self.trust.as_ref(), self.patience).ok()?;
        reader.agreed().allocation.map(|_| reader)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::channel::pair;
    use super::*;

    #[test]
    fn a_question_gets_the_answer_that_was_found() {
        let (ours, theirs) = pair().unwrap();
        let answering = std::thread::spawn(move || {
            answer(&theirs, |offset, len| match (offset, len) {
                (7, u64::MAX) => vec![(3, nbd::STATE_HOLE | nbd::STATE_ZERO), (5, 0), (9, nbd::STATE_HOLE)],
                (8, 1) => vec![(1, 0); 5000],
                _ => Vec::new(),
            });
        });
        let ask = |question: Question| {
            question.ask(&ours).unwrap();
            let mut bytes = vec![0; LONGEST + 1];
            let got = rustix::net::recv(&ours, &mut bytes, RecvFlags::empty()).unwrap().0;
            question.ranges(&bytes[..got]).map(<[u8]>::to_vec)
        };
        let found = ask(Question { number: 1, offset: 7, len: u64::MAX }).unwrap();
        let at = |at| state_at(&found, at, &mut Cursor::default());
        assert_eq!((at(0), at(2)), (Some((3, true, true)), Some((1, true, true))));
        assert_eq!((at(3), at(7)), (Some((5, false, false)), Some((1, false, false))));
        assert_eq!((at(8), at(17), at(u64::MAX)), (Some((9, true, false)), None, None));
        assert_eq!(ask(Question { number: 2, offset: 8, len: 1 }).unwrap().len(), MOST * RANGE);
        assert_eq!(ask(Question { number: 3, offset: 0, len: 1 }), Some(Vec::new()));
        let other = Question { number: 4, offset: 0, len: 1 };
        assert_eq!(other.ranges(&3u64.to_le_bytes()), None, "the answer to another question");
        drop(ours);
        answering.join().unwrap();
    }

    proptest! {
        #[test]
        fn whatever_is_answered_is_a_hole_only_where_it_is_said(
            said in prop::collection::vec((0u32..20, any::<u32>()), 0..8), cut in 0usize..8, places in prop::collection::vec(0u64..200, 1..8),
        ) {
            let words = said.iter().flat_map(|(len, state)| [*len, *state]);
            let mut bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
            bytes.truncate(bytes.len().saturating_sub(cut));
            let whole = &said[..bytes.len() / RANGE];
            let each: Vec<u32> =
                whole.iter().flat_map(|(len, state)| std::iter::repeat_n(*state, *len as usize)).collect();
            let mut cursor = Cursor::default();
            for at in places {
                match state_at(&bytes, at, &mut cursor) {
                    None => prop_assert!(at >= each.len() as u64),
                    Some((len, hole, zero)) => {
                        prop_assert!(len > 0);
                        for state in &each[at as usize..(at + len) as usize] {
                            prop_assert_eq!((state & 1 != 0, state & 2 != 0), (hole, zero));
                        }
                    }
                }
            }
        }
    }
}

//! A compressed object that is fetched while it is decoded: read in its order, with requests ahead.
//! Nothing is fetched far ahead before much was read: a look at its start costs no more than that.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use becket_image::ReadAt as _;

use crate::Error;
use crate::object::Object;
use crate::order::PackedAt;
use crate::stream::Packed;
use crate::table::index;

/// How many requests are in flight, and how many bytes each asks for.
const LINES: usize = 4;
const PART: u64 = 1 << 20;
/// How far is fetched ahead at most, in bytes.
const AHEAD: u64 = 16 << 20;
/// Each thread's stack in bytes: the process's memory may be locked.
const STACK: usize = 512 << 10;

/// Hears whether bytes were there, and if not, why; says whether to try again.
pub(crate) type Heard = Box<dyn Fn(Result<(), &Error>) -> bool + Send + Sync>;

/// See the module.
pub(crate) struct InOrder {
    shared: Arc<Shared>,
    heard: Heard,
}

struct Shared {
    object: Arc<Object>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Where the reader is, and from where on nothing was asked for yet.
    at: u64,
    next: u64,
    /// The threads that fetch were started.
    begun: bool,
    ends: bool,
}

impl InOrder {
    pub(crate) fn new(object: Arc<Object>, heard: Heard) -> InOrder {
        InOrder {
            shared: Arc::new(Shared { object, state: Mutex::default(), changed: Condvar::new() }),
            heard,
        }
    }

    /// The reader is at `at`.
    fn reached(&self, at: u64) {
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.at = at;
        state.next = state.next.max(at);
        if at >= PART && !state.begun {
            state.begun = true;
            for _ in 0..LINES {
                let shared = Arc::clone(&self.shared);
                // Without them it comes all the same.
                let _ = std::thread::Builder::new().stack_size(STACK).spawn(move || shared.work());
            }
        }
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// Fetches ahead of the reader until it is gone.
    fn work(&self) {
        let chunk = self.object.held.meta.chunk;
        loop {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let (start, end) = loop {
                let most = self.object.held.meta.size.min(state.at.saturating_add(state.at.min(AHEAD)));
                if state.ends {
                    return;
                }
                if state.next < most {
                    break (state.next, most.min(state.next + PART));
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            state.next = end;
            drop(state);
            // Why it does not come the reader hears.
            let _ = self.object.ensure(start / chunk..end.div_ceil(chunk));
        }
    }
}

impl Packed for InOrder {
    fn read(&self, buf: &mut [u8], at: u64) -> Result<usize, Error> {
        let Shared { object, .. } = &*self.shared;
        let (size, chunk) = (object.held.meta.size, object.held.meta.chunk);
        let len = buf.len().min(index(size.saturating_sub(at)));
        let Some(buf) = buf.get_mut(..len).filter(|buf| !buf.is_empty()) else { return Ok(0) };
        self.reached(at);
        while let Err(error) = object.ensure(at / chunk..(at + len as u64).div_ceil(chunk)) {
            if !(self.heard)(Err(&error)) {
                return Err(error);
            }
        }
        (self.heard)(Ok(()));
        object.read_at(buf, at).map_err(object.failed("what was fetched cannot be read"))?;
        Ok(len)
    }

    fn is_near(&self) -> bool {
        false
    }

    fn lend(&self) -> io::Result<(PackedAt, Vec<OwnedFd>)> {
        let object = &self.shared.object;
        Ok((PackedAt::Object(Box::new(object.order()?.0)), object.envelopes()?))
    }
}

impl Drop for InOrder {
    fn drop(&mut self) {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner).ends = true;
        self.shared.changed.notify_all();
    }
}

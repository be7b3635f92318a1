//! A stream that is decoded chunk by chunk, as readers need what it yields. Its length is known before.
//! It never hands out the last chunk before the stream has ended where it should.

use std::fs::File;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use becket_image::zeroes;

use crate::Error;
use crate::stream::{Decoding, LOOK_EVERY, Stream};

/// See the module.
pub(crate) struct Steps {
    pub(crate) stream: Stream,
    next: Mutex<Next>,
}

/// The chunk that comes next.
#[derive(Default)]
struct Next {
    decoding: Option<Decoding>,
    /// Its first byte.
    start: u64,
    /// Its bytes, once it `is_there`.
    buffer: Vec<u8>,
    is_there: bool,
    /// Bytes before it that are not zeroes.
    stored: u64,
    /// When it was last looked whether there is room.
    looked: u64,
    /// Why it goes no further, and what helps.
    damaged: Option<(String, Option<String>)>,
}

/// Takes a chunk by its number.
type Take<'a> = dyn FnMut(u64, &[u8]) -> Result<(), Error> + 'a;

/// Into which file, and what of it.
pub(crate) struct Room<'a> {
    pub(crate) data: &'a File,
    pub(crate) path: &'a Path,
    /// Its length in bytes, and that of a chunk.
    pub(crate) size: u64,
    pub(crate) chunk: u64,
}

impl Steps {
    pub(crate) fn new(stream: Stream) -> Steps {
        Steps { stream, next: Mutex::default() }
    }

    /// Decodes the next chunk, the first one after the last, and has it taken by `take` with its number.
    /// One that could not be taken comes again.
    pub(crate) fn step(&self, room: &Room<'_>, take: &mut Take<'_>) -> Result<(), Error> {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((why, fix)) = &next.damaged {
            return Err(self.stream.failed(why.clone(), fix.clone()));
        }
        let len = room.chunk.min(room.size.saturating_sub(next.start));
        if let Err(error) = self.fill(&mut next, usize::try_from(len).unwrap_or(usize::MAX), room.size) {
            // The decoder knows no way back.
            *next = Next::default();
            if let Error::Stream { why, fix, .. } = &error {
                next.damaged = Some((why.clone(), fix.clone()));
            }
            return Err(error);
        }
        let end = next.start + len;
        if end - next.looked >= LOOK_EVERY {
            self.stream.check_room(room.data, room.path, end, next.stored)?;
            next.looked = end;
        }
        take(next.start / room.chunk, &next.buffer)?;
        let stored = if zeroes::is_all(&next.buffer) { 0 } else { len };
        (next.start, next.is_there, next.stored) = (end, false, next.stored + stored);
        if end == room.size {
            // Decoders take much memory.
            *next = Next::default();
        }
        Ok(())
    }

    /// Decodes the next chunk, which has so many bytes, unless it is there. The last one is there once the
    /// stream has ended.
    fn fill(&self, next: &mut Next, len: usize, size: u64) -> Result<(), Error> {
        let Next { decoding, buffer, is_there, start, .. } = next;
        if *is_there {
            return Ok(());
        }
        let decoding = match decoding {
            Some(decoding) => decoding,
            none => none.insert(self.stream.begin()?),
        };
        buffer.resize(len, 0);
        if self.stream.fill(decoding, buffer)? < len {
            let why = format!("it yields {} bytes, and says {size}", decoding.done);
            return Err(self.stream.failed(why, Some(again())));
        }
        if *start + len as u64 == size && self.stream.read(decoding, &mut [0])? > 0 {
            let why = format!("it yields more than the {size} bytes that it says");
            return Err(self.stream.failed(why, Some(again())));
        }
        *is_there = true;
        Ok(())
    }
}

fn again() -> String {
    "run the command again: it then decodes all of the file before it uses it".to_owned()
}

//! Compares what the store has of an object with its checksums, and the whole with its digest.
//! It never takes from a process or a device what that uses.

use std::io;

use serde::Serialize;

use crate::Error;
use crate::digest;
use crate::store::{Entry, Store, checksum, is_lost, read_meta, unused};

/// What a check of an object found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Bytes whose checksum is right.
    pub good: u64,
    /// Bytes whose checksum was wrong: they are fetched again when they are needed by what does not read them
    /// already.
    pub damaged: u64,
    /// Whether a process or a device uses it, and may read what is damaged.
    pub in_use: bool,
}

impl Store {
    /// Compares all chunks of an object with their checksums. Chunks that are damaged are fetched again when
    /// they are needed: who begins to use it compares them, too. As long as it is in use they are found again
    /// each time, for what has compared them before goes on with them. `step` hears how many bytes were
    /// looked at.
    ///
    /// # Errors
    /// The object cannot be read.
    pub fn verify(&self, entry: &Entry, step: &mut dyn FnMut(u64)) -> Result<Verified, Error> {
        let failed = || Error::store(&entry.path, "it cannot be read");
        let missing = || failed()(io::ErrorKind::NotFound.into());
        let meta = read_meta(&entry.dir).map_err(failed())?.ok_or_else(missing)?;
        let in_use = unused(&entry.dir, &entry.path).map_err(failed())?.is_none();
        let held = match self.look(&entry.dir, &meta) {
            Err(error) if !is_lost(&error) => return Err(failed()(error)),
            Ok(Some(held)) => held,
            // One of its files is lost. It is made anew when it is needed.
            _ => return Ok(Verified { good: 0, damaged: entry.stored, in_use }),
        };
        let mut verified = Verified { good: 0, damaged: 0, in_use };
        let mut buffer = vec![0; 128 << 10];
        for (chunk, sum) in (0..).zip(held.table.sums(0..held.meta.chunks())) {
            let Some(sum) = sum else { continue };
            let (start, len) = held.part(chunk);
            match checksum(&held.data, start, len, &mut buffer).map_err(failed())? == sum {
                true => verified.good += len,
                false => {
                    if !in_use {
                        held.table.clear(chunk..chunk + 1).map_err(failed())?;
                    }
                    verified.damaged += len;
                }
            }
            step(verified.good + verified.damaged);
        }
        if digest::is_due(&held) {
            match digest::is_right(&held).map_err(failed())? {
                true => digest::note(&held).map_err(failed())?,
                false => {
                    if !in_use {
                        held.table.clear(0..held.meta.chunks()).map_err(failed())?;
                    }
                    verified = Verified { good: 0, damaged: held.meta.size, in_use };
                }
            }
        }
        Ok(verified)
    }
}

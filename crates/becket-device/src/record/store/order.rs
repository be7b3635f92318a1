//! What keeps the records in order, beside the devices' own use of them.
//! Readers never do any of it: a look at a record changes nothing.

use std::fs;

use tracing::warn;

use super::reading::{Looked, same_use, with_note};
use super::{Device, Entry, Store};
use crate::contract::Error;

impl Store {
    /// Sets aside what is not a record. For the supervisor when it begins.
    pub(crate) fn sweep(&self) {
        for name in self.names().unwrap_or_default() {
            let wrong = |looked: &Looked| matches!(looked, Looked::Corrupt(_) | Looked::Foreign);
            if !self.look(&name).is_ok_and(|looked| wrong(&looked)) {
                continue;
            }
            // Looked at again under the lock: it may have been replaced.
            let aside =
                self.lock(&name).and_then(|_lock| self.look(&name).and_then(|at| self.set_aside(&name, &at)));
            if let Err(error) = aside {
                warn!("{error}");
            }
        }
    }

    /// Notes that a device's worker is of another version, and changes nothing else: the record stays one
    /// that its own version reads.
    pub(crate) fn note_unspoken(&self, device: &Device, why: &str) -> Result<(), Error> {
        let name = &device.info.name;
        let _lock = self.lock(name)?;
        let path = self.path(name);
        if !matches!(self.read(name)?, Some(Entry::Device(found)) if same_use(&found, device)) {
            return Ok(());
        }
        let text = fs::read(&path).map_err(Error::io("read", &path))?;
        let noted = with_note(&text, "unspoken", why).map_err(Error::io("write", &path))?;
        self.prepare_text(name, &noted, true).map_err(Error::io("write", &path))?.publish()?;
        Ok(())
    }
}

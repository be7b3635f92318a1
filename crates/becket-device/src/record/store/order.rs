//! What keeps the records in order, beside the devices' own use of them.
//! Readers never do any of it: a look at a record changes nothing.

use std::fs;
use std::time::{Duration, SystemTime};
use tracing::warn;

use super::reading::{Looked, same_use, with_note};
use super::{Device, Entry, Store};
use crate::contract::Error;

impl Store {
    /// Removes what those left who died while they wrote a record (nobody takes a minute for it), and sets
    /// aside what is not a record. For the supervisor when it begins.
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
        for item in fs::read_dir(self.runtime.records()).into_iter().flatten().flatten() {
            let is_old = |at: SystemTime| at.elapsed().is_ok_and(|age| age > Duration::from_secs(60));
            let file = item.file_name().into_string().unwrap_or_default();
            if file.starts_with('.')
                && file.ends_with(".new")
                && item.metadata().and_then(|meta| meta.modified()).is_ok_and(is_old)
            {
                // One that stays does no harm.
                let _ = fs::remove_file(item.path());
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

//! Files beside the records: notes of devices that are being made, and what those left who died while they
//! wrote.
//! No record is touched here.

use std::fs;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Beside, Store};
use crate::contract::Error;
use crate::system::process::ProcessId;

/// That a process makes a device which has no record yet.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Note {
    maker: ProcessId,
    /// By which the device is known.
    pub(crate) mark: u64,
    /// What the kernel calls the file that it is over.
    #[serde(with = "crate::contract::path_text::one")]
    pub(crate) backing: PathBuf,
}

/// A file of one who died.
#[derive(Debug)]
pub(crate) struct Left {
    path: PathBuf,
    /// What was being made; a record may be in its place by now.
    pub(crate) note: Option<Note>,
}

impl Left {
    pub(crate) fn forget(&self) {
        // Another process may have done so.
        let _ = fs::remove_file(&self.path);
    }
}

impl Store {
    /// Notes that this process makes a device, until the answer is dropped.
    pub(crate) fn note(&self, mark: u64, backing: PathBuf) -> Result<Beside, Error> {
        let note = Note { maker: ProcessId::own(), mark, backing };
        let text = serde_json::to_vec(&note).map_err(io::Error::from);
        let written = text.and_then(|text| self.prepare_text("", &text, false));
        Ok(written.map_err(Error::io("write a note in", &self.runtime.records()))?.beside)
    }

    /// What those left who died while they wrote, or made a device.
    pub(crate) fn left(&self) -> Vec<Left> {
        let files = fs::read_dir(self.runtime.records()).into_iter().flatten().flatten();
        let left = |item: fs::DirEntry| {
            let file = item.file_name().into_string().ok()?;
            let (name, _serial) = file.strip_prefix('.')?.strip_suffix(".new")?.rsplit_once('.')?;
            let pid = name.rsplit_once('.')?.1.parse().ok()?;
            let path = item.path();
            let note: Option<Note> = fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
            let lives = note.as_ref().map_or_else(|| ProcessId::of(pid).is_some(), |note| note.maker.alive());
            (!lives).then_some(Left { path, note })
        };
        files.filter_map(left).collect()
    }
}

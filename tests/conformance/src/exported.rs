//! becket over becket: each image is exported over NBD, and the device under test is attached from there.
//! What a test does to a device goes through the export's server, the protocol and the source of the same
//! name. Must never reach an image in another way: only tests that check image paths see the file instead.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};

use crate::bench::skip;
use crate::driver::{Attach, Becket, Driver, Info};

/// An image, its export, and the device over that.
struct Export {
    image: PathBuf,
    name: String,
    uri: String,
    device: PathBuf,
}

/// The `becket` command, given exports instead of images.
pub(crate) struct Exported {
    becket: Becket,
    /// Where the sockets are: a path of a socket must be short.
    sockets: tempfile::TempDir,
    count: AtomicU32,
    exports: Mutex<Vec<Export>>,
}

impl Exported {
    pub(crate) fn new(becket: Becket) -> Result<Self> {
        let sockets = tempfile::tempdir()?;
        Ok(Self { becket, sockets, count: AtomicU32::new(0), exports: Mutex::default() })
    }

    fn exports(&self) -> MutexGuard<'_, Vec<Export>> {
        // A test that panicked changed nothing halfway.
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a device's export.
    fn end(&self, device: &Path, end: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let mut exports = self.exports();
        let Some(at) = exports.iter().position(|export| export.device == device) else { return Ok(()) };
        end(Path::new(&exports.remove(at).name))
    }

    /// A device of the list, with the image and the worker of its export.
    fn shown(exports: &[Export], all: &[Info], info: &Info) -> Option<Info> {
        let export = exports.iter().find(|export| export.device == info.device)?;
        let below = all.iter().find(|other| other.name.as_deref() == Some(&export.name))?;
        let image = if info.image == Path::new(&export.uri) { &export.image } else { &info.image };
        Some(Info { image: image.clone(), worker_pid: below.worker_pid, ..info.clone() })
    }
}

impl Driver for Exported {
    fn is_becket(&self) -> bool {
        true
    }

    fn attach(&self, image: &Path, options: &Attach) -> Result<Info> {
        let name = format!("export{}", self.count.fetch_add(1, Ordering::Relaxed));
        let socket = self.sockets.path().join(&name);
        let uri = self.becket.export(image, options, &name, &socket)?;
        // Where the export begins and ends, and how it reaches its file, is not the device's concern.
        let above = Attach { offset: 0, size_limit: None, direct_io: None, ..options.clone() };
        let device = match self.becket.attach(Path::new(&uri), &above) {
            Ok(info) => info.device,
            Err(error) => {
                self.becket.detach(Path::new(&name))?;
                return Err(error);
            }
        };
        let export = Export { image: image.to_owned(), name, uri, device: device.clone() };
        self.exports().push(export);
        let mut list = self.list()?.into_iter();
        list.find(|info| info.device == device).context("an attached device is in the list")
    }

    fn detach(&self, target: &Path) -> Result<()> {
        self.becket.detach(target)?;
        self.end(target, |export| self.becket.detach(export))
    }

    fn abandon(&self, target: &Path) -> Result<()> {
        self.becket.abandon(target)?;
        self.end(target, |export| self.becket.abandon(export))
    }

    fn list(&self) -> Result<Vec<Info>> {
        let (all, exports) = (self.becket.list()?, self.exports());
        Ok(all.iter().filter_map(|info| Self::shown(&exports, &all, info)).collect())
    }

    fn refresh(&self, target: &Path) -> Result<()> {
        self.becket.refresh(target)?;
        skip("a device on a server hears of another length when it connects anew")
    }

    fn set_direct_io(&self, _: &Path, _: &str) -> Result<()> {
        skip("a device over an export has no direct I/O of its own")
    }

    fn set(&self, target: &Path, words: &[&str]) -> Result<()> {
        match (self.becket.set(target, words), words) {
            (Err(error), ["--image" | "--size-limit", ..])
                if format!("{error:#}").contains("becket detach") =>
            {
                skip("a device on a server keeps its image and its length, and says so")
            }
            (outcome, _) => outcome,
        }
    }

    fn records(&self) -> Option<PathBuf> {
        self.becket.records()
    }
}

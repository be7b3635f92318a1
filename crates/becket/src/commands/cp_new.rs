//! Something new in a directory of the host, until it is complete: taken away if it never is.
//! Never takes away what has got its own name.

use rustix::{fs::AtFlags, io::Errno};
use std::{fs::File, os::fd::OwnedFd, rc::Rc, sync::Arc};

/// Something that was made and is not complete.
pub(super) struct New {
    pub(super) dir: Rc<OwnedFd>,
    pub(super) name: Vec<u8>,
    /// The name is not its own, which another file has until this one replaces it.
    pub(super) hidden: bool,
    /// It, if it is a file.
    pub(super) file: Option<Arc<File>>,
    complete: bool,
}

impl New {
    pub(super) fn made(dir: Rc<OwnedFd>, name: Vec<u8>, hidden: bool, file: Option<File>) -> Self {
        Self { dir, name, hidden, file: file.map(Arc::new), complete: false }
    }

    /// The file, to write to it.
    pub(super) fn file(&self) -> Option<Arc<File>> {
        self.file.clone()
    }

    /// It is complete and gets its own name.
    pub(super) fn settle(mut self, own: &[u8]) -> Result<(), Errno> {
        if self.hidden {
            rustix::fs::renameat(&self.dir, &self.name, &self.dir, own)?;
        }
        // Two names of one file both stay when renamed: the hidden one goes in any case.
        self.complete = !self.hidden;
        Ok(())
    }
}

impl Drop for New {
    fn drop(&mut self) {
        if !self.complete {
            // Why it is not complete is reported, not this.
            let _ = rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty());
        }
    }
}

//! A directory for one command, on a file system in memory where there is one.
//! It is never that of another process, and is removed when nothing needs it any more; what a process has
//! left that was killed is removed by the next one.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Access, FlockOperation, flock};

use crate::Error;

/// Where sparse files need no room, even if every disk is full.
const SHARED: &str = "/dev/shm";
/// What the directories' names begin with.
const PREFIX: &str = "becket-nostore-";
/// How many names are tried.
const TRIES: u32 = 64;

/// See the module.
#[derive(Debug)]
pub(crate) struct Temporary {
    path: PathBuf,
    /// Locked as long as it is needed.
    _lock: File,
}

impl Temporary {
    pub(crate) fn new() -> Result<Temporary, Error> {
        let usable = rustix::fs::access(SHARED, Access::WRITE_OK | Access::EXEC_OK).is_ok();
        let place = if usable { PathBuf::from(SHARED) } else { std::env::temp_dir() };
        sweep(&place);
        Temporary::within(&place)
    }

    fn within(place: &Path) -> Result<Temporary, Error> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        for _ in 0..TRIES {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = place.join(format!("{PREFIX}{}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made.map_err(Error::store(&path, "it cannot be made"))?,
            }
            let lock = File::open(&path).map_err(Error::store(&path, "it cannot be opened"))?;
            // Where another process has just removed it, the next name is tried.
            if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() && path.exists() {
                return Ok(Temporary { path, _lock: lock });
            }
        }
        Err(Error::store(place, "no directory can be made in it")(io::ErrorKind::AlreadyExists.into()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Its files have no bytes on a disk, wherever they stay.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Removes what processes of this user have left that were killed.
fn sweep(place: &Path) {
    let ours = rustix::process::geteuid().as_raw();
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let is_one = entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes());
        // No link is followed: the directory may be others', too.
        let of_us = || entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == ours);
        if is_one
            && of_us()
            && let Ok(dir) = File::open(entry.path())
            && flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_has_left_is_removed_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let ours = Temporary::within(place.path()).unwrap();
        let left = place.path().join(format!("{PREFIX}1-0"));
        fs::create_dir_all(left.join("v1")).unwrap();
        let (other, link) = (place.path().join("other"), place.path().join(format!("{PREFIX}2-0")));
        fs::create_dir(&other).unwrap();
        std::os::unix::fs::symlink(&other, &link).unwrap();
        sweep(place.path());
        assert!(ours.path().exists() && !left.exists() && other.exists() && link.is_symlink());
        let path = ours.path().to_owned();
        drop(ours);
        assert!(!path.exists());
    }
}

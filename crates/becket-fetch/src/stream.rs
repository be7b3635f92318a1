//! A file compressed as one piece, as it is decoded from its start to its end.
//! It never yields a byte that was decoded from a file that has changed, and no last byte before the end of
//! the file was found to be right.

use std::fs::{File, Metadata};
use std::io::{self, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Error;
use crate::order::PackedAt;
use crate::store::SIZE_MAX;
use crate::unpack::Packing;

/// How much of the file is read at once.
const READ: usize = 256 << 10;
/// How often, in decoded bytes, it is looked whether there is room.
pub(crate) const LOOK_EVERY: u64 = 8 << 20;
/// What is left free on the store's file system: this part of it, and no more than so many bytes.
const FREE_PART: u64 = 32;
const FREE_MOST: u64 = 1 << 30;

/// The bytes of a compressed file.
pub(crate) trait Packed: Send + Sync {
    /// Fills the start of `buf` with bytes from `at` on; says how many there are, which is none at the end.
    fn read(&self, buf: &mut [u8], at: u64) -> Result<usize, Error>;

    /// Whether they are on this host, so that it costs little to look anywhere.
    fn is_near(&self) -> bool;

    /// What another process needs to read them.
    fn lend(&self) -> io::Result<(PackedAt, Vec<OwnedFd>)>;
}

/// A file of this host that is complete.
pub(crate) struct PackedFile {
    pub(crate) file: File,
    /// [`written`] when it was opened.
    pub(crate) state: String,
    /// What people know it by.
    pub(crate) called: String,
}

/// A line that another state of a file does not have.
pub(crate) fn state_of(meta: &Metadata) -> String {
    let times = (meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec());
    format!("{}:{} {} {times:?}", meta.dev(), meta.ino(), meta.len())
}

/// The same of a file that is open: it may get another name or other rights.
pub(crate) fn written(meta: &Metadata) -> String {
    format!("{} {:?}", meta.len(), (meta.mtime(), meta.mtime_nsec()))
}

impl Packed for PackedFile {
    fn read(&self, buf: &mut [u8], at: u64) -> Result<usize, Error> {
        let read = self.file.read_at(buf, at).map_err(Error::store(&self.called, "it cannot be read"))?;
        let meta = self.file.metadata().map_err(Error::store(&self.called, "it cannot be looked up"))?;
        if written(&meta) != self.state {
            let why = "it was written to while it was decoded".to_owned();
            return Err(Error::Changed { url: self.called.clone(), why });
        }
        Ok(read)
    }

    fn is_near(&self) -> bool {
        true
    }

    fn lend(&self) -> io::Result<(PackedAt, Vec<OwnedFd>)> {
        Ok((PackedAt::File { state: self.state.clone() }, vec![self.file.try_clone()?.into()]))
    }
}

/// Hears how many bytes of how many were decoded.
type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// A compressed file that is decoded once.
pub(crate) struct Stream {
    pub(crate) packing: Packing,
    /// What people know it by.
    pub(crate) called: String,
    /// Its own length in bytes.
    pub(crate) len: u64,
    pub(crate) packed: Arc<dyn Packed>,
    /// How many bytes the store may keep of what it yields.
    pub(crate) limit: Option<u64>,
    pub(crate) progress: Option<Progress>,
}

/// How far a stream is decoded.
pub(crate) struct Decoding {
    output: Box<dyn Read + Send>,
    /// Why the file could not be read: decoders do not pass that on as it is.
    unread: Arc<Mutex<Option<Error>>>,
    /// Bytes that were decoded.
    pub(crate) done: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The compressed file, read in order.
struct Reader {
    packed: Arc<dyn Packed>,
    at: u64,
    len: u64,
    progress: Option<Progress>,
    unread: Arc<Mutex<Option<Error>>>,
}

impl Read for Reader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.packed.read(buf, self.at).map_err(|error| {
            *lock(&self.unread) = Some(error);
            io::Error::other("it cannot be read")
        })?;
        self.at += read as u64;
        if let Some(progress) = &self.progress {
            progress(self.at, self.len);
        }
        Ok(read)
    }
}

impl Stream {
    pub(crate) fn failed(&self, why: String, fix: Option<String>) -> Error {
        Error::Stream { file: self.called.clone(), why, fix }
    }

    /// Begins at its start.
    pub(crate) fn begin(&self) -> Result<Decoding, Error> {
        self.begin_by(0, self.progress.clone())
    }

    /// Begins at what may be the start of a member of it. Nobody hears how far that comes.
    pub(crate) fn begin_at(&self, at: u64) -> Result<Decoding, Error> {
        self.begin_by(at, None)
    }

    fn begin_by(&self, at: u64, progress: Option<Progress>) -> Result<Decoding, Error> {
        let unread: Arc<Mutex<Option<Error>>> = Arc::default();
        let packed = Arc::clone(&self.packed);
        let reader = Reader { packed, at, len: self.len, progress, unread: Arc::clone(&unread) };
        let output = self.packing.reader(BufReader::with_capacity(READ, reader));
        let output = output.map_err(|error| self.broken(0, &error))?;
        Ok(Decoding { output, unread, done: 0 })
    }

    /// The next bytes; says how many there are, which is none at the end, and only where that is right.
    pub(crate) fn read(&self, decoding: &mut Decoding, buf: &mut [u8]) -> Result<usize, Error> {
        loop {
            match decoding.output.read(buf) {
                Ok(len) => {
                    decoding.done += len as u64;
                    return Ok(len);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let unread = lock(&decoding.unread).take();
                    return Err(unread.unwrap_or_else(|| self.broken(decoding.done, &error)));
                }
            }
        }
    }

    /// Fills `buf`; says how many bytes there are, which are fewer at the end only.
    pub(crate) fn fill(&self, decoding: &mut Decoding, buf: &mut [u8]) -> Result<usize, Error> {
        let mut filled = 0;
        while let Some(rest) = buf.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.read(decoding, rest)? {
                0 => break,
                len => filled += len,
            }
        }
        Ok(filled)
    }

    fn broken(&self, done: u64, error: &io::Error) -> Error {
        let (name, called) = (self.packing.name(), &self.called);
        let checks = match called.contains("://") {
            // The program opens no URL.
            true => format!("fetch it, and check the file: {name} -t FILE"),
            false => format!("{name} -t {called} checks it"),
        };
        match error.kind() {
            io::ErrorKind::UnexpectedEof => self.failed(
                format!("it is cut short: {done} bytes could be decoded"),
                Some(format!("fetch or copy it again; {checks}")),
            ),
            _ => self.failed(
                format!("it is damaged behind the first {done} decoded bytes: {error}"),
                Some(checks),
            ),
        }
    }

    /// That what was decoded may go on, of which `stored` bytes are not zeroes: a few bytes can yield any
    /// number.
    pub(crate) fn check_room(&self, file: &File, path: &Path, done: u64, stored: u64) -> Result<(), Error> {
        if done > SIZE_MAX {
            return Err(self.failed(format!("it yields more than {SIZE_MAX} bytes"), None));
        }
        if let Some(limit) = self.limit.filter(|limit| stored > *limit) {
            let why = format!("it yields more than the {limit} bytes that the store may have");
            return Err(self.failed(why, Some("a larger --store-limit allows it".to_owned())));
        }
        let room = rustix::fs::fstatvfs(file)
            .map_err(|errno| Error::store(path, "it cannot be looked up")(errno.into()))?;
        let unit = room.f_frsize.max(1);
        let (free, all) = (room.f_bavail.saturating_mul(unit), room.f_blocks.saturating_mul(unit));
        if free < (all / FREE_PART).min(FREE_MOST) {
            return Err(self.no_room(done, free));
        }
        Ok(())
    }

    pub(crate) fn no_room(&self, done: u64, free: u64) -> Error {
        Error::NoRoom { file: self.called.clone(), done, free }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_written_to_is_another_file() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(temp.path(), b"as it was").unwrap();
        let file = temp.reopen().unwrap();
        let state = written(&file.metadata().unwrap());
        let packed = PackedFile { file, state, called: "x.gz".to_owned() };
        let mut bytes = [0; 20];
        assert_eq!(packed.read(&mut bytes, 3).unwrap(), 6);
        assert_eq!(packed.read(&mut bytes, 9).unwrap(), 0);
        std::fs::set_permissions(temp.path(), std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
        std::fs::hard_link(temp.path(), temp.path().with_extension("moved")).unwrap();
        std::fs::remove_file(temp.path().with_extension("moved")).unwrap();
        assert_eq!(packed.read(&mut bytes, 3).unwrap(), 6, "it was not written to");
        // A clock tick later: times of files are no finer.
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::write(temp.path(), b"as it is!").unwrap();
        assert!(matches!(packed.read(&mut bytes, 3), Err(Error::Changed { .. })));
    }
}

//! Sealed memfds, which cannot be changed any more: for what is too long for a message.
//! It never believes that a descriptor is one before it has looked.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, MemfdFlags, SealFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest file in bytes: a million extents or encoded blocks.
pub(crate) const LARGEST: u64 = 128 << 20;

/// What cannot be done to such a file.
pub(crate) fn seals() -> SealFlags {
    SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE
}

/// A file that becomes no longer than its readers accept.
pub(crate) struct Bounded {
    file: File,
    /// In bytes.
    room: u64,
}

impl Write for Bounded {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if buf.len() as u64 > self.room {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let written = self.file.write(buf)?;
        self.room -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes a file of what `write` writes. More than [`LARGEST`] bytes are an error,
/// [`io::ErrorKind::FileTooLarge`].
pub(crate) fn file(
    name: &str,
    write: impl FnOnce(&mut BufWriter<Bounded>) -> io::Result<()>,
) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create(name, flags)?);
    let mut file = BufWriter::new(Bounded { file, room: LARGEST });
    write(&mut file)?;
    file.flush()?;
    let file = OwnedFd::from(file.into_inner().map_err(io::IntoInnerError::into_error)?.file);
    rustix::fs::fcntl_add_seals(&file, seals())?;
    Ok(file)
}

/// Whether it is a file in memory that cannot change, and is not too long.
pub(crate) fn is_sealed(fd: &OwnedFd) -> bool {
    let sealed = rustix::fs::fcntl_get_seals(fd).is_ok_and(|found| found.contains(seals()));
    let fits = |stat: rustix::fs::Stat| {
        let len = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && len <= LARGEST
    };
    sealed && rustix::fs::fstat(fd).is_ok_and(fits)
}

/// Writes a value.
pub(crate) fn write_json(name: &str, value: &impl Serialize) -> io::Result<OwnedFd> {
    file(name, |file| Ok(serde_json::to_writer(file, value)?))
}

/// Reads a value; whether that makes sense is for its type to say.
pub(crate) fn read_json<T: DeserializeOwned>(fd: &OwnedFd) -> io::Result<T> {
    Ok(serde_json::from_reader(read(fd)?)?)
}

/// Reads such a file from its beginning, even if other processes read it.
pub(crate) fn read(fd: &OwnedFd) -> io::Result<impl Read> {
    if !is_sealed(fd) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a file that cannot change"));
    }
    // The position belongs to all who have the descriptor.
    Ok(BufReader::new(Whole { fd, at: 0 }))
}

struct Whole<'a> {
    fd: &'a OwnedFd,
    at: u64,
}

impl Read for Whole<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let got = rustix::io::retry_on_intr(|| rustix::io::pread(self.fd, &mut *buf, self.at))?;
        self.at += got as u64;
        Ok(got)
    }
}

//! What the writer of a qcow2 needs of its file, as a trait, so that a test can sit between the two and watch
//! the order of operations.
//! It never reports that something is on the disk before a [`Storage::sync`] has succeeded.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::bytes::ReadAt;

/// A file that is written in place and made longer.
pub trait Storage: ReadAt + Debug {
    /// Its length in bytes.
    ///
    /// # Errors
    /// It cannot be asked.
    fn size(&self) -> io::Result<u64>;

    /// Makes it so long: it loses what lies behind, and what is new reads as zeroes.
    ///
    /// # Errors
    /// There is no room, or the file failed.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Writes all these bytes at `offset`.
    ///
    /// # Errors
    /// There is no room, or the file failed; some of them may be written.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// All that was written before, and the length, are on the disk when this returns.
    ///
    /// # Errors
    /// They are not, and may never be.
    fn sync(&self) -> io::Result<()>;
}

impl Storage for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        File::set_len(self, len)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}

/// A file with a second descriptor of it for syncs. The kernel reports a failed write-back once for each
/// opened file: a process that syncs through its own descriptor takes nobody else's error, and nobody takes
/// its.
#[derive(Debug)]
pub(super) struct Twofold {
    pub(super) file: File,
    pub(super) for_syncs: File,
}

impl ReadAt for Twofold {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        ReadAt::read_at(&self.file, buf, offset)
    }
}

impl Storage for Twofold {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.for_syncs.sync_data()
    }
}

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

/// A file with a second open file description of it for syncs. The kernel reports a failed write-back once
/// for each description, to the first sync or durable write through it: none of them takes the errors of the
/// syncs here, as long as it is through another one. That the descriptor is another one is not enough.
#[derive(Debug)]
pub(super) struct Twofold<S> {
    pub(super) file: S,
    pub(super) for_syncs: S,
}

impl<S: Storage> ReadAt for Twofold<S> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_at(buf, offset)
    }
}

impl<S: Storage> Storage for Twofold<S> {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.for_syncs.sync()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

    use super::super::create::write_empty;
    use super::super::header::BackingName;
    use super::super::writer::Grower;
    use super::*;
    use crate::grow::{Grow as _, Wanted};
    use crate::image::Image;

    const CLUSTER: u64 = 4096;
    /// What the disk holds before it is written.
    const OLD: u8 = 0xa5;

    /// A file on a disk that loses what is written back while it is `broken`.
    #[derive(Debug)]
    struct Disk {
        file: File,
        broken: AtomicBool,
        /// Write-backs that have failed so far.
        failed: AtomicU64,
    }

    /// An open file description of it, with the number of failures that were reported to it.
    #[derive(Debug)]
    struct Description {
        disk: Arc<Disk>,
        seen: AtomicU64,
    }

    impl Description {
        fn of(disk: &Arc<Disk>) -> Arc<Description> {
            let seen = AtomicU64::new(disk.failed.load(SeqCst));
            Arc::new(Description { disk: Arc::clone(disk), seen })
        }
    }

    impl ReadAt for Arc<Description> {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
            ReadAt::read_at(&self.disk.file, buf, offset)
        }
    }

    impl Storage for Arc<Description> {
        fn size(&self) -> io::Result<u64> {
            self.disk.file.size()
        }

        fn set_len(&self, len: u64) -> io::Result<()> {
            Storage::set_len(&self.disk.file, len)
        }

        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
            Storage::write_at(&self.disk.file, bytes, offset)
        }

        fn sync(&self) -> io::Result<()> {
            let failed = self.disk.failed.load(SeqCst) + u64::from(self.disk.broken.swap(false, SeqCst));
            self.disk.failed.store(failed, SeqCst);
            match self.seen.swap(failed, SeqCst) == failed {
                true => Ok(()),
                false => Err(rustix::io::Errno::IO.into()),
            }
        }
    }

    /// What the writer syncs through, where the device has a request synced through `device` right after the
    /// disk has lost what was written to it.
    #[derive(Debug)]
    struct Beside {
        writer: Arc<Description>,
        device: Arc<Description>,
    }

    impl ReadAt for Beside {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
            self.writer.read_at(buf, offset)
        }
    }

    impl Storage for Beside {
        fn size(&self) -> io::Result<u64> {
            self.writer.size()
        }

        fn set_len(&self, len: u64) -> io::Result<()> {
            self.writer.set_len(len)
        }

        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
            self.writer.write_at(bytes, offset)
        }

        fn sync(&self) -> io::Result<()> {
            if self.writer.disk.broken.load(SeqCst) {
                assert!(self.device.sync().is_err(), "the device hears of it");
            }
            self.writer.sync()
        }
    }

    /// Places a cluster whose copy is lost, and says whether the file names it then. `for_syncs` makes what
    /// the writer syncs through, beside the device's own.
    fn published(for_syncs: fn(&Arc<Description>) -> Arc<Description>) -> bool {
        let file = tempfile::tempfile().unwrap();
        let backing = BackingName { name: b"below".to_vec(), format: Some(b"raw".to_vec()) };
        write_empty(&file, 1 << 20, CLUSTER, &backing).unwrap();
        let (broken, failed) = Default::default();
        let disk = Arc::new(Disk { file, broken, failed });
        let (buffered, direct) = (Description::of(&disk), Description::of(&disk));
        let own = for_syncs(&direct);
        let beside = |writer| Beside { writer, device: Arc::clone(&direct) };
        let file = Twofold { file: beside(buffered), for_syncs: beside(own) };
        let old = Image::raw(Arc::new(vec![OLD; 1 << 20]), 1 << 20, 512);
        let mut grower = Grower::over(Arc::new(file), old).unwrap();
        let wanted = |unit| [Wanted { unit, zeroed: false }];
        // The room and the table are there from now on.
        grower.place(&wanted(0)).unwrap();
        disk.broken.store(true, SeqCst);
        let placed = grower.place(&wanted(1));
        assert_eq!(placed.is_err(), grower.has_lost());
        let mut units = Vec::new();
        grower.placed(&mut |unit, _| units.push(unit)).unwrap();
        assert_eq!(units.contains(&1), placed.is_ok());
        assert_eq!(grower.place(&wanted(2)).is_err(), placed.is_err(), "and nothing later, either");
        placed.is_ok()
    }

    #[test]
    fn an_error_that_a_request_of_the_device_has_taken_is_the_writers_too() {
        assert!(!published(|device| Description::of(&device.disk)), "a cluster is not on the disk");
        assert!(published(Arc::clone), "through a copy of the device's descriptor nobody would know");
    }
}

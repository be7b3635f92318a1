//! What the syncs of a written file have heard from the kernel, kept beyond the process that serves it.
//! Syncs nothing itself.
//!
//! The kernel reports pages that it could not write back once for each open file description, to the first
//! sync through it. A process that is killed during a sync takes that report along, and a sync of its
//! successor through the same description would succeed though bytes are lost. So words in shared memory say
//! whether a sync is under way and what one has failed with, and there are descriptions of the file through
//! which nobody has synced yet: the successor of a process that died during a sync asks one of those first.
//! It has heard everything since the device was attached, unless its own sync is interrupted, too; then it
//! is the next one's turn. When all have been interrupted nothing is known.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;

use becket_uapi::shared::{self, Words};
use rustix::fs::OFlags;

use super::facts::{open_quietly, proc_path};

/// The feature of devices with such a source.
pub const FEATURE: &str = "heard";

/// Descriptors of it: the memory, then the descriptions.
pub(super) const DESCRIPTORS: usize = 1 + UNUSED;
/// Descriptions of the file through which nobody has synced.
const UNUSED: usize = 2;

const WORDS: usize = 3;
/// What a sync has failed with: an errno, or 0.
const FAILED: usize = 0;
/// Whether a sync is under way.
const SYNCING: usize = 1;
/// How many of the descriptions have been asked without an answer.
const ASKED: usize = 2;

/// See the module.
#[derive(Debug)]
pub struct Heard {
    memory: OwnedFd,
    words: Words,
    unused: [OwnedFd; UNUSED],
}

/// What a process finds that begins to serve a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// No sync has failed, and none was interrupted.
    Well,
    /// A sync has failed, with that errno.
    Failed(i32),
    /// A sync was interrupted: this description has to be asked before a sync is believed.
    Ask(usize),
    /// Syncs were interrupted so often that none is left to be asked: bytes may be lost.
    Unknown,
}

impl Heard {
    /// For a file to which nothing was written yet for this device.
    ///
    /// # Errors
    /// It cannot be opened once more, or there is no memory.
    pub(super) fn new(file: &OwnedFd) -> io::Result<Heard> {
        let path = proc_path(file);
        let open = || open_quietly(&path, OFlags::RDONLY | OFlags::CLOEXEC);
        let unused = [open()?, open()?];
        let memory = shared::file("becket-heard", WORDS, 0)?;
        Ok(Heard { words: Words::map(&memory, WORDS, 0)?, memory, unused })
    }

    /// The same again, of its next descriptors.
    pub(super) fn join(fds: &mut impl Iterator<Item = OwnedFd>) -> Option<Heard> {
        let memory = fds.next()?;
        let words = Words::map(&memory, WORDS, 0).ok()?;
        Some(Heard { memory, words, unused: [fds.next()?, fds.next()?] })
    }

    /// Its descriptors, in their order.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(&self.memory).chain(&self.unused).map(OwnedFd::as_fd)
    }

    /// The same, which are given away.
    pub(super) fn into_descriptors(self) -> impl Iterator<Item = OwnedFd> {
        std::iter::once(self.memory).chain(self.unused)
    }

    /// What those have left who served the file before.
    pub fn before(&self) -> Before {
        let [failed, syncing, asked] = [FAILED, SYNCING, ASKED].map(|word| self.words[word].load(SeqCst));
        match (failed, syncing) {
            (1.., _) => Before::Failed(failed.cast_signed()),
            (0, 0) => Before::Well,
            (0, 1..) => usize::try_from(asked)
                .ok()
                .filter(|asked| *asked < UNUSED)
                .map_or(Before::Unknown, Before::Ask),
        }
    }

    /// The description of that number.
    pub fn unused(&self, number: usize) -> Option<BorrowedFd<'_>> {
        self.unused.get(number).map(OwnedFd::as_fd)
    }

    /// A sync begins; of [`Before::Ask`] it goes through the description of that number.
    pub fn begins(&self, asks: Option<usize>) {
        if let Some(number) = asks {
            self.asked(number + 1);
        }
        self.words[SYNCING].store(1, SeqCst);
    }

    /// A sync has said that all is well since the device was attached, or that what may have been lost before
    /// was reported: all descriptions can be asked of what comes.
    pub fn answered(&self) {
        self.asked(0);
    }

    fn asked(&self, count: usize) {
        self.words[ASKED].store(u32::try_from(count).unwrap_or(u32::MAX), SeqCst);
    }

    /// The sync that began last has ended, and what it has failed with is noted.
    pub fn ended(&self) {
        self.words[SYNCING].store(0, SeqCst);
    }

    /// A sync has failed, with that errno.
    pub fn failed(&self, errno: i32) {
        self.words[FAILED].store(errno.unsigned_abs(), SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the next process gets it.
    fn next(heard: &Heard) -> Heard {
        let mut fds = heard.descriptors().map(|fd| fd.try_clone_to_owned().unwrap());
        Heard::join(&mut fds).unwrap()
    }

    #[test]
    fn who_comes_next_knows_of_failed_and_of_interrupted_syncs() {
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        let first = Heard::new(&file).unwrap();
        assert_eq!(first.before(), Before::Well);
        first.begins(None);
        let second = next(&first);
        assert_eq!(second.before(), Before::Ask(0));
        second.begins(Some(0));
        second.answered();
        second.ended();
        assert_eq!(next(&second).before(), Before::Well);
        for _ in 0..3 {
            second.begins(None);
            for number in 0..UNUSED {
                let next = next(&second);
                assert_eq!(next.before(), Before::Ask(number), "nobody has heard what the last was answered");
                next.begins(Some(number));
            }
            assert_eq!(next(&second).before(), Before::Unknown);
            second.answered();
        }
        second.failed(5);
        second.ended();
        assert_eq!(next(&second).before(), Before::Failed(5));
    }

    #[test]
    fn what_was_not_asked_has_a_description_of_its_own() {
        use rustix::fs::{SeekFrom, seek};
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        let heard = Heard::new(&file).unwrap();
        seek(&file, SeekFrom::Start(7)).unwrap();
        for number in 0..UNUSED {
            let unused = heard.unused(number).unwrap();
            assert_eq!(seek(unused, SeekFrom::Current(3)).unwrap(), 3);
        }
        assert!(heard.unused(UNUSED).is_none());
    }
}

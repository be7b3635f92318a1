//! Words of memory that several processes share, waiting until one of them changes, and room for bytes behind
//! them, which is read and written as a file's.
//! It never maps a file that could become shorter under the mapping.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;

/// Seals without which a mapping could lose its memory.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Where the room behind the words of a file begins is a multiple of this, in bytes: no page has both.
const ROOM: u64 = 64 << 10;

/// A mapped file of words.
pub struct Words {
    base: NonNull<AtomicU32>,
    len: usize,
}

// SAFETY: it is atomics only, and the mapping lives as long as this.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

/// A new file of so many words with room for so many bytes behind them, all 0, whose length is final. It
/// takes memory for what is written only.
///
/// # Errors
/// Those of `memfd_create`, `ftruncate` and `fcntl`.
pub fn file(name: &str, words: usize, room: u64) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len(words, room)?)?;
    rustix::fs::fcntl_add_seals(&fd, SEALS)?;
    Ok(fd)
}

/// Where the room behind so many words begins, in bytes.
pub fn room_behind(words: usize) -> u64 {
    ((words * size_of::<AtomicU32>()) as u64).next_multiple_of(ROOM)
}

/// Length of such a file in bytes.
fn len(words: usize, room: u64) -> io::Result<u64> {
    match room {
        0 => Ok(bytes(words)? as u64),
        room => Ok(room_behind(words).checked_add(room).ok_or(Errno::FBIG)?),
    }
}

/// Words in bytes.
fn bytes(words: usize) -> io::Result<usize> {
    words.checked_mul(size_of::<AtomicU32>()).filter(|bytes| *bytes > 0).ok_or(Errno::INVAL.into())
}

impl Words {
    /// Maps the words of such a file.
    ///
    /// # Errors
    /// It has another length, or its length is not final; those of `mmap`.
    pub fn map(fd: impl AsFd, words: usize, room: u64) -> io::Result<Words> {
        let (bytes, len) = (bytes(words)?, len(words, room)?);
        let sealed = rustix::fs::fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK | SealFlags::GROW);
        let size = u64::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(0);
        if !sealed || size != len {
            return Err(Errno::INVAL.into());
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a place that nothing else uses.
        let base = unsafe { mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, &fd, 0) }?;
        let base = NonNull::new(base.cast::<AtomicU32>()).ok_or(Errno::NOMEM)?;
        Ok(Words { base, len: words })
    }
}

impl std::ops::Deref for Words {
    type Target = [AtomicU32];

    #[inline]
    fn deref(&self) -> &[AtomicU32] {
        // SAFETY: so many words are mapped as long as this lives, for the file cannot become shorter; all who
        // have it use them as atomics.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Words").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: it is our mapping, and nothing borrows it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len * size_of::<AtomicU32>()) };
    }
}

/// Waits until a word is not `seen` any more, in whichever process it is changed; no longer than `limit`. May
/// return early.
pub fn wait(word: &AtomicU32, seen: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| futex::Timespec {
        tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    // It is another one already, or a signal came, or the time is over: the caller looks.
    let _ = futex::wait(word, futex::Flags::empty(), seen, limit.as_ref());
}

/// Wakes all who wait for a word.
pub fn wake(word: &AtomicU32) {
    // There is nothing that could fail: the word is mapped.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.unsigned_abs());
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;

    #[test]
    fn what_one_mapping_writes_another_sees_and_is_woken_by() {
        let fd = file("test", 3, 0).unwrap();
        let (one, other) = (Words::map(&fd, 3, 0).unwrap(), Words::map(&fd, 3, 0).unwrap());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                while other[1].load(SeqCst) == 0 {
                    wait(&other[1], 0, None);
                }
            });
            std::thread::sleep(Duration::from_millis(20));
            one[1].store(7, SeqCst);
            wake(&one[1]);
            waits.join().unwrap();
        });
        wait(&one[1], 7, Some(Duration::from_millis(1)));
        assert!(Words::map(&fd, 2, 0).is_err() && Words::map(&fd, 4, 0).is_err());
        assert!(rustix::fs::ftruncate(&fd, 4).is_err(), "its length is final");
        let loose = rustix::fs::memfd_create("loose", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&loose, 12).unwrap();
        assert!(Words::map(&loose, 3, 0).is_err(), "it could become shorter");
    }

    #[test]
    fn what_is_written_into_the_room_is_none_of_the_words() {
        use std::os::unix::fs::{FileExt as _, MetadataExt as _};
        let fd = file("test", 3, 1 << 40).unwrap();
        let words = Words::map(&fd, 3, 1 << 40).unwrap();
        assert!(Words::map(&fd, 3, 0).is_err() && Words::map(&fd, 3, 1 << 41).is_err());
        let file = std::fs::File::from(fd);
        file.write_all_at(&[7; 10], room_behind(3)).unwrap();
        assert!(words.iter().all(|word| word.load(SeqCst) == 0));
        assert!(file.metadata().unwrap().blocks() * 512 <= 64 << 10, "it takes what was written");
    }
}

//! Reports which process opens, reads and writes a file (fanotify(7)), so that a test can show that a process
//! leaves an image alone. It never delays an access: it asks for notifications, not for permission events.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A process opened it; `O_PATH` does not count.
pub const OPEN: u64 = libc::FAN_OPEN;
/// A process read from it, by any descriptor; a mapping does not count.
pub const ACCESS: u64 = libc::FAN_ACCESS;
/// A process wrote to it.
pub const MODIFY: u64 = libc::FAN_MODIFY;

/// Files that are watched. What happens to them is kept by the kernel until it is asked for, without a bound.
#[derive(Debug)]
pub struct Watch(OwnedFd);

/// What a process has done to a file. The kernel makes one of several that are equal.
#[derive(Debug)]
pub struct Event {
    /// The process (not its thread); 0 for one that this process cannot see.
    pub pid: u32,
    /// [`OPEN`], [`ACCESS`], [`MODIFY`]: all that were reported at once.
    pub what: u64,
    /// The file, open for reading.
    pub file: OwnedFd,
}

impl Watch {
    /// Watches nothing yet.
    ///
    /// # Errors
    /// `EPERM`: this process lacks `CAP_SYS_ADMIN`. `ENOSYS`: the kernel has no fanotify.
    pub fn new() -> io::Result<Watch> {
        let flags = libc::FAN_CLOEXEC
            | libc::FAN_NONBLOCK
            | libc::FAN_CLASS_NOTIF
            | libc::FAN_UNLIMITED_QUEUE
            | libc::FAN_UNLIMITED_MARKS;
        let of_events = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_LARGEFILE;
        // SAFETY: takes no memory.
        let group = unsafe { libc::fanotify_init(flags, of_events.unsigned_abs()) };
        if group < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it, and nothing else owns it.
        Ok(Watch(unsafe { OwnedFd::from_raw_fd(group) }))
    }

    /// Watches an open file too, under any name and by any process.
    ///
    /// # Errors
    /// That of fanotify_mark(2).
    pub fn add(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        let what = OPEN | ACCESS | MODIFY;
        // SAFETY: without a path the call takes no memory, and marks what the descriptor stands for.
        let marked = unsafe {
            libc::fanotify_mark(
                self.0.as_raw_fd(),
                libc::FAN_MARK_ADD,
                what,
                file.as_raw_fd(),
                std::ptr::null(),
            )
        };
        if marked < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// What has happened since this was last asked.
    ///
    /// # Errors
    /// That of read(2): `EMFILE` where there is no room for the descriptors that come with the events.
    pub fn events(&self) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            match rustix::io::read(self.0.as_fd(), &mut buffer) {
                Ok(len) => take(buffer.get(..len).unwrap_or_default(), &mut events),
                Err(rustix::io::Errno::AGAIN) => return Ok(events),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Takes events apart, and with them their descriptors over.
fn take(mut bytes: &[u8], events: &mut Vec<Event>) {
    const LEN: usize = size_of::<libc::fanotify_event_metadata>();
    while let Some((event, _)) = bytes.split_first_chunk::<LEN>() {
        let number =
            |at: usize| event.get(at..at + 4).and_then(|word| word.try_into().ok()).map(i32::from_ne_bytes);
        let mask = event.get(8..16).and_then(|word| word.try_into().ok()).map(u64::from_ne_bytes);
        let (Some(len), Some(what), Some(fd), Some(pid)) = (number(0), mask, number(16), number(20)) else {
            return;
        };
        if fd >= 0 {
            // SAFETY: the kernel opened it for the reader of the event, which is read once.
            let file = unsafe { OwnedFd::from_raw_fd(fd) };
            events.push(Event { pid: pid.unsigned_abs(), what, file });
        }
        bytes = usize::try_from(len)
            .ok()
            .filter(|&len| len >= LEN)
            .and_then(|len| bytes.get(len..))
            .unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::mem::offset_of;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn events_are_laid_out_as_in_c() {
        type C = libc::fanotify_event_metadata;
        assert_eq!(size_of::<C>(), 24);
        let places = [offset_of!(C, event_len), offset_of!(C, mask), offset_of!(C, fd), offset_of!(C, pid)];
        assert_eq!(places, [0, 8, 16, 20]);
    }

    #[test]
    fn opening_and_mere_reading_are_distinguished() -> io::Result<()> {
        let name = "fanotify::tests::opening_and_mere_reading_are_distinguished";
        if !crate::require_root(name) {
            return Ok(());
        }
        let path = std::env::temp_dir().join(format!("becket-fanotify-{}", std::process::id()));
        std::fs::write(&path, "bytes")?;
        let mut file = File::options().read(true).append(true).open(&path)?;
        let watch = Watch::new()?;
        watch.add(file.as_fd())?;
        assert!(watch.events()?.is_empty());

        // It reads what others have opened for it.
        let mut reader = Command::new("cat").stdin(file.try_clone()?).stdout(Stdio::null()).spawn()?;
        reader.wait()?;
        let mut opener = Command::new("cat").arg(&path).stdout(Stdio::null()).spawn()?;
        opener.wait()?;
        file.write_all(b"bytes")?;
        std::fs::remove_file(&path)?;

        let events = watch.events()?;
        let done =
            |pid: u32| events.iter().filter(|event| event.pid == pid).fold(0, |all, event| all | event.what);
        assert_eq!(done(reader.id()), ACCESS, "{events:?}");
        assert_eq!(done(opener.id()), OPEN | ACCESS, "{events:?}");
        assert_eq!(done(std::process::id()), MODIFY, "{events:?}");
        for event in &events {
            let (seen, meant) = (rustix::fs::fstat(&event.file)?, rustix::fs::fstat(&file)?);
            assert_eq!((seen.st_dev, seen.st_ino), (meant.st_dev, meant.st_ino));
        }
        Ok(())
    }
}

//! A connection between the kernel's FUSE and the servers that answer its requests: made, negotiated, kept
//! over their deaths.
//! It never answers a request but the first, which negotiates the terms.
//!
//! A process with a copy of each descriptor keeps the connection when the server dies: what the server has
//! read and not answered stays with the kernel, which sends it again on request (Linux 6.9). Without copies
//! the kernel fails all of it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use becket_uapi::fuse as uapi;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use uapi::Wire;

use super::mount;
use super::tree::IMAGE;
use crate::{Error, Kind};

/// Longest read or write that is one request, in bytes. Longer ones come in pieces, side by side; each
/// request that may be under way has a buffer of this size.
pub const MAX_IO: u32 = 256 << 10;
/// Pages that a request may be spread over: the most that every kernel grants (`fs.fuse.max_pages_limit`).
const MAX_PAGES: u16 = 256;
/// The least that a direct transfer of a disk has in a page, in bytes: memory begins at a sector, and parts
/// of it are as long as sectors.
const SECTOR: u32 = 512;

/// How long the kernel may take for its first message, which it has ready before the mount is done.
const FIRST: Duration = Duration::from_secs(5);
/// What is wanted of the kernel, where it can do it.
const WANTED: u64 = uapi::FUSE_ASYNC_READ
    | uapi::FUSE_BIG_WRITES
    | uapi::FUSE_ASYNC_DIO
    | uapi::FUSE_PARALLEL_DIROPS
    | uapi::FUSE_MAX_PAGES
    | uapi::FUSE_NO_OPENDIR_SUPPORT
    | uapi::FUSE_INIT_EXT
    | uapi::FUSE_DIRECT_IO_ALLOW_MMAP
    | uapi::FUSE_HAS_RESEND;
/// What there is no doing without: a request as long as a buffer.
const NEEDED: u64 = uapi::FUSE_MAX_PAGES;
const FUSE: &str = "/dev/fuse";
/// What is before the bytes of a FUSE_NOTIFY_STORE.
const STORE: usize = uapi::OutHeader::SIZE + uapi::StoreOut::SIZE;

/// Longest read or write of a disk whose requests must be whole units of so many bytes; at most [`MAX_IO`].
///
/// The kernel cuts a transfer where this many bytes are full, or where `MAX_PAGES` pages are, whichever
/// comes first (`fuse_direct_io`). Only the former is at the end of a unit. It comes first if all those pages
/// hold that many bytes also where there is no more than a sector in each.
pub fn max_io(unit: u32) -> u32 {
    if unit > SECTOR { u32::from(MAX_PAGES) * SECTOR } else { MAX_IO }
}

/// A connection, as its keeper holds it.
#[derive(Debug)]
pub struct Connection {
    devices: Vec<OwnedFd>,
    resends: bool,
}

impl Connection {
    /// Makes a file system that only descriptors lead to, and answers with its root too. Needs CAP_SYS_ADMIN.
    /// No read or write will be longer than `max_io` bytes, see [`max_io()`].
    ///
    /// # Errors
    /// There is no FUSE here, this user may not, or the kernel is too old.
    pub fn detached(queues: u16, depth: u16, max_io: u32) -> Result<(Connection, OwnedFd), Error> {
        let device = mount::open_device()?;
        let root = mount::detached(&device, max_io)?;
        Ok((Connection::agree(device, queues, depth, max_io)?, root))
    }

    /// The same on a directory, by the system's helper.
    ///
    /// # Errors
    /// The helper is not there or refuses, or the kernel is too old.
    pub fn on(directory: &Path, queues: u16, depth: u16, max_io: u32) -> Result<Connection, Error> {
        let device = mount::on(directory, max_io)?;
        Connection::agree(device, queues, depth, max_io).inspect_err(|_| {
            let _ = mount::off(directory, true);
        })
    }

    /// One that another process made and has handed over.
    pub fn taken_over(devices: Vec<OwnedFd>, resends: bool) -> Connection {
        Connection { devices, resends }
    }

    /// Its descriptors, one for each queue.
    pub fn devices(&self) -> &[OwnedFd] {
        &self.devices
    }

    /// Whether a server's death costs no request.
    pub fn resends(&self) -> bool {
        self.resends
    }

    /// Has the kernel send again what a server that is gone has read and not answered.
    ///
    /// # Errors
    /// It does not know how, or the connection is gone.
    pub fn resend(&self) -> Result<(), Error> {
        let order =
            uapi::OutHeader { len: uapi::OutHeader::SIZE as u32, error: uapi::FUSE_NOTIFY_RESEND, unique: 0 };
        let mut message = [0; uapi::OutHeader::SIZE];
        order.write(&mut message);
        self.tell(&message).map_err(Error::io("have requests sent again by", FUSE))
    }

    /// Makes the kernel believe that the image's file is `length` bytes long, if it takes it for shorter. The
    /// server must know of the bytes already.
    ///
    /// Attributes would not do. The kernel drops the length in an answer to GETATTR when direct I/O of the
    /// same file has ended since it asked, and reads behind the length that it remembers yield nothing. A
    /// byte that is said to exist moves that length in any case. It lands in a page that does not count as
    /// read, so it is never seen.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn lengthen(&self, length: u64) -> Result<(), Error> {
        let Some(last) = length.checked_sub(1) else { return Ok(()) };
        let mut message = [0; STORE + 1];
        let store = uapi::StoreOut { nodeid: IMAGE, offset: last, size: 1, padding: 0 };
        let len = message.len() as u32;
        uapi::OutHeader { len, error: uapi::FUSE_NOTIFY_STORE, unique: 0 }.write(&mut message);
        store.write(&mut message[uapi::OutHeader::SIZE..]);
        match self.tell(&message) {
            // It has no length in mind, because the file was never looked up.
            Err(rustix::io::Errno::NOENT) => Ok(()),
            result => result.map_err(Error::io("make a file longer in", FUSE)),
        }
    }

    fn tell(&self, message: &[u8]) -> rustix::io::Result<()> {
        let device = self.devices.first().ok_or(rustix::io::Errno::NOTCONN)?;
        rustix::io::write(device, message).map(drop)
    }

    /// Whether the file system is gone.
    pub fn is_gone(&self) -> bool {
        let Some(device) = self.devices.first() else { return true };
        let mut fds = [PollFd::new(device, PollFlags::empty())];
        let asked = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        asked.is_ok() && fds[0].revents().contains(PollFlags::ERR)
    }

    /// Answers the kernel's first message and opens the other descriptors.
    fn agree(device: OwnedFd, queues: u16, depth: u16, max_io: u32) -> Result<Connection, Error> {
        let mut message = vec![0; MAX_IO as usize];
        let timeout = Timespec::try_from(FIRST).ok();
        poll(&mut [PollFd::new(&device, PollFlags::IN)], timeout.as_ref())
            .map_err(Error::io("wait for", FUSE))?;
        let len = rustix::io::read(&device, &mut message).map_err(Error::io("read the terms of", FUSE))?;
        let (answer, flags) = terms(&message[..len], queues, depth, max_io)
            .map_err(|reason| Error::Unavailable { kind: Kind::Fuse, reason, fix: None })?;
        rustix::io::write(&device, &answer).map_err(Error::io("agree with", FUSE))?;
        let mut devices = vec![device];
        for _ in 1..queues {
            let fresh = mount::open_device()?;
            let first = devices[0].as_fd();
            uapi::clone_device(fresh.as_fd(), first).map_err(Error::io("open another one of", FUSE))?;
            devices.push(fresh);
        }
        Ok(Connection { devices, resends: flags & uapi::FUSE_HAS_RESEND != 0 })
    }
}

/// The answer to the kernel's first message, and what was agreed on.
fn terms(message: &[u8], queues: u16, depth: u16, max_io: u32) -> Result<(Vec<u8>, u64), String> {
    let header = uapi::InHeader::read(message).filter(|header| header.opcode == uapi::FUSE_INIT);
    let body = message.get(uapi::InHeader::SIZE..).unwrap_or_default();
    let (Some(header), Some(theirs)) = (header, uapi::InitIn::read(body)) else {
        return Err("the kernel's first message makes no sense".to_owned());
    };
    let upper = body.get(uapi::InitIn::SIZE..).and_then(u32::read).unwrap_or(0);
    let extended = u64::from(theirs.flags) & uapi::FUSE_INIT_EXT != 0;
    let offered = u64::from(theirs.flags) | if extended { u64::from(upper) << 32 } else { 0 };
    if theirs.major != uapi::FUSE_KERNEL_VERSION
        || theirs.minor < uapi::FUSE_LEAST_MINOR_VERSION
        || offered & NEEDED != NEEDED
    {
        return Err(format!(
            "this kernel speaks FUSE {}.{}, and becket needs {}.{} (Linux 4.20)",
            theirs.major,
            theirs.minor,
            uapi::FUSE_KERNEL_VERSION,
            uapi::FUSE_LEAST_MINOR_VERSION
        ));
    }
    let flags = offered & WANTED;
    // Asynchronous requests beyond this number wait in the kernel although there are tags for them.
    let background = queues.saturating_mul(depth).max(1);
    let ours = uapi::InitOut {
        major: uapi::FUSE_KERNEL_VERSION,
        minor: theirs.minor.min(uapi::FUSE_KERNEL_MINOR_VERSION),
        max_readahead: theirs.max_readahead.min(max_io),
        flags: flags as u32,
        max_background: background,
        congestion_threshold: background,
        max_write: max_io,
        time_gran: 1,
        max_pages: MAX_PAGES,
        flags2: (flags >> 32) as u32,
        ..uapi::InitOut::default()
    };
    let len = uapi::OutHeader::SIZE + uapi::InitOut::SIZE;
    let mut answer = vec![0; len];
    let first = uapi::OutHeader { len: len as u32, error: 0, unique: header.unique };
    first
        .write(&mut answer)
        .and_then(|()| ours.write(&mut answer[uapi::OutHeader::SIZE..]))
        .ok_or("the answer has no room")?;
    Ok((answer, flags))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(minor: u32, flags: u64) -> Vec<u8> {
        let mut message = vec![0; 104];
        let header = uapi::InHeader { opcode: uapi::FUSE_INIT, unique: 9, ..Default::default() };
        header.write(&mut message).unwrap();
        let init = uapi::InitIn { major: 7, minor, max_readahead: 1 << 20, flags: flags as u32 };
        init.write(&mut message[40..]).unwrap();
        ((flags >> 32) as u32).write(&mut message[56..]).unwrap();
        message
    }

    #[test]
    fn only_what_both_sides_know_is_agreed_on() {
        let (answer, flags) = terms(&message(46, u64::MAX), 2, 64, MAX_IO).unwrap();
        assert_eq!(flags, WANTED);
        let header = uapi::OutHeader::read(&answer).unwrap();
        assert_eq!((header.len as usize, header.error, header.unique), (answer.len(), 0, 9));
        let ours = uapi::InitOut::read(&answer[16..]).unwrap();
        assert_eq!((ours.minor, ours.max_background, ours.max_write), (41, 128, MAX_IO));
        assert!(u32::from(ours.max_pages) * 4096 >= MAX_IO);

        // Linux 6.1 has a second word and no resending.
        let old = WANTED & !uapi::FUSE_HAS_RESEND & !uapi::FUSE_DIRECT_IO_ALLOW_MMAP;
        assert_eq!(terms(&message(37, old), 1, 64, MAX_IO).unwrap().1, old);
        // Without the mark the second word means nothing.
        let (answer, flags) = terms(&message(31, !uapi::FUSE_INIT_EXT), 1, 64, MAX_IO).unwrap();
        assert_eq!(flags >> 32, 0);
        assert_eq!(uapi::InitOut::read(&answer[16..]).unwrap().flags2, 0);
    }

    /// Also where each page holds a single sector of it.
    #[test]
    fn what_takes_whole_units_only_is_never_cut_by_the_number_of_pages() {
        for (unit, longest) in [(1, MAX_IO), (512, MAX_IO), (1024, 128 << 10), (4096, 128 << 10)] {
            assert_eq!(max_io(unit), longest);
            let (answer, _) = terms(&message(46, u64::MAX), 1, 64, max_io(unit)).unwrap();
            let ours = uapi::InitOut::read(&answer[16..]).unwrap();
            assert_eq!((ours.max_write, ours.max_write % unit), (longest, 0));
            assert!(unit <= SECTOR || u32::from(ours.max_pages) * SECTOR >= ours.max_write);
        }
    }

    #[test]
    fn a_file_is_lengthened_by_its_last_byte() {
        let (kernel, ours) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let connection = Connection::taken_over(vec![ours], true);
        connection.lengthen(0).unwrap();
        connection.lengthen(4096).unwrap();
        let mut message = [0; 64];
        let len = rustix::io::read(&kernel, &mut message).unwrap();
        let header = uapi::OutHeader::read(&message).unwrap();
        assert_eq!((header.len as usize, header.error, header.unique), (len, 4, 0));
        let store = uapi::StoreOut::read(&message[16..]).unwrap();
        assert_eq!(store, uapi::StoreOut { nodeid: 2, offset: 4095, size: 1, padding: 0 });
        assert_eq!(len, 41, "and one byte");
        assert!(Connection::taken_over(Vec::new(), true).lengthen(4096).is_err(), "let go of");
    }

    #[test]
    fn a_kernel_that_is_too_old_or_makes_no_sense_is_refused() {
        assert!(terms(&message(27, u64::MAX), 1, 64, MAX_IO).unwrap_err().contains("4.20"));
        assert!(terms(&message(46, !uapi::FUSE_MAX_PAGES), 1, 64, MAX_IO).is_err());
        assert!(terms(&message(46, u64::MAX)[..50], 1, 64, MAX_IO).is_err());
        assert!(terms(&[0; 104], 1, 64, MAX_IO).is_err());
    }
}

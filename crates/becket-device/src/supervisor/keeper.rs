//! What the guard does: it keeps a copy of each device, and hands that to the supervisor that follows a
//! dead one. It parses nothing, opens no image, and closes at once what it is to forget: the image's locks
//! are among it.
//!
//! # Words
//!
//! Packets on the guard's connection: one byte that says what, the device's mark (8 bytes, little end
//! first), the number of its descriptors (4 bytes), and the device (a [`Serve`] as JSON) or, where that is
//! too long, a sealed file with it as the first descriptor. [`FORGET`] is answered by the mark. Another
//! supervisor than the guard asks for all of it at a socket in the runtime directory, and gets the same
//! packets, and [`PEACE`] at the end.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use becket_transport::aside;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect, socket_with,
};
use tracing::{error, warn};

use crate::contract::kept::Kept;
use crate::contract::protocol::{self, Serve};
use crate::contract::rendezvous;
use crate::contract::{Error, sealed, wrong};
use crate::record::runtime::{Runtime, lock_file};

/// Keep a device: its words follow, or lie in the first descriptor.
const KEEP: u8 = b'k';
const KEEP_ASIDE: u8 = b'a';
/// Close all of a device, and say so.
const FORGET: u8 = b'f';
/// All is well, or all has been said.
const PEACE: u8 = b'p';
/// Others start the next supervisor: only keep.
const STAY: u8 = b's';
const HEADER: usize = 1 + 8 + 4;
/// The longest words in a packet.
const LONGEST: usize = protocol::LARGEST - HEADER;
/// The most devices and bytes of words that are kept. Descriptors end before that.
const MOST_DEVICES: usize = 1 << 16;
const MOST_BYTES: usize = 64 << 20;
/// How long to wait for the process that won the race to be the next supervisor.
const RACE: Duration = Duration::from_secs(60);
/// How long one may take to say what it kept, or to hear it.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often the supervisor's lock is tried.
const LOOK: Duration = Duration::from_millis(10);

/// Where a guard can be asked for what it keeps.
pub(super) fn place(runtime: &Runtime, pid: u32) -> PathBuf {
    runtime.dir().join(format!("keeper-{pid}"))
}

fn header(what: u8, mark: u64, fds: usize) -> Vec<u8> {
    let fds = u32::try_from(fds).unwrap_or(u32::MAX);
    [&[what][..], &mark.to_le_bytes(), &fds.to_le_bytes()].concat()
}

/// Sends a packet; one that is not taken in time is an error.
fn send(socket: &OwnedFd, packet: &[u8], fds: &[BorrowedFd<'_>], patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        match protocol::send_packet(socket, packet, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                await_event(socket, PollFlags::OUT, deadline)?;
            }
            sent => return sent.map(drop),
        }
    }
}

/// Waits until a socket can be written or read.
fn await_event(socket: &OwnedFd, event: PollFlags, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(socket, event)], Some(&left)) {
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Has a device kept.
pub(super) fn keep(
    socket: &OwnedFd,
    serve: &Serve,
    fds: &[BorrowedFd<'_>],
    patience: Duration,
) -> io::Result<()> {
    let mut words = serde_json::to_vec(serve)?;
    if words.len() <= LONGEST {
        let mut packet = header(KEEP, serve.mark, fds.len());
        packet.append(&mut words);
        return send(socket, &packet, fds, patience);
    }
    let aside = sealed::file("becket-words", |file| io::Write::write_all(file, &words))?;
    let fds: Vec<BorrowedFd<'_>> = std::iter::once(aside.as_fd()).chain(fds.iter().copied()).collect();
    send(socket, &header(KEEP_ASIDE, serve.mark, fds.len()), &fds, patience)
}

/// Has a device forgotten; returns when nothing of it is open any more.
pub(super) fn forget(socket: &OwnedFd, mark: u64, patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    send(socket, &header(FORGET, mark, 0), &[], patience)?;
    let mut answer = [0; 8];
    loop {
        await_event(socket, PollFlags::IN, deadline)?;
        match rustix::io::read(socket, &mut answer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) if answer == mark.to_le_bytes() => return Ok(()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Says that all is well, and waits until the guard has ended.
pub(super) fn dismiss(socket: &OwnedFd, patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    send(socket, &header(PEACE, 0, 0), &[], patience)?;
    loop {
        await_event(socket, PollFlags::IN, deadline)?;
        if rustix::io::read(socket, &mut [0; 8])? == 0 {
            return Ok(());
        }
    }
}

/// Says that the guard is not to be the next supervisor.
pub(super) fn stay(socket: &OwnedFd) -> io::Result<()> {
    send(socket, &header(STAY, 0, 0), &[], PATIENCE)
}

/// A device as the guard has it.
struct Keepsake {
    aside: bool,
    words: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// What a guard has when its supervisor is dead.
#[derive(Default)]
pub(super) struct Keeper {
    kept: BTreeMap<u64, Keepsake>,
    bytes: usize,
    stays: bool,
    door: Option<Door>,
}

/// The supervisor's lock, and devices by their marks.
pub(super) type Inheritance = (File, BTreeMap<u64, Kept>);

/// Where others ask for what is kept.
struct Door {
    socket: OwnedFd,
    place: PathBuf,
}

impl Drop for Door {
    fn drop(&mut self) {
        // The next supervisor removes what stays.
        let _ = fs::remove_file(&self.place);
    }
}

/// In the guard: keeps what it is given until the supervisor ends. `None` when that was in peace.
pub(super) fn wait(socket: &OwnedFd) -> Option<Keeper> {
    let open = || -> Result<Door, Error> {
        let place = place(&Runtime::open()?, std::process::id());
        let socket = rendezvous::open(&place).map_err(Error::io("listen at", &place))?;
        Ok(Door { socket, place })
    };
    let door = open().inspect_err(|error| {
        warn!("another server than this will not find it: {error}");
    });
    Keeper { door: door.ok(), ..Keeper::default() }.listen(socket)
}

impl Keeper {
    fn listen(mut self, socket: &OwnedFd) -> Option<Keeper> {
        let mut packet = vec![0; protocol::LARGEST];
        loop {
            match protocol::receive_packet(&mut packet, socket) {
                Ok(Some((len, fds))) => {
                    let (what, mark) = self.take(packet.get(..len).unwrap_or_default(), fds);
                    match what {
                        PEACE => return None,
                        STAY => self.stays = true,
                        // The other side may be dead; that is found next.
                        FORGET => drop(rustix::net::send(socket, &mark.to_le_bytes(), SendFlags::NOSIGNAL)),
                        _ => {}
                    }
                }
                Ok(None) => return Some(self),
                // A packet that was cut is one device that is not kept.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    warn!("{error}");
                }
                Err(error) => {
                    error!("cannot hear its server: {error}");
                    return None;
                }
            }
        }
    }

    /// Takes a packet; answers with what it says, and of which device.
    fn take(&mut self, packet: &[u8], fds: Vec<OwnedFd>) -> (u8, u64) {
        let Some((&[what, ref numbers @ ..], words)) = packet.split_first_chunk::<HEADER>() else {
            return (0, 0);
        };
        let (mark, count) = numbers.split_at(8);
        let mark = mark.try_into().map_or(0, u64::from_le_bytes);
        let count = count.try_into().map_or(0, u32::from_le_bytes);
        if let Some(old) = self.kept.remove(&mark) {
            self.bytes -= old.words.len();
            // The file system of an image may not answer, and this guard is the guard of all devices.
            aside::close(move || drop(old));
        }
        if what == KEEP || what == KEEP_ASIDE {
            let fits = self.kept.len() < MOST_DEVICES && self.bytes + words.len() <= MOST_BYTES;
            if fits && usize::try_from(count) == Ok(fds.len()) {
                self.bytes += words.len();
                let keepsake = Keepsake { aside: what == KEEP_ASIDE, words: words.to_vec(), fds };
                self.kept.insert(mark, keepsake);
            } else {
                warn!("a device is not kept: no room, or too many descriptors");
            }
        }
        (what, mark)
    }

    /// What is kept, by the devices' marks.
    fn into_kept(mut self) -> BTreeMap<u64, Kept> {
        let mut kept = BTreeMap::new();
        for (mark, keepsake) in std::mem::take(&mut self.kept) {
            match keepsake.understood() {
                Ok(device) => drop(kept.insert(mark, device)),
                Err(error) => {
                    warn!("what was kept of a device is not used: {error}")
                }
            }
        }
        kept
    }

    /// Becomes the next supervisor, with its lock, or hands everything to the one that is faster.
    pub(super) fn succeed(mut self, runtime: &Runtime) -> Result<Option<Inheritance>, Error> {
        let path = runtime.lock();
        let file = lock_file(&path)?;
        let deadline = Instant::now() + RACE;
        loop {
            if !self.stays {
                match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                    Ok(()) => {
                        self.door = None;
                        return Ok(Some((file, self.into_kept())));
                    }
                    Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(Error::io("lock", &path)(error)),
                }
            }
            let over = if self.stays { self.kept.is_empty() } else { Instant::now() >= deadline };
            if over || self.asked() {
                return Ok(None);
            }
        }
    }

    /// Waits a moment for another supervisor; whether one came and has everything now.
    fn asked(&self) -> bool {
        let Some(Door { socket, .. }) = &self.door else {
            std::thread::sleep(LOOK);
            return false;
        };
        if await_event(socket, PollFlags::IN, Instant::now() + LOOK).is_err() {
            return false;
        }
        let given = accept_with(socket, SocketFlags::CLOEXEC)
            .map_err(io::Error::from)
            .and_then(|caller| rendezvous::trusted(&caller).and_then(|_| self.give(&caller)));
        given.inspect_err(|error| warn!("a call came to nothing: {error}")).is_ok()
    }

    fn give(&self, caller: &OwnedFd) -> io::Result<()> {
        for (mark, Keepsake { aside, words, fds }) in &self.kept {
            let what = if *aside { KEEP_ASIDE } else { KEEP };
            let mut packet = header(what, *mark, fds.len());
            packet.extend_from_slice(words);
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            send(caller, &packet, &fds, PATIENCE)?;
        }
        send(caller, &header(PEACE, 0, 0), &[], PATIENCE)
    }
}

impl Keepsake {
    fn understood(self) -> io::Result<Kept> {
        let Keepsake { aside, words, mut fds } = self;
        let serve: Serve = match aside {
            true if !fds.is_empty() => sealed::read_json(&fds.remove(0))?,
            true => return Err(wrong("its words are missing")),
            false => serde_json::from_slice(&words)?,
        };
        Kept::guarded(serve, fds)
    }
}

/// In a supervisor that begins: what the guard of a dead one has kept, where that guard is not this process.
pub(super) fn inherited(runtime: &Runtime) -> BTreeMap<u64, Kept> {
    let mut kept = BTreeMap::new();
    for item in fs::read_dir(runtime.dir()).into_iter().flatten().flatten() {
        if !item.file_name().to_str().is_some_and(|name| name.starts_with("keeper-")) {
            continue;
        }
        match ask(&item.path()) {
            Ok(its) => kept.extend(its),
            Err(error)
                if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) =>
            {
                // The peer is gone.
                let _ = fs::remove_file(item.path());
            }
            Err(error) => warn!("the guard at {} does not say what it kept: {error}", item.path().display()),
        }
    }
    kept
}

fn ask(place: &Path) -> io::Result<BTreeMap<u64, Kept>> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    connect(&socket, &SocketAddrUnix::new(place)?)?;
    rendezvous::trusted(&socket)?;
    let (mut heard, mut packet) = (Keeper::default(), vec![0; protocol::LARGEST]);
    loop {
        let (len, fds) =
            protocol::receive_packet(&mut packet, &socket)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        if heard.take(packet.get(..len).unwrap_or_default(), fds).0 == PEACE {
            return Ok(heard.into_kept());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::protocol::tests::{facts, serve};
    use becket_image::FileFacts;

    /// A guard that listens to one end, and the other end.
    fn guard() -> (OwnedFd, std::thread::JoinHandle<Option<Keeper>>) {
        let (ours, theirs) = protocol::pair().unwrap();
        (ours, std::thread::spawn(move || Keeper::default().listen(&theirs)))
    }

    #[test]
    fn only_a_silent_end_is_a_death() {
        let (ours, guard_) = guard();
        dismiss(&ours, PATIENCE).unwrap();
        assert!(guard_.join().unwrap().is_none(), "it said that all is well");
        let (ours, guard_) = guard();
        drop(ours);
        assert!(guard_.join().unwrap().is_some());
    }

    #[test]
    fn what_is_kept_comes_back_and_what_is_forgotten_is_closed() {
        let temp = tempfile::tempdir().unwrap();
        let open = |name: &str| OwnedFd::from(File::create(temp.path().join(name)).unwrap());
        let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
        let device = |mark| Serve {
            mark,
            ..serve(vec![FileFacts { facts: facts(), direct: false, heard: false }.into()])
        };
        let (first, second, (pipe, end)) = (open("first"), open("second"), rustix::pipe::pipe().unwrap());
        let (ours, guard_) = guard();
        keep(&ours, &device(1), &[first.as_fd()], PATIENCE).unwrap();
        keep(&ours, &device(1), &[second.as_fd()], PATIENCE).unwrap();
        keep(&ours, &device(2), &[end.as_fd()], PATIENCE).unwrap();
        drop(end);
        // Nothing of it is open once that is said.
        forget(&ours, 2, PATIENCE).unwrap();
        assert_eq!(rustix::io::read(&pipe, &mut [0; 1]), Ok(0));
        // As many extents as do not fit into a packet.
        let extents = (0..LONGEST as u64 / 16).map(|n| (n * 8192, 4096)).collect::<Vec<_>>();
        let long =
            Serve { mark: 3, partitions: extents.iter().map(|(a, b)| (1, *a, *b)).collect(), ..device(3) };
        keep(&ours, &long, &[first.as_fd()], PATIENCE).unwrap();
        drop(ours);
        let kept = guard_.join().unwrap().unwrap().into_kept();
        assert_eq!(kept.keys().copied().collect::<Vec<_>>(), [1, 3]);
        let file = kept[&1].sources[0].file().unwrap();
        assert_eq!(inode(file.buffered.as_fd()), inode(second.as_fd()));
        assert_eq!(kept[&3].serve, long);
    }

    #[test]
    fn another_supervisor_than_the_guard_gets_everything() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(temp.path().join("run"), temp.path().join("links")).unwrap();
        // The other one has won.
        let lock = lock_file(&runtime.lock()).unwrap();
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        let place = place(&runtime, 7);
        let door = Door { socket: rendezvous::open(&place).unwrap(), place: place.clone() };
        let file = OwnedFd::from(File::create(temp.path().join("image")).unwrap());
        let mut keeper = Keeper { door: Some(door), ..Keeper::default() };
        let sent = Serve {
            mark: 9,
            ..serve(vec![FileFacts { facts: facts(), direct: false, heard: false }.into()])
        };
        let packet = [header(KEEP, 9, 1), serde_json::to_vec(&sent).unwrap()].concat();
        keeper.take(&packet, vec![file]);
        let cut = [header(KEEP, 10, 2), serde_json::to_vec(&sent).unwrap()].concat();
        keeper.take(&cut, Vec::new());
        let asks = std::thread::spawn({
            let runtime = runtime.clone();
            move || inherited(&runtime)
        });
        assert!(keeper.succeed(&runtime).unwrap().is_none());
        let kept = asks.join().unwrap();
        assert_eq!(kept.len(), 1, "a device without its descriptors is none");
        assert_eq!(kept[&9].serve, sent);
        assert!(!place.exists());
        // One that is not taken.
        File::create(place).unwrap();
        assert!(inherited(&runtime).is_empty());
    }
}

//! The port over a socket that keeps messages apart, as `/dev/fuse` does: every answer to every request, no
//! mount.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use becket_engine::{Geometry, IoThreads};
use becket_image::{DirectIo, Facts, FileKind, FileSource, Map};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::super::serve;
use super::*;
use crate::serve::{Content, Served, Setup};

const SIZE: u64 = 1 << 20;
const DEPTH: u16 = 4;

/// A connection whose kernel is the test.
struct Kernel {
    socket: Option<OwnedFd>,
    threads: IoThreads,
    served: Served,
    file: File,
    closed: Receiver<()>,
    /// The other end of the socket, for the next server.
    next: OwnedFd,
    unique: u64,
}

impl Kernel {
    fn new(read_only: bool, discard: bool) -> Kernel {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::io::ioctl_fionbio(&ours, false).unwrap();
        let timeout = Some(Duration::from_secs(20));
        rustix::net::sockopt::set_socket_timeout(&ours, rustix::net::sockopt::Timeout::Recv, timeout)
            .unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE).unwrap();
        file.write_all_at(b"sixteen bytes...", 8192).unwrap();
        let facts = Facts::unasked(FileKind::Regular, SIZE, true);
        let source = FileSource::of(file.try_clone().unwrap().into(), None, facts);
        let (tether, _) = rustix::pipe::pipe().unwrap();
        let next = theirs.try_clone().unwrap();
        let threads = IoThreads::start(1).unwrap();
        let (sender, closed) = channel();
        let setup = Setup {
            id: 1,
            first: 1,
            queues: 1,
            depth: DEPTH,
            geometry: geometry(read_only, discard),
            content: Content::plain(Map::contiguous(0, 0, SIZE), vec![source.into()], DirectIo::Off),
        };
        let ended = Box::new(move || sender.send(()).unwrap());
        let served = serve(&threads, setup, vec![theirs], tether, vec![(1, 8192, 4096)], ended).unwrap();
        Kernel { socket: Some(ours), threads, served, file, closed, next, unique: 1 }
    }

    fn send(&mut self, opcode: u32, nodeid: u64, body: &[u8]) -> u64 {
        self.unique += 2;
        let len = u32::try_from(40 + body.len()).unwrap();
        let header = uapi::InHeader { len, opcode, unique: self.unique, nodeid, ..Default::default() };
        let mut message = vec![0; 40];
        header.write(&mut message).unwrap();
        message.extend_from_slice(body);
        rustix::net::send(self.socket.as_ref().unwrap(), &message, rustix::net::SendFlags::empty()).unwrap();
        self.unique
    }

    fn answer(&self) -> (u64, Result<Vec<u8>, i32>) {
        let mut message = vec![0; 1 << 20];
        let flags = rustix::net::RecvFlags::empty();
        let (_, len) = rustix::net::recv(self.socket.as_ref().unwrap(), &mut message[..], flags).unwrap();
        let header = uapi::OutHeader::read(&message).unwrap();
        assert_eq!(header.len as usize, len);
        let data = message[uapi::OutHeader::SIZE..len].to_vec();
        match header.error {
            0 => (header.unique, Ok(data)),
            error => {
                assert!(data.is_empty(), "an error has no data");
                (header.unique, Err(-error))
            }
        }
    }

    /// Answers that are not read.
    fn left(&self) -> usize {
        let read = || rustix::net::recv(&self.next, &mut [0; 1], rustix::net::RecvFlags::empty());
        std::iter::from_fn(|| read().ok()).take_while(|(_, len)| *len > 0).count()
    }

    fn ask(&mut self, opcode: u32, nodeid: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        let unique = self.send(opcode, nodeid, body);
        let (answered, answer) = self.answer();
        assert_eq!(answered, unique);
        answer
    }
}

fn geometry(read_only: bool, discard: bool) -> Geometry {
    Geometry {
        size: SIZE,
        logical_block: 512,
        physical_block: 512,
        io_min: 512,
        io_opt: 0,
        dma_align: 1,
        read_only,
        rotational: false,
        discard,
        discard_granularity: 4096,
        write_zeroes: true,
        max_io: 65536,
    }
}

fn transfer(offset: u64, size: u32, data: &[u8]) -> Vec<u8> {
    let mut body = vec![0; uapi::TransferIn::SIZE];
    uapi::TransferIn { offset, size, ..Default::default() }.write(&mut body).unwrap();
    body.extend_from_slice(data);
    body
}

fn range(mode: i32, offset: u64, length: u64) -> Vec<u8> {
    let mut body = vec![0; uapi::FallocateIn::SIZE];
    let mode = mode.cast_unsigned();
    uapi::FallocateIn { fh: 0, offset, length, mode, padding: 0 }.write(&mut body).unwrap();
    body
}

#[test]
fn bytes_go_to_their_places_and_come_back() {
    let mut kernel = Kernel::new(false, true);
    let data: Vec<u8> = (0..65536u32).map(|n| (n % 251) as u8).collect();
    let written = kernel.ask(uapi::FUSE_WRITE, 2, &transfer(131072, 65536, &data)).unwrap();
    assert_eq!(uapi::WriteOut::read(&written).unwrap().size, 65536);
    let mut found = vec![0; 65536];
    kernel.file.read_exact_at(&mut found, 131072).unwrap();
    assert!(found == data);
    assert!(kernel.ask(uapi::FUSE_READ, 2, &transfer(131072, 65536, &[])).unwrap() == data);
    // A partition's file begins where the partition does, and ends with it.
    assert_eq!(kernel.ask(uapi::FUSE_READ, 3, &transfer(0, 16, &[])).unwrap(), b"sixteen bytes...");
    assert_eq!(kernel.ask(uapi::FUSE_READ, 3, &transfer(4000, 512, &[])).unwrap().len(), 96);
    assert_eq!(kernel.ask(uapi::FUSE_READ, 3, &transfer(4096, 512, &[])).unwrap().len(), 0);
    assert_eq!(kernel.ask(uapi::FUSE_READ, 2, &transfer(u64::MAX, 512, &[])).unwrap().len(), 0);
    assert_eq!(kernel.ask(uapi::FUSE_READ, 9, &transfer(0, 512, &[])), Err(libc::ENOENT));
    let behind = kernel.ask(uapi::FUSE_WRITE, 3, &transfer(4000, 512, &[1; 512]));
    assert_eq!(behind, Err(libc::ENOSPC), "nothing is written behind a partition");
    assert_eq!(kernel.ask(uapi::FUSE_FSYNC, 2, &[0; 16]), Ok(vec![]));
    assert_eq!(kernel.ask(uapi::FUSE_READ, 2, &[0; 8]), Err(libc::EINVAL), "a message that was cut");
    let stats = kernel.served.stats();
    assert_eq!((stats.write.operations, stats.flush.operations), (1, 1));
    assert!(kernel.threads.count() == 1);
}

#[test]
fn a_range_is_zeroed_or_refused() {
    const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    for discard in [true, false] {
        let mut kernel = Kernel::new(false, discard);
        kernel.file.write_all_at(&[7; 16384], 0).unwrap();
        let outcome = kernel.ask(uapi::FUSE_FALLOCATE, 2, &range(PUNCH, 4096, 4096));
        assert_eq!(outcome, if discard { Ok(vec![]) } else { Err(libc::EOPNOTSUPP) });
        let zeroed = kernel.ask(uapi::FUSE_FALLOCATE, 2, &range(libc::FALLOC_FL_ZERO_RANGE, 8192, 4096));
        assert_eq!(zeroed, Ok(vec![]));
        let mut found = [0; 16384];
        kernel.file.read_exact_at(&mut found, 0).unwrap();
        let punched = if discard { 0 } else { 7 };
        assert_eq!(
            [found[0], found[4096], found[8191], found[8192], found[12287], found[12288]],
            [7, punched, punched, 0, 0, 7]
        );
        let longer = range(libc::FALLOC_FL_ZERO_RANGE, SIZE - 4096, 8192);
        assert_eq!(kernel.ask(uapi::FUSE_FALLOCATE, 2, &longer), Err(libc::ENOSPC));
        assert_eq!(kernel.ask(uapi::FUSE_FALLOCATE, 2, &range(0, 0, 4096)), Err(libc::EOPNOTSUPP));
    }
}

#[test]
fn what_is_read_only_stays_so() {
    let mut kernel = Kernel::new(true, false);
    assert_eq!(kernel.ask(uapi::FUSE_WRITE, 2, &transfer(0, 512, &[1; 512])), Err(libc::EROFS));
    assert_eq!(
        kernel.ask(uapi::FUSE_FALLOCATE, 2, &range(libc::FALLOC_FL_ZERO_RANGE, 0, 512)),
        Err(libc::EROFS)
    );
    assert_eq!(kernel.ask(uapi::FUSE_READ, 3, &transfer(0, 7, &[])).unwrap(), b"sixteen");
}

#[test]
fn more_requests_than_tags_wait_and_none_is_lost() {
    let mut kernel = Kernel::new(false, false);
    let mut waiting: Vec<u64> =
        (0..64).map(|n| kernel.send(uapi::FUSE_READ, 2, &transfer(n * 512, 512, &[]))).collect();
    // These have no answer, and must not cost a tag.
    for _ in 0..64 {
        kernel.send(uapi::FUSE_FORGET, 2, &[0; 8]);
    }
    waiting.push(kernel.send(uapi::FUSE_GETATTR, 2, &[0; 16]));
    while !waiting.is_empty() {
        let (unique, answer) = kernel.answer();
        answer.unwrap();
        waiting.remove(waiting.iter().position(|waits| *waits == unique).unwrap());
    }
}

/// A process that is forked to serve next closes what it inherits, this file too: it would wait for itself.
#[test]
fn closing_a_file_asks_no_server() {
    let mut kernel = Kernel::new(false, false);
    let answer = kernel.ask(uapi::FUSE_OPEN, 2, &[0; 8]).unwrap();
    let flags = u32::from_ne_bytes(answer[8..12].try_into().unwrap());
    assert_ne!(flags & uapi::FOPEN_NOFLUSH, 0, "{flags:#x}");
}

#[test]
fn what_is_not_known_is_said_so_and_interrupts_are_not_wanted() {
    let mut kernel = Kernel::new(false, false);
    for opcode in [36, 25, 22, 46, 99] {
        assert_eq!(kernel.ask(opcode, 2, &[0; 40]), Err(libc::ENOSYS), "{opcode}");
    }
    kernel.send(uapi::FUSE_READ, 2, &transfer(0, 512, &[]));
    assert!(kernel.answer().1.is_ok());
}

/// A quiet queue waits, which has to be ended; a busy one answers what it has read, and leaves the rest.
#[test]
fn a_queue_that_leaves_owes_no_answer() {
    const SENT: usize = 100;
    let mut kernel = Kernel::new(false, false);
    // After many at a time, reads wait as well.
    for _ in 0..3 * DEPTH {
        kernel.send(uapi::FUSE_FSYNC, 2, &[0; 16]);
    }
    (0..3 * DEPTH).for_each(|_| drop(kernel.answer().1.unwrap()));
    kernel.served.leave(&kernel.threads).unwrap();
    kernel.closed.recv_timeout(Duration::from_secs(120)).unwrap();
    kernel.send(uapi::FUSE_READ, 2, &transfer(0, 512, &[]));
    assert_eq!(kernel.left(), 1);
    kernel.served.leave(&kernel.threads).expect("it is gone, which is all that is wanted");

    let mut kernel = Kernel::new(false, false);
    let ours = kernel.socket.as_ref().unwrap().try_clone().unwrap();
    let answered = std::thread::spawn(move || {
        let read = || rustix::net::recv(&ours, &mut [0; 1], rustix::net::RecvFlags::empty());
        std::iter::from_fn(|| read().ok()).take_while(|(_, len)| *len > 0).count()
    });
    for sent in 0..SENT {
        kernel.send(uapi::FUSE_READ, 2, &transfer(0, 65536, &[]));
        if sent == SENT / 2 {
            kernel.served.leave(&kernel.threads).unwrap();
        }
    }
    kernel.closed.recv_timeout(Duration::from_secs(120)).unwrap();
    let left = kernel.left();
    rustix::net::shutdown(kernel.socket.as_ref().unwrap(), rustix::net::Shutdown::Both).unwrap();
    let answered = answered.join().unwrap();
    assert!(left >= SENT / 2 - 1, "{left} of {SENT} were left");
    assert_eq!(answered + left, SENT);
}

#[test]
fn the_queue_ends_with_the_connection() {
    let mut kernel = Kernel::new(false, false);
    kernel.send(uapi::FUSE_READ, 2, &transfer(0, 512, &[]));
    // The end that is kept for a successor keeps no connection: its kernel side is gone.
    drop(kernel.socket.take());
    kernel.closed.recv_timeout(Duration::from_secs(120)).unwrap();
    assert!(kernel.served.serving().is_none(), "the image's files are closed");
}

#[test]
fn as_many_reads_are_queued_as_were_of_use() {
    let mut line = Incoming { asked: 1, reading: 1, next: 1, ..Incoming::default() };
    line.read(true);
    assert_eq!(line.next, 2);
    line = Incoming { asked: 8, reading: 8, ..line };
    line.brought = 0;
    (0..3).for_each(|_| line.read(true));
    (0..5).for_each(|_| line.read(false));
    assert_eq!(line.next, 3);
    line = Incoming { asked: 2, reading: 2, brought: 0, ..line };
    (0..2).for_each(|_| line.read(false));
    assert_eq!(line.next, 1, "never none");
}

//! What was read below the file is told only while the lease holds: a file of other bytes plays the block device.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    fs::File,
    io::Write,
    os::fd::OwnedFd,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

use becket_engine::{
    Answer, Backing, Below, Data, Io, IoThreads, Memory, NewQueue, Op, Port, QueueId, Request, Token,
};
use becket_image::{BackingKind, Extent, Facts, Map, Place, ReadLease};
use rustix::io::Errno;

const BLOCK: u64 = 4096;
/// The device's length in blocks; each is one byte, repeated: the file's `f`, the disk's `d`.
const BLOCKS: u64 = 8;

type Outcome = (u16, Result<u64, Errno>, Vec<u8>);

/// Reads every block once, each under a tag of its own.
struct Reader {
    descriptor: OwnedFd,
    left: usize,
    outcomes: Sender<Outcome>,
}

impl Port for Reader {
    fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        for tag in 0..BLOCKS as u16 {
            let offset = u64::from(tag) * BLOCK;
            io.begin(tag, Request { op: Op::Read, offset, len: BLOCK, data: Data::Buffer });
        }
        Ok(())
    }

    fn completed(&mut self, _: &mut Io<'_>, _: Token, _: Answer) {}

    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>) {
        self.outcomes.send((tag, result, io.buffer(tag)[..BLOCK as usize].to_vec())).unwrap();
        self.left -= 1;
        if self.left == 0 {
            io.close();
        }
    }
}

/// Cargo's own place for files of tests, on a disk; the system's where the tests run without cargo.
fn place() -> tempfile::TempDir {
    let cargos = Path::new(env!("CARGO_TARGET_TMPDIR"));
    if cargos.is_dir() { tempfile::tempdir_in(cargos).unwrap() } else { tempfile::tempdir().unwrap() }
}

fn backing(file: impl Into<OwnedFd>) -> becket_image::Backing {
    let facts = Facts {
        physical_block_size: 4096,
        nowait: true,
        ..Facts::unasked(BackingKind::Regular, BLOCKS * BLOCK, false)
    };
    becket_image::Backing { buffered: file.into(), direct: None, facts }
}

struct Image {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl Image {
    fn new() -> Image {
        let dir = place();
        let path = dir.path().join("image");
        std::fs::write(&path, vec![b'f'; (BLOCKS * BLOCK) as usize]).unwrap();
        Image { _dir: dir, path }
    }

    fn lease(&self) -> Arc<ReadLease> {
        // A process that another test is starting holds the writing descriptor until it becomes its program.
        for _ in 0..500 {
            match ReadLease::take(File::open(&self.path).unwrap().into()) {
                Ok(lease) => return Arc::new(lease),
                Err(reason) if reason.contains("open for writing") => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(reason) => panic!("{reason}"),
            }
        }
        panic!("the image stays open for writing")
    }

    /// Begins a break of the lease without waiting for its end.
    fn want_to_write(&self) {
        let opened = File::options().write(true).custom_flags(libc::O_NONBLOCK).open(&self.path);
        assert_eq!(opened.unwrap_err().raw_os_error(), Some(libc::EWOULDBLOCK));
    }
}

fn disk_of(bytes: &[u8]) -> File {
    let mut disk = tempfile::tempfile().unwrap();
    disk.write_all(bytes).unwrap();
    disk
}

fn disk() -> File {
    disk_of(&vec![b'd'; (BLOCKS * BLOCK) as usize])
}

/// The odd blocks are below, the even ones are not.
fn mixed() -> Map {
    let block = |n| Extent {
        start: n * BLOCK,
        len: BLOCK,
        place: Place::Data { file: (n % 2) as u32, offset: n * BLOCK },
    };
    Map::from_extents((0..BLOCKS).map(block).collect()).unwrap()
}

struct Running {
    threads: IoThreads,
    queue: QueueId,
    outcomes: Receiver<Outcome>,
    closed: Receiver<()>,
}

fn start(image: &Image, disk: impl Into<OwnedFd>, map: Map, lease: Arc<ReadLease>) -> Running {
    let threads = IoThreads::start(1).unwrap();
    let (sender, outcomes) = channel();
    let (closing, closed) = channel();
    let files = vec![backing(File::open(&image.path).unwrap()), backing(disk)];
    let queue = NewQueue {
        port: Box::new(Reader {
            descriptor: File::open("/dev/null").unwrap().into(),
            left: BLOCKS as usize,
            outcomes: sender,
        }),
        depth: BLOCKS as u16,
        number: 0,
        backing: Arc::new(Backing::new(Map::contiguous(0, 0, BLOCKS * BLOCK), files, true, 1)),
        memory: Memory::Buffers(BLOCK as usize),
        batch: None,
        below: Some(Below { map: Arc::new(map), lease }),
        merge: false,
        stats: Arc::default(),
        on_closed: Box::new(move || closing.send(()).unwrap()),
    };
    let queue = threads.add(0, queue).unwrap();
    Running { threads, queue, outcomes, closed }
}

impl Running {
    /// What each block was told to be, once all are.
    fn told(self) -> Vec<Result<u8, Errno>> {
        self.closed.recv_timeout(Duration::from_secs(20)).expect("the queue does not end");
        let mut told = vec![None; BLOCKS as usize];
        for (tag, result, bytes) in self.outcomes.try_iter() {
            let byte = result.map(|len| {
                assert_eq!(len, BLOCK);
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "torn");
                bytes[0]
            });
            assert_eq!(told[usize::from(tag)].replace(byte), None, "told twice");
        }
        told.into_iter().map(|one| one.expect("never told")).collect()
    }
}

const FILE: [Result<u8, Errno>; BLOCKS as usize] = [Ok(b'f'); BLOCKS as usize];

#[test]
fn under_a_lease_the_map_below_is_read() {
    let image = Image::new();
    let told = start(&image, disk(), mixed(), image.lease()).told();
    let wanted: Vec<_> = (0..BLOCKS).map(|n| Ok(if n % 2 == 1 { b'd' } else { b'f' })).collect();
    assert_eq!(told, wanted);
}

#[test]
fn what_was_read_below_a_broken_lease_is_read_again_from_the_file() {
    let image = Image::new();
    let lease = image.lease();
    image.want_to_write();
    assert_eq!(start(&image, disk(), Map::contiguous(1, 0, BLOCKS * BLOCK), lease).told(), FILE);
}

#[test]
fn a_queue_that_returned_lets_go_of_the_lease() {
    let image = Image::new();
    let lease = image.lease();
    let gone = Arc::downgrade(&lease);
    image.want_to_write();
    start(&image, disk(), mixed(), lease).told();
    assert!(gone.upgrade().is_none());
    File::options().write(true).custom_flags(libc::O_NONBLOCK).open(&image.path).unwrap();
}

/// No lease sees this: `open` for reading may truncate all the same.
#[test]
fn an_image_that_was_emptied_by_a_reader_is_noticed() {
    let image = Image::new();
    let lease = image.lease();
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::TRUNC;
    rustix::fs::open(&image.path, flags, rustix::fs::Mode::empty()).unwrap();
    assert!(has_lease(&lease), "then the size need not be looked at");
    assert!(!lease.holds());
    let told = start(&image, disk(), mixed(), lease).told();
    assert_eq!(told, vec![Err(Errno::IO); BLOCKS as usize], "the file has no bytes any more");
}

/// Whether the kernel still says that there is a lease.
fn has_lease(lease: &ReadLease) -> bool {
    // SAFETY: the command takes no argument and touches no memory.
    let kind = unsafe {
        libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(lease)), libc::F_GETLEASE)
    };
    kind == libc::F_RDLCK
}

/// The size is back where it was, by means that no lease sees.
#[test]
fn an_image_whose_size_was_put_back_is_noticed() {
    let image = Image::new();
    let lease = image.lease();
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::TRUNC;
    rustix::fs::open(&image.path, flags, rustix::fs::Mode::empty()).unwrap();
    let handed_over = ReadLease::handed_over(
        File::open(&image.path).unwrap().into(),
        becket_image::Untouched { size: 0, ..lease.untouched() },
    );
    assert!(!handed_over.holds(), "the size alone is not enough");
    assert!(!lease.holds());
}

#[test]
fn a_failure_below_is_the_files_to_tell() {
    let image = Image::new();
    // Half as long as the map says: reading behind the end brings nothing.
    let short = disk_of(&vec![b'd'; (BLOCKS / 2 * BLOCK) as usize]);
    let told = start(&image, short, Map::contiguous(1, 0, BLOCKS * BLOCK), image.lease()).told();
    let (first, second) = told.split_at(BLOCKS as usize / 2);
    assert!(first.iter().all(|told| matches!(told, Ok(b'd' | b'f'))), "{told:?}");
    assert_eq!(second, &FILE[BLOCKS as usize / 2..]);
}

/// Gives the reads of a pipe that stands for a disk what they wait for. The queue may have all that it wants, and be
/// gone with its end of the pipe, before the last byte is written.
fn feed(writer: OwnedFd) {
    match File::from(writer).write_all(&vec![b'd'; (BLOCKS * BLOCK) as usize]) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
        other => other.unwrap(),
    }
}

#[test]
fn what_is_under_way_when_the_queue_returns_is_read_again() {
    let image = Image::new();
    // A pipe as the disk: its reads wait for as long as we like.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let lease = image.lease();
    let held = Arc::clone(&lease);
    let running = start(&image, reader, mixed(), lease);
    assert!(running.threads.return_to_file(running.queue).unwrap());
    assert_eq!(Arc::strong_count(&held), 1, "the queue's share is gone although reads are under way");
    assert!(held.holds(), "so that no proof can be why they are read again");
    feed(writer);
    assert_eq!(running.told(), FILE);
}

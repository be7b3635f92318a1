//! A connection in one process: its keeper and its server together, with the kernel's own FUSE and loop
//! drivers.
//! Needs root, /dev/fuse and loop devices; elsewhere it says in the skip log that it did not run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use becket_engine::{Geometry, IoThreads};
use becket_image::{DirectIo, OpenOptions as ImageOptions, Opened};
use becket_testkit::skip;
use becket_transport::fuse::{Connection, MAX_IO, attach_disk, serve};
use becket_transport::serve::{Content, Served, Setup};
use becket_transport::{geometry, loop_};

const SIZE: usize = 16 << 20;
const DEPTH: u16 = 32;
const PATIENCE: Duration = Duration::from_secs(60);

fn can(name: &str) -> bool {
    let here = becket_testkit::require_root(name);
    let drivers = ["/dev/fuse", "/dev/loop-control"].iter().all(|path| Path::new(path).exists());
    if here && !drivers {
        skip(name, "needs /dev/fuse and loop devices");
    }
    here && drivers
}

/// Bytes that differ from block to block and from one generation to the next.
fn pattern(generation: u8) -> Vec<u8> {
    (0..SIZE).map(|at| (at / 512) as u8 ^ (at as u8).wrapping_mul(generation | 1)).collect()
}

struct Bench {
    directory: tempfile::TempDir,
    geometry: Geometry,
}

impl Bench {
    fn new() -> Bench {
        let place = std::env::var_os("BECKET_SCRATCH").map_or_else(std::env::temp_dir, Into::into);
        let directory = tempfile::tempdir_in(place).unwrap();
        std::fs::write(directory.path().join("image"), pattern(1)).unwrap();
        let bench = Bench { geometry: geometry_of(&directory.path().join("image")), directory };
        bench.opened();
        bench
    }

    fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    fn opened(&self) -> Opened {
        open(&self.image())
    }

    /// Serves a connection; what comes back are its server, the end of the tether, and who hears of its end.
    fn serve(&self, connection: &Connection) -> (IoThreads, Served, OwnedFd, Receiver<()>) {
        let threads = IoThreads::start(2).unwrap();
        let (closed, is_closed) = channel();
        let (reader, tether) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let Opened { map, sources, .. } = self.opened();
        let devices = connection.devices().iter().map(|device| device.try_clone().unwrap()).collect();
        let setup = Setup {
            id: 1,
            first: 1,
            queues: u16::try_from(connection.devices().len()).unwrap(),
            depth: DEPTH,
            geometry: self.geometry.clone(),
            content: Content::plain(map, sources, DirectIo::Auto),
        };
        let ended = Box::new(move || _ = closed.send(()));
        let served = serve(&threads, setup, devices, tether, Vec::new(), ended).unwrap();
        (threads, served, reader, is_closed)
    }
}

fn open(path: &Path) -> Opened {
    becket_image::open(path, &ImageOptions { shared: true, ..ImageOptions::default() }).unwrap()
}

fn geometry_of(path: &Path) -> Geometry {
    let opened = open(path);
    geometry(&opened.map, &opened.sources, opened.block_size, opened.read_only, MAX_IO)
}

#[test]
fn fuse_disk_round_trip() {
    if !can("fuse_disk_round_trip") {
        return;
    }
    let bench = Bench::new();
    let (connection, root) = Connection::detached(2, DEPTH, MAX_IO).unwrap();
    let (_threads, served, _tether, closed) = bench.serve(&connection);
    let disk = attach_disk(root, &bench.image(), &bench.geometry, &[], false).unwrap();
    let (number, diskseq) = (disk.number, disk.diskseq);
    assert!(disk.direct_io, "{:?}", disk.warnings);
    drop(disk.fd);

    let mut bytes = vec![0; SIZE];
    File::open(&disk.path).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == pattern(1), "the device shows the file's bytes");
    let writer = OpenOptions::new().write(true).open(&disk.path).unwrap();
    writer.write_all_at(&pattern(2), 0).unwrap();
    writer.sync_all().unwrap();
    drop(writer);
    assert!(
        std::fs::read(bench.image()).unwrap() == pattern(2),
        "the file holds what was written and synced"
    );
    let stats = served.stats();
    assert!(stats.read.bytes >= SIZE as u64 && stats.write.bytes >= SIZE as u64, "{stats:?}");
    assert!(stats.flush.operations > 0);

    assert!(loop_::detach_unused(number, Some(diskseq)).unwrap());
    closed.recv_timeout(PATIENCE).expect("the queues end when the device does");
    assert!(connection.is_gone());
}

#[test]
fn what_a_server_had_read_the_next_one_answers() {
    let name = "what_a_server_had_read_the_next_one_answers";
    if !can(name) {
        return;
    }
    let bench = Bench::new();
    let (connection, root) = Connection::detached(1, DEPTH, MAX_IO).unwrap();
    if !connection.resends() {
        return skip(name, "this kernel sends no request again");
    }
    // A server that takes a request and dies over it: its copy of the descriptor is gone, the keeper's is
    // not.
    let stat = std::thread::spawn(move || {
        let file = rustix::fs::openat(&root, "image", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty());
        File::from(file.unwrap()).metadata().unwrap().len()
    });
    let mut message = vec![0; MAX_IO as usize + 80];
    let device = &connection.devices()[0];
    let read = loop {
        match rustix::io::read(device, &mut message) {
            Err(rustix::io::Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
            other => break other.unwrap(),
        }
    };
    assert!(read > 40);
    let (_threads, _served, _tether, closed) = bench.serve(&connection);
    connection.resend().unwrap();
    assert_eq!(stat.join().unwrap(), SIZE as u64);
    closed.recv_timeout(PATIENCE).expect("the file system goes with its last user");
}

#[test]
fn a_tether_is_let_go_of_with_the_queues() {
    if !can("a_tether_is_let_go_of_with_the_queues") {
        return;
    }
    let bench = Bench::new();
    let (connection, root) = Connection::detached(1, DEPTH, MAX_IO).unwrap();
    let (_threads, _served, tether, closed) = bench.serve(&connection);
    rustix::io::ioctl_fionbio(&tether, true).unwrap();
    assert_eq!(rustix::io::read(&tether, &mut [0u8]), Err(rustix::io::Errno::AGAIN), "the ring holds it");
    drop(root);
    closed.recv_timeout(PATIENCE).unwrap();
    assert_eq!(rustix::io::read(&tether, &mut [0u8]), Ok(0));
}

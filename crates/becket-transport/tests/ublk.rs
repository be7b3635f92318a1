//! A ublk device in one process: control and data side together, without supervisor and worker.
//! Needs a kernel with ublk and its privileges; elsewhere it says in the skip log that it did not run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    fs::{File, OpenOptions},
    io::Write,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::mpsc::channel,
    time::Duration,
};

use becket_engine::IoThreads;
use becket_image::{DirectIo, OpenOptions as ImageOptions};
use becket_transport::{
    geometry,
    serve::{Content, Setup},
    ublk::{self, DataMode, control::Control},
};

const SIZE: usize = 16 << 20;

/// Says that a test did not run, where the runner counts it.
fn skip(name: &str, why: &str) {
    println!("SKIP {name}: {why}");
    if let Some(log) = std::env::var_os("BECKET_SKIP_LOG") {
        let mut log = OpenOptions::new().create(true).append(true).open(log).unwrap();
        // One write: tests run side by side.
        log.write_all(format!("{name}: {why}\n").as_bytes()).unwrap();
    }
}

/// Bytes that differ from block to block and from one generation to the next.
fn pattern(generation: u8) -> Vec<u8> {
    let row: Vec<u8> = (0..1024).map(|at: u32| (at as u8).wrapping_mul(generation | 1)).collect();
    // By blocks: tests are compiled without optimisation.
    (0..SIZE / 512).map(|block| &row[block % 256..][..512]).collect::<Vec<_>>().concat()
}

fn device_round_trip(mode: DataMode, name: &str) {
    if !Path::new("/dev/ublk-control").exists() {
        return skip(name, "this kernel has no /dev/ublk-control");
    }
    let control = Control::open().unwrap();
    let features = control.features().unwrap();
    let place = std::env::var_os("BECKET_SCRATCH").map_or_else(std::env::temp_dir, Into::into);
    let directory = tempfile::tempdir_in(place).unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, pattern(1)).unwrap();
    let opened = becket_image::open(&path, &ImageOptions::default()).unwrap();
    let flags = match ublk::flags_for(features, Some(mode), &opened.map) {
        Ok(flags) => flags,
        Err(error) => return skip(name, &error.to_string()),
    };
    let geometry = geometry(&opened.map, &opened.sources, opened.block_size, opened.read_only, 128 << 10);
    let mark = 100 + mode as u64;
    let request =
        ublk::control::AddRequest { id: None, queues: 2, depth: 32, flags, max_io: geometry.max_io, mark };
    let info = control.add(request).unwrap();
    control.set_params(info.dev_id, &geometry).unwrap();
    let char_device = ublk::control::open_char(info.dev_id).unwrap();
    let threads = IoThreads::start(2).unwrap();
    let (closed, is_closed) = channel();
    let setup = Setup {
        id: info.dev_id,
        first: info.dev_id,
        queues: info.nr_hw_queues,
        depth: info.queue_depth,
        geometry,
        content: Content::plain(opened.map, opened.sources, DirectIo::Auto),
    };
    let ended = Box::new(move || closed.send(()).unwrap());
    ublk::serve(&threads, setup, info.flags, char_device, ended).unwrap();
    control.start(info.dev_id, std::process::id(), Duration::from_secs(30)).unwrap();

    let node = Path::new("/dev").join(format!("ublkb{}", info.dev_id));
    let mut bytes = vec![0; SIZE];
    let reader = File::open(&node).unwrap();
    reader.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == pattern(1), "the device shows the file's bytes");
    drop(reader);

    let writer = OpenOptions::new().write(true).open(&node).unwrap();
    writer.write_all_at(&pattern(2), 0).unwrap();
    writer.sync_all().unwrap();
    drop(writer);
    assert!(std::fs::read(&path).unwrap() == pattern(2), "the file holds what was written and synced");

    let durable = OpenOptions::new().write(true).custom_flags(libc::O_DSYNC).open(&node).unwrap();
    durable.write_all_at(&[0xa5; 4096], 8192).unwrap();
    drop(durable);
    assert_eq!(std::fs::read(&path).unwrap()[8192..12288], [0xa5; 4096]);

    control.stop(info.dev_id).unwrap();
    is_closed.recv_timeout(Duration::from_secs(120)).expect("the queues end when the device stops");
    control.del(info.dev_id).unwrap();
    // A test beside this one may have been given the number meanwhile.
    let others = control.info(info.dev_id).unwrap().is_none_or(|info| info.ublksrv_flags != mark);
    assert!(others, "the device is gone");
}

#[test]
fn copying_device_round_trip() {
    device_round_trip(DataMode::Copy, "copying_device_round_trip");
}

#[test]
fn zero_copy_device_round_trip() {
    device_round_trip(DataMode::ZeroCopy, "zero_copy_device_round_trip");
}

#[test]
fn batch_copying_device_round_trip() {
    device_round_trip(DataMode::BatchCopy, "batch_copying_device_round_trip");
}

#[test]
fn batch_zero_copy_device_round_trip() {
    device_round_trip(DataMode::BatchZeroCopy, "batch_zero_copy_device_round_trip");
}

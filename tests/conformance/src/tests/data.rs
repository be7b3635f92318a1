//! Bytes written are the bytes read, by whatever way.
//! Must never compare only what the device says: the backing file has to hold the same.

use std::fs;
use std::os::unix::fs::FileExt;
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};

use super::device;
use crate::bench::{Access, Bench, open, verify};
use crate::bytes::{Buffer, Mismatch, Random, fill, pattern};
use crate::driver::Attach;
use crate::exercise::{Exercise, verify_backing, verify_device};
use crate::ioctl;
use crate::suite::Test;

pub(super) const TESTS: &[Test] = &[
    device("random-io", random_io),
    device("random-io-direct", random_io_direct),
    device("direct-io-to-and-fro", direct_io_to_and_fro),
    device("suite-notices-corruption", notices_corruption),
    device("survives-reattach", survives_reattach),
    device("fsync-fills-the-file", fsync_fills_the_file),
    device("flush-buffers", flush_buffers),
    device("two-devices", two_devices),
    device("open-close", open_close),
    device("backing-block-device", backing_block_device),
];

const MIB: u64 = 1 << 20;

/// An image whose first half is allocated and full and whose second half is a hole, and its content.
fn half_full(bench: &Bench, name: &str, size: u64) -> Result<(std::path::PathBuf, Vec<u8>)> {
    let mut model = vec![0; size as usize];
    fill(&mut model[..size as usize / 2], bench.seed);
    let image = bench.image(name, size)?;
    open(&image, Access::Buffered)?.write_all_at(&model[..size as usize / 2], 0)?;
    Ok((image, model))
}

fn exercise_all(bench: &Bench, ops: u64, options: &Attach) -> Result<()> {
    let (image, mut model) = half_full(bench, "image", 64 * MIB)?;
    let device = bench.attach(&image, options)?;
    let exercise = Exercise { threads: 4, ..Exercise::of(device.path(), ops, bench.seed)? };
    let tally = exercise.run(device.path(), &mut model)?;
    verify_device(&device, &model).context(tally)?;
    verify_backing(&image, 0, &model).context(tally)?;
    device.detach()?;
    verify_backing(&image, 0, &model).context("after detaching")
}

fn random_io(bench: &Bench) -> Result<()> {
    exercise_all(bench, bench.ops, &Attach::default())
}

/// Direct I/O is switched off and on again and again while the device is read and written; nothing is lost,
/// and the list shows the current setting.
fn direct_io_to_and_fro(bench: &Bench) -> Result<()> {
    let (image, mut model) = half_full(bench, "image", 64 * MIB)?;
    let device = bench.attach(&image, &Attach::default())?;
    let shown = || -> Result<bool> {
        let listed = bench.driver.list()?;
        let found = listed.iter().find(|info| info.device == device.path());
        Ok(found.with_context(|| format!("{} is not listed", device.path().display()))?.direct_io)
    };
    let set = |mode| bench.driver.set_direct_io(device.path(), mode);
    if bench.via == crate::driver::Via::Dm {
        ensure!(set("on").is_ok() && set("off").is_err(), "device-mapper has no page cache to switch to");
        return device.detach();
    }
    // What the program can have here, whatever it began with.
    let can = set("on").is_ok();
    ensure!(shown()? == can, "direct I/O could be switched on: {can}, and the list says otherwise");
    let exercise = Exercise { threads: 4, ..Exercise::of(device.path(), bench.ops, bench.seed)? };
    let switches = thread::scope(|scope| {
        let load = scope.spawn(|| exercise.run(device.path(), &mut model));
        let mut switches = 0;
        while !load.is_finished() {
            let on = switches % 2 == 1 && can;
            set(if on { "auto" } else { "off" })?;
            ensure!(shown()? == on, "after switch {switches} the list says otherwise");
            switches += 1;
        }
        load.join().map_err(|_| anyhow!("the load panicked"))?.context(format!("{switches} switches"))?;
        Ok(switches)
    })?;
    ensure!(switches > 1, "the load was over after {switches} switches");
    verify_device(&device, &model).context(format!("{switches} switches"))?;
    device.detach()?;
    verify_backing(&image, 0, &model).context("after detaching")
}

/// With direct I/O to the backing file, where requests that do not fit its alignment take another way.
fn random_io_direct(bench: &Bench) -> Result<()> {
    let path = bench.image_of("probe", &[0; 4096])?;
    if open(&path, Access::ReadDirect).is_err() {
        return crate::bench::skip("the scratch file system has no direct I/O");
    }
    exercise_all(bench, bench.ops / 4, &Attach { direct_io: Some("on"), ..Attach::default() })
}

/// A suite that cannot fail proves nothing: here the backing file is changed behind the device's back.
fn notices_corruption(bench: &Bench) -> Result<()> {
    let (image, mut model) = half_full(bench, "image", 4 * MIB)?;
    let device = bench.attach(&image, &Attach::default())?;
    let exercise = Exercise::of(device.path(), 100, bench.seed)?;
    exercise.run(device.path(), &mut model)?;
    verify_device(&device, &model)?;
    let backing = open(&image, Access::Buffered)?;
    let at = Random::new(bench.seed).below(4 * MIB);
    let flip = |at: u64, model: &[u8]| backing.write_all_at(&[model[at as usize] ^ 1], at);
    flip(at, &model)?;
    ioctl::flush_buffers(&device.open(Access::Buffered)?)?;
    for (what, seen) in
        [("device", verify_device(&device, &model)), ("backing file", verify_backing(&image, 0, &model))]
    {
        let error = seen.err().with_context(|| format!("the {what} was changed at {at} and looks fine"))?;
        let mismatch: &Mismatch = error.downcast_ref().with_context(|| format!("{what}: {error:#}"))?;
        ensure!((mismatch.at, mismatch.count) == (at, 1), "{what}: changed at {at}, seen: {mismatch}");
    }
    backing.write_all_at(&model[at as usize..=at as usize], at)?;
    verify_device(&device, &model).context("after mending it")?;
    // Random reads notice as well, not only the comparison at the end.
    for at in (0..4 * MIB).step_by(512) {
        flip(at, &model)?;
    }
    ioctl::flush_buffers(&device.open(Access::Buffered)?)?;
    let outcome = Exercise { seed: bench.seed + 1, ..exercise }.run(device.path(), &mut model);
    let error = outcome.err().context("every block was changed and no random read noticed")?;
    ensure!(error.downcast_ref::<Mismatch>().is_some(), "noticed by another error: {error:#}");
    device.detach()
}

fn survives_reattach(bench: &Bench) -> Result<()> {
    let size = 8 * MIB;
    let (image, mut model) = half_full(bench, "image", size)?;
    for round in 0..3 {
        let device = bench.attach(&image, &Attach::default())?;
        verify_device(&device, &model).with_context(|| format!("attached for the time {round}"))?;
        let mut random = Random::new(bench.seed + round);
        let file = device.open(Access::Buffered)?;
        for _ in 0..16 {
            let at = random.below(size - 65536) as usize;
            let len = random.log_uniform(1, 65536) as usize;
            fill(&mut model[at..at + len], random.next());
            file.write_all_at(&model[at..at + len], at as u64)?;
        }
        // No fsync: closing and detaching must lose nothing.
        drop(file);
        device.detach()?;
        verify_backing(&image, 0, &model).with_context(|| format!("detached for the time {round}"))?;
    }
    Ok(())
}

fn fsync_fills_the_file(bench: &Bench) -> Result<()> {
    let image = bench.image("image", 4 * MIB)?;
    let device = bench.attach(&image, &Attach::default())?;
    let file = device.open(Access::Buffered)?;
    for round in 0..8u64 {
        let (at, content) = (round * 300_001, pattern(100_003, bench.seed + round));
        file.write_all_at(&content, at)?;
        if round % 2 == 0 {
            file.sync_all()?
        } else {
            file.sync_data()?
        }
        verify_backing(&image, at, &content)?;
    }
    drop(file);
    device.detach()
}

fn flush_buffers(bench: &Bench) -> Result<()> {
    let image = bench.image("image", MIB)?;
    let device = bench.attach(&image, &Attach::default())?;
    let file = device.open(Access::Buffered)?;
    let content = pattern(MIB as usize, bench.seed);
    file.write_all_at(&content, 0)?;
    ioctl::flush_buffers(&file)?;
    verify_backing(&image, 0, &content)?;
    // It also forgets: what changes below is read afresh.
    verify(&file, 0, &content)?;
    let other = pattern(8192, bench.seed + 1);
    open(&image, Access::Buffered)?.write_all_at(&other, 4096)?;
    ioctl::flush_buffers(&file)?;
    verify(&file, 4096, &other)?;
    drop(file);
    device.detach()
}

fn two_devices(bench: &Bench) -> Result<()> {
    let size = 8 * MIB as usize;
    let images = [bench.image("one", 8 * MIB)?, bench.image("two", 8 * MIB)?];
    let attach = |image| bench.attach(image, &Attach::default());
    let devices = [attach(&images[0])?, attach(&images[1])?];
    ensure!(devices[0].path() != devices[1].path(), "both are {}", devices[0].path().display());
    let models = thread::scope(|scope| {
        let work = |index: usize| {
            let (device, seed) = (&devices[index], bench.seed + index as u64);
            let ops = bench.ops / 20;
            scope.spawn(move || {
                let mut model = vec![0; size];
                Exercise::of(device.path(), ops, seed)?.run(device.path(), &mut model)?;
                Ok::<_, anyhow::Error>(model)
            })
        };
        let threads = [work(0), work(1)];
        threads.map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked"))))
    });
    for ((device, image), model) in devices.into_iter().zip(&images).zip(models) {
        let model = model?;
        verify_device(&device, &model)?;
        verify_backing(image, 0, &model)?;
        device.detach()?;
        verify_backing(image, 0, &model)?;
    }
    Ok(())
}

fn open_close(bench: &Bench) -> Result<()> {
    let image = bench.image("image", 4 * MIB)?;
    let device = bench.attach(&image, &Attach::default())?;
    let mut model = vec![0; 4 * MIB as usize];
    let first = pattern(4096, bench.seed);
    model[..4096].copy_from_slice(&first);
    device.open(Access::Direct)?.write_all_at(Buffer::pattern(4096, bench.seed).as_ref(), 0)?;
    let (path, first) = (device.path(), &first);
    thread::scope(|scope| {
        let openers: Vec<_> = [Access::Read, Access::ReadDirect, Access::Buffered, Access::Direct]
            .map(|access| {
                scope.spawn(move || {
                    for _ in 0..100 {
                        verify(&open(path, access)?, 0, first).with_context(|| format!("{access:?}"))?;
                    }
                    Ok::<_, anyhow::Error>(())
                })
            })
            .into();
        let file = device.open(Access::Direct)?;
        for index in 1..200usize {
            let content = Buffer::pattern(4096, bench.seed + index as u64);
            file.write_all_at(content.as_ref(), index as u64 * 8192)?;
            model[index * 8192..][..4096].copy_from_slice(content.as_ref());
        }
        for opener in openers {
            opener.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))?;
        }
        Ok::<_, anyhow::Error>(())
    })?;
    verify_device(&device, &model)?;
    device.detach()
}

fn backing_block_device(bench: &Bench) -> Result<()> {
    let size = 16 * MIB;
    let (image, mut model) = half_full(bench, "image", size)?;
    let below = crate::bench::PlainLoop::new(&image)?;
    let device = bench.attach(&below.0, &Attach::default())?;
    ensure!(device.info.size == size, "the device has {} bytes, its backing {size}", device.info.size);
    Exercise::of(device.path(), bench.ops / 20, bench.seed)?.run(device.path(), &mut model)?;
    verify_device(&device, &model)?;
    device.detach()?;
    verify_backing(&below.0, 0, &model).context("the block device below")?;
    drop(below);
    verify_backing(&image, 0, &model)?;
    fs::remove_file(image)?;
    Ok(())
}

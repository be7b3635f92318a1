//! A device changes while it is used: read-only, shorter and longer, another image.
//! Must never ask for more than a transport promises: it must refuse what it cannot change live, and stay as
//! it was.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};

use super::becket;
use crate::bench::{Access, Bench, Device, Mount, skip, verify, wait_until};
use crate::bytes::{Buffer, Random, pattern};
use crate::command::sh;
use crate::driver::{Attach, Via};
use crate::exercise::verify_backing;
use crate::ioctl;
use crate::suite::Test;

pub(super) const TESTS: &[Test] = &[
    becket("read-only-to-and-fro", read_only_to_and_fro),
    becket("size-limit-to-and-fro", size_limit_to_and_fro),
    becket("image-to-and-fro", image_to_and_fro),
    becket("image-of-a-mounted-device", image_of_a_mounted_device),
    becket("grown-under-a-file-system", grown_under_a_file_system),
    becket("block-size-needs-a-new-device", block_size),
];

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// How often a device changes.
const ROUNDS: u64 = 12;

fn set(bench: &Bench, device: &Device, words: &[&str]) -> Result<()> {
    bench.driver.set(device.path(), words)
}

/// The refusal must say what else to do, and leave the device alone.
fn refused(bench: &Bench, device: &Device, words: &[&str], hint: &str) -> Result<()> {
    let error = set(bench, device, words).err().with_context(|| format!("{words:?} was not refused"))?;
    let said = format!("{error:#}");
    ensure!(said.contains(hint), "{words:?}: the refusal does not say {hint:?}: {said}");
    Ok(())
}

/// Kills the process that serves a device, where there is one; it must come back as it was.
fn kill_worker(bench: &Bench, device: &Device) -> Result<()> {
    let worker = || -> Result<Option<u32>> {
        let listed = bench.driver.list()?;
        let found = listed.iter().find(|info| info.device == device.path());
        Ok(found.with_context(|| format!("{} is not listed", device.path().display()))?.worker_pid)
    };
    let Some(pid) = worker()? else { return Ok(()) };
    sh(&["kill", "-9", &pid.to_string()])?;
    wait_until("another worker serves", || worker().is_ok_and(|now| now.is_some_and(|now| now != pid)))
}

/// Runs `load` again and again in a thread of its own while `change` runs; returns how often.
fn beside(load: impl Fn(u64) -> Result<()> + Sync, change: impl FnOnce() -> Result<()>) -> Result<u64> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let loading = scope.spawn(|| {
            let mut times = 0;
            while !done.load(Ordering::Relaxed) {
                load(times)?;
                times += 1;
            }
            Ok::<_, anyhow::Error>(times)
        });
        let changed = change();
        done.store(true, Ordering::Relaxed);
        let times = loading.join().map_err(|_| anyhow!("the load panicked"))?.context("the load")?;
        changed.map(|()| times)
    })
}

fn read_only_to_and_fro(bench: &Bench) -> Result<()> {
    let image = bench.image_of("image", &pattern(MIB as usize, bench.seed))?;
    let device = bench.attach(&image, &Attach::default())?;
    if bench.via == Via::Dm {
        refused(bench, &device, &["--read-only", "on"], "detach")?;
        return device.detach();
    }
    let file = device.open(Access::Direct)?;
    let content = Buffer::pattern(PAGE as usize, bench.seed + 1);
    // Each write is done or refused as a whole, at any time.
    let write = |at: u64| match file.write_all_at(content.as_ref(), at % (MIB / PAGE) * PAGE) {
        Err(error) if ![libc::EPERM, libc::EROFS, libc::EIO].contains(&error.raw_os_error().unwrap_or(0)) => {
            Err(anyhow!(error).context("a write"))
        }
        _ => Ok(()),
    };
    let reader = device.open(Access::ReadDirect)?;
    let cached = device.open(Access::Buffered)?;
    beside(write, || {
        for round in 0..ROUNDS {
            // What waits in the page cache for being written back reaches the image first.
            cached.write_all_at(content.as_ref(), 0)?;
            set(bench, &device, &["--read-only", "on"])?;
            verify_backing(&image, 0, content.as_ref()).context("written before")?;
            ensure!(
                ioctl::read_only(&reader)?,
                "round {round}: the kernel does not know that it is read-only"
            );
            let before = std::fs::read(&image)?;
            ensure!(file.write_all_at(content.as_ref(), 0).is_err(), "round {round}: a write was taken");
            if round + 1 == ROUNDS {
                kill_worker(bench, &device)?;
                ensure!(file.write_all_at(content.as_ref(), 0).is_err(), "the next worker takes writes");
            }
            ensure!(
                std::fs::read(&image)? == before,
                "round {round}: the image of a read-only device changed"
            );
            verify(&reader, 0, &before)?;
            set(bench, &device, &["--read-only", "off"])?;
            file.write_all_at(content.as_ref(), PAGE).context("once it is writable again")?;
        }
        Ok(())
    })?;
    drop((file, reader, cached));
    device.detach()
}

fn size_limit_to_and_fro(bench: &Bench) -> Result<()> {
    let content = pattern(4 * MIB as usize, bench.seed);
    let image = bench.image_of("image", &content)?;
    let device = bench.attach(&image, &Attach::default())?;
    let file = device.open(Access::ReadDirect)?;
    if bench.via == Via::Ublk
        && let Err(error) = set(bench, &device, &["--size-limit", "1MiB"])
    {
        ensure!(ioctl::size(&file)? == 4 * MIB, "it was refused, and the size is another");
        return skip(format!("a live ublk device does not take over a new size: {error:#}"));
    }
    let read = |at: u64| {
        let at = at % (MIB / PAGE) * PAGE;
        verify(&file, at, &content[at as usize..][..PAGE as usize])
    };
    beside(read, || {
        for round in 0..ROUNDS {
            set(bench, &device, &["--size-limit", "1MiB"])?;
            ensure!(ioctl::size(&file)? == MIB, "round {round}: {} bytes under a limit", ioctl::size(&file)?);
            ensure!(
                file.read_exact_at(Buffer::new(PAGE as usize).as_mut(), MIB).is_err(),
                "read behind the end"
            );
            if round + 1 == ROUNDS {
                kill_worker(bench, &device)?;
                ensure!(ioctl::size(&file)? == MIB, "another size after a death");
            }
            set(bench, &device, &["--size-limit", "none"])?;
            ensure!(ioctl::size(&file)? == 4 * MIB, "round {round}: {} bytes", ioctl::size(&file)?);
            verify(&file, 0, &content)?;
        }
        Ok(())
    })?;
    drop(file);
    device.detach()
}

fn image_to_and_fro(bench: &Bench) -> Result<()> {
    let contents = [pattern(MIB as usize, bench.seed), pattern(MIB as usize, bench.seed + 1)];
    let images = [bench.image_of("one", &contents[0])?, bench.image_of("two", &contents[1])?];
    // The loop driver changes images of read-only devices alone.
    let read_only = bench.via == Via::Loop;
    let device = bench.attach(&images[0], &Attach { read_only, ..Attach::default() })?;
    let path = |index: usize| images[index].display().to_string();
    if bench.via == Via::Dm {
        refused(bench, &device, &["--image", &path(1)], "detach")?;
        return device.detach();
    }
    let (file, cached) = (device.open(Access::ReadDirect)?, device.open(Access::Read)?);
    let page = |image: usize, at: u64| &contents[image][at as usize..][..PAGE as usize];
    let read = |times: u64| {
        let at = Random::new(bench.seed + times).below(MIB / PAGE) * PAGE;
        let mut buffer = Buffer::new(PAGE as usize);
        file.read_exact_at(buffer.as_mut(), at)?;
        let whole = (0..2).any(|image| buffer.as_ref() == page(image, at));
        ensure!(whole, "at {at} is neither image's page");
        Ok(())
    };
    let wrong = bench.image("short", MIB / 2)?;
    beside(read, || {
        for round in 0..ROUNDS {
            let now = usize::from(round % 2 == 0);
            // Its programs know of it, and want no refusal.
            set(bench, &device, &["--image", &path(now), "--force"])?;
            // Neither past the page cache nor through it is anything left of the old one.
            verify(&file, 0, &contents[now]).with_context(|| format!("round {round}"))?;
            verify(&cached, 0, &contents[now]).with_context(|| format!("round {round}, cached"))?;
            if round + 1 == ROUNDS {
                kill_worker(bench, &device)?;
                verify(&file, 0, &contents[now]).context("after a death")?;
            }
            // The one that was let go of is free for others, the other one is not.
            bench.attach(&images[1 - now], &Attach::default()).context("the old image")?.detach()?;
            ensure!(bench.attach(&images[now], &Attach::default()).is_err(), "its image was attached twice");
        }
        if read_only {
            refused(bench, &device, &["--image", &wrong.display().to_string()], "attach")?;
        }
        Ok(())
    })?;
    drop((file, cached));
    if !read_only {
        let now = usize::from(ROUNDS % 2 == 1);
        device.open(Access::Direct)?.write_all_at(Buffer::pattern(PAGE as usize, 7).as_ref(), 0)?;
        verify_backing(&images[now], 0, Buffer::pattern(PAGE as usize, 7).as_ref())?;
        verify_backing(&images[1 - now], 0, page(1 - now, 0)).context("the image that was let go of")?;
    }
    device.detach()
}

/// A device in use accepts an equal image and no other.
fn image_of_a_mounted_device(bench: &Bench) -> Result<()> {
    if bench.via != Via::Ublk {
        return Ok(());
    }
    let image = bench.image("image", 8 * MIB)?;
    sh(&["mkfs.ext4", "-q", "-F", &image.display().to_string()])?;
    let (equal, other) = (bench.dir.join("equal"), bench.image("other", 8 * MIB)?);
    let device = bench.attach(&image, &Attach::default())?;
    let mount = Mount::new(device.path(), bench.dir.join("mounted"), "ext4", None)?;
    std::fs::copy(&image, &equal)?;
    let equal = equal.display().to_string();
    refused(bench, &device, &["--image", &equal], "umount")?;
    refused(bench, &device, &["--read-only", "on"], "remount")?;
    refused(bench, &device, &["--size-limit", "4MiB"], "unmount")?;
    mount.unmount()?;
    set(bench, &device, &["--read-only", "on"])?;
    std::fs::copy(&image, &equal)?;
    let dir = bench.dir.join("read");
    std::fs::create_dir_all(&dir)?;
    sh(&["mount", "-o", "ro,noload", &device.name(), &dir.display().to_string()])?;
    let changed = refused(bench, &device, &["--image", &other.display().to_string()], "umount")
        .and_then(|()| set(bench, &device, &["--image", &equal]));
    let listed = std::fs::read_dir(&dir).map(Iterator::count);
    sh(&["umount", &dir.display().to_string()])?;
    changed?;
    ensure!(listed? > 0, "the file system is empty");
    device.detach()
}

/// A mounted file system grows with its device.
fn grown_under_a_file_system(bench: &Bench) -> Result<()> {
    let image = bench.image("image", 64 * MIB)?;
    let limited = Attach { size_limit: Some(32 * MIB), ..Attach::default() };
    let device = bench.attach(&image, &limited)?;
    sh(&["mkfs.ext4", "-q", &device.name()])?;
    let mount = Mount::new(device.path(), bench.dir.join("mounted"), "ext4", None)?;
    let content = pattern(2 * MIB as usize, bench.seed);
    std::fs::write(mount.dir.join("file"), &content)?;
    if let Err(error) = set(bench, &device, &["--size-limit", "none"]) {
        mount.unmount()?;
        device.detach()?;
        return skip(format!("a live device does not take over a new size: {error:#}"));
    }
    match sh(&["resize2fs", &device.name()]) {
        Err(error) if format!("{error:#}").contains("Permission denied") => {
            mount.unmount()?;
            device.detach()?;
            return skip("growing a mounted file system takes CAP_SYS_RESOURCE");
        }
        other => other.map(drop)?,
    }
    let room = rustix::fs::statvfs(&mount.dir)?;
    ensure!(room.f_blocks * room.f_frsize > 40 * MIB, "{} blocks of {}", room.f_blocks, room.f_frsize);
    ensure!(std::fs::read(mount.dir.join("file"))? == content, "the file is another");
    std::fs::write(mount.dir.join("more"), vec![1; 30 * MIB as usize]).context("into what is new")?;
    mount.unmount()?;
    device.detach()?;
    sh(&["e2fsck", "-f", "-n", &image.display().to_string()]).map(drop)
}

fn block_size(bench: &Bench) -> Result<()> {
    let image: &Path = &bench.image("image", MIB)?;
    let device = bench.attach(image, &Attach::default())?;
    refused(bench, &device, &["--block-size", "4096"], "becket attach --block-size")?;
    set(bench, &device, &["--block-size", "512"]).context("the one that it has")?;
    let file: File = device.open(Access::Read)?;
    ensure!(ioctl::logical_block(&file)? == 512, "it was refused, and the block size is another");
    drop(file);
    device.detach()
}

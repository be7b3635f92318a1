//! The backing lets the device down: no space, no bytes.
//! Must never accept silence: what could not be kept is an error for the writer.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::device;
use crate::bench::{Access, Bench, Device, Mount, PlainLoop, open, verify};
use crate::bytes::{Buffer, pattern};
use crate::command::sh;
use crate::driver::{Attach, Via};
use crate::exercise::verify_backing;
use crate::suite::Test;

pub(super) const TESTS: &[Test] = &[
    device("full-tmpfs", full_tmpfs),
    device("full-ext4", full_ext4),
    device("truncated-while-attached", truncated),
];

const MIB: u64 = 1 << 20;

fn full_tmpfs(bench: &Bench) -> Result<()> {
    let small = Mount::new(Path::new("tmpfs"), bench.dir.join("small"), "tmpfs", Some("size=12m"))?;
    full(bench, &small.dir)?;
    small.unmount()
}

fn full_ext4(bench: &Bench) -> Result<()> {
    let disk = bench.image("disk", 16 * MIB)?;
    sh(&["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", &disk.display().to_string()])?;
    let below = PlainLoop::new(&disk)?;
    let small = Mount::new(&below.0, bench.dir.join("small"), "ext4", None)?;
    full(bench, &small.dir)?;
    small.unmount()
}

/// Writes a device until the file system below is full, then makes room again.
fn full(bench: &Bench, dir: &Path) -> Result<()> {
    let kept = pattern(2 * MIB as usize, bench.seed);
    let image = dir.join("image");
    let file = fs::File::create(&image)?;
    file.set_len(64 * MIB)?;
    file.write_all_at(&kept, 0)?;
    file.sync_all()?;
    drop(file);
    let filler = dir.join("filler");
    fs::write(&filler, vec![1; 4 * MIB as usize])?;
    fs::File::open(&filler)?.sync_all()?;

    let device = bench.attach(&image, &Attach::default())?;
    for access in [Access::Direct, Access::Buffered] {
        let errno = write_until_full(&device, access)?;
        ensure!(
            [libc::EIO, libc::ENOSPC].contains(&errno),
            "{access:?}: a full file system gives errno {errno}"
        );
        verify(&device.open(Access::ReadDirect)?, 0, &kept).context("what was there before")?;
    }
    verify_backing(&image, 0, &kept)?;
    // The error belongs to that moment: with room again the device works again.
    fs::remove_file(&filler)?;
    fs::File::open(&image)?.sync_all()?;
    let file = device.open(Access::Direct)?;
    let content = Buffer::pattern(MIB as usize, bench.seed + 1);
    file.write_all_at(content.as_ref(), MIB).context("there is room again")?;
    file.sync_all().context("there is room again")?;
    verify(&file, MIB, content.as_ref())?;
    verify(&file, 0, &kept[..MIB as usize])?;
    drop(file);
    device.detach()
}

/// The errno of the first write or fsync that failed. Direct writes are synced too: room that is promised
/// on write-back only is found wanting no later than there.
fn write_until_full(device: &Device, access: Access) -> Result<i32> {
    let file = device.open(access)?;
    let content = Buffer::pattern(MIB as usize, 7);
    // Buffered writes start where the direct ones have certainly not come, so that they need room too.
    let start = if access == Access::Buffered { 40 } else { 2 };
    for place in start..64 {
        let outcome = file.write_all_at(content.as_ref(), place * MIB).and_then(|()| file.sync_all());
        if let Err(error) = outcome {
            return error.raw_os_error().with_context(|| format!("{error} has no errno"));
        }
    }
    bail!("{access:?}: more was written than the file system can hold, and no error came")
}

fn truncated(bench: &Bench) -> Result<()> {
    let content = pattern(8 * MIB as usize, bench.seed);
    let image = bench.image_of("image", &content)?;
    let device = bench.attach(&image, &Attach::default())?;
    let backing = open(&image, Access::Buffered)?;
    backing.set_len(MIB)?;
    let file = device.open(Access::ReadDirect)?;
    verify(&file, 0, &content[..MIB as usize]).context("the part that is left")?;
    for at in [MIB, 4 * MIB, 8 * MIB - 4096] {
        let mut buffer = Buffer::pattern(4096, 5);
        match file.read_exact_at(buffer.as_mut(), at) {
            Err(error) => {
                ensure!(error.raw_os_error() == Some(libc::EIO), "a read past the file's end: {error}");
            }
            // The kernel's loop driver reads zeroes where its file ends early; bytes of somewhere else are
            // worse. Below device-mapper there is one.
            Ok(()) if matches!(bench.via, Via::Loop | Via::Dm) => {
                ensure!(buffer.as_ref().iter().all(|&byte| byte == 0), "stale bytes at {at}");
            }
            Ok(()) => bail!("a read of bytes that are gone succeeded at {at}"),
        }
    }
    // A write may fail or may make the file longer again; either way it must say so truly.
    let writer = device.open(Access::Direct)?;
    let fresh = Buffer::pattern(4096, 6);
    let written = writer.write_all_at(fresh.as_ref(), 2 * MIB).and_then(|()| writer.sync_all());
    if written.is_ok() {
        verify(&file, 2 * MIB, fresh.as_ref()).context("a write past the file's end succeeded")?;
    }
    verify(&file, 0, &content[..MIB as usize]).context("the part that is left, after a write")?;
    // Restored, the device serves again.
    backing.set_len(8 * MIB)?;
    backing.write_all_at(&content, 0)?;
    verify(&file, 0, &content).context("the file is whole again")?;
    drop((file, writer));
    device.detach()
}

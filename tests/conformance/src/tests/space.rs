//! Discards and write-zeroes: zeroes afterwards, and space given back.
//! Must never count blocks before the file's own delayed allocation is over.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::FallocateFlags;

use super::device;
use crate::bench::{Access, Bench, allocated, skip};
use crate::bytes::pattern;
use crate::driver::Attach;
use crate::exercise::{verify_backing, verify_device};
use crate::ioctl;
use crate::suite::Test;

pub(super) const TESTS: &[Test] = &[
    device("discard", discard),
    device("write-zeroes", write_zeroes),
    device("write-zeroes-keeps-space", write_zeroes_keeps_space),
    device("discard-all", discard_all),
];

const MIB: u64 = 1 << 20;

type Clear = fn(&std::fs::File, Range<u64>) -> rustix::io::Result<()>;

/// fallocate on a block device is a write-zeroes that may free the space.
fn punch(file: &std::fs::File, range: Range<u64>) -> rustix::io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, range.start, range.end - range.start)
}

/// Clears parts of a full device; returns how many bytes the backing file lost.
fn clear(bench: &Bench, image: &Path, ranges: &[Range<u64>], how: Clear) -> Result<u64> {
    let mut model = pattern(16 * MIB as usize, bench.seed);
    std::fs::write(image, &model)?;
    let device = bench.attach(image, &Attach::default())?;
    let before = allocated(image)?;
    let file = device.open(Access::Buffered)?;
    for range in ranges {
        how(&file, range.clone()).with_context(|| format!("{range:?}"))?;
        model[range.start as usize..range.end as usize].fill(0);
    }
    verify_device(&device, &model)?;
    drop(file);
    device.detach()?;
    verify_backing(image, 0, &model)?;
    ensure!(image.metadata()?.len() == 16 * MIB, "the image's length has changed");
    let after = allocated(image)?;
    Ok(before.saturating_sub(after))
}

/// Whole file system blocks, unaligned sectors, one sector, and more than one request can hold.
const RANGES: [Range<u64>; 4] =
    [MIB..3 * MIB, 4 * MIB + 512..4 * MIB + 7 * 512, 5 * MIB - 512..5 * MIB, 6 * MIB + 1024..13 * MIB + 3584];

/// What must come back when `RANGES` go: the whole blocks of 64 KiB, for no file system has larger ones.
fn whole_blocks() -> u64 {
    const BLOCK: u64 = 65536;
    let inner =
        |range: &Range<u64>| (range.end / BLOCK * BLOCK).saturating_sub(range.start.next_multiple_of(BLOCK));
    RANGES.iter().map(inner).sum()
}

fn discard(bench: &Bench) -> Result<()> {
    if !bench.can_punch()? {
        return skip("the scratch file system cannot punch holes");
    }
    let freed = clear(bench, &bench.dir.join("image"), &RANGES, ioctl::discard)?;
    ensure!(freed >= whole_blocks(), "discards freed {freed} bytes, not {}", whole_blocks());
    Ok(())
}

fn discard_all(bench: &Bench) -> Result<()> {
    if !bench.can_punch()? {
        return skip("the scratch file system cannot punch holes");
    }
    let all: Range<u64> = 0..16 * MIB;
    let freed = clear(bench, &bench.dir.join("image"), std::slice::from_ref(&all), ioctl::discard)?;
    ensure!(freed >= 16 * MIB, "discarding everything freed {freed} bytes of {}", 16 * MIB);
    Ok(())
}

fn write_zeroes(bench: &Bench) -> Result<()> {
    if !bench.can_punch()? {
        return skip("the scratch file system cannot punch holes");
    }
    let freed = clear(bench, &bench.dir.join("image"), &RANGES, punch)?;
    ensure!(freed >= whole_blocks(), "write-zeroes freed {freed} bytes, not {}", whole_blocks());
    Ok(())
}

/// BLKZEROOUT promises that the space stays: a program that zeroes a swap file or a database must not get
/// ENOSPC later.
fn write_zeroes_keeps_space(bench: &Bench) -> Result<()> {
    let freed = clear(bench, &bench.dir.join("image"), &RANGES, ioctl::zero_out)?;
    // A few blocks of metadata may come and go.
    ensure!(freed < 65536, "BLKZEROOUT must keep the space and freed {freed} bytes");
    Ok(())
}

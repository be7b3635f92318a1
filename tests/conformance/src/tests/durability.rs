//! Flush and FUA arrive where they must: at the backing file.
//! Must never take reading back as a proof: a page cache answers reads, only a finished fsync is durable.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};

use anyhow::{Result, ensure};

use super::device;
use crate::bench::{Access, Bench, skip};
use crate::bytes::Buffer;
use crate::driver::Attach;
use crate::suite::Test;
use crate::trace::Trace;

pub(super) const TESTS: &[Test] =
    &[device("flush-reaches-the-file", flush), device("fua-reaches-the-file", fua)];

/// How many of `step`'s rounds were followed by a finished fsync of the backing file when they returned.
fn observe(bench: &Bench, access: Access, step: fn(&fs::File, u64) -> Result<()>) -> Result<usize> {
    const ROUNDS: u64 = 5;
    let image = bench.image_of("image", &[1; 1 << 20])?;
    fs::File::open(&image)?.sync_all()?;
    let trace = Trace::of(bench, &image)?;
    let device = bench.attach(&image, &Attach::default())?;
    let file = device.open(access)?;
    let mut seen = 0;
    for round in 0..ROUNDS {
        let before = trace.syncs()?;
        step(&file, round)?;
        seen += usize::from(trace.syncs()? > before);
    }
    drop(file);
    device.detach()?;
    ensure!(seen == 0 || seen == ROUNDS as usize, "the file was synced in {seen} of {ROUNDS} rounds");
    Ok(seen)
}

fn write(file: &fs::File, round: u64) -> Result<()> {
    Ok(file.write_all_at(Buffer::pattern(8192, round).as_ref(), round * 65536)?)
}

fn flush(bench: &Bench) -> Result<()> {
    let without = observe(bench, Access::Direct, write)?;
    ensure!(
        without == 0,
        "plain writes sync the backing file: a flush would prove nothing, and they are slow"
    );
    for access in [Access::Direct, Access::Buffered] {
        let with = observe(bench, access, |file, round| {
            write(file, round)?;
            if round % 2 == 0 {
                file.sync_data()?
            } else {
                file.sync_all()?
            }
            Ok(())
        })?;
        ensure!(with > 0, "fsync of the device ({access:?}) returned and the backing file was not synced");
    }
    Ok(())
}

fn fua(bench: &Bench) -> Result<()> {
    // A disk with FUA below ext4 makes direct writes durable without a sync that could be traced.
    let dev = fs::metadata(&bench.dir)?.dev();
    let below = format!("/sys/dev/block/{}:{}", rustix::fs::major(dev), rustix::fs::minor(dev));
    let fua = ["queue/fua", "../queue/fua"].map(|name| fs::read_to_string(format!("{below}/{name}")));
    if fua.into_iter().flatten().any(|text| text.trim() == "1") {
        return skip("the disk below the scratch folder has FUA, so that no sync shows it");
    }
    let seen = observe(bench, Access::Durable, write)?;
    ensure!(seen > 0, "an O_DSYNC write returned and the backing file was not synced");
    Ok(())
}

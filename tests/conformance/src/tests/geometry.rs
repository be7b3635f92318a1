//! What a device looks like: sizes, blocks, limits.
//! Must never trust one source: attach's answer, sysfs and the ioctls have to agree.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{becket, device};
use crate::bench::{Access, Bench, Device, allocated, verify};
use crate::bytes::{Buffer, pattern};
use crate::driver::{Attach, Via};
use crate::exercise::{Exercise, verify_backing, verify_device};
use crate::ioctl;
use crate::suite::Test;

pub(super) const TESTS: &[Test] = &[
    device("geometry", geometry),
    device("queue-limits", queue_limits),
    device("block-size-4096", block_size_4096),
    device("partial-last-block", partial_last_block),
    becket("partial-last-block-4096", partial_last_block_4096),
    device("sparse-1tib", sparse),
    device("refresh-takes-the-new-size", refresh),
];

const MIB: u64 = 1 << 20;

/// Holds what attach, sysfs and the ioctls say against each other and against what must be.
fn agree(device: &Device, size: u64, block: u32, read_only: bool) -> Result<()> {
    let (info, disk, file) = (&device.info, device.sysfs()?, device.open(Access::Read)?);
    let sizes = [info.size, disk.size()?, ioctl::size(&file)?];
    ensure!(sizes == [size; 3], "size: attach, sysfs and ioctl say {sizes:?}, should be {size}");
    let sysfs = |name: &str| disk.number(&format!("queue/{name}"));
    let blocks =
        [u64::from(info.block_size), sysfs("logical_block_size")?, ioctl::logical_block(&file)?.into()];
    ensure!(blocks == [u64::from(block); 3], "logical block: {blocks:?}, should be {block}");
    let physical = [
        u64::from(info.physical_block_size),
        sysfs("physical_block_size")?,
        ioctl::physical_block(&file)?.into(),
    ];
    ensure!(physical == [physical[0]; 3], "physical block: attach, sysfs and ioctl say {physical:?}");
    ensure!(physical[0].is_power_of_two() && physical[0] >= blocks[0], "physical block of {}", physical[0]);
    let refuses = [info.read_only, disk.number("ro")? != 0, ioctl::read_only(&file)?];
    ensure!(refuses == [read_only; 3], "read-only: {refuses:?}, should be {read_only}");
    Ok(())
}

fn geometry(bench: &Bench) -> Result<()> {
    for (size, read_only) in [(8 * MIB, false), (8 * MIB, true), (512, false), (MIB + 512, false)] {
        let image = bench.image("image", size)?;
        let device = bench.attach(&image, &Attach { read_only, ..Attach::default() })?;
        agree(&device, size, 512, read_only)?;
        ensure!(device.info.image == image, "attach says image {}", device.info.image.display());
        let listed = bench.driver.list()?;
        ensure!(
            listed.iter().any(|other| other.device == device.info.device && other.size == size),
            "list does not show {} with {size} bytes: {listed:?}",
            device.name()
        );
        device.detach()?;
    }
    Ok(())
}

fn queue_limits(bench: &Bench) -> Result<()> {
    let image = bench.image("image", 8 * MIB)?;
    let device = bench.attach(&image, &Attach::default())?;
    let disk = device.sysfs()?;
    let limit = |name: &str| disk.number(&format!("queue/{name}"));
    let block = limit("logical_block_size")?;
    let (soft, hard) = (limit("max_sectors_kb")? << 10, limit("max_hw_sectors_kb")? << 10);
    ensure!((4096..=hard).contains(&soft), "max_sectors {soft}, max_hw_sectors {hard}");
    // Device-mapper hands on what it gets before it is a request.
    if bench.via != Via::Dm {
        ensure!(limit("nr_requests")? >= 2, "nr_requests {}", limit("nr_requests")?);
    }
    let (least, best) = (limit("minimum_io_size")?, limit("optimal_io_size")?);
    ensure!(least >= block && least % block == 0, "minimum_io_size {least}");
    ensure!(best % least == 0, "optimal_io_size {best} is not a multiple of minimum_io_size {least}");
    // btrfs writes back in pieces of the stated size, so stating the smallest is worse than stating none.
    ensure!(best == 0 || best > least, "optimal_io_size {best} is the smallest request again");
    // Without "write back" the kernel sends no flush, and nothing would ever be durable.
    let cache = disk.text("queue/write_cache")?;
    ensure!(cache == "write back", "write_cache is {cache:?}");
    if let Ok(mask) = limit("dma_alignment") {
        ensure!((mask + 1).is_power_of_two() && mask < 4096, "dma_alignment {mask}");
    }
    let (discard, granularity) = (limit("discard_max_bytes")?, limit("discard_granularity")?);
    ensure!(
        (discard > 0) >= bench.can_punch()?,
        "the file system can punch holes, the device cannot discard"
    );
    if discard > 0 {
        ensure!(granularity.is_power_of_two() && granularity >= block, "discard_granularity {granularity}");
        ensure!(
            discard % granularity == 0 || discard > u64::from(u32::MAX) - granularity,
            "discard_max {discard}"
        );
        ensure!(limit("write_zeroes_max_bytes")? > 0, "discards, but no write-zeroes");
    }
    device.detach()
}

fn block_size_4096(bench: &Bench) -> Result<()> {
    let size = 16 * MIB;
    let image = bench.image("image", size)?;
    let device = bench.attach(&image, &Attach { block_size: Some(4096), ..Attach::default() })?;
    agree(&device, size, 4096, false)?;
    let direct = device.open(Access::Direct)?;
    let sector = Buffer::pattern(512, 1);
    let refused = direct.write_all_at(sector.as_ref(), 0).map_err(|error| error.raw_os_error());
    ensure!(refused == Err(Some(libc::EINVAL)), "a write of 512 bytes to 4096-byte blocks: {refused:?}");
    let refused = ioctl::discard(&direct, 512..1024).map_err(|error| error.raw_os_error());
    ensure!(refused == Err(libc::EINVAL), "a discard of 512 bytes on 4096-byte blocks: {refused:?}");
    let mut model = vec![0; size as usize];
    let exercise = Exercise::of(device.path(), bench.ops / 10, bench.seed)?;
    ensure!(exercise.block == 4096, "the exercise would use blocks of {}", exercise.block);
    exercise.run(device.path(), &mut model)?;
    verify_device(&device, &model)?;
    verify_backing(&image, 0, &model)?;
    drop(direct);
    device.detach()
}

fn partial_last_block(bench: &Bench) -> Result<()> {
    for tail in [100, 700] {
        let content = pattern(MIB as usize + tail, bench.seed);
        let image = bench.image_of("image", &content)?;
        let device = bench.attach(&image, &Attach::default())?;
        let whole = content.len() / 512 * 512;
        agree(&device, whole as u64, 512, false)?;
        let fresh = pattern(whole, bench.seed + 1);
        let file = device.open(Access::Buffered)?;
        file.write_all_at(&fresh, 0)?;
        file.sync_all()?;
        verify_device(&device, &fresh)?;
        drop(file);
        device.detach()?;
        verify_backing(&image, 0, &fresh)?;
        verify_backing(&image, whole as u64, &content[whole..])?;
        ensure!(image.metadata()?.len() == content.len() as u64, "the image's length has changed");
    }
    Ok(())
}

/// The kernel's own tool counts in units of 512 whatever the block size; becket cuts what no block can hold.
fn partial_last_block_4096(bench: &Bench) -> Result<()> {
    let image = bench.image("image", MIB + 512)?;
    let device = bench.attach(&image, &Attach { block_size: Some(4096), ..Attach::default() })?;
    agree(&device, MIB, 4096, false)?;
    device.detach()
}

fn sparse(bench: &Bench) -> Result<()> {
    let size = 1 << 40;
    let image = bench.image("image", size)?;
    let started = Instant::now();
    let device = bench.attach(&image, &Attach::default())?;
    // Generous for emulated machines; code that reads every block of a terabyte needs hours.
    ensure!(started.elapsed() < Duration::from_secs(30), "attaching took {:?}", started.elapsed());
    agree(&device, size, 512, false)?;
    let file = device.open(Access::Direct)?;
    let places = [0, 1 << 31, 1 << 32, (1 << 32) + 4096, size / 2, size - MIB];
    for at in places {
        verify(&file, at, &vec![0; MIB as usize])?;
    }
    for (index, at) in places.into_iter().enumerate() {
        file.write_all_at(Buffer::pattern(4096, index as u64).as_ref(), at)?;
    }
    for (index, at) in places.into_iter().enumerate().rev() {
        verify(&file, at, &pattern(4096, index as u64))?;
        verify_backing(&image, at, &pattern(4096, index as u64))?;
    }
    let used = allocated(&image)?;
    ensure!(used < 4 * MIB, "24 KiB were written and {used} bytes are allocated");
    drop(file);
    device.detach()
}

fn refresh(bench: &Bench) -> Result<()> {
    let image = bench.image_of("image", &pattern(MIB as usize, bench.seed))?;
    let device = bench.attach(&image, &Attach::default())?;
    crate::bench::open(&image, Access::Buffered)?.set_len(4 * MIB)?;
    if let Err(error) = bench.driver.refresh(device.path()) {
        // Resizing came to ublk with Linux 6.16; a kernel without it must leave the device as it was.
        agree(&device, MIB, 512, false)?;
        if bench.via == Via::Ublk {
            return crate::bench::skip(format!(
                "a live ublk device does not take over a new size: {error:#}"
            ));
        }
        return Err(error);
    }
    let size = device.sysfs()?.size()?;
    ensure!(size == 4 * MIB, "after refresh the device has {size} bytes");
    let file = device.open(Access::Direct)?;
    verify(&file, 0, &pattern(MIB as usize, bench.seed))?;
    file.write_all_at(Buffer::pattern(4096, 9).as_ref(), 4 * MIB - 4096)?;
    verify_backing(&image, 4 * MIB - 4096, Buffer::pattern(4096, 9).as_ref())?;
    drop(file);
    device.detach()
}

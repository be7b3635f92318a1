//! What a device must not do: write when it is read-only, touch a byte outside its range.
//! Must never look only at the device: the bytes around it and below it are what could be harmed.

use std::fs;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};

use super::device;
use crate::bench::{Access, Bench, open, verify};
use crate::bytes::{Buffer, compare, pattern};
use crate::driver::{Attach, Via};
use crate::exercise::{Exercise, verify_device};
use crate::ioctl;
use crate::suite::Test;

pub(super) const TESTS: &[Test] = &[
    device("read-only-refuses-writes", read_only),
    device("read-only-image", read_only_image),
    device("offset-and-limit", offset_and_limit),
    device("end-of-device", end_of_device),
];

const MIB: u64 = 1 << 20;

fn read_only(bench: &Bench) -> Result<()> {
    let content = pattern(4 * MIB as usize, bench.seed);
    let image = bench.image_of("image", &content)?;
    let device = bench.attach(&image, &Attach { read_only: true, ..Attach::default() })?;
    refuses(&device).context("attached read-only")?;
    verify_reads(&device, &content)?;
    // `blockdev --setrw` may persuade the kernel; it must not persuade the server that holds the file.
    if ioctl::set_read_only(&device.open(Access::Read)?, false).is_ok() {
        write_somehow(&device);
    }
    verify_reads(&device, &content).context("after blockdev --setrw")?;
    device.detach()?;
    compare(&fs::read(&image)?, &content, 0)?;
    Ok(())
}

/// An image that cannot be opened for writing is attached read-only, as losetup does it.
fn read_only_image(bench: &Bench) -> Result<()> {
    use crate::bench::Mount;
    let content = pattern(MIB as usize, bench.seed);
    let dir = Mount::new("tmpfs".as_ref(), bench.dir.join("fs"), "tmpfs", Some("size=4m"))?;
    let image = dir.dir.join("image");
    fs::write(&image, &content)?;
    rustix::mount::mount_remount(&dir.dir, rustix::mount::MountFlags::RDONLY, "")?;
    let device = bench.attach(&image, &Attach::default())?;
    ensure!(device.info.read_only, "an image on a read-only file system is attached read-write");
    refuses(&device)?;
    verify_reads(&device, &content)?;
    device.detach()?;
    dir.unmount()
}

fn verify_reads(device: &crate::bench::Device, content: &[u8]) -> Result<()> {
    verify(&device.open(Access::ReadDirect)?, 0, content)
}

/// Demands that nothing can be written, and that the error says why.
fn refuses(device: &crate::bench::Device) -> Result<()> {
    let errors = [libc::EPERM, libc::EROFS, libc::EACCES];
    for access in [Access::Buffered, Access::Direct, Access::Durable] {
        // Some drivers refuse the open already.
        let outcome = open(device.path(), access).and_then(|file| {
            file.write_all_at(Buffer::pattern(4096, 1).as_ref(), 4096)?;
            file.sync_all()?;
            Ok(())
        });
        let error = outcome.err().with_context(|| format!("{access:?}: a write was accepted"))?;
        let errno = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
        ensure!(errno.is_some_and(|errno| errors.contains(&errno)), "{access:?}: refused with {error:#}");
    }
    if let Ok(file) = device.open(Access::Buffered) {
        for (what, outcome) in
            [("discard", ioctl::discard(&file, 0..4096)), ("zeroes", ioctl::zero_out(&file, 0..4096))]
        {
            let errno = outcome.err().with_context(|| format!("a {what} was accepted"))?.raw_os_error();
            // A device that only reads may have no discards at all.
            let fine = errors.contains(&errno) || (what == "discard" && errno == libc::EOPNOTSUPP);
            ensure!(fine, "{what}: refused with errno {errno}");
        }
    }
    Ok(())
}

/// Tries to write by every way there is; what counts is what the image holds afterwards.
fn write_somehow(device: &crate::bench::Device) {
    for access in [Access::Buffered, Access::Direct] {
        if let Ok(file) = device.open(access) {
            let _ = file.write_all_at(Buffer::pattern(4096, 1).as_ref(), 8192);
            let _ = file.sync_all();
            let _ = ioctl::discard(&file, 65536..131_072);
            let _ = ioctl::zero_out(&file, 131_072..262_144);
            let _ = ioctl::flush_buffers(&file);
        }
    }
}

fn offset_and_limit(bench: &Bench) -> Result<()> {
    let whole = 8 * MIB;
    // Aligned to pages, to sectors, to nothing at all; with a limit, without, and with one past the end.
    let cases = [
        (MIB, Some(4 * MIB)),
        (512, Some(3 * MIB + 512)),
        (3 * 4096 + 512, None),
        (1000, Some(2 * MIB)),
        (0, Some(MIB + 1536)),
        (7 * MIB, Some(16 * MIB)),
    ];
    for (index, (offset, size_limit)) in cases.into_iter().enumerate() {
        let around = pattern(whole as usize, bench.seed + index as u64);
        let image = bench.image_of("image", &around)?;
        let size = (whole - offset).min(size_limit.unwrap_or(u64::MAX)) / 512 * 512;
        let case = || format!("offset {offset}, size limit {size_limit:?}");
        let attached = bench.attach(&image, &Attach { offset, size_limit, ..Attach::default() });
        if bench.via == Via::Dm && offset % 512 != 0 {
            let error = attached.err().with_context(|| format!("{}: dm cannot have that offset", case()))?;
            ensure!(format!("{error:#}").contains("do not lie on the blocks"), "{}: {error:#}", case());
            continue;
        }
        let device = attached.with_context(case)?;
        ensure!(device.info.size == size, "{}: {} bytes, should be {size}", case(), device.info.size);
        let inside = offset as usize..(offset + size) as usize;
        let mut model = around[inside.clone()].to_vec();
        verify_device(&device, &model).with_context(case)?;
        let exercise = Exercise::of(device.path(), bench.ops / 50, bench.seed + index as u64)?;
        exercise.run(device.path(), &mut model).with_context(case)?;
        verify_device(&device, &model).with_context(case)?;
        let outside = |step: &str| -> Result<()> {
            let found = fs::read(&image)?;
            let context = || format!("{}: {step} left the device's range", case());
            ensure!(found.len() == around.len(), "{}: {step}: the image's length has changed", case());
            compare(&found[..inside.start], &around[..inside.start], 0).with_context(context)?;
            compare(&found[inside.end..], &around[inside.end..], inside.end as u64).with_context(context)?;
            Ok(())
        };
        outside("random I/O")?;
        let file = device.open(Access::Buffered)?;
        ioctl::zero_out(&file, 0..size).with_context(case)?;
        outside("zeroing everything")?;
        if bench.can_punch()? {
            ioctl::discard(&file, 0..size).with_context(case)?;
            outside("discarding everything")?;
        }
        verify_device(&device, &vec![0; size as usize]).with_context(case)?;
        drop(file);
        device.detach()?;
        outside("detaching")?;
    }
    Ok(())
}

fn end_of_device(bench: &Bench) -> Result<()> {
    let (size, more) = (MIB + 512, 65536);
    let content = pattern((size + more) as usize, bench.seed);
    let image = bench.image_of("image", &content)?;
    let device = bench.attach(&image, &Attach { size_limit: Some(size), ..Attach::default() })?;
    for access in [Access::Buffered, Access::Direct] {
        let file = device.open(access)?;
        let mut buffer = Buffer::new(4096);
        let read = file.read_at(buffer.as_mut(), size - 512)?;
        ensure!(read == 512, "{access:?}: {read} bytes read where 512 are left");
        compare(&buffer.as_ref()[..512], &content[size as usize - 512..size as usize], size - 512)?;
        ensure!(file.read_at(buffer.as_mut(), size)? == 0, "{access:?}: something is read past the end");
        let errno = file.write_at(buffer.as_ref(), size).err().and_then(|error| error.raw_os_error());
        ensure!(errno == Some(libc::ENOSPC), "{access:?}: a write past the end ends with {errno:?}");
        for range in [size - 512..size + 512, size..size + 4096] {
            ensure!(ioctl::discard(&file, range.clone()).is_err(), "{range:?}: discarded past the end");
            ensure!(ioctl::zero_out(&file, range.clone()).is_err(), "{range:?}: zeroed past the end");
        }
    }
    device.detach()?;
    compare(&fs::read(&image)?, &content, 0)?;
    Ok(())
}

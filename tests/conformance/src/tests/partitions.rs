//! Partitions are there when attach returns, at their place, and writable.
//! Must never wait for them: a script that mounts `...p2` on its next line does not wait either.

use std::fs;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use super::{becket, device};
use crate::bench::{Access, Bench, Device, open, verify};
use crate::bytes::{compare, pattern};
use crate::command;
use crate::driver::{Attach, Via};
use crate::exercise::verify_backing;
use crate::ioctl;
use crate::suite::Test;
use crate::sysfs::Sysfs;

pub(super) const TESTS: &[Test] = &[
    device("partitions-gpt", gpt),
    device("partitions-mbr", mbr),
    becket("partitions-gpt-4096", gpt_4096),
    device("partitions-none", none),
];

const MIB: u64 = 1 << 20;

/// Number, first byte, bytes.
type Place = (u32, u64, u64);

fn sfdisk(target: &str, script: &str) -> Result<()> {
    // A shell for the pipe: sfdisk reads its script from standard input.
    let line =
        format!("printf '{script}' | sfdisk --quiet --no-reread --no-tell-kernel --wipe never '{target}'");
    command::sh(&["sh", "-c", &line]).map(drop)
}

fn gpt(bench: &Bench) -> Result<()> {
    let image = bench.image("image", 16 * MIB)?;
    let script = "label: gpt\\nstart=2048, size=4096, name=one\\nstart=8192, size=8192, name=two\\n";
    sfdisk(&image.display().to_string(), script)?;
    let device = bench.attach(&image, &Attach::default())?;
    check(bench, device, &image, &[(1, MIB, 2 * MIB), (2, 4 * MIB, 4 * MIB)])
}

/// With an extended partition, whose logical ones count from 5.
fn mbr(bench: &Bench) -> Result<()> {
    let image = bench.image("image", 16 * MIB)?;
    let script = "label: dos\\nstart=2048, size=4096, type=83\\nstart=8192, size=16384, type=5\\n\
                  start=10240, size=4096, type=83\\n";
    sfdisk(&image.display().to_string(), script)?;
    let device = bench.attach(&image, &Attach::default())?;
    // The kernel shows only the first sectors of an extended partition, so that nothing writes the rest
    // through it.
    let extended = (2, 4 * MIB, device.info.partitions.get(1).map_or(0, |place| place.size));
    ensure!(extended.2 < MIB, "an extended partition of {} bytes", extended.2);
    check(bench, device, &image, &[(1, MIB, 2 * MIB), extended, (5, 5 * MIB, 2 * MIB)])
}

/// A table that counts in blocks of 4096 makes a device of such blocks, without an option.
fn gpt_4096(bench: &Bench) -> Result<()> {
    let image = bench.image("image", 16 * MIB)?;
    let device = bench.attach(&image, &Attach { block_size: Some(4096), ..Attach::default() })?;
    sfdisk(
        &device.name(),
        "label: gpt\\nstart=256, size=512, name=one\\nstart=1024, size=1024, name=two\\n",
    )?;
    device.detach()?;
    let attached = bench.attach(&image, &Attach::default());
    if bench.via == Via::Dm {
        // Such a table has the blocks of the device below: another transport must do it.
        let error = attached.err().context("blocks that the device below does not have")?;
        ensure!(format!("{error:#}").contains("512 bytes, not 4096"), "{error:#}");
        return Ok(());
    }
    let device = attached?;
    ensure!(device.info.block_size == 4096, "blocks of {}", device.info.block_size);
    check(bench, device, &image, &[(1, MIB, 2 * MIB), (2, 4 * MIB, 4 * MIB)])
}

fn none(bench: &Bench) -> Result<()> {
    let image = bench.image_of("image", &pattern(MIB as usize, bench.seed))?;
    let device = bench.attach(&image, &Attach::default())?;
    ensure!(device.info.partitions.is_empty(), "noise has partitions: {:?}", device.info.partitions);
    ensure!(device.sysfs()?.partitions()?.is_empty(), "the kernel sees partitions in noise");
    device.detach()
}

/// Right after attach: sysfs, nodes and attach's answer agree; then writes land where they must.
fn check(bench: &Bench, device: Device, image: &PathBuf, places: &[Place]) -> Result<()> {
    let kernel = device.sysfs()?.partitions()?;
    // To the kernel a disk of device-mapper has none: they are disks on the disk.
    let expected: &[Place] = if bench.via == Via::Dm { &[] } else { places };
    ensure!(kernel == expected, "the kernel has {kernel:?}, the table {places:?}");
    let said: Vec<Place> = device.info.partitions.iter().map(|p| (p.number, p.start, p.size)).collect();
    ensure!(said == places, "attach says {said:?}, the table {places:?}");
    let before = fs::read(image)?;
    let mut expected = before.clone();
    for partition in device.info.partitions.iter().filter(|partition| partition.size >= MIB) {
        let node = &partition.device;
        let kind = fs::metadata(node).with_context(|| format!("{}", node.display()))?.file_type();
        ensure!(kind.is_block_device(), "{} is not a block device", node.display());
        let file = open(node, Access::Buffered)?;
        ensure!(
            ioctl::size(&file)? == partition.size,
            "{} has {} bytes",
            node.display(),
            ioctl::size(&file)?
        );
        let content = pattern(partition.size as usize, bench.seed + u64::from(partition.number));
        file.write_all_at(&content, 0)?;
        file.sync_all()?;
        verify_backing(image, partition.start, &content).with_context(|| format!("{}", node.display()))?;
        verify(&open(node, Access::ReadDirect)?, 0, &content)?;
        expected[partition.start as usize..(partition.start + partition.size) as usize]
            .copy_from_slice(&content);
    }
    let nodes: Vec<PathBuf> = device.info.partitions.iter().map(|p| p.device.clone()).collect();
    let folders = nodes.iter().map(|node| Sysfs::of(node)).collect::<Result<Vec<_>>>()?;
    device.detach()?;
    for (node, folder) in nodes.iter().zip(folders) {
        crate::bench::wait_until(&format!("{} is gone", node.display()), || !folder.exists())?;
    }
    compare(&fs::read(image)?, &expected, 0).context("outside of the partitions")?;
    Ok(())
}

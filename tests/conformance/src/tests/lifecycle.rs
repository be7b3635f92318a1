//! Devices come and go, and nothing of them stays.
//! Must never count what belongs to others: a machine may have devices of its own.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{becket, device};
use crate::bench::{Access, Bench, Device, verify, wait_until};
use crate::bytes::{Buffer, pattern};
use crate::command::sh;
use crate::driver::Attach;
use crate::ioctl;
use crate::suite::Test;

pub(super) const TESTS: &[Test] = &[
    device("detach-removes", detach_removes),
    becket("detach-refuses-a-device-in-use", in_use),
    becket("detach-outlasts-a-passing-look", passing_look),
    becket("one-writer-per-image", one_writer),
    device("leaks-nothing", leaks_nothing),
];

const MIB: u64 = 1 << 20;

/// Whether the node leads to this image no more: gone, empty, or another image's by now.
fn released(bench: &Bench, device: &Path, image: &Path) -> Result<bool> {
    let listed = bench.driver.list()?;
    let shown = listed.iter().any(|info| info.device == device && info.image == image);
    let name = device.file_name().context("a node has a name")?;
    let behind = Path::new("/sys/class/block").join(name).join("loop/backing_file");
    let bound = fs::read_to_string(behind).is_ok_and(|text| Path::new(text.trim_end()) == image);
    let node = fs::File::open(device).and_then(|file| Ok(ioctl::size(&file)?));
    // A loop node stays when its image goes; of others nothing may stay.
    let empty = match bench.via {
        crate::driver::Via::Loop | crate::driver::Via::Fuse => true,
        crate::driver::Via::Ublk | crate::driver::Via::Dm => node.is_err() && !device.exists(),
    };
    Ok(!shown && !bound && empty)
}

fn detach_removes(bench: &Bench) -> Result<()> {
    let image = bench.image("image", MIB)?;
    let device = bench.attach(&image, &Attach::default())?;
    let path = device.path().to_owned();
    ensure!(!released(bench, &path, &image)?, "attached, and {} looks detached", path.display());
    device.detach()?;
    if bench.driver.is_becket() {
        ensure!(released(bench, &path, &image)?, "detach came back before {} was gone", path.display());
    }
    wait_until(&format!("{} is released", path.display()), || {
        released(bench, &path, &image).unwrap_or(false)
    })?;
    let again = bench.driver.detach(&path);
    ensure!(again.is_err(), "{} was detached twice", path.display());
    Ok(())
}

fn in_use(bench: &Bench) -> Result<()> {
    let image = bench.image_of("image", &pattern(MIB as usize, bench.seed))?;
    let device = bench.attach(&image, &Attach::default())?;
    let user = device.open(Access::Buffered)?;
    let refusal = bench.driver.detach(device.path()).err().context("a device that is open was detached")?;
    let said = format!("{refusal:#}");
    let pid = std::process::id().to_string();
    ensure!(said.contains(&pid), "the refusal does not name process {pid}: {said}");
    verify(&user, 0, &pattern(MIB as usize, bench.seed)).context("after the refused detach")?;
    user.write_all_at(&[7; 512], 0)?;
    user.sync_all().context("after the refused detach")?;
    drop(user);
    device.detach()
}

/// udev and similar programs open every device for a moment, at any time: a script's detach must not fail
/// because of it.
fn passing_look(bench: &Bench) -> Result<()> {
    let image = bench.image("image", MIB)?;
    let device = bench.attach(&image, &Attach::default())?;
    // A program that is called as the one which udev runs.
    let looker = bench.dir.join("blkid");
    let sleep = sh(&["sh", "-c", "command -v sleep"])?;
    fs::copy(sleep.stdout.trim(), &looker).context("a copy of sleep")?;
    let mut child = Command::new(&looker).arg("0.6").stdin(device.open(Access::Read)?).spawn()?;
    let detached = device.detach();
    child.kill()?;
    child.wait()?;
    detached
}

/// Two devices that write one image know nothing of each other's caches.
fn one_writer(bench: &Bench) -> Result<()> {
    let image = bench.image("image", MIB)?;
    let device = bench.attach(&image, &Attach::default())?;
    match bench.attach(&image, &Attach::default()) {
        Ok(_) => anyhow::bail!("the image was attached twice read-write"),
        Err(error) => {
            let said = format!("{error:#}");
            ensure!(said.contains("--shared"), "the refusal does not show the way out (--shared): {said}");
        }
    }
    device.open(Access::Direct)?.write_all_at(Buffer::pattern(4096, 1).as_ref(), 0)?;
    device.detach()?;
    bench.attach(&image, &Attach::default()).context("after the first was detached")?.detach()
}

/// What might pile up: nodes, records, the servers' descriptors.
#[derive(Debug)]
struct Traces {
    devices: BTreeSet<PathBuf>,
    nodes: BTreeSet<PathBuf>,
    links: BTreeSet<PathBuf>,
    records: BTreeSet<PathBuf>,
    descriptors: Vec<usize>,
    threads: Vec<usize>,
}

impl Traces {
    fn look(bench: &Bench, keeper: &Device) -> Result<Self> {
        let entries = |dir: &Path| -> BTreeSet<PathBuf> {
            let entries = fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect()
        };
        let ours = |path: &PathBuf| {
            let name = path.file_name().map(|name| name.to_string_lossy());
            name.is_some_and(|name| ["ublk", "dm-"].iter().any(|prefix| name.starts_with(prefix)))
        };
        let count = |what: &str| -> Vec<usize> {
            let servers = [keeper.info.server_pid, keeper.info.worker_pid].into_iter().flatten();
            servers.map(|pid| entries(Path::new(&format!("/proc/{pid}/{what}"))).len()).collect()
        };
        let listed = bench.driver.list()?.into_iter().filter(|info| info.image.starts_with(&bench.dir));
        Ok(Self {
            devices: listed.map(|info| info.device).collect(),
            nodes: entries(Path::new("/dev")).into_iter().filter(ours).collect(),
            links: if bench.driver.is_becket() { entries(Path::new("/dev/becket")) } else { BTreeSet::new() },
            records: bench.driver.records().map(|dir| entries(&dir)).unwrap_or_default(),
            descriptors: count("fd"),
            threads: count("task"),
        })
    }

    fn is_no_more_than(&self, before: &Self) -> bool {
        // io_uring keeps idle kernel threads for a while: they are bounded, not leaked.
        const IDLE_THREADS: usize = 8;
        let within = |now: &[usize], then: &[usize], slack| {
            now.len() == then.len() && now.iter().zip(then).all(|(now, then)| *now <= then + slack)
        };
        self.devices == before.devices
            && self.nodes.is_subset(&before.nodes)
            && self.links.is_subset(&before.links)
            && self.records.is_subset(&before.records)
            && within(&self.descriptors, &before.descriptors, 0)
            && within(&self.threads, &before.threads, IDLE_THREADS)
    }
}

fn leaks_nothing(bench: &Bench) -> Result<()> {
    // One device stays, so that the same server sees all of the others come and go.
    let keeper_image = bench.image("keeper", MIB)?;
    let keeper = bench.attach(&keeper_image, &Attach::default())?;
    let image = bench.image("image", MIB)?;
    let once = |round: u64| -> Result<()> {
        let device = bench.attach(&image, &Attach::default())?;
        if let (Some(now), Some(before)) = (device.info.server_pid, keeper.info.server_pid) {
            ensure!(now == before, "server {before} became {now}");
        }
        let block = Buffer::pattern(4096, round);
        device.open(Access::Direct)?.write_all_at(block.as_ref(), 8192)?;
        device.detach().with_context(|| format!("round {round}"))
    };
    // The first rounds may still fill pools.
    once(0)?;
    once(1)?;
    let before = Traces::look(bench, &keeper)?;
    for round in 2..2 + (bench.ops / 200).clamp(10, 48) {
        once(round)?;
    }
    // The kernel takes some things away a moment after they ended.
    let mut after = String::new();
    let settled = wait_until("all is as it was", || match Traces::look(bench, &keeper) {
        Ok(now) => {
            after = format!("{now:?}");
            now.is_no_more_than(&before)
        }
        Err(error) => {
            after = format!("{error:#}");
            false
        }
    });
    settled.with_context(|| format!("before: {before:?}\nafter: {after}"))?;
    keeper.detach()?;
    if let Some(records) = bench.driver.records() {
        let entries = fs::read_dir(&records).into_iter().flatten().flatten().map(|entry| entry.path());
        let left: Vec<_> =
            entries.filter(|path| path.extension().is_some_and(|kind| kind == "json")).collect();
        ensure!(left.is_empty(), "records of nobody: {left:?}");
    }
    Ok(())
}

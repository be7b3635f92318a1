//! `cargo xtask disks`: a machine whose disks becket serves over vhost-user, with split and with packed
//! rings. Their workers are killed while it writes to them; neither it nor its hypervisor may notice.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::exec;
use crate::vm::{Machine, Series, show};

/// What the guest does.
const SCRIPT: &str = include_str!("disks/script.sh");
/// Exports, and what QEMU's device has for each.
const DISKS: [(&str, &str); 2] = [("split", ",num-queues=2"), ("packed", ",num-queues=2,packed=on")];
/// Between two deaths: longer than becket takes for a worker that cannot serve.
const PAUSE: Duration = Duration::from_secs(4);

/// Arguments of `cargo xtask disks`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which kernel to boot
    #[arg(long, default_value = "6.1")]
    kernel: Series,
}

/// Boots the machine and shows what it does; its exit code.
pub(crate) fn run(args: &Args) -> Result<u8> {
    boot(args.kernel, &exec::shipped()?, &mut show)
}

/// Exports the disks, boots the machine and kills workers until it ends; its exit code.
pub(crate) fn boot(series: Series, becket: &Path, output: &mut dyn FnMut(&[u8])) -> Result<u8> {
    let place = Exports::start(becket)?;
    let mut machine = Machine::new(series, SCRIPT.to_owned());
    machine.timeout = Duration::from_secs(900);
    machine.served =
        DISKS.map(|(name, properties)| (place.at(&format!("{name}.sock")), properties.to_owned())).to_vec();
    let (ended, end) = channel::<()>();
    let (code, kills) = std::thread::scope(|scope| {
        let place = &place;
        let killer = scope.spawn(move || {
            let mut kills = 0;
            while end.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                kills += place.kill_workers()?;
            }
            Ok::<_, anyhow::Error>(kills)
        });
        let code = machine.boot(output);
        drop(ended);
        let kills = killer.join().unwrap_or_else(|_| bail!("who kills workers has died"));
        anyhow::Ok((code?, kills?))
    })?;
    let recoveries: u64 = place.list()?.iter().filter_map(|disk| disk["recoveries"].as_u64()).sum();
    output(format!("{kills} workers were killed over them, {recoveries} deaths were recovered\n").as_bytes());
    ensure!(kills >= 4 && recoveries >= 4, "too few workers died over the machine's requests");
    place.end()?;
    for (name, _) in DISKS {
        exec::quietly(Command::new("e2fsck").arg("-fn").arg(place.at(&format!("{name}.img"))))?;
    }
    Ok(code)
}

/// Two images that are exported, by a server of their own.
struct Exports {
    becket: PathBuf,
    dir: tempfile::TempDir,
}

impl Exports {
    fn start(becket: &Path) -> Result<Exports> {
        // Not below target/: a socket's path must be short.
        let exports = Exports { becket: becket.to_owned(), dir: tempfile::tempdir()? };
        for (name, _) in DISKS {
            let image = exports.at(&format!("{name}.img"));
            std::fs::File::create(&image)?.set_len(256 << 20)?;
            let address = format!("unix:{}", exports.at(&format!("{name}.sock")).display());
            let mut command = exports.becket();
            command.arg("export").arg(&image).args([
                "--vhost-user",
                &address,
                "--queues",
                "2",
                "--name",
                name,
            ]);
            exec::quietly(&mut command)?;
        }
        Ok(exports)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn becket(&self) -> Command {
        let mut command = Command::new(&self.becket);
        command.env("BECKET_RUNTIME_DIR", self.at("run"));
        command
    }

    fn list(&self) -> Result<Vec<Value>> {
        let text = exec::output(self.becket().args(["list", "--json"]))?;
        let list: Value = serde_json::from_str(&text)?;
        list["devices"].as_array().cloned().context("a list has devices")
    }

    /// Kills the workers of the disks that the machine uses; how many those are.
    fn kill_workers(&self) -> Result<u64> {
        let mut kills = 0;
        let is_used = |disk: &&Value| disk["connections"] == 1 && disk["state"] == "live";
        for disk in self.list()?.iter().filter(is_used) {
            let worker = disk["worker_pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32));
            // One that has ended meanwhile is none of ours to count.
            kills += u64::from(worker.is_some_and(|worker| kill_process(worker, Signal::KILL).is_ok()));
        }
        Ok(kills)
    }

    fn end(&self) -> Result<()> {
        exec::quietly(self.becket().args(["detach", "--all"]))
    }
}

impl Drop for Exports {
    fn drop(&mut self) {
        // After a failure they are still there; otherwise there is nothing to detach.
        let _ = self.becket().args(["detach", "--all", "--force"]).output();
    }
}

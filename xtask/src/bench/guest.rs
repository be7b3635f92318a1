//! The guest of the benchmarks: one emulated CPU whose clock counts instructions, and a backing that costs little.
//! Never measures the guest's own disks: the image lives on ext4 in memory, behind the kernel's null block device.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::contestant::Field;
use super::record;
use crate::exec;
use crate::vm::{Machine, Place, Series};

/// Makes `$IMAGE` and loads the drivers.
const SETUP: &str = include_str!("guest/setup.sh");

/// Where the guest's scripts write their report.
const REPORT: &str = "/root/report";

/// What a benchmark may choose about its guest.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Emulated CPUs (all of them on one thread of the host)
    #[arg(long, default_value_t = 1)]
    pub(crate) cpus: u32,
    /// Seconds of the host until the guest is given up
    #[arg(long, default_value_t = 3600)]
    pub(crate) timeout: u64,
    /// Measure this becket instead of building the checkout's
    #[arg(long, value_name = "PATH")]
    pub(crate) becket: Option<PathBuf>,
}

/// becket, optimised, of this checkout unless another was asked for.
pub(crate) fn becket(options: &Options) -> Result<PathBuf> {
    if let Some(path) = &options.becket {
        return Ok(path.clone());
    }
    eprintln!("xtask: building becket");
    let mut command = exec::cargo();
    let status = command
        .args(["build", "--quiet", "--release", "-p", "becket"])
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("`{}` failed ({status})", exec::shown(&command));
    }
    Ok(exec::target_dir().join("release/becket"))
}

/// Boots the guest, runs `script` after the setup, and returns its report; what it prints is shown as it comes.
pub(crate) fn run(options: &Options, field: &Field, extra: Vec<Place>, script: &str) -> Result<String> {
    let work = tempfile::tempdir_in(record::dir()?)?;
    let report = work.path().join("report");
    let head = format!("CPUS={} REPORT={REPORT}\n{SETUP}\n{}", options.cpus, field.functions());
    let mut machine = Machine::new(Series::V7, format!("{head}\n{script}"));
    machine.icount = true;
    machine.cpus = options.cpus;
    machine.timeout = Duration::from_secs(options.timeout);
    machine.files = field.programs.clone();
    machine.files.extend(extra);
    machine.outs.push(Place { host: report.clone(), guest: REPORT.to_owned() });
    let code = machine.boot(&mut |bytes| eprint!("{}", String::from_utf8_lossy(bytes)))?;
    if code != 0 {
        bail!("the guest's script ended with {code}");
    }
    read(&report)
}

fn read(report: &Path) -> Result<String> {
    let bytes = std::fs::read(report).context("the guest sent no report")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The setting of a measurement in this guest; the guest's kernel and fio come from its report.
pub(crate) fn setting(options: &Options, kernel: &str, notes: Vec<String>) -> Result<record::Setting> {
    Ok(record::Setting {
        date: record::date()?,
        commit: match options.becket {
            // Somebody else built it; the checkout's commit would be a guess.
            Some(_) => "unknown (a build given by --becket)".to_owned(),
            None => record::commit()?,
        },
        kernel: kernel.to_owned(),
        cpus: options.cpus,
        emulator: format!(
            "{}, tcg, thread=single, icount shift=0, sleep=off",
            exec::output(Command::new("qemu-system-x86_64").arg("--version"))?
                .lines()
                .next()
                .unwrap_or_default()
        ),
        command: command(std::env::args().skip(1)),
        notes,
    })
}

/// This run's command line, as one would type it again; a path of this machine is shown by its last part only.
fn command(arguments: impl Iterator<Item = String>) -> String {
    let mut line = "cargo xtask".to_owned();
    for argument in arguments {
        let (head, path) = argument.split_at(argument.find('/').unwrap_or(argument.len()));
        line.push(' ');
        line.push_str(head);
        line.push_str(path.rsplit('/').next().unwrap_or_default());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_name_no_place_of_this_machine() {
        let words =
            ["bench", "cost", "--beside", "before=/home/me/becket", "--becket", "/x/y", "--rounds", "3"];
        let line = command(words.into_iter().map(str::to_owned));
        assert_eq!(line, "cargo xtask bench cost --beside before=becket --becket y --rounds 3");
    }
}

//! The guest of the benchmarks: its clock counts instructions, or time; its image lies where access costs
//! little.
//! Never measures the guest's own disks: the image lives on ext4 in memory, behind the kernel's null block
//! device.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::build::Build;
use super::contestant::Field;
use super::fio;
use super::record::{self, Clock, Setting};
use crate::exec;
use crate::vm::{Machine, Place, Series};

/// What every script knows.
pub(crate) const LIBRARY: &str = include_str!("guest/lib.sh");

/// Makes `$IMAGE` and loads the drivers.
const SETUP: &str = include_str!("guest/setup.sh");

/// Where the guest's scripts write their report.
const REPORT: &str = "/root/report";

/// What the setup makes, for a record's notes.
pub(crate) const IMAGE: &str =
    "image: 256 MiB on ext4 on a memory-backed null_blk (queue_mode=2, irqmode=0, 512-byte blocks)";

/// What a benchmark may choose about its guest.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Emulated CPUs (default: one where instructions are counted, two where time is)
    #[arg(long)]
    pub(crate) cpus: Option<u32>,
    /// Seconds of the host until the guest is given up
    #[arg(long, default_value_t = 7200)]
    pub(crate) timeout: u64,
    /// Measure this becket instead of building the checkout's
    #[arg(long, value_name = "PATH")]
    pub(crate) becket: Option<PathBuf>,
}

/// One guest to be booted.
pub(crate) struct Guest<'a> {
    options: &'a Options,
    build: &'a Build,
    clock: Clock,
    cpus: u32,
    memory_mib: u32,
}

impl<'a> Guest<'a> {
    /// A guest with this many CPUs unless the options say otherwise.
    pub(crate) fn new(options: &'a Options, build: &'a Build, clock: Clock, cpus: u32) -> Guest<'a> {
        Guest { options, build, clock, cpus: options.cpus.unwrap_or(cpus), memory_mib: 2048 }
    }

    /// The same with more memory.
    pub(crate) fn with_memory(self, memory_mib: u32) -> Guest<'a> {
        Guest { memory_mib, ..self }
    }

    /// Boots, makes the image, runs `script`, and returns its report; what it prints is shown as it comes.
    pub(crate) fn run(&self, field: &Field, extra: Vec<Place>, script: &str) -> Result<String> {
        self.boot(field, extra, &format!("{SETUP}\n{script}"))
    }

    /// The same for a script that makes its own images.
    pub(crate) fn boot(&self, field: &Field, extra: Vec<Place>, script: &str) -> Result<String> {
        let work = tempfile::tempdir_in(record::dir()?)?;
        let report = work.path().join("report");
        let head = format!("CPUS={} REPORT={REPORT}\n{LIBRARY}\n{}", self.cpus, field.functions());
        let mut machine = Machine::new(Series::V7, format!("{head}\n{script}"));
        machine.icount = self.clock == Clock::Instructions;
        machine.cpus = self.cpus;
        machine.memory_mib = self.memory_mib;
        machine.timeout = Duration::from_secs(self.options.timeout);
        machine.files = field.programs.clone();
        machine.files.extend(extra);
        machine.outs.push(Place { host: report.clone(), guest: REPORT.to_owned() });
        let code = machine.boot(&mut |bytes| eprint!("{}", String::from_utf8_lossy(bytes)))?;
        if code != 0 {
            bail!("the guest's script ended with {code}");
        }
        let bytes = std::fs::read(&report).context("the guest sent no report")?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The setting of a measurement in this guest; the kernel's name comes from its report.
    pub(crate) fn setting(&self, kernel: &str, notes: Vec<String>) -> Result<Setting> {
        let version = exec::output(Command::new("qemu-system-x86_64").arg("--version"))?;
        let version = version.lines().next().unwrap_or_default();
        let mode = match self.clock {
            Clock::Instructions => "tcg, thread=single, icount shift=0, sleep=off",
            Clock::Time => "tcg, thread=multi",
        };
        let emulator = format!("{version}, {mode}");
        setting(self.build, self.clock, kernel, self.cpus, &emulator, notes)
    }
}

/// The setting of a measurement with this becket, wherever it was made.
pub(crate) fn setting(
    build: &Build,
    clock: Clock,
    kernel: &str,
    cpus: u32,
    emulator: &str,
    mut notes: Vec<String>,
) -> Result<Setting> {
    notes.push(build.host.clone());
    Ok(Setting {
        date: record::date()?,
        commit: build.commit.clone(),
        build: build.hash.clone(),
        clock,
        kernel: kernel.to_owned(),
        cpus,
        emulator: emulator.to_owned(),
        command: command(std::env::args().skip(1)),
        notes,
    })
}

/// The kernel that a guest's report names.
pub(crate) fn kernel_of(report: &str) -> Result<String> {
    let kernel = |section: fio::Section<'_>| match section.words[..] {
        ["kernel", release] => Some(release.to_owned()),
        _ => None,
    };
    fio::sections(report).into_iter().find_map(kernel).context("the guest does not name its kernel")
}

/// This run's command line, as one would type it again; a path of this machine is shown by its last part
/// only.
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

//! The scenarios' scripts on this machine itself: scenarios that need only the kernel that runs here.
//! Never leaves files behind: a folder of its own holds the script's files and becket's records.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use super::build::Build;
use super::contestant::Field;
use super::guest::{self, LIBRARY};
use super::record::{self, Clock, Setting};
use crate::vm::quoted;

/// Where what is written goes to no disk.
const MEMORY: &str = "/dev/shm";

/// A folder, and where becket keeps its records meanwhile.
pub(crate) struct Host {
    work: TempDir,
    records: PathBuf,
    /// Where those are, when they are elsewhere.
    _memory: Option<TempDir>,
}

impl Host {
    /// Below target/bench, on the checkout's disk.
    pub(crate) fn new() -> Result<Host> {
        let work = tempfile::tempdir_in(record::dir()?)?;
        Ok(Host { records: work.path().join("run"), _memory: None, work })
    }

    /// The same with becket's records where they usually are: in memory, as all of `/run` is.
    pub(crate) fn with_records_in_memory(self) -> Result<Host> {
        let memory = tempfile::tempdir_in(MEMORY)?;
        Ok(Host { records: memory.path().join("run"), _memory: Some(memory), ..self })
    }

    /// A file or folder of the script's, as a word for the shell.
    pub(crate) fn word(&self, name: &str) -> String {
        word(&self.work.path().join(name))
    }

    /// Runs the script with the variables that every script has; returns its report. becket uses its default
    /// plan.
    pub(crate) fn run(&self, field: &Field, script: &str) -> Result<String> {
        let head = format!(
            "REPORT={} SAID={}\n{LIBRARY}\n{}",
            self.word("report"),
            self.word("said"),
            field.functions()
        );
        let mut command = Command::new("bash");
        command.arg("-c").arg(format!("{head}\n{script}")).current_dir(self.work.path());
        command.env("BECKET_RUNTIME_DIR", &self.records).env("BECKET_LINK_DIR", self.records.join("links"));
        command.env_remove("BECKET_TEST_VIA").stdin(Stdio::null()).stdout(io::stderr());
        let status = command.status().context("cannot start `bash`")?;
        ensure!(
            status.success(),
            "the benchmark's script failed on this machine ({status}); why is the last that it said"
        );
        Ok(std::fs::read_to_string(self.work.path().join("report"))?)
    }

    /// The setting of a measurement here; the kernel's name comes from its report.
    pub(crate) fn setting(&self, build: &Build, report: &str, notes: Vec<String>) -> Result<Setting> {
        let cpus = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        guest::setting(build, Clock::Time, &guest::kernel_of(report)?, cpus, "no emulator", notes)
    }
}

/// A path as a word for the shell.
pub(crate) fn word(path: &Path) -> String {
    quoted(&path.display().to_string())
}

//! What the tests need: a place of its own for each, and processes that do not outlive theirs.
//! It never touches the user's own devices.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use becket_testkit as testkit;
use serde_json::Value;

use crate::talk;

/// A directory of its own for each test, with becket's directories in it.
pub(crate) struct Place {
    pub(crate) name: &'static str,
    pub(crate) temp: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new(name: &'static str) -> Place {
        Place { name, temp: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    pub(crate) fn runtime(&self) -> PathBuf {
        self.path("run")
    }

    pub(crate) fn image(&self, name: &str, size: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(size).unwrap();
        path
    }

    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command
            .args(words)
            .env("BECKET_RUNTIME_DIR", self.runtime())
            .env("BECKET_LINK_DIR", self.path("links"));
        command
    }

    pub(crate) fn run(&self, words: &[&str]) -> Result<Value, String> {
        let output = self.command(words).output().unwrap();
        if output.status.success() {
            return Ok(serde_json::from_slice(&output.stdout).unwrap());
        }
        Err(String::from_utf8(output.stderr).unwrap())
    }

    /// A supervisor that is ready.
    pub(crate) fn supervisor(&self) -> Running {
        let mut child = self
            .command(&["serve", "--ready-fd", "1"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut byte = Vec::new();
        child.stdout.take().unwrap().read_to_end(&mut byte).unwrap();
        assert_eq!(byte, b"\n", "one byte when it is ready, and then the pipe is closed");
        Running(child)
    }

    pub(crate) fn call(&self, call: &str) -> Value {
        serde_json::from_str(&talk(&self.runtime().join("control"), call).unwrap()).unwrap()
    }

    pub(crate) fn records(&self) -> usize {
        let files = fs::read_dir(self.runtime().join("devices")).unwrap();
        files.flatten().filter(|item| item.path().extension().is_some_and(|e| e == "json")).count()
    }

    /// Whether this kernel has ublk.
    pub(crate) fn has_ublk(&self) -> bool {
        let root = testkit::require_root(self.name);
        let found = root && Path::new("/dev/ublk-control").exists();
        if root && !found {
            testkit::skip(self.name, "needs /dev/ublk-control");
        }
        found
    }

    /// Whether loop devices can be attached here.
    pub(crate) fn has_loop(&self) -> bool {
        testkit::require_root(self.name) && testkit::require_loop(self.name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A test that failed leaves nothing attached either.
        if let Ok(Value::Array(devices)) = self.run(&["list"]) {
            for device in devices {
                let _ = self.run(&["detach", device["name"].as_str().unwrap(), "lazy"]);
            }
        }
    }
}

/// A process that does not outlive its test.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.pid()).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn ends(&mut self, within: Duration) -> Option<i32> {
        let mut status = None;
        testkit::wait_until(within, || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap_or_else(|| panic!("still there after {within:?}")).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn status_field(pid: u32, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().to_owned()
}

pub(crate) fn mount_points(pid: u32) -> Vec<String> {
    let table = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    table.lines().map(|line| line.split(' ').nth(4).unwrap().to_owned()).collect()
}

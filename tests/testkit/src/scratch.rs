//! A place of its own for one test: a directory, a state of becket's, and the binary that uses it.
//! Never leaves a device behind: dropping it detaches what the test attached.

use crate::{patience, via};
use serde_json::Value;
use std::{
    ffi::OsStr,
    fs,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// A command that hangs fails its test after this time.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a command of becket did.
#[derive(Debug)]
pub struct Ran {
    /// Exit status; 128 and the signal when it was killed.
    pub code: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Ran {
    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("no JSON ({error}): {self:?}"))
    }
}

/// A directory and a state of becket's that only one test uses.
#[derive(Debug)]
pub struct Scratch {
    dir: TempDir,
    binary: PathBuf,
    outputs: AtomicUsize,
}

impl Scratch {
    /// `binary` is the becket to test: `env!("CARGO_BIN_EXE_becket")` in its own tests.
    pub fn new(binary: impl Into<PathBuf>) -> Self {
        // Not /tmp where it can be helped: tmpfs has no direct I/O.
        let base = ["/var/tmp", "/tmp"].into_iter().find(|dir| Path::new(dir).is_dir()).unwrap_or(".");
        let dir =
            tempfile::Builder::new().prefix("becket-test-").tempdir_in(base).expect("a scratch directory");
        Self { dir, binary: binary.into(), outputs: AtomicUsize::new(0) }
    }

    /// A path in the scratch directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A new directory in the scratch directory.
    pub fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).expect("creates");
        path
    }

    /// What BECKET_RUNTIME_DIR is for this test.
    pub fn runtime(&self) -> PathBuf {
        self.path("run")
    }

    /// Where becket puts its links for this test, instead of /dev/becket.
    pub fn links(&self) -> PathBuf {
        self.path("links")
    }

    /// A command of becket, set to use this place; for tests that steer it themselves.
    pub fn becket(&self) -> Command {
        let mut command = Command::new(&self.binary);
        self.prepare(&mut command);
        command
    }

    /// Sets what becket looks at, for a command (a shell, unshare) that runs becket in turn.
    pub fn prepare(&self, command: &mut Command) {
        command
            .env("BECKET_RUNTIME_DIR", self.runtime())
            .env("BECKET_LINK_DIR", self.links())
            .env("BECKET", &self.binary)
            .env("NO_COLOR", "1")
            .env_remove("BECKET_DEVICE")
            .current_dir(self.dir.path())
            .stdin(Stdio::null());
    }

    /// Runs becket to its end.
    #[track_caller]
    pub fn run<W: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = W>) -> Ran {
        self.finish(self.becket().args(words))
    }

    /// Runs becket to its end, which must be a good one; returns its standard output.
    #[track_caller]
    pub fn ok<W: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = W>) -> String {
        let ran = self.run(words);
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.out
    }

    /// Runs becket with `--json`; it must end well.
    #[track_caller]
    pub fn json<W: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = W>) -> Value {
        let ran = self.finish(self.becket().arg("--json").args(words));
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.json()
    }

    /// Attaches an image by the transport that is tested; returns the device's path.
    #[track_caller]
    pub fn attach(&self, image: &Path, more: &[&str]) -> PathBuf {
        let mut words: Vec<&OsStr> = vec!["attach".as_ref()];
        let via = via();
        if !more.contains(&"--via") {
            words.extend(["--via".as_ref(), OsStr::new(&via)]);
        }
        words.extend(more.iter().map(OsStr::new));
        words.push(image.as_os_str());
        PathBuf::from(self.ok(words).trim_end())
    }

    /// The devices that `becket list` tells.
    #[track_caller]
    pub fn devices(&self) -> Vec<Value> {
        self.json(["list"])["devices"].as_array().expect("an array").clone()
    }

    /// Runs a prepared command to its end.
    #[track_caller]
    pub fn finish(&self, command: &mut Command) -> Ran {
        // Into files: a pipe that some child of becket keeps would be waited for.
        let number = self.outputs.fetch_add(1, Ordering::Relaxed);
        let (out, err) = (self.path(&format!(".out{number}")), self.path(&format!(".err{number}")));
        command
            .stdout(fs::File::create(&out).expect("creates"))
            .stderr(fs::File::create(&err).expect("creates"));
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let status = wait(&mut child);
        let read = |path| String::from_utf8_lossy(&fs::read(path).expect("reads")).into_owned();
        let (out, err) = (read(&out), read(&err));
        let status = status.unwrap_or_else(|| panic!("{command:?} hangs; it said: {out}{err}"));
        Ran { code: code(status), out, err }
    }
}

impl Scratch {
    /// A test that failed has left its mounts, whose devices the next test would meet.
    fn unmount(&self) {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(1).map(Path::new));
        let ours: Vec<_> = points.filter(|point| point.starts_with(self.path(""))).collect();
        for point in ours.iter().rev() {
            let _ = Command::new("umount").arg(point).status();
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if thread::panicking() {
            self.unmount();
        }
        let detached = self.becket().args(["detach", "--all", "--timeout", "10s"]).output();
        let reason = match &detached {
            Ok(output) if output.status.success() => return,
            Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
            Err(error) => error.to_string(),
        };
        // What is in use now goes at least when its user does.
        let _ = self.becket().args(["detach", "--all", "--lazy"]).output();
        eprintln!("the test left a device behind: {reason}");
        assert!(thread::panicking(), "the test left a device behind: {reason}");
    }
}

/// Waits for a child's end; kills it and returns `None` when it hangs.
fn wait(child: &mut Child) -> Option<ExitStatus> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("is our child") {
            return Some(status);
        }
        let waited = begun.elapsed();
        if waited >= PATIENCE && waited >= patience(PATIENCE) {
            child.kill().expect("is our child");
            child.wait().expect("is our child");
            return None;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// As shells have it.
fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

//! A file system that hangs as a network's does: what waits for its server waits until that goes on.
//! It never hangs for ever, whatever becomes of the test.

use std::{
    io::Read as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use becket_testkit::{Scratch, image, patience, require_fuse, require_tools, wait_until};
use becket_transport::aside::within;
use tempfile::TempDir;

use super::scratch;

const SIZE: u64 = 8 << 20;

/// A file system of one file, `file`, that acts as a network's: its server can be stopped. It ends before the
/// test does, whatever the result, so that nothing that is left over it waits for ever.
pub(crate) struct Net {
    server: Child,
    pub(crate) file: PathBuf,
    _dir: TempDir,
}

impl Net {
    /// Besides it a place, whose devices go before it, and the file's bytes. `None` if this machine cannot.
    pub(crate) fn mount(name: &str) -> Option<(Net, Scratch, Vec<u8>)> {
        if !require_fuse(name) || !require_tools(name, &["qemu-storage-daemon", "bash"]) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let (file, bottom) = (dir.path().join("net"), dir.path().join("bottom"));
        let content = image::random_bytes(SIZE as usize, 6);
        std::fs::write(&bottom, &content).unwrap();
        std::fs::write(&file, "").unwrap();
        let blockdev = format!("file,filename={},node-name=n", bottom.display());
        let export = format!("fuse,id=e,node-name=n,mountpoint={},writable=on", file.display());
        let mut server = Command::new("qemu-storage-daemon");
        let server = server.args(["--blockdev", &blockdev, "--export", &export]).spawn().unwrap();
        let net = Net { server, file, _dir: dir };
        let there = || std::fs::metadata(&net.file).is_ok_and(|file| file.len() == SIZE);
        assert!(wait_until(Duration::from_secs(30), there));
        Some((net, scratch(), content))
    }

    /// Stops the server. When this returns the kernel no longer answers from attributes of the file that it
    /// has cached.
    pub(crate) fn stop(&self) -> Stopped {
        // With room for what comes: a detach waits ten seconds for a backing.
        self.stop_for(Duration::from_secs(60))
    }

    /// The same, for at most that long.
    pub(crate) fn stop_for(&self, most: Duration) -> Stopped {
        let stopped = Stopped::for_at_most(&self.server.id().to_string(), most);
        let answers = || {
            let file = self.file.clone();
            within(Duration::from_secs(2), move || std::fs::metadata(file)).is_some()
        };
        assert!(wait_until(Duration::from_secs(20), || !answers()));
        stopped
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // It unmounts by itself then.
        let _ = Command::new("kill").arg(self.server.id().to_string()).status();
        let _ = self.server.wait();
    }
}

/// A process that is stopped; but not for ever, since a process that waits for it can keep others waiting, by
/// locks of the kernel's. A test that has it go on is a process, too, which outlives this one.
pub(crate) struct Stopped(Child);

impl Stopped {
    pub(crate) fn new(pid: &str) -> Stopped {
        Self::for_at_most(pid, Duration::from_secs(60))
    }

    fn for_at_most(pid: &str, most: Duration) -> Stopped {
        // As the load is when it begins.
        let enough = patience(most).as_secs().to_string();
        let script = "kill -STOP $0 && echo; read -t $1; kill -CONT $0";
        let mut guard = Command::new("bash");
        let guard = guard.args(["-c", script, pid, &enough]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut guard = guard.spawn().unwrap();
        let mut said = [0];
        guard.stdout.take().unwrap().read_exact(&mut said).expect("it is stopped");
        Stopped(guard)
    }

    pub(crate) fn lasts(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

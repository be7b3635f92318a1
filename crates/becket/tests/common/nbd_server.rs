//! Foreign NBD servers, and devices over them. Each listens at a unix socket in the test's own directory.

use std::{
    fs,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use becket_testkit::{Scratch, tool, wait_until};
use serde_json::Value;

use super::alive;

/// A foreign server of one image, which ends with this.
pub(crate) struct Server {
    child: Child,
    command: Command,
    pub(crate) socket: PathBuf,
}

impl Server {
    pub(crate) fn start(mut command: Command, socket: PathBuf) -> Self {
        let _ = fs::remove_file(&socket);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        assert!(wait_until(Duration::from_secs(10), || socket.exists()), "{command:?} does not listen");
        Self { child, command, socket }
    }

    /// It dies without a word.
    pub(crate) fn die(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, name: &str) {
        tool(Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]));
    }

    /// Another one takes its place.
    pub(crate) fn again(&mut self) {
        let _ = fs::remove_file(&self.socket);
        self.child = self.command.spawn().unwrap();
        assert!(wait_until(Duration::from_secs(10), || self.socket.exists()), "it does not listen again");
    }

    /// nbdkit's file plugin.
    pub(crate) fn nbdkit(image: &Path, words: &[&str]) -> Self {
        let socket = image.with_extension("nbdkit");
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-U"]).arg(&socket).args(words).arg("file").arg(image);
        Self::start(command, socket)
    }

    /// qemu-nbd with an export named `disk`.
    pub(crate) fn qemu(image: &Path, words: &[&str]) -> Self {
        let socket = image.with_extension("qemu");
        let mut command = Command::new("qemu-nbd");
        command.args(["-t", "-f", "raw", "-x", "disk", "-k"]).arg(&socket).args(words).arg(image);
        Self::start(command, socket)
    }

    pub(crate) fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An ext4 of 32 MiB with one file.
pub(crate) fn ext4(place: &Scratch) -> PathBuf {
    let tree = place.dir("tree");
    fs::create_dir(tree.join("dir")).unwrap();
    fs::write(tree.join("dir/file"), "from afar").unwrap();
    let image = place.path("d.img");
    tool(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&tree).arg(&image).arg("32M"));
    image
}

/// Attaches over FUSE and returns the disk.
pub(crate) fn attach(place: &Scratch, words: &[&str]) -> PathBuf {
    let mut all = vec!["attach", "--via", "fuse"];
    all.extend(words);
    place.ok(&all).trim().into()
}

pub(crate) fn only(place: &Scratch) -> Value {
    place.devices().remove(0)
}

pub(crate) fn kill(pid: &Value) {
    tool(Command::new("kill").args(["-KILL", &pid.to_string()]));
    let pid = u32::try_from(pid.as_u64().unwrap()).unwrap();
    assert!(wait_until(Duration::from_secs(20), || !alive(pid)));
}

pub(crate) fn open(disk: &Path) -> fs::File {
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    fs::OpenOptions::new().read(true).write(true).custom_flags(flags).open(disk).unwrap()
}

/// A block that is aligned for direct I/O, filled with a number.
#[repr(align(4096))]
pub(crate) struct Block(pub(crate) [u8; 4096]);

impl Block {
    pub(crate) fn of(number: u64) -> Box<Self> {
        let mut block = Box::new(Self([0; 4096]));
        block.0.chunks_exact_mut(8).for_each(|place| place.copy_from_slice(&number.to_le_bytes()));
        block
    }
}

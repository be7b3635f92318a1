//! Foreign NBD servers, and devices over them. Each listens at a unix socket in the test's own directory.

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use becket_testkit::{Scratch, tool, wait_until};
/// A foreign server of one image, which ends with this.
pub(crate) struct Server {
    child: Child,
    command: Command,
    pub(crate) socket: PathBuf,
}

impl Server {
    pub(crate) fn start(mut command: Command, socket: PathBuf) -> Self {
        let _ = fs::remove_file(&socket);
        // A process that a test stops is in no group with others: the kernel sends SIGHUP to all of a group
        // with a stopped process that no shell controls any more.
        command.process_group(0);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        assert!(wait_until(Duration::from_secs(10), || listens(&socket)), "{command:?} does not listen");
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
        assert!(wait_until(Duration::from_secs(10), || listens(&self.socket)), "it does not listen again");
    }

    /// nbdkit's file plugin.
    pub(crate) fn nbdkit(image: &Path, words: &[&str]) -> Self {
        Self::nbdkit_by(image, words, &[])
    }

    /// The same, which writes down in `log` what it is asked.
    pub(crate) fn nbdkit_with_log(image: &Path, log: &Path) -> Self {
        Self::nbdkit_by(image, &["--filter", "log"], &[&format!("logfile={}", log.display())])
    }

    /// The same, with parameters of filters.
    pub(crate) fn nbdkit_by(image: &Path, words: &[&str], parameters: &[&str]) -> Self {
        let socket = image.with_extension("nbdkit");
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-U"]).arg(&socket).args(words).arg("file").arg(image).args(parameters);
        Self::start(command, socket)
    }

    /// qemu-nbd with an export named `disk`.
    pub(crate) fn qemu(image: &Path, words: &[&str]) -> Self {
        Self::qemu_of_one(image, &[&["-t"], words].concat())
    }

    /// The same, which ends with its first client.
    pub(crate) fn qemu_of_one(image: &Path, words: &[&str]) -> Self {
        let socket = image.with_extension("qemu");
        let mut command = Command::new("qemu-nbd");
        command.args(["-f", "raw", "-x", "disk", "-k"]).arg(&socket).args(words).arg(image);
        Self::start(command, socket)
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub(crate) fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }
}

/// Whether a process listens at a socket, without being one of its clients: its file is there before that.
fn listens(socket: &Path) -> bool {
    // Behind a colon: references, protocol, flags (__SO_ACCEPTCON), type, state, inode, path.
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let is_it = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.get(3) == Some(&"00010000") && words.get(7).is_some_and(|path| Path::new(path) == socket)
    };
    sockets.lines().any(is_it)
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

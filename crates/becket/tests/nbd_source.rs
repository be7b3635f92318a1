//! Images on NBD servers: read by commands, attached, and served while servers and workers die.
//! Every server listens at a unix socket in the test's own directory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use becket_testkit::{Scratch, require_plain_machine, tool, wait_until};
use common::scratch;

/// A foreign server of one image, which ends with this.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn start(mut command: Command, socket: PathBuf) -> Self {
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        assert!(wait_until(Duration::from_secs(10), || socket.exists()), "{command:?} does not listen");
        Self { child, socket }
    }

    /// nbdkit's file plugin.
    fn nbdkit(image: &Path, words: &[&str]) -> Self {
        let socket = image.with_extension("nbdkit");
        let _ = fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-U"]).arg(&socket).args(words).arg("file").arg(image);
        Self::start(command, socket)
    }

    /// qemu-nbd with an export named `disk`.
    fn qemu(image: &Path, words: &[&str]) -> Self {
        let socket = image.with_extension("qemu");
        let _ = fs::remove_file(&socket);
        let mut command = Command::new("qemu-nbd");
        command.args(["-t", "-f", "raw", "-x", "disk", "-k"]).arg(&socket).args(words).arg(image);
        Self::start(command, socket)
    }

    fn uri(&self, export: &str) -> String {
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
fn ext4(place: &Scratch) -> PathBuf {
    let tree = place.dir("tree");
    fs::create_dir(tree.join("dir")).unwrap();
    fs::write(tree.join("dir/file"), "from afar").unwrap();
    let image = place.path("d.img");
    tool(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&tree).arg(&image).arg("32M"));
    image
}

#[test]
fn an_image_on_a_server_is_read_without_a_device() {
    let name = "nbd_source::an_image_on_a_server_is_read_without_a_device";
    if !require_plain_machine(name, &["mke2fs", "nbdkit", "qemu-nbd", "qemu-img"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let qcow2 = place.path("e.qcow2");
    tool(Command::new("qemu-img").args(["convert", "-O", "qcow2"]).args([&image, &qcow2]));
    let servers = [
        (Server::nbdkit(&image, &[]), ""),
        (Server::qemu(&image, &["-e", "4", "-r"]), "disk"),
        // The server gives out the file's own bytes, and becket unpacks them.
        (Server::nbdkit(&qcow2, &["-r"]), ""),
    ];
    for (server, export) in &servers {
        let uri = server.uri(export);
        let inside = format!("{uri}#dir/file");
        assert_eq!(place.ok(["cat", &inside]), "from afar");
        assert!(place.ok(["ls", &format!("{uri}#dir")]).contains("file"));
        assert!(place.ok(["inspect", &uri]).contains("ext4"));
        assert!(place.ok(["map", &uri]).contains("data"));
        let copied = place.path("copied");
        place.ok(["copy", "--force", &uri, copied.to_str().unwrap()]);
        assert!(fs::read(&copied).unwrap() == fs::read(&image).unwrap(), "the copy differs");
        place.ok(["cp", "--force", &inside, place.path("file").to_str().unwrap()]);
        assert_eq!(fs::read_to_string(place.path("file")).unwrap(), "from afar");
    }
    let gone = place.run(["ls", &servers[1].0.uri("other")]);
    assert_eq!(gone.code, 1, "{gone:?}");
    assert!(gone.err.contains("no export named \"other\"") && gone.err.contains("nbdinfo"), "{gone:?}");
    let wrong = place.run(["ls", "nbd+unix:///x"]);
    assert!(wrong.err.contains("it names no socket"), "{wrong:?}");
}

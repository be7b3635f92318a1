//! Devices on NBD servers: what names them, and what is refused of them.
//! Every server listens in the test's own directory, or at a port of this host.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{require_fuse, require_tools};
use common::nbd_server::{Server, attach, ext4};
use common::one::only;
use common::{scratch, text};

#[test]
fn fuse_a_device_on_a_server_goes_by_what_was_typed_and_by_what_is_shown() {
    let name = "nbd_named::fuse_a_device_on_a_server_goes_by_what_was_typed_and_by_what_is_shown";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let server = Server::nbdkit(&ext4(&place), &["-e", "disk"]);
    // Commands run in the directory of the socket.
    let socket = server.socket.file_name().unwrap().to_str().unwrap();
    for typed in [
        server.uri("disk"),
        format!("nbd+unix:///disk?socket={socket}"),
        format!("nbd+unix:///d%69sk?unheard=1&socket={socket}"),
        format!("nbd+unix:///disk?socket={socket}#dir/file"),
    ] {
        attach(&place, &["-r", &typed]);
        let device = only(&place);
        let shown = text(&device, "image").to_owned();
        for command in ["list", "stat", "why", "refresh"] {
            place.ok([command, &typed]);
            place.ok([command, &shown]);
        }
        let other = place.run(["stat", &typed.replace("sk?", "sk-2?")]);
        assert!(other.code == 1 && other.err.contains("no device or image"), "{other:?}");
        place.ok(["set", "--read-only", "on", &typed]);
        place.ok(["detach", &typed]);
        assert!(place.devices().is_empty());
        attach(&place, &["-r", &typed]);
        place.ok(["detach", &shown]);
    }
}

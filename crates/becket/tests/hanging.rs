//! A network file system that hangs below an image: a becket command then ends in time, with the reason, and
//! other devices are not affected. The server of the file system is stopped while a test looks, and continues
//! before anything is cleaned up.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    process::Command,
    thread,
    time::Duration,
};

use becket_testkit::{Scratch, require_loop, require_ublk, tool, wait_until};
use common::net::Net;
use common::page::{PAGE, direct, read, write};
use common::{Use, text};

const MIB: u64 = 1 << 20;

/// `net` over the file system that will hang and `other` over one that will not, by the service that this
/// machine has.
struct Two {
    other: File,
    place: Scratch,
    content: Vec<u8>,
    net: Net,
}

impl Two {
    fn attach(name: &str, via: &str) -> Option<Two> {
        let (net, place, content) = Net::mount(name)?;
        std::fs::write(place.path("two"), &content).unwrap();
        place.attach(&net.file, &["--via", via, "--name", "net"]);
        let other = direct(&place.attach(&place.path("two"), &["--via", via, "--name", "other"]));
        Some(Two { other, place, content, net })
    }

    #[track_caller]
    fn other_is_served(&self) {
        assert_eq!(read(&self.other, MIB).unwrap().0, self.content[MIB as usize..][..PAGE]);
    }

    fn worker(&self) -> u64 {
        self.place.devices().iter().find(|device| text(device, "name") == "other").unwrap()["worker_pid"]
            .as_u64()
            .unwrap()
    }

    /// Takes all away, once the file system has answered again.
    #[track_caller]
    fn end(self) {
        drop(self.other);
        // A process that another test begins holds a copy of the descriptor until it runs its program.
        let gone = || self.place.run(["detach", "other"]).code == 0;
        assert!(wait_until(Duration::from_secs(10), gone), "{:?}", self.place.devices());
        // It may have gone by itself.
        let _ = self.place.run(["detach", "net"]);
        assert!(wait_until(Duration::from_secs(30), || self.place.devices().is_empty()));
    }
}

/// Those of FUSE wherever there is FUSE; those of ublk where there is ublk.
fn served(via: &str, name: &str) -> bool {
    via != "ublk" || require_ublk(name)
}

fn detached_over_one_that_hangs(via: &str, name: &str) {
    let Some(two) = served(via, name).then(|| Two::attach(name, via)).flatten() else { return };
    let used = Use::of(&std::fs::canonicalize(two.place.links().join("net")).unwrap());
    let worker = two.worker();
    let mut stopped = two.net.stop();
    let ran = two.place.run(["detach", "net"]);
    // Where the worker could let go of the image in time, the device is gone.
    let later = "the file system of its image may not answer, and it goes when that does";
    assert!(ran.code == 0 || (ran.code == 1 && ran.err.contains(later)), "{ran:?}");
    two.other_is_served();
    assert!(stopped.lasts(), "detach or the other device has waited for the server");
    drop(stopped);
    let gone = || two.place.devices().iter().all(|device| text(device, "name") != "net") && !used.lasts();
    assert!(wait_until(Duration::from_secs(30), gone), "it goes by itself: {:?}", two.place.devices());
    assert_eq!(two.worker(), worker);
    two.other_is_served();
    two.end();
}

#[test]
fn ublk_a_device_over_one_that_hangs_goes_when_that_answers() {
    detached_over_one_that_hangs("ublk", "hanging::ublk_a_device_over_one_that_hangs_goes_when_that_answers");
}

#[test]
fn fuse_a_device_over_one_that_hangs_goes_when_that_answers() {
    detached_over_one_that_hangs("fuse", "hanging::fuse_a_device_over_one_that_hangs_goes_when_that_answers");
}

/// The command syncs the device before it makes it read-only; here the file system begins to hang just after
/// that.
fn frozen_over_one_that_hangs(via: &str, name: &str) {
    let Some(two) = served(via, name).then(|| Two::attach(name, via)).flatten() else { return };
    let node = two.place.links().join("net");
    write(&direct(&node), MIB, 7).unwrap();
    let worker = two.worker();
    let mut stopped = two.net.stop_for(Duration::from_secs(90));
    let answer = thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let wish = serde_json::json!({"name": "net", "read_only": true, "shortest": 0});
            call(&two.place, "Set", &wish)
        });
        while !asked.is_finished() {
            two.other_is_served();
            thread::sleep(Duration::from_millis(50));
        }
        asked.join().unwrap()
    });
    assert!(answer.contains("everything goes on as before"), "{answer}");
    assert!(answer.contains("the file system of its image may not answer"), "{answer}");
    assert!(stopped.lasts(), "the sync has ended: {answer}");
    assert_eq!(two.worker(), worker, "one device's image has cost all devices their worker");
    two.other_is_served();
    drop(stopped);
    // It is as it was, and can become what it was to be.
    write(&direct(&node), MIB, 8).unwrap();
    two.place.ok(["set", "net", "--read-only", "on"]);
    assert_eq!(read(&File::open(&node).unwrap(), MIB).unwrap().0, [8; PAGE]);
    assert_eq!(two.worker(), worker);
    two.end();
}

#[test]
fn ublk_a_sync_that_hangs_ends_no_worker() {
    frozen_over_one_that_hangs("ublk", "hanging::ublk_a_sync_that_hangs_ends_no_worker");
}

#[test]
fn fuse_a_sync_that_hangs_ends_no_worker() {
    frozen_over_one_that_hangs("fuse", "hanging::fuse_a_sync_that_hangs_ends_no_worker");
}

/// What the server says to a call, past the command and its precautions.
fn call(place: &Scratch, method: &str, parameters: &serde_json::Value) -> String {
    let mut stream = UnixStream::connect(place.runtime().join("control")).unwrap();
    let call =
        serde_json::json!({"method": format!("org.becket.Becket1.{method}"), "parameters": parameters});
    stream.write_all(format!("{call}\0").as_bytes()).unwrap();
    let mut answer = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).unwrap() == 1 && byte != [0] {
        answer.extend(byte);
    }
    String::from_utf8(answer).unwrap()
}

#[test]
fn fuse_a_refresh_over_one_that_hangs_is_given_up() {
    let name = "hanging::fuse_a_refresh_over_one_that_hangs_is_given_up";
    let Some(two) = Two::attach(name, "fuse") else { return };
    let worker = two.worker();
    let mut stopped = two.net.stop();
    let ran = two.place.run(["refresh", "net"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("does not answer") && ran.err.contains("the file system below"), "{ran:?}");
    two.other_is_served();
    assert!(stopped.lasts(), "a process has waited for the server");
    assert_eq!(two.worker(), worker);
    drop(stopped);
    two.place.ok(["refresh", "net"]);
    two.end();
}

/// By the path of the attach, as it is recorded; not by another one, which would have to be looked up.
#[test]
fn fuse_a_path_on_one_that_hangs_is_not_waited_for() {
    let name = "hanging::fuse_a_path_on_one_that_hangs_is_not_waited_for";
    if !require_loop(name) {
        return;
    }
    let Some((net, place, _)) = Net::mount(name) else { return };
    let device = place.attach(&net.file, &["--via", "loop", "--read-only", "--name", "one"]);
    let link = place.path("link");
    std::os::unix::fs::symlink(&net.file, &link).unwrap();
    let used = Use::of(&device);
    let mut stopped = net.stop();
    let ran = place.run(["detach", link.to_str().unwrap()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    let reported = format!("{}: its file system has not answered for 10 s", link.display());
    assert!(ran.err.contains(&reported) && ran.err.contains("becket list"), "{ran:?}");
    assert!(used.lasts());
    place.ok(["detach", net.file.to_str().unwrap()]);
    assert!(!used.lasts() && place.devices().is_empty());
    assert!(stopped.lasts(), "a process has waited for the server");
}

/// A process that is ended closes its files, and at that of the image it waits for the server, however it was
/// killed: its successor begins when that answers. Until then devices are served, and commands that ask the
/// records are answered.
#[test]
fn fuse_a_killed_supervisor_that_cannot_end_costs_no_request() {
    let name = "hanging::fuse_a_killed_supervisor_that_cannot_end_costs_no_request";
    let Some(two) = Two::attach(name, "fuse") else { return };
    let server = |place: &Scratch| place.devices().first().and_then(|device| device["server_pid"].as_u64());
    let (before, worker) = (server(&two.place).unwrap(), two.worker());
    let mut stopped = two.net.stop();
    tool(Command::new("kill").args(["-KILL", &before.to_string()]));
    let all_are = |state: &str| two.place.devices().iter().all(|device| text(device, "state") == state);
    for _ in 0..20 {
        two.other_is_served();
        // Orphaned, or still live for those who look while the kernel takes the process for one that runs.
        assert_eq!(two.place.devices().len(), 2);
        thread::sleep(Duration::from_millis(100));
    }
    assert!(stopped.lasts(), "a process has waited for the server");
    drop(stopped);
    let taken_over = || all_are("live") && server(&two.place) != Some(before);
    assert!(wait_until(Duration::from_secs(30), taken_over), "{:?}", two.place.devices());
    assert_eq!(two.worker(), worker);
    two.other_is_served();
    two.end();
}

//! Supervisor and worker die under a device, or are replaced: it goes on, or is reported as lost and cleaned
//! up. Requests never fail as long as a process is left that can serve them.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use becket_testkit as testkit;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::place::{Place, Running};

/// How long a recovery may take on a slow machine.
const SOON: Duration = Duration::from_secs(30);

fn attached(place: &Place, more: &[&str]) -> (Value, PathBuf) {
    let image = place.image("image", 1 << 20);
    let words = [&["attach", image.to_str().unwrap(), "name=one", "via=ublk"], more].concat();
    let info = place.run(&words).unwrap();
    let node = info["device"].as_str().unwrap().into();
    (info, node)
}

fn kill(pid: u64) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL).unwrap();
}

fn now(place: &Place) -> Value {
    place.run(&["list"]).unwrap()[0].clone()
}

fn becomes(place: &Place, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    assert!(testkit::wait_until(SOON, || is(&now(place))), "{what}: {}", now(place));
    now(place)
}

/// Whether it stores and returns bytes.
fn works(node: &Path, byte: u8) {
    let file = File::options().read(true).write(true).open(node).unwrap();
    let mut block = [byte; 4096];
    file.write_all_at(&block, 8192).unwrap();
    file.sync_all().unwrap();
    block = [0; 4096];
    file.read_exact_at(&mut block, 8192).unwrap();
    assert_eq!(block, [byte; 4096]);
}

/// The process that waits for the supervisor's death.
fn guard_of(server: u64) -> u64 {
    let is_guard = |pid: &u64| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let child = status.lines().any(|line| line.strip_prefix("PPid:\t") == Some(&server.to_string()));
        child && words.split(|byte| *byte == 0).any(|word| word == b"--after-fd")
    };
    let pids = fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(is_guard).expect("a guard stands")
}

pub(crate) fn a_death_does_not_end_the_device(place: &Place) {
    if !place.has_ublk() {
        return;
    }
    let (info, node) = attached(place, &[]);
    let (worker, server) = (info["worker_pid"].as_u64().unwrap(), info["server_pid"].as_u64().unwrap());
    kill(worker);
    let info = becomes(place, "recovered", |info| info["state"] == "live" && info["recoveries"] == 1);
    assert_ne!(info["worker_pid"], worker);
    works(&node, 1);

    kill(server);
    let info = becomes(place, "adopted", |info| {
        info["state"] == "live" && info["server_pid"].as_u64() != Some(server)
    });
    assert_eq!(info["recoveries"], 1, "its worker went on");
    works(&node, 2);
    // The successor does all that its predecessor did, and has a successor itself.
    kill(info["worker_pid"].as_u64().unwrap());
    let info = becomes(place, "recovered by the successor", |info| info["recoveries"] == 2);
    kill(info["server_pid"].as_u64().unwrap());
    works(&node, 3);
    let second = info["server_pid"].as_u64();
    becomes(place, "adopted again", |info| info["state"] == "live" && info["server_pid"].as_u64() != second);
    place.run(&["detach", "one"]).unwrap();
    assert_eq!(place.run(&["list"]).unwrap(), Value::Array(vec![]));
    assert!(!node.exists());
    assert_eq!(place.records(), 0);
}

pub(crate) fn a_death_with_all_others_is_reported_and_cleaned(place: &Place) {
    if !place.has_ublk() {
        return;
    }
    for (last, state) in [("server_pid", "orphaned"), ("worker_pid", "lost")] {
        let (info, node) = attached(place, &[]);
        kill(guard_of(info["server_pid"].as_u64().unwrap()));
        kill(info["server_pid"].as_u64().unwrap());
        if last == "worker_pid" {
            kill(info["worker_pid"].as_u64().unwrap());
        }
        becomes(place, state, |info| info["state"] == state);
        if state == "orphaned" {
            let mut block = [1; 512];
            File::open(&node).unwrap().read_exact(&mut block).unwrap();
            assert_eq!(block, [0; 512], "it still serves");
        }
        // The next command that needs a server starts one, which takes over what it can.
        place.run(&["detach", "one"]).unwrap();
        assert_eq!(place.run(&["list"]).unwrap(), Value::Array(vec![]), "{state}");
        let char_device = format!("/sys/class/ublk-char/ublkc{}", info["number"]);
        assert!(!Path::new(&char_device).exists(), "{state}: the kernel forgot it");
        assert!(!node.exists(), "{state}");
        assert_eq!(place.records(), 0);
    }
    // Nothing holds the image's locks any more.
    attached(place, &[]);
    place.run(&["detach", "one"]).unwrap();
}

pub(crate) fn a_death_keeps_the_lease(place: &Place) {
    if !place.has_ublk() {
        return;
    }
    let image = place.image("image", 1 << 20);
    let child = place
        .command(&["lease", image.to_str().unwrap(), "ublk"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut keeper = Running(child);
    let there = || place.run(&["list"]).unwrap()[0]["state"] == "live";
    assert!(testkit::wait_until(SOON, there));
    let before = now(place);
    kill(before["server_pid"].as_u64().unwrap());
    let info = becomes(place, "adopted", |info| {
        info["state"] == "live" && info["server_pid"] != before["server_pid"]
    });
    kill(info["worker_pid"].as_u64().unwrap());
    becomes(place, "recovered", |info| info["recoveries"] == 1);
    assert_eq!(place.run(&["list"]).unwrap().as_array().unwrap().len(), 1, "it is kept");
    keeper.0.kill().unwrap();
    keeper.0.wait().unwrap();
    let gone = || place.run(&["list"]).unwrap() == Value::Array(vec![]);
    assert!(testkit::wait_until(SOON, gone), "it goes with its keeper, by the server after the next");
}

pub(crate) fn an_upgrade_replaces_server_and_worker(place: &Place) {
    if !place.has_ublk() {
        return;
    }
    let (before, node) = attached(place, &[]);
    let child = place.command(&["serve", "--takeover"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut successor = Running(child.unwrap());
    let info = becomes(place, "taken over", |info| info["recoveries"] == 1 && info["state"] == "live");
    assert_eq!(info["server_pid"], successor.pid());
    assert_ne!(info["worker_pid"], before["worker_pid"]);
    works(&node, 1);
    let gone = |of: &str| !Path::new(&format!("/proc/{}", before[of])).exists();
    assert!(
        testkit::wait_until(SOON, || gone("server_pid") && gone("worker_pid")),
        "the old ones have ended"
    );
    place.run(&["detach", "one"]).unwrap();
    successor.signal(Signal::TERM);
    assert_eq!(successor.ends(SOON), Some(0));
}

pub(crate) fn an_isolated_device_has_a_worker_of_its_own(place: &Place) {
    if !place.has_ublk() {
        return;
    }
    let (own, node) = attached(place, &["isolate=true"]);
    let other = place.image("other", 1 << 20);
    let shared = place.run(&["attach", other.to_str().unwrap(), "name=two", "via=ublk"]).unwrap();
    assert_eq!((&own["isolated"], &shared["isolated"]), (&true.into(), &false.into()));
    assert_ne!(own["worker_pid"], shared["worker_pid"]);
    kill(own["worker_pid"].as_u64().unwrap());
    let own = becomes(place, "recovered", |info| info["recoveries"] == 1 && info["state"] == "live");
    works(&node, 1);
    let two = &place.run(&["list"]).unwrap()[1];
    assert_eq!((&two["recoveries"], &two["worker_pid"]), (&0.into(), &shared["worker_pid"]));
    place.run(&["detach", "one"]).unwrap();
    let gone = || !Path::new(&format!("/proc/{}", own["worker_pid"])).exists();
    assert!(testkit::wait_until(SOON, gone), "it ends with its device");
    place.run(&["detach", "two"]).unwrap();
}

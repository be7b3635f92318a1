//! `--isolate`: what a device costs is charged to the control group of its caller, and not to the server's.
//! Real control groups, so as root; each test makes its own and removes it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use becket_testkit::{Scratch, image, require_device, require_root, skip, tool, via, wait_until};
use common::scratch;
use serde_json::Value;

/// Where control groups are on every machine with systemd, and in the tests' guest.
const GROUPS: &str = "/sys/fs/cgroup";
/// Length of an image.
const SIZE: u64 = 8 << 20;

/// A control group of the test's own.
struct Group(PathBuf);

impl Group {
    fn new(name: &str) -> Group {
        let dir = Path::new(GROUPS).join(format!("becket-{name}-{}", std::process::id()));
        // Allowed at the root of the hierarchy, which may have processes.
        fs::write(Path::new(GROUPS).join("cgroup.subtree_control"), "+memory +io").unwrap();
        fs::create_dir(&dir).unwrap();
        Group(dir)
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).unwrap()
    }

    /// Bytes that its processes have read from disks.
    fn bytes_read(&self) -> u64 {
        let words = self.read("io.stat");
        words.split_whitespace().filter_map(|word| word.strip_prefix("rbytes=")?.parse::<u64>().ok()).sum()
    }

    /// Attaches an image from within.
    fn attach(&self, place: &Scratch, image: &Path) -> Value {
        let mut command = Command::new("sh");
        command.args(["-c", "echo 0 >\"$0\"/cgroup.procs && exec \"$@\""]).arg(&self.0);
        command
            .args([env!("CARGO_BIN_EXE_becket"), "--json", "attach", "--via", "ublk", "--isolate"])
            .arg(image);
        place.prepare(&mut command);
        let ran = place.finish(&mut command);
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.json()["devices"][0].clone()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its last process may be on its way out.
        becket_testkit::wait_until(std::time::Duration::from_secs(10), || fs::remove_dir(&self.0).is_ok());
    }
}

/// The group of a device's worker.
fn worker_s_group(device: &Value) -> String {
    fs::read_to_string(format!("/proc/{}/cgroup", device["worker_pid"])).unwrap().trim().to_owned()
}

#[test]
fn an_isolated_device_is_charged_to_its_caller() {
    const NAME: &str = "isolate::an_isolated_device_is_charged_to_its_caller";
    if !require_root(NAME) || !require_device(NAME) {
        return;
    }
    if via() != "ublk" {
        return skip(NAME, "the kernel's loop driver has no server");
    }
    if !Path::new(GROUPS).join("cgroup.controllers").exists() {
        return skip(NAME, "no cgroup v2 is mounted here");
    }
    // On a file system that has a disk (TMPDIR's in the guest): memory is no I/O.
    let disk = tempfile::tempdir().unwrap();
    if rustix::fs::major(fs::metadata(disk.path()).unwrap().dev()) == 0 {
        return skip(NAME, "needs a temporary directory on a disk");
    }
    let place = scratch();
    let [shared, own] = ["shared.img", "own.img"].map(|name| disk.path().join(name));
    for image in [&shared, &own] {
        image::random(image, SIZE, 7);
        // Else the disk need not be asked for them.
        fs::File::open(image).unwrap().sync_all().unwrap();
    }
    // The server begins outside of the group, and so does the worker of all who do not ask for their own.
    place.attach(&shared, &["--via", "ublk"]);
    let shared = place.devices()[0].clone();
    let group = Group::new("isolate");
    let own = group.attach(&place, &own);
    assert_eq!(own["warnings"], serde_json::json!([]), "it is there, and has all its precautions");

    let name = group.0.file_name().unwrap().to_str().unwrap();
    assert_eq!(worker_s_group(&own), format!("0::/{name}"));
    assert_ne!(worker_s_group(&shared), worker_s_group(&own));
    let members = group.read("cgroup.procs");
    assert_eq!(members.trim(), own["worker_pid"].to_string(), "nobody else, the server least of all");

    // Only the worker is in there: this is its memory, rings and buffers.
    let memory: u64 = group.read("memory.current").trim().parse().unwrap();
    let before = group.bytes_read();
    let read = |device: &Value| {
        let input = format!("if={}", common::text(device, "device"));
        tool(Command::new("dd").args([&input, "of=/dev/null", "bs=256K", "iflag=direct", "status=none"]));
    };
    read(&shared);
    assert_eq!(group.bytes_read(), before, "what others read is not charged to the group");
    read(&own);
    let charged = group.bytes_read() - before;
    println!("memory {memory}, read {charged} of {SIZE}");
    assert!(memory >= 256 << 10, "{memory} bytes of memory");
    assert!(charged >= SIZE, "{charged} of {SIZE} bytes");

    place.ok(["detach", "--all"]);
    let ended = || group.read("cgroup.procs").is_empty();
    assert!(wait_until(Duration::from_secs(10), ended), "the worker ends with its device");
}

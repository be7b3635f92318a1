//! What becket's own end-to-end tests share beyond the testkit: the binary that was just built, processes.
//! Never assumes a transport: `becket_testkit::via` says which one is tested.
#![allow(dead_code, reason = "every test file uses its own part")]

pub(crate) mod below;
pub(crate) mod ceph;
pub(crate) mod disk;
pub(crate) mod disturb;
pub(crate) mod fetched;
pub(crate) mod load;
pub(crate) mod nbd;
pub(crate) mod nbd_server;
pub(crate) mod net;
pub(crate) mod one;
pub(crate) mod page;
pub(crate) mod pki;
pub(crate) mod web;

use becket_testkit::{Scratch, require_device, require_tools, tool, wait_until};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
    time::Duration,
};

/// A place of its own for one test, with the binary that was just built.
pub(crate) fn scratch() -> Scratch {
    Scratch::new(env!("CARGO_BIN_EXE_becket"))
}

/// Whether a device, and disks and file systems for it, can be made here; when not, the test is skipped.
#[must_use]
pub(crate) fn ready(name: &str) -> bool {
    require_device(name) && require_tools(name, &["mke2fs", "sfdisk"])
}

/// A string of a JSON object.
#[track_caller]
pub(crate) fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no string {key:?} in {value:#}"))
}

/// The processes of a role that a supervisor has started.
pub(crate) fn helpers(parent: u32, role: &str) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields = stat.rsplit(')').next().unwrap_or_default();
        let its = fields.split_whitespace().nth(1).and_then(|word| word.parse::<u32>().ok()) == Some(parent);
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if its && words.split(|byte| *byte == 0).nth(1) == Some(role.as_bytes()) {
            found.push(pid);
        }
    }
    found
}

/// Whether a process lives; one that only waits to be buried does not.
pub(crate) fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .and_then(|rest| rest.split_whitespace().next())
        .is_some_and(|state| !"ZX".contains(state))
}

/// A device whose ext file system is mounted is not detached, and its mount is named; then it is detached by
/// its image.
#[track_caller]
pub(crate) fn a_mount_is_named(place: &Scratch, image: &str, device: &Path) {
    let point = place.dir("mnt");
    let used = Use::of(device);
    tool(Command::new("mount").args([device, &point]));
    let ran = place.run(["detach", device.to_str().expect("a node's name")]);
    let still = fs::metadata(point.join("lost+found")).is_ok();
    becket_testkit::umount(&point);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains(&format!("mounted on {}", point.display())), "{ran:?}");
    assert!(still, "the file system is still there");
    place.ok(["detach", image]);
    assert!(!used.lasts());
}

/// How a child ended; one that hangs is killed and fails its test.
#[track_caller]
pub(crate) fn ended(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_until(Duration::from_secs(60), || {
        status = child.try_wait().expect("is our child");
        status.is_some()
    });
    let Some(status) = status else {
        let everybody = Command::new("ps")
            .args(["-eo", "pid,ppid,stat,pending,blocked,wchan:24,args"])
            .output()
            .map_or_else(|error| error.to_string(), |ps| String::from_utf8_lossy(&ps.stdout).into_owned());
        child.kill().expect("is our child");
        child.wait().expect("is our child");
        panic!("{} has not ended:\n{everybody}", child.id());
    };
    status
}

/// The numbers in a file, once it has `count` of them; fails when they do not come.
#[track_caller]
pub(crate) fn numbers(path: &Path, count: usize) -> Vec<u32> {
    let read = || -> Vec<u32> {
        let text = fs::read_to_string(path).unwrap_or_default();
        // The last line may be half written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.split_whitespace().map(|word| word.parse().expect("a number")).collect()
    };
    assert!(
        wait_until(Duration::from_secs(20), || read().len() >= count),
        "{}: {:?}",
        path.display(),
        read()
    );
    read()
}

/// One use of a block device's node. Other tests, and other people, use the same node before and after.
#[derive(Debug)]
pub(crate) struct Use {
    name: String,
    diskseq: String,
}

impl Use {
    /// The use that a device is in now.
    #[track_caller]
    pub(crate) fn of(device: &Path) -> Self {
        let name = device.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        let diskseq = attribute(&name, "diskseq").unwrap_or_else(|| panic!("{name} is not there"));
        Self { name, diskseq }
    }

    /// What a script wrote into a file by [`WRITE_USE`].
    #[track_caller]
    pub(crate) fn written(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (device, diskseq) = text.trim().split_once(' ').expect("a device and its sequence number");
        Self { diskseq: diskseq.to_owned(), name: device.trim_start_matches("/dev/").to_owned() }
    }

    pub(crate) fn device(&self) -> PathBuf {
        Path::new("/dev").join(&self.name)
    }

    /// Whether it lasts. A loop node stays when its device is gone; its size does not.
    pub(crate) fn lasts(&self) -> bool {
        attribute(&self.name, "diskseq").as_ref() == Some(&self.diskseq) && self.has_size()
    }

    /// Whether another program uses the node by now, as a test beside this one may.
    pub(crate) fn is_anothers(&self) -> bool {
        attribute(&self.name, "diskseq").is_some_and(|diskseq| diskseq != self.diskseq) && self.has_size()
    }

    fn has_size(&self) -> bool {
        attribute(&self.name, "size").is_some_and(|size| size != "0")
    }
}

/// A shell command below `becket run` that writes the use of its device into the file `device`.
pub(crate) const WRITE_USE: &str =
    "echo $BECKET_DEVICE $(cat /sys/block/${BECKET_DEVICE#/dev/}/diskseq) > device";

fn attribute(name: &str, attribute: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/sys/block/{name}/{attribute}")).ok()?;
    Some(text.trim().to_owned())
}

/// A file system of 64 KiB in memory, until this is dropped.
pub(crate) struct Small(pub(crate) PathBuf);

impl Small {
    #[track_caller]
    pub(crate) fn mount(dir: PathBuf) -> Small {
        tool(Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k,mode=700", "small"]).arg(&dir));
        Small(dir)
    }

    #[track_caller]
    pub(crate) fn again(&self, option: &str) {
        tool(Command::new("mount").args(["-o", &format!("remount,{option}")]).arg(&self.0));
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily: a server may still have its log there.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

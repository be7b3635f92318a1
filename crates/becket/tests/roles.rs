//! Who touches an image: the client opens it, the worker moves its bytes by the client's descriptors, the
//! supervisor does neither. Never relies on what the processes say: the kernel reports which process did what
//! to the files (fanotify).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    os::fd::AsFd as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use becket_testkit::fanotify::{MODIFY, OPEN, Watch};
use becket_testkit::{
    Scratch, image, require_device, require_fuse, require_root, require_tools, require_ublk, tool,
};
use common::disturb::{SUPERVISOR, WORKER, await_device, send};
use common::{ended, scratch};

const MIB: u64 = 1 << 20;

/// Images that are found in different ways: the name of the device, the path, and the host's files that hold
/// it.
type Images = [(&'static str, &'static str, &'static [&'static str]); 4];
const IMAGES: Images = [
    ("raw", "raw.img", &["raw.img"]),
    ("chain", "top.qcow2", &["top.qcow2", "base.raw"]),
    ("nested", "disk.img/p1/dir/inner.img", &["disk.img"]),
    ("packed", "packed.squashfs/dir/inner.img", &["packed.squashfs"]),
];

fn make(place: &Scratch) {
    image::random(&place.path("raw.img"), MIB, 1);
    image::random(&place.path("base.raw"), MIB, 2);
    let backed = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "top.qcow2"];
    tool(Command::new("qemu-img").current_dir(place.path("")).args(backed));
    // Compressible, so that a worker decodes.
    fs::write(place.dir("tree/dir").join("inner.img"), b"becket! ".repeat(MIB as usize / 8)).unwrap();
    image::partitioned(&place.path("disk.img"), &place.path("tree"));
    let mut squash = Command::new("mksquashfs");
    tool(squash.arg(place.path("tree")).arg(place.path("packed.squashfs")).args(["-quiet", "-no-progress"]));
}

/// What was done to the watched files, by which process.
struct Deeds {
    watch: Watch,
    names: BTreeMap<(u64, u64), &'static str>,
    /// By process and file.
    seen: BTreeMap<(u32, &'static str), u64>,
}

impl Deeds {
    fn watch(place: &Scratch) -> Deeds {
        let watch = Watch::new().expect("root, and a kernel with fanotify");
        let mut names = BTreeMap::new();
        for name in IMAGES.iter().flat_map(|(_, _, files)| *files) {
            let file = File::open(place.path(name)).unwrap();
            watch.add(file.as_fd()).unwrap();
            let id = file.metadata().unwrap();
            names.insert((id.dev(), id.ino()), *name);
        }
        Deeds { watch, names, seen: BTreeMap::new() }
    }

    fn gather(&mut self) {
        for event in self.watch.events().unwrap() {
            let id = File::from(event.file).metadata().unwrap();
            *self.seen.entry((event.pid, self.names[&(id.dev(), id.ino())])).or_default() |= event.what;
        }
    }

    /// Who did it to that file.
    fn who(&self, what: u64, file: &str) -> BTreeSet<u32> {
        let did = |&(&(_, name), done): &(&(u32, &str), &u64)| name == file && done & what != 0;
        self.seen.iter().filter(did).map(|(&(pid, _), _)| pid).collect()
    }
}

/// Runs becket, and says as which process.
#[track_caller]
fn client<'a>(place: &Scratch, words: impl IntoIterator<Item = &'a str>) -> u32 {
    let words: Vec<&str> = words.into_iter().collect();
    let mut child = place.becket().args(&words).stdout(Stdio::null()).spawn().unwrap();
    assert!(ended(&mut child).success(), "{words:?}");
    child.id()
}

/// Those who serve now, by their role.
fn serving(place: &Scratch, role: &str) -> BTreeSet<u32> {
    place.devices().iter().map(|info| u32::try_from(info[role].as_u64().unwrap()).unwrap()).collect()
}

fn link(place: &Scratch, name: &str) -> PathBuf {
    fs::canonicalize(place.links().join(name)).unwrap()
}

#[test]
fn supervisor_and_worker_open_no_image() {
    let name = "roles::supervisor_and_worker_open_no_image";
    let ublk = Path::new("/dev/ublk-control").exists();
    if !require_root(name) || !require_tools(name, &["qemu-img", "mksquashfs", "mke2fs", "sfdisk"]) {
        return;
    }
    let via = if ublk { "ublk" } else { "fuse" };
    if !(if ublk { require_ublk(name) && require_device(name) } else { require_fuse(name) }) {
        return;
    }
    let place = scratch();
    make(&place);
    let mut deeds = Deeds::watch(&place);
    let mut clients = BTreeSet::new();
    for (name, path, _) in IMAGES {
        clients.insert(client(&place, ["inspect", path]));
        clients.insert(client(&place, ["attach", "--via", via, "--name", name, path]));
    }
    let use_all = |deeds: &mut Deeds| {
        for (name, ..) in IMAGES {
            let device = link(&place, name);
            assert_eq!(fs::read(&device).unwrap().len() as u64, MIB, "{name}");
            tool(Command::new("blockdev").arg("--flushbufs").arg(device));
        }
        // A qcow2 that grows has tables that its worker reads and writes.
        let top = File::options().write(true).open(link(&place, "chain")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&top, &[3; 4096], 0).unwrap();
        top.sync_all().unwrap();
        deeds.gather();
    };
    use_all(&mut deeds);
    let (mut supervisors, mut workers) = (serving(&place, SUPERVISOR), serving(&place, WORKER));
    clients.insert(client(&place, ["set", "raw", "--direct-io", "off"]));
    clients.insert(client(&place, ["set", "raw", "--read-only", "on"]));
    clients.insert(client(&place, ["set", "raw", "--read-only", "off"]));
    clients.insert(client(&place, ["refresh", "raw"]));
    clients.insert(client(&place, ["stat", "raw"]));

    // Who comes after one that died has the more reason to open something.
    let before = await_device(&place, "raw", |_| true);
    send("KILL", &before[WORKER]);
    for (name, ..) in IMAGES {
        await_device(&place, name, |now| now[WORKER] != before[WORKER]);
    }
    workers.append(&mut serving(&place, WORKER));
    use_all(&mut deeds);
    send("KILL", &before[SUPERVISOR]);
    for (name, ..) in IMAGES {
        await_device(&place, name, |now| now[SUPERVISOR] != before[SUPERVISOR]);
    }
    supervisors.append(&mut serving(&place, SUPERVISOR));
    let last = await_device(&place, "raw", |_| true);
    send("KILL", &last[WORKER]);
    for (name, ..) in IMAGES {
        await_device(&place, name, |now| now[WORKER] != last[WORKER]);
    }
    workers.append(&mut serving(&place, WORKER));
    use_all(&mut deeds);
    for (name, ..) in IMAGES {
        clients.insert(client(&place, ["detach", name]));
    }
    deeds.gather();

    assert_eq!((supervisors.len(), workers.len()), (2, 3), "{supervisors:?}, {workers:?}");
    for file in IMAGES.iter().flat_map(|(_, _, files)| *files) {
        let openers = deeds.who(OPEN, file);
        assert!(
            !openers.is_empty() && openers.is_subset(&clients),
            "{file} was opened by {openers:?} of {clients:?}"
        );
        let touched = deeds.who(u64::MAX, file);
        assert!(
            touched.is_disjoint(&supervisors),
            "{file}: {touched:?}, and {supervisors:?} are supervisors"
        );
        let others: Vec<_> = touched.difference(&clients).filter(|pid| !workers.contains(pid)).collect();
        assert!(others.is_empty(), "{file} was used by {others:?}: {:?}", deeds.seen);
        // Else nothing of a server's would have been seen.
        assert!(!touched.is_disjoint(&workers), "no worker has read {file}: {:?}", deeds.seen);
    }
    assert!(!deeds.who(MODIFY, "top.qcow2").is_disjoint(&workers), "{:?}", deeds.seen);
}

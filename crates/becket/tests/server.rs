//! A server serves all commands, whichever one started it: nothing of that command, its session or its
//! limits stays with it. Over FUSE, whose devices need a server on every machine.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Scratch, crc_whole, image, require_fuse, require_root, require_tools, wait_until};
use common::{alive, scratch};
use std::{
    fs,
    io::Read as _,
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::Path,
    process::Command,
    time::Duration,
};

/// A place with images `a.img` and `b.img` in it.
fn place_with_images() -> Scratch {
    let place = scratch();
    for (name, seed) in [("a.img", 1), ("b.img", 2)] {
        image::random(&place.path(name), 1 << 20, seed);
    }
    place
}

/// A shell script that runs becket by `$BECKET`.
fn shell(place: &Scratch, script: &str) -> becket_testkit::Ran {
    let mut command = Command::new("sh");
    place.prepare(&mut command);
    let ran = place.finish(command.args(["-c", script]));
    assert_eq!(ran.code, 0, "{ran:?}");
    ran
}

/// Supervisor and worker.
fn server(place: &Scratch) -> [u32; 2] {
    let server = place.json(["doctor"])["server"].clone();
    ["pid", "worker_pid"]
        .map(|key| u32::try_from(server[key].as_u64().unwrap_or_else(|| panic!("{server}"))).unwrap())
}

fn still_whole(place: &Scratch, name: &str) {
    let devices = place.devices();
    let path = place.path(name);
    let device =
        devices.iter().find(|device| device["image"] == path.to_str().unwrap()).unwrap_or_else(|| {
            panic!(
                "{name} is not attached: {devices:#?}\n{}",
                fs::read_to_string(place.runtime().join("log")).unwrap()
            )
        });
    assert_eq!(crc_whole(Path::new(device["device"].as_str().unwrap())), crc_whole(&path));
}

#[test]
fn fuse_a_server_outlives_the_run_that_needed_it_first() {
    if !require_fuse("server::fuse_a_server_outlives_the_run_that_needed_it_first") {
        return;
    }
    let place = place_with_images();
    shell(&place, "\"$BECKET\" run --via loop a.img -- \"$BECKET\" attach --via fuse b.img");
    still_whole(&place, "b.img");
    let pids = server(&place);
    let own = fs::read_to_string("/proc/self/cgroup").unwrap();
    for pid in pids {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        assert!(!groups.contains("becket-run-"), "{groups}; {own}");
    }
}

/// A container whose plugin calls the server of its host, with and without the host's processes.
#[test]
fn fuse_a_container_hands_its_image_to_the_server_of_the_host() {
    let name = "server::fuse_a_container_hands_its_image_to_the_server_of_the_host";
    if !require_fuse(name) || !require_root(name) || !require_tools(name, &["unshare"]) {
        return;
    }
    let place = place_with_images();
    shell(&place, "\"$BECKET\" attach --via fuse b.img");
    let own = "mkdir own && mount -t tmpfs none own && cp a.img own/c.img";
    shell(&place, &format!("unshare -m sh -ec '{own}; \"$BECKET\" attach --via fuse own/c.img'"));
    assert!(!place.path("own/c.img").exists(), "only the container sees it");
    let device =
        place.devices().into_iter().find(|one| one["image"].as_str().unwrap().ends_with("own/c.img"));
    let disk = device.unwrap()["device"].as_str().unwrap().to_owned();
    assert_eq!(crc_whole(Path::new(&disk)), crc_whole(&place.path("a.img")));
    let refused = "unshare -mpf --mount-proc sh -c '\"$BECKET\" attach --via fuse a.img 2>&1; true'";
    let ran = shell(&place, refused);
    assert!(ran.out.contains("needs the host's (hostPID)"), "{ran:?}");
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_a_server_outlives_a_run_without_a_cgroup() {
    let name = "server::fuse_a_server_outlives_a_run_without_a_cgroup";
    if !require_fuse(name) || !require_tools(name, &["unshare"]) {
        return;
    }
    let place = place_with_images();
    let inner = "mount -t tmpfs none /sys/fs/cgroup && \
        \"$BECKET\" run --via loop a.img -- \"$BECKET\" attach --via fuse b.img";
    shell(&place, &format!("unshare --mount sh -c '{inner}'"));
    still_whole(&place, "b.img");
}

#[test]
fn fuse_a_lock_of_the_first_caller_is_free_when_it_ends() {
    let name = "server::fuse_a_lock_of_the_first_caller_is_free_when_it_ends";
    if !require_fuse(name) || !require_tools(name, &["flock"]) {
        return;
    }
    let place = place_with_images();
    shell(&place, "( flock 9; \"$BECKET\" attach --via fuse a.img ) 9>lock; flock --nonblock lock true");
    still_whole(&place, "a.img");
}

#[test]
fn fuse_limits_of_the_first_caller_end_no_later_device() {
    if !require_fuse("server::fuse_limits_of_the_first_caller_end_no_later_device") {
        return;
    }
    let place = place_with_images();
    // Enough for the command; too little for a cache of decoded blocks, or a hundred devices.
    shell(&place, "ulimit -Sv 400000; ulimit -St 5; ulimit -Sf 1; \"$BECKET\" attach --via fuse a.img");
    for pid in server(&place) {
        let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        for name in ["Max address space", "Max cpu time", "Max file size"] {
            let line = limits.lines().find(|line| line.starts_with(name)).unwrap();
            assert_eq!(line.matches("unlimited").count(), 2, "{line}");
        }
    }
    still_whole(&place, "a.img");
}

#[test]
fn fuse_a_caller_that_ignores_the_ends_of_its_children_has_a_server_all_the_same() {
    let name = "server::fuse_a_caller_that_ignores_the_ends_of_its_children_has_a_server_all_the_same";
    if !require_fuse(name) || !require_tools(name, &["env"]) {
        return;
    }
    let place = place_with_images();
    let ran = shell(
        &place,
        "env --ignore-signal=CHLD --block-signal=TERM,CHLD \"$BECKET\" attach --via fuse a.img >&2",
    );
    let [supervisor, worker] = server(&place);
    assert!(Command::new("kill").args(["-KILL", &worker.to_string()]).status().unwrap().success());
    assert!(wait_until(Duration::from_secs(10), || !alive(worker)), "{ran:?}");
    still_whole(&place, "a.img");
    // It hears that it is to end, too.
    place.ok(["detach", "--all"]);
    assert!(Command::new("kill").args(["-TERM", &supervisor.to_string()]).status().unwrap().success());
    assert!(wait_until(Duration::from_secs(10), || !alive(supervisor)));
}

/// Whether a process has a lock on an image by QEMU's rules: those lie at fixed bytes of the file.
fn is_locked(path: &Path) -> bool {
    use becket_uapi::lock::{LockKind, ofd_test};
    use std::os::fd::AsFd as _;
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    ofd_test(file.as_fd(), LockKind::Exclusive, 0, 0).unwrap()
}

#[test]
fn fuse_run_returns_when_its_image_can_be_opened() {
    let name = "server::fuse_run_returns_when_its_image_can_be_opened";
    if !require_fuse(name) || !require_tools(name, &["dd"]) {
        return;
    }
    let place = place_with_images();
    image::random(&place.path("busy.img"), 64 << 20, 3);
    let busy = place.attach(&place.path("busy.img"), &["--via", "fuse"]);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let locked = std::thread::scope(|scope| {
        for part in 0..6 {
            let (busy, stop) = (&busy, &stop);
            scope.spawn(move || {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let (of, seek) = (format!("of={}", busy.display()), format!("seek={}", part * 40));
                    let words =
                        ["if=/dev/zero", &of, &seek, "bs=256k", "count=40", "oflag=direct", "status=none"];
                    assert!(Command::new("dd").args(words).status().unwrap().success());
                }
            });
        }
        let mut locked = Vec::new();
        for round in 0..60 {
            let ran = place.run(["run", "--via", "fuse", "a.img", "--", "true"]);
            if is_locked(&place.path("a.img")) {
                locked.push(round);
            }
            if ran.code != 0 {
                locked.push(1000 + ran.code);
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        locked
    });
    assert_eq!(locked, [0; 0], "runs after which the image was locked");
    // Detach says so only then, too.
    for _ in 0..10 {
        place.attach(&place.path("b.img"), &["--via", "fuse"]);
        assert!(is_locked(&place.path("b.img")));
        place.ok(["detach", "b.img"]);
        assert!(!is_locked(&place.path("b.img")));
    }
}

/// Has bash do something as an ordinary user whose runtime directory is a small file system.
fn as_user(place: &Scratch, options: &str, script: &str) -> std::process::Output {
    use std::os::unix::fs::PermissionsExt as _;
    const NOBODY: u32 = 65534;
    let (home, program, node) = (place.dir("home"), place.path("program"), place.path("node"));
    fs::copy(env!("CARGO_BIN_EXE_becket"), &program).unwrap();
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    let user = "mknod -m 666 $1 c 10 229 && mount --bind $1 /dev/fuse && mkdir run && \
                mount -t tmpfs -o mode=700,uid=65534,gid=65534,$2 small run && \
                exec setpriv --reuid 65534 --regid 65534 --clear-groups bash -euc \"$3\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "bash", "-euc", user, "bash"]);
    command.arg(&node).args([options, script]).current_dir(&home);
    command.env("BECKET", &program).env("BECKET_RUNTIME_DIR", home.join("run")).output().unwrap()
}

const FULL: &str = r#"
    truncate -s 4M a.img b.img
    echo here >a.img
    truncate -s 4M a.img
    mounts() { grep -c fuse.becket /proc/self/mounts || true; }
    server() { "$BECKET" --json list | sed -n 's/.*"server_pid": \([0-9]*\).*/\1/p' | head -1; }
    "$BECKET" attach a.img >at 2>said
    file=$(cat at)
    # Nothing of that is left: no mount, no name, nothing that a later one stumbles over.
    fill
    for round in 1 2; do
        if "$BECKET" attach b.img >said 2>&1; then echo "it was attached"; exit 1; fi
        if [[ $(mounts) != 1 ]]; then cat said; grep becket /proc/self/mounts; exit 1; fi
    done
    # A successor takes over all the same.
    old=$(server)
    kill -9 "$old"
    for round in $(seq 200); do
        new=$(server)
        [[ $new != "$old" ]] && "$BECKET" --json list | grep -q '"live"' && break
        sleep 0.05
    done
    "$BECKET" list
    [[ $new != "$old" ]]
    "$BECKET" --json list | grep -q '"live"'
    cmp -n 5 "$file" a.img
    unfill
    "$BECKET" attach b.img >at 2>said
    [[ $(mounts) == 2 ]]
    "$BECKET" detach a.img b.img >said
    [[ $(mounts) == 0 ]]
"#;

#[test]
fn fuse_a_full_runtime_directory_costs_no_device() {
    let name = "server::fuse_a_full_runtime_directory_costs_no_device";
    let tools = ["setpriv", "unshare", "fusermount3", "bash", "cmp"];
    if !require_fuse(name) || !require_tools(name, &tools) {
        return;
    }
    for (options, fill) in [
        (
            "size=128k",
            "fill() { head -c 1M /dev/zero >run/filler 2>/dev/null || true; }; unfill() { rm run/filler; }",
        ),
        (
            "nr_inodes=40",
            "fill() { for i in $(seq 40); do true 2>/dev/null >run/filler$i || true; done; }; unfill() { rm run/filler*; }",
        ),
    ] {
        let place = scratch();
        let ran = as_user(&place, options, &format!("{fill}\n{FULL}"));
        let said = [ran.stdout, ran.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        assert!(ran.status.success(), "{options}: {said:?}");
    }
}

#[test]
fn fuse_the_log_has_times_and_does_not_grow_for_ever() {
    if !require_fuse("server::fuse_the_log_has_times_and_does_not_grow_for_ever") {
        return;
    }
    let place = place_with_images();
    place.attach(&place.path("a.img"), &["--via", "fuse"]);
    let log = place.runtime().join("log");
    let text = fs::read_to_string(&log).unwrap();
    let line = text.lines().find(|line| line.contains("attached as")).unwrap();
    let (time, rest) = line.split_once(' ').unwrap();
    assert!(time.len() == 24 && time.ends_with('Z') && time.starts_with("20"), "{line}");
    assert!(rest.starts_with(&format!("becket[{}]: info supervisor: fuse0: ", server(&place)[0])), "{line}");
    // What a worker that has gone mad could write.
    let mut file = fs::File::options().append(true).open(&log).unwrap();
    std::io::Write::write_all(&mut file, &b"nonsense\n".repeat(200_000)).unwrap();
    place.attach(&place.path("b.img"), &["--via", "fuse"]);
    assert!(fs::metadata(&log).unwrap().len() < 64 << 10, "{:?}", fs::metadata(&log));
    let old = fs::read_to_string(place.runtime().join("log.old")).unwrap();
    assert!(old.len() <= 512 << 10 && old.contains("nonsense\n"));
    place.ok(["detach", "--all"]);
    assert!(fs::read_to_string(&log).unwrap().contains("detached"), "the server goes on writing there");
}

/// What a server writes to its standard error, a pipe, when a command has asked it for its status.
fn written(place: &Scratch, prepare: impl FnOnce(&mut Command, String)) -> (u32, String) {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let pipe = fs::metadata(format!("/proc/self/fd/{}", writer.as_raw_fd())).unwrap();
    let mut command = place.becket();
    command.arg("serve").stderr(writer);
    prepare(&mut command, format!("{}:{}", pipe.dev(), pipe.ino()));
    let mut child = command.spawn().unwrap();
    drop(command);
    assert!(wait_until(Duration::from_secs(10), || place.json(["doctor"])["server"].is_object()));
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    assert!(child.wait().unwrap().success());
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    (child.id(), text)
}

#[test]
fn a_server_writes_as_much_as_it_should_in_the_form_of_its_reader() {
    let place = scratch();
    let answered = "org.becket.Becket1.Status took ";
    let (pid, text) = written(&place, |command, _| {
        command.args(["--log-level", "debug"]);
    });
    let line = text.lines().find(|line| line.contains(answered)).unwrap_or_else(|| panic!("{text}"));
    assert!(
        line.starts_with("20") && line.contains(&format!("Z becket[{pid}]: debug supervisor: ")),
        "{line}"
    );
    let (pid, text) = written(&place, |command, journal| {
        command.env("BECKET_LOG", "debug").env("JOURNAL_STREAM", journal);
    });
    assert!(
        text.lines().any(|line| line.starts_with(&format!("<7>supervisor[{pid}]: {answered}"))),
        "{text}"
    );
    // The option goes before the variable.
    let (_, text) = written(&place, |command, _| {
        command.args(["--log-level", "error"]).env("BECKET_LOG", "trace");
    });
    assert_eq!(text, "");
    let (_, text) = written(&place, |_, _| {});
    assert!(!text.contains(answered), "{text}");
    assert_eq!(place.run(["serve", "--log-level", "much"]).code, 2);
}

#[test]
fn fuse_a_device_is_listed_as_long_as_its_image_is_locked() {
    let name = "server::fuse_a_device_is_listed_as_long_as_its_image_is_locked";
    if !require_fuse(name) || !require_tools(name, &["losetup"]) {
        return;
    }
    let place = place_with_images();
    let device = place.attach(&place.path("a.img"), &["--via", "fuse"]);
    let [supervisor, _] = server(&place);
    let signal = |signal: &str| {
        assert!(Command::new("kill").args([signal, &supervisor.to_string()]).status().unwrap().success());
    };
    // A supervisor that is busy when the kernel has lost the disk.
    signal("-STOP");
    let ended = Command::new("losetup").arg("--detach").arg(&device).status();
    let (devices, locked) = (place.devices(), is_locked(&place.path("a.img")));
    signal("-CONT");
    assert!(ended.unwrap().success());
    assert!(locked && devices.len() == 1, "{locked}: {devices:?}");
    assert_eq!(devices[0]["state"], "not_responding", "its server is stopped");
    assert!(wait_until(Duration::from_secs(10), || place.devices().is_empty()));
    assert!(!is_locked(&place.path("a.img")));
}

#[test]
fn fuse_a_runtime_directory_that_was_removed_comes_back() {
    if !require_fuse("server::fuse_a_runtime_directory_that_was_removed_comes_back") {
        return;
    }
    let place = place_with_images();
    place.attach(&place.path("a.img"), &["--via", "fuse"]);
    for _ in 0..2 {
        // The server may still be writing there: rm then finds the directory not empty.
        let removed = || Command::new("rm").arg("-rf").arg(place.runtime()).status().unwrap().success();
        assert!(wait_until(Duration::from_secs(10), removed));
        assert!(wait_until(Duration::from_secs(10), || place.runtime().join("control").exists()));
        still_whole(&place, "a.img");
    }
    let log = fs::read_to_string(place.runtime().join("log")).unwrap();
    assert!(log.contains("made again, with the records of 1 devices"), "{log}");
    // A successor finds the worker there.
    let [supervisor, _] = server(&place);
    assert!(Command::new("kill").args(["-KILL", &supervisor.to_string()]).status().unwrap().success());
    let live = || place.devices().iter().any(|device| device["state"] == "live");
    assert!(wait_until(Duration::from_secs(10), || !alive(supervisor) && live()), "{:?}", place.devices());
    still_whole(&place, "a.img");
    place.ok(["detach", "a.img"]);
}

#[test]
fn fuse_loop_devices_that_outlive_all_processes_are_detached_by_their_nodes() {
    let name = "server::fuse_loop_devices_that_outlive_all_processes_are_detached_by_their_nodes";
    if !require_fuse(name) || !require_tools(name, &["losetup"]) {
        return;
    }
    let place = place_with_images();
    let device = place.attach(&place.path("a.img"), &["--via", "loop", "--name", "kept"]);
    fs::remove_dir_all(place.runtime()).unwrap();
    assert!(place.devices().is_empty());
    let used = common::Use::of(&device);
    place.ok(["detach", device.to_str().unwrap()]);
    assert!(!used.lasts());
    assert!(fs::symlink_metadata(place.links().join("kept")).is_err(), "its link goes as well");
    // One of others is none of ours.
    let path = place.path("b.img");
    let other = becket_testkit::tool(Command::new("losetup").args(["--find", "--show"]).arg(&path));
    let ran = place.run(["detach", other.trim()]);
    becket_testkit::tool(Command::new("losetup").args(["--detach", other.trim()]));
    assert_eq!(ran.code, 1, "{ran:?}");
}

/// The server has another working directory than the command that starts it.
#[test]
fn fuse_directories_of_the_environment_may_be_relative() {
    let name = "server::fuse_directories_of_the_environment_may_be_relative";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    let run = |words: &[&str]| {
        let mut becket = place.becket();
        becket.env("BECKET_RUNTIME_DIR", "run").env("BECKET_LINK_DIR", "links").env("BECKET_STORE", "store");
        let ran = place.finish(becket.args(words));
        assert_eq!(ran.code, 0, "{words:?}: {ran:?}");
        ran
    };
    let device = run(&["attach", "--via", "fuse", "--name", "one", "a.img"]).out;
    assert_eq!(fs::canonicalize(place.links().join("one")).unwrap(), Path::new(device.trim_end()));
    run(&["detach", "one"]);
    assert!(!place.path("store").exists());
    run(&["store", "list"]);
    assert!(place.path("store").is_dir(), "as by --store store");
}

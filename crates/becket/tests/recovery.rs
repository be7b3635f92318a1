//! Who comes after supervisor and worker, whatever dies or stops, and of whichever version the next one is.
//! A device that is written and read all the time must not notice: no error, no wrong byte.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use becket_testkit::{
    Scratch, image, in_a_guest, patience, require_device, require_fuse, skip, tool, via, wait_until,
};
use common::disturb::{PATIENCE, SUPERVISOR, WORKER, await_device, send};
use common::load::{SIZE, Seen, under_load};
use common::{alive, scratch};
use serde_json::Value;

/// A worker that has lived for so long did not die at once.
const LIFE: Duration = Duration::from_millis(2200);
/// How long a command may take that cannot be carried out, because a process does not respond; twice what it
/// is meant to, for machines under load.
const ANSWER: Duration = Duration::from_secs(10);
/// What makes this build speak as a later version would; see `becket_device`'s `versions`.
const LATER: &str = "BECKET_TEST_LATER";

/// `image` attached over FUSE as `one`: its node, and what is known of it.
fn one(place: &Scratch) -> (PathBuf, Value) {
    image::random(&place.path("image"), 4 << 20, 1);
    let device = place.attach(&place.path("image"), &["--via", "fuse", "--name", "one"]);
    (device, await_device(place, "one", |_| true))
}

/// What changes a device or asks for it.
const COMMANDS: [&[&str]; 4] =
    [&["stat", "one"], &["set", "--read-only", "on", "one"], &["refresh", "one"], &["detach", "one"]];

/// Two tests that differ in the transport: the one that is tested, and FUSE.
macro_rules! by_both {
    ($body:ident: $chosen:ident, $fuse:ident) => {
        #[test]
        fn $chosen() {
            let name = concat!("recovery::", stringify!($chosen));
            if require_device(name) {
                $body(name, &via());
            }
        }

        #[test]
        fn $fuse() {
            let name = concat!("recovery::", stringify!($fuse));
            if require_fuse(name) {
                $body(name, "fuse");
            }
        }
    };
}

/// A device that is verified all the time, while something happens to it; then on the device and in the file.
fn verified(place: &Scratch, name: &str, via: &str, body: impl FnOnce(&Seen)) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    fs::write(&path, vec![0; SIZE]).unwrap();
    let device = place.attach(&path, &["--via", via, "--name", "one"]);
    if place.devices()[0][WORKER].is_null() {
        place.ok(["detach", "one"]);
        return skip(name, "this transport has no server");
    }
    let seen = Seen::default();
    let ((), model) = under_load(&device, &seen, || body(&seen));
    seen.compare(&fs::read(&device).unwrap(), &model, 0);
    place.ok(["detach", "one"]);
    seen.compare(&fs::read(&path).unwrap(), &model, 0);
    println!(
        "{name} over {via}: {} operations, {} errors, {} wrong bytes",
        seen.operations.load(Ordering::Relaxed),
        seen.errors.load(Ordering::Relaxed),
        seen.wrong_bytes.load(Ordering::Relaxed)
    );
    assert!(seen.nothing_wrong(), "{:?}", seen.first.lock().unwrap());
}

fn kill(pids: &[&Value]) {
    tool(Command::new("kill").arg("-KILL").args(pids.iter().map(|pid| pid.to_string())));
}

fn both_die(name: &str, via: &str) {
    let place = scratch();
    verified(&place, name, via, |seen| {
        for _ in 0..3 {
            let before = await_device(&place, "one", |_| true);
            thread::sleep(LIFE);
            kill(&[&before[SUPERVISOR], &before[WORKER]]);
            await_device(&place, "one", |now| {
                now[SUPERVISOR] != before[SUPERVISOR] && now[WORKER] != before[WORKER]
            });
            assert!(seen.goes_on(PATIENCE), "the load goes on");
        }
    });
}

by_both!(both_die: supervisor_and_worker_that_die_together_are_not_noticed,
    fuse_supervisor_and_worker_that_die_together_are_not_noticed);

/// While the device has no server, since its workers die at once, its supervisor dies, too.
fn dies_in_the_back_off(name: &str, via: &str) {
    let place = scratch();
    verified(&place, name, via, |seen| {
        let state = || place.devices().into_iter().find(|info| info["name"] == "one").unwrap();
        let failing = wait_until(PATIENCE, || {
            let now = state();
            let worker = now[WORKER].as_u64().unwrap();
            if now["state"] == "live" && alive(u32::try_from(worker).unwrap()) {
                // It may be dead by now.
                let _ = Command::new("kill").args(["-KILL", &worker.to_string()]).output();
            }
            now["state"] == "failing"
        });
        assert!(failing, "{:#}", state());
        let before = state();
        kill(&[&before[SUPERVISOR]]);
        await_device(&place, "one", |now| now[SUPERVISOR] != before[SUPERVISOR]);
        assert!(seen.goes_on(PATIENCE), "the load goes on");
    });
}

by_both!(dies_in_the_back_off: a_supervisor_that_dies_in_the_back_off_is_not_noticed,
    fuse_supervisor_that_dies_in_the_back_off_is_not_noticed);

/// The children of a supervisor besides its worker: its guard.
fn guards(info: &Value) -> Vec<u32> {
    let supervisor = &info[SUPERVISOR];
    let tasks = fs::read_dir(format!("/proc/{supervisor}/task")).unwrap();
    let children =
        tasks.flatten().map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
    let all: Vec<u32> =
        children.collect::<String>().split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    all.into_iter().filter(|pid| info[WORKER] != *pid && alive(*pid)).collect()
}

#[test]
fn fuse_guard_that_dies_is_replaced_at_once_and_keeps_what_the_first_one_kept() {
    let name = "recovery::fuse_guard_that_dies_is_replaced_at_once_and_keeps_what_the_first_one_kept";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    verified(&place, name, "fuse", |seen| {
        let info = await_device(&place, "one", |_| true);
        let [guard] = guards(&info)[..] else { panic!("{:?}", guards(&info)) };
        kill(&[&guard.into()]);
        let another = || guards(&info).iter().any(|pid| *pid != guard);
        assert!(wait_until(Duration::from_secs(10), another), "nobody stands guard");
        // It has been given all devices.
        thread::sleep(Duration::from_millis(500));
        kill(&[&info[SUPERVISOR], &info[WORKER]]);
        await_device(&place, "one", |now| now[SUPERVISOR] != info[SUPERVISOR]);
        assert!(seen.goes_on(PATIENCE), "the load goes on");
    });
}

/// The guard closes a device before it counts as detached: its image is free, and its file system
/// can be unmounted.
#[test]
fn fuse_device_that_is_detached_is_kept_by_nobody() {
    if !require_fuse("recovery::fuse_device_that_is_detached_is_kept_by_nobody") {
        return;
    }
    let place = scratch();
    image::random(&place.path("image"), 1 << 20, 1);
    // Another one, so that all processes stay.
    image::random(&place.path("other"), 1 << 20, 2);
    place.attach(&place.path("other"), &["--via", "fuse", "--name", "other"]);
    for _ in 0..20 {
        place.attach(&place.path("image"), &["--via", "fuse", "--name", "one"]);
        place.ok(["detach", "one"]);
        let image = place.path("image");
        let info = await_device(&place, "other", |_| true);
        let pids: Vec<u32> =
            guards(&info).into_iter().chain([info[SUPERVISOR].as_u64().unwrap() as u32]).collect();
        for pid in pids {
            let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
            let holds = open.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|path| path == image);
            assert!(!holds, "process {pid} has it open");
        }
    }
    place.ok(["detach", "other"]);
}

/// Runs a command that must answer soon; what it said.
fn answered(place: &Scratch, words: &[&str]) -> becket_testkit::Ran {
    let begun = Instant::now();
    let ran = place.run(words);
    assert!(begun.elapsed() < patience(ANSWER), "{words:?} took {:?}", begun.elapsed());
    ran
}

fn stopped(whom: &str) {
    let place = scratch();
    let (device, info) = one(&place);
    let pid = info[whom].to_string();
    send("STOP", &info[whom]);
    let listed = answered(&place, &["list"]);
    assert!(listed.out.contains("not responding"), "{listed:?}");
    let now = place.devices()[0].clone();
    assert_eq!(now["state"], "not_responding", "{now:#}");
    let doctor = answered(&place, &["doctor"]);
    assert!(doctor.out.contains("not responding") && doctor.out.contains(&pid), "{doctor:?}");
    for words in COMMANDS {
        let ran = answered(&place, words);
        assert!(ran.code != 0, "{words:?}: {ran:?}");
        assert!(ran.err.contains("does not respond") && ran.err.contains("stopped"), "{words:?}: {ran:?}");
        assert!(ran.err.contains(&format!("kill -CONT {pid}")), "{words:?}: {ran:?}");
    }
    if whom == WORKER {
        // Others go on: a new device gets a worker of its own.
        image::random(&place.path("two"), 1 << 20, 2);
        let two = place.attach(&place.path("two"), &["--via", "fuse", "--name", "two"]);
        assert!(fs::read(two).unwrap() == fs::read(place.path("two")).unwrap());
        place.ok(["detach", "two"]);
    }
    send("CONT", &info[whom]);
    // What was refused is not done later, nor was a process replaced.
    let now = await_device(&place, "one", |_| true);
    assert_eq!((&now[WORKER], &now[SUPERVISOR]), (&info[WORKER], &info[SUPERVISOR]));
    if whom == WORKER {
        assert_eq!(now["read_only"], false);
    }
    assert!(fs::read(device).unwrap() == fs::read(place.path("image")).unwrap());
    place.run(["detach", "one"]);
    assert!(wait_until(PATIENCE, || place.devices().is_empty()));
}

#[test]
fn fuse_worker_that_is_stopped_is_said_not_to_respond_and_keeps_no_command_waiting() {
    if require_fuse(
        "recovery::fuse_worker_that_is_stopped_is_said_not_to_respond_and_keeps_no_command_waiting",
    ) {
        stopped(WORKER);
    }
}

#[test]
fn fuse_supervisor_that_is_stopped_is_said_not_to_respond_and_keeps_no_command_waiting() {
    if require_fuse(
        "recovery::fuse_supervisor_that_is_stopped_is_said_not_to_respond_and_keeps_no_command_waiting",
    ) {
        stopped(SUPERVISOR);
    }
}

/// Its worker serves it, and its supervisor and guard are dead: no hint says to take it away
/// from its users.
#[test]
fn fuse_device_that_is_orphaned_is_not_to_be_detached() {
    if !require_fuse("recovery::fuse_device_that_is_orphaned_is_not_to_be_detached") {
        return;
    }
    let place = scratch();
    let (device, info) = one(&place);
    orphan(&place, &info);
    let ran = place.run(["stat", "one"]);
    assert!(ran.code == 1 && ran.err.contains("orphaned"), "{ran:?}");
    assert!(ran.err.contains("do not detach") && ran.err.contains("becket refresh one"), "{ran:?}");
    place.ok(["refresh", "one"]);
    let now = await_device(&place, "one", |_| true);
    assert_eq!(now[WORKER], info[WORKER]);
    place.ok(["stat", "one"]);
    assert!(fs::read(device).unwrap() == fs::read(place.path("image")).unwrap());
    place.ok(["detach", "one"]);
}

/// Ends the supervisor and its guard, and leaves the worker.
#[track_caller]
fn orphan(place: &Scratch, info: &Value) {
    let mut pids: Vec<Value> = guards(info).into_iter().map(Value::from).collect();
    pids.push(info[SUPERVISOR].clone());
    // While it is stopped it starts no other guard.
    send("STOP", &info[SUPERVISOR]);
    kill(&pids.iter().collect::<Vec<_>>());
    let orphaned =
        || ["orphaned", "unknown_version"].iter().any(|state| place.devices()[0]["state"] == **state);
    assert!(wait_until(PATIENCE, orphaned), "{:#?}", place.devices());
}

/// Whether the command here can act as a later version: the guest has the optimised one, which cannot.
fn has_two_versions(name: &str) -> bool {
    if in_a_guest() {
        skip(name, "the optimised command speaks one version only");
        return false;
    }
    require_fuse(name)
}

/// becket as a later version would be.
fn as_later(place: &Scratch, how: &str) -> Command {
    let mut becket = place.becket();
    becket.env(LATER, how);
    becket
}

fn later(place: &Scratch, how: &str, words: &[&str]) -> becket_testkit::Ran {
    place.finish(as_later(place, how).args(words))
}

/// Another server takes over.
fn take_over(mut becket: Command) -> Server {
    becket.args(["serve", "--takeover", "--until-idle"]).stdout(Stdio::null()).stderr(Stdio::null());
    Server(becket.spawn().unwrap())
}

/// It ends by itself, and is buried.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.wait();
    }
}

/// A device goes to the server that `other` starts and back, twice, while it is written and verified.
fn there_and_back(name: &str, other: impl Fn(&Scratch) -> Command) {
    let place = scratch();
    let mut servers = Vec::new();
    verified(&place, name, "fuse", |seen| {
        for next in [&other as &dyn Fn(&Scratch) -> Command, &Scratch::becket].repeat(2) {
            let before = await_device(&place, "one", |_| true);
            thread::sleep(LIFE);
            servers.push(take_over(next(&place)));
            await_device(&place, "one", |now| {
                now[SUPERVISOR] != before[SUPERVISOR]
                    && now["recoveries"].as_u64() > before["recoveries"].as_u64()
            });
            assert!(seen.goes_on(PATIENCE), "the load goes on");
        }
    });
}

/// From this version to a later one.
#[test]
fn fuse_devices_move_between_two_versions_both_ways() {
    let name = "recovery::fuse_devices_move_between_two_versions_both_ways";
    if has_two_versions(name) {
        there_and_back(name, |place| as_later(place, "speaks"));
    }
}

/// From this build to the one that `BECKET_TEST_OTHER` names: `cargo xtask versions COMMIT` makes it.
#[test]
fn fuse_devices_move_between_two_builds_both_ways() {
    let name = "recovery::fuse_devices_move_between_two_builds_both_ways";
    let Some(other) = std::env::var_os("BECKET_TEST_OTHER") else {
        return skip(name, "BECKET_TEST_OTHER names no other build");
    };
    if require_fuse(name) {
        there_and_back(name, |place| {
            let mut becket = Command::new(&other);
            place.prepare(&mut becket);
            becket
        });
    }
}

fn record(place: &Scratch, name: &str) -> Vec<u8> {
    fs::read(place.runtime().join("devices").join(format!("{name}.json"))).unwrap()
}

/// A device that this version does not understand is shown, served on by its own worker, and touched by
/// nobody, be it beside others that are understood.
#[test]
fn fuse_device_of_a_later_version_is_left_alone_and_comes_back() {
    if !has_two_versions("recovery::fuse_device_of_a_later_version_is_left_alone_and_comes_back") {
        return;
    }
    let place = scratch();
    let at = |name: &str, seed| {
        image::random(&place.path(name), 4 << 20, seed);
        place.path(name)
    };
    let [one, two] = [at("one", 1), at("two", 2)];
    let attach = |how, path: &Path, name| -> PathBuf {
        let ran = later(&place, how, &["attach", "--via", "fuse", "--name", name, path.to_str().unwrap()]);
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.out.trim_end().into()
    };
    let device = attach("needs", &one, "one");
    let same = |device: &Path, path: &Path| assert!(fs::read(device).unwrap() == fs::read(path).unwrap());
    let untouched = record(&place, "one");
    let unknown = |what: &str| {
        let listed = place.run(["list"]);
        assert!(listed.out.contains("unknown version"), "{what}: {listed:?}");
        let infos = place.devices();
        let info = infos.iter().find(|info| info["name"] == "one").unwrap();
        assert_eq!(info["state"], "unknown_version", "{what}");
        assert!(record(&place, "one") == untouched, "{what}: its record has changed");
        same(&device, &one);
    };
    unknown("as its server lives");
    let doctor = place.run(["doctor"]);
    assert!(doctor.out.contains("unknown version") && doctor.out.contains("one"), "{doctor:?}");
    for words in COMMANDS {
        let ran = place.run(words);
        assert!(ran.code == 1 && ran.err.contains("unknown version"), "{words:?}: {ran:?}");
    }
    // Nor is its name taken.
    let ran = place.run(["attach", "--via", "fuse", "--name", "one", two.to_str().unwrap()]);
    assert!(ran.code == 1 && ran.err.contains("one"), "{ran:?}");
    // A server of this version takes over: it gets the devices that it understands.
    let plain = later(&place, "needs", &["list", "--json"]);
    assert_eq!(plain.json()["devices"][0]["state"], "live", "{plain:?}");
    let infos = plain.json()["devices"][0].clone();
    let first = take_over(place.becket());
    let gone = || !alive(u32::try_from(infos[SUPERVISOR].as_u64().unwrap()).unwrap());
    assert!(wait_until(PATIENCE, gone), "the later one ends");
    let second = place.attach(&two, &["--via", "fuse", "--name", "two"]);
    await_device(&place, "two", |_| true);
    unknown("under a server of this version");
    same(&second, &two);
    // And one of the later version takes both.
    let last = take_over(as_later(&place, "needs"));
    let live = || {
        let devices = later(&place, "needs", &["list", "--json"]).json()["devices"].clone();
        let devices = devices.as_array().unwrap().clone();
        devices.len() == 2
            && devices.iter().all(|info| info["state"] == "live" && info[SUPERVISOR] == last.0.id())
    };
    assert!(wait_until(PATIENCE, live), "{:?}", later(&place, "needs", &["list", "--json"]));
    same(&device, &one);
    same(&second, &two);
    let ran = later(&place, "needs", &["detach", "--all"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    drop((first, last));
}

/// Its worker shares no version with the server that comes: it goes on without one, until one comes that it
/// knows.
#[test]
fn fuse_worker_of_another_version_goes_on_without_a_server() {
    if !has_two_versions("recovery::fuse_worker_of_another_version_goes_on_without_a_server") {
        return;
    }
    let place = scratch();
    let (device, info) = one(&place);
    orphan(&place, &info);
    // It writes its own records otherwise, and reads ours.
    let ran = later(&place, "only", &["refresh", "one"]);
    assert!(ran.code == 1 && ran.err.contains("unknown version"), "{ran:?}");
    let listed = later(&place, "only", &["list"]);
    assert!(listed.out.contains("unknown version"), "{listed:?}");
    assert!(fs::read(&device).unwrap() == fs::read(place.path("image")).unwrap());
    assert!(alive(u32::try_from(info[WORKER].as_u64().unwrap()).unwrap()), "its worker was ended");
    // One of its own version.
    let server = take_over(place.becket());
    let now = await_device(&place, "one", |now| now[SUPERVISOR] == server.0.id());
    assert_eq!(now["size"], info["size"]);
    assert!(fs::read(device).unwrap() == fs::read(place.path("image")).unwrap());
    place.ok(["detach", "one"]);
}

//! Images of a real Ceph cluster (`scripts/ceph.sh`) while everything dies that can: programs of becket,
//! daemons of the cluster, keys and lengths.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use becket_testkit::{Scratch, require_fuse, tool, wait_until};
use common::ceph::{Cluster, attach, fuse, helpers, require_cluster};
use common::disturb::{Disturbance, How, SUPERVISOR};
use common::load::Random;
use common::one::{Block, kill, only};
use common::page::direct as open;
use common::{alive, scratch, text};
use rustix::fs::OFlags;
use serde_json::Value;

/// Blocks that are written and read in turn.
const BLOCKS: u64 = 64;

/// How many processes are killed: `BECKET_TEST_KILLS`, for a campaign.
fn kills(usually: usize) -> usize {
    std::env::var("BECKET_TEST_KILLS").ok().map_or(usually, |count| count.parse().unwrap())
}

/// A cluster of the test's own, where others would be disturbed, or disturb.
fn own(name: &str, store: &str) -> Option<Cluster> {
    (require_fuse(name) && require_cluster(name)).then(|| Cluster::start(store))
}

/// Kills one process after another under a load that verifies all it reads, and compares the image with what
/// was written last. Prints how long the longest request took, by who was killed.
fn campaign(cluster: &Cluster, place: &Scratch, image: &str, victims: &[&'static str], kills: usize) {
    cluster.rbd(&["create", "--size", "8M", image]);
    let disk = open(&attach(cluster, place, &[&format!("rbd:{image}")]));
    let (ends, longest, rounds) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let timed = |work: &mut dyn FnMut() -> std::io::Result<()>| {
        let begun = Instant::now();
        work().unwrap();
        longest.fetch_max(u64::try_from(begun.elapsed().as_micros()).unwrap(), Ordering::Relaxed);
    };
    let mut pauses = BTreeMap::<&str, Vec<Duration>>::new();
    thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut round = 0;
            while !ends.load(Ordering::Relaxed) {
                round += 1;
                for block in 0..BLOCKS {
                    let number = Block::of(round * BLOCKS + block);
                    timed(&mut || disk.write_all_at(&number.0, block * 4096));
                }
                timed(&mut || disk.sync_all());
                for block in 0..BLOCKS {
                    let mut found = Block::of(0);
                    timed(&mut || disk.read_exact_at(&mut found.0, block * 4096));
                    assert!(found.0 == Block::of(round * BLOCKS + block).0, "round {round}, block {block}");
                }
                rounds.store(round, Ordering::Relaxed);
            }
        });
        for victim in victims.iter().copied().cycle().take(kills) {
            thread::sleep(Duration::from_millis(700));
            assert!(!load.is_finished(), "the load has failed");
            longest.store(0, Ordering::Relaxed);
            let device = only(place);
            match victim {
                "helper" => kill(helpers(&device["server_pid"])[0]),
                "worker" => kill(&device["worker_pid"]),
                "server" => kill(&device["server_pid"]),
                "upgrade" => {
                    let upgrade = Disturbance { whom: SUPERVISOR, how: How::Replaced };
                    upgrade.happen(place, text(&device, "name"), &mut Random::new(1));
                }
                daemon => {
                    cluster.say(&format!("kill-{daemon}"));
                    thread::sleep(Duration::from_millis(500));
                    cluster.say(&format!("start-{daemon}"));
                }
            }
            let before = rounds.load(Ordering::Relaxed);
            let on = || text(&only(place), "state") == "live" && rounds.load(Ordering::Relaxed) > before + 1;
            assert!(wait_until(Duration::from_secs(60), on), "{:?} after {victim}", only(place));
            let pause = Duration::from_micros(longest.load(Ordering::Relaxed));
            pauses.entry(victim).or_default().push(pause);
        }
        ends.store(true, Ordering::Relaxed);
        load.join().unwrap();
    });
    drop(disk);
    place.ok(["detach", "--all"]);
    let out = place.path("out.img");
    cluster.rbd(&["export", "--no-progress", image, out.to_str().unwrap()]);
    let (found, round) = (fs::read(&out).unwrap(), rounds.load(Ordering::Relaxed));
    for block in 0..BLOCKS {
        let at = usize::try_from(block * 4096).unwrap();
        assert!(found[at..at + 4096] == Block::of(round * BLOCKS + block).0, "block {block}");
    }
    println!("{kills} kills, {round} rounds of {BLOCKS} blocks, 0 errors; longest request, median and most:");
    for (victim, mut all) in pauses {
        all.sort();
        println!("  {victim}: {:?} {:?}", all[all.len() / 2], all[all.len() - 1]);
        let ours = ["helper", "worker", "server", "upgrade"].contains(&victim);
        assert!(
            !ours || all[all.len() - 1] < Duration::from_secs(8),
            "a request took {:?}",
            all[all.len() - 1]
        );
    }
}

#[test]
fn fuse_no_write_is_lost_when_processes_die() {
    let Some(cluster) = fuse("rbd_life::fuse_no_write_is_lost_when_processes_die") else { return };
    let victims = ["helper", "worker", "server", "upgrade"];
    campaign(cluster, &scratch(), "rbd/killed", &victims, kills(8));
}

/// What comes next must know who has the lock, also if nothing has happened before.
#[test]
fn fuse_no_write_is_lost_by_an_upgrade_that_comes_first() {
    let Some(cluster) = fuse("rbd_life::fuse_no_write_is_lost_by_an_upgrade_that_comes_first") else {
        return;
    };
    campaign(cluster, &scratch(), "rbd/upgraded", &["upgrade", "server"], kills(2));
}

#[test]
fn fuse_an_image_is_renamed_under_its_device_and_cannot_be_removed() {
    let name = "rbd_life::fuse_an_image_is_renamed_under_its_device_and_cannot_be_removed";
    let Some(cluster) = fuse(name) else { return };
    let place = scratch();
    cluster.rbd(&["create", "--size", "8M", "rbd/old"]);
    let disk = open(&attach(cluster, &place, &["rbd:rbd/old"]));
    cluster.rbd(&["mv", "rbd/old", "rbd/new"]);
    disk.write_all_at(&Block::of(1).0, 0).unwrap();
    let mut remove = Command::new("rbd");
    let removed = remove.arg("--conf").arg(cluster.conf()).args(["rm", "--no-progress", "rbd/new"]).output();
    assert!(!removed.unwrap().status.success(), "it is in use");
    disk.write_all_at(&Block::of(2).0, 4096).unwrap();
    // The next program looks for the name that it was given.
    kill(helpers(&only(&place)["server_pid"])[0]);
    thread::scope(|scope| {
        let written = scope.spawn(|| disk.write_all_at(&Block::of(3).0, 8192));
        let waits = || only(&place)["away"].as_str().is_some_and(|away| away.contains("no image \"old\""));
        assert!(wait_until(Duration::from_secs(30), waits), "{:?}", only(&place));
        assert!(!written.is_finished(), "it waits for the name");
        // Who renames an image whose client is dead takes its lock, and could write.
        cluster.rbd(&["mv", "rbd/new", "rbd/old"]);
        assert_eq!(written.join().unwrap().map_err(|error| error.raw_os_error()), Err(Some(5)));
    });
    // The request may hear of it first.
    let lost = || text(&only(&place), "away").contains("lock");
    assert!(wait_until(Duration::from_secs(10), lost), "{:?}", only(&place));
    drop(disk);
    place.ok(["detach", "--all"]);
}

/// The client that has the lock of an image, if it lives.
fn live_owner(cluster: &Cluster, image: &str) -> Option<String> {
    let said = |words: &[&str]| -> Value {
        serde_json::from_str(&cluster.rbd(&[words, &["--format", "json", image]].concat())).unwrap()
    };
    let owner = said(&["lock", "ls"])[0]["locker"].as_str()?.to_owned();
    let watchers = said(&["status"])["watchers"].as_array()?.clone();
    let lives = |watcher: &Value| owner == format!("client.{}", watcher["client"]);
    watchers.iter().any(lives).then_some(owner)
}

/// The next program opens the image at once: without it another host could take it.
#[test]
fn fuse_an_idle_device_keeps_its_image_when_its_programs_die() {
    let name = "rbd_life::fuse_an_idle_device_keeps_its_image_when_its_programs_die";
    let Some(cluster) = fuse(name) else { return };
    let (place, other) = (scratch(), scratch());
    cluster.rbd(&["create", "--size", "8M", "rbd/idle"]);
    let path = attach(cluster, &place, &["rbd:rbd/idle"]);
    let disk = open(&path);
    disk.write_all_at(&Block::of(1).0, 0).unwrap();
    for victim in ["helper", "server"] {
        let before = live_owner(cluster, "rbd/idle");
        assert!(before.is_some());
        let device = only(&place);
        match victim {
            "helper" => kill(helpers(&device["server_pid"])[0]),
            _ => kill(&device["server_pid"]),
        }
        let taken = || live_owner(cluster, "rbd/idle").is_some_and(|owner| Some(owner) != before);
        assert!(wait_until(Duration::from_secs(20), taken), "{victim}: {:?}", only(&place));
    }
    let conf = cluster.conf();
    let ran = other.run(["attach", "--via", "fuse", "--ceph-conf", conf.to_str().unwrap(), "rbd:rbd/idle"]);
    assert!(ran.err.contains("is in use"), "{ran:?}");
    // Its length is followed without a request, too.
    cluster.rbd(&["resize", "--no-progress", "--size", "16M", "rbd/idle"]);
    let followed = || only(&place)["size"].as_u64() == Some(16 << 20);
    assert!(wait_until(Duration::from_secs(10), followed), "{:?}", only(&place));
    disk.write_all_at(&Block::of(2).0, 0).unwrap();
    drop(disk);
    place.ok(["detach", "--all"]);
    assert!(cluster.rbd(&["lock", "ls", "rbd/idle"]).trim().is_empty(), "the lock is given back");
}

/// A program that died and may still write is waited for, and never taken for another host.
#[test]
fn fuse_a_dead_program_that_cannot_be_fenced_off_is_waited_for() {
    let name = "rbd_life::fuse_a_dead_program_that_cannot_be_fenced_off_is_waited_for";
    let Some(cluster) = fuse(name) else { return };
    let place = scratch();
    cluster.rbd(&["create", "--size", "8M", "rbd/unfenced"]);
    let ring = place.path("ring");
    cluster.user("client.weak", "profile rbd", &ring);
    cluster.ceph(&["auth", "caps", "client.weak", "mon", "allow r", "osd", "allow rwx"]);
    let conf = cluster.conf_with(&place, "keyring", ring.to_str().unwrap());
    let words = ["attach", "--via", "fuse", "--ceph-conf", &conf, "--ceph-id", "weak", "rbd:rbd/unfenced"];
    let disk = open(Path::new(place.ok(words).trim()));
    disk.write_all_at(&Block::of(1).0, 0).unwrap();
    kill(helpers(&only(&place)["server_pid"])[0]);
    thread::scope(|scope| {
        let written = scope.spawn(|| disk.write_all_at(&Block::of(2).0, 0));
        let waits =
            || only(&place)["away"].as_str().is_some_and(|away| away.contains("cannot be fenced off"));
        assert!(wait_until(Duration::from_secs(30), waits), "{:?}", only(&place));
        // More programs than are remembered.
        let log = place.runtime().join("log");
        let tried = || fs::read_to_string(&log).unwrap().matches("another takes its place").count() > 18;
        assert!(wait_until(Duration::from_secs(120), || tried() || written.is_finished()));
        let waits = waits();
        cluster.ceph(&["auth", "caps", "client.weak", "mon", "profile rbd", "osd", "profile rbd"]);
        written.join().unwrap().unwrap();
        assert!(waits, "it was not said why it waits");
    });
    drop(disk);
    place.ok(["detach", "--all"]);
}

/// One that is only read has no lock that keeps it from being removed.
#[test]
fn fuse_another_image_of_the_same_name_is_not_served() {
    let Some(cluster) = fuse("rbd_life::fuse_another_image_of_the_same_name_is_not_served") else { return };
    let create = || cluster.rbd(&["create", "--size", "8M", "rbd/anew"]);
    let snap = |what: &str| cluster.rbd(&["snap", what, "--no-progress", "rbd/anew@s"]);
    create();
    for image in ["rbd:rbd/anew@s", "rbd:rbd/anew"] {
        snap("create");
        let place = scratch();
        let path = attach(cluster, &place, &["--read-only", image]);
        // Past the page cache.
        let flags = i32::try_from(OFlags::DIRECT.bits()).unwrap();
        let disk = fs::OpenOptions::new().read(true).custom_flags(flags).open(&path).unwrap();
        disk.read_exact_at(&mut Block::of(0).0, 0).unwrap();
        snap("rm");
        if image.contains('@') {
            snap("create");
        } else {
            cluster.rbd(&["rm", "--no-progress", "rbd/anew"]);
            create();
        }
        kill(helpers(&only(&place)["server_pid"])[0]);
        let said = || only(&place)["away"].as_str().is_some_and(|away| away.starts_with("source changed: "));
        assert!(wait_until(Duration::from_secs(20), said), "{image}: {:?}", only(&place));
        assert_eq!(text(&only(&place), "state"), "live");
        assert!(place.ok(["list"]).contains("source changed"));
        assert!(disk.read_exact_at(&mut Block::of(0).0, 4096).is_err(), "{image}: it is another one's");
        drop(disk);
        place.ok(["detach", "--all"]);
        if image.contains('@') {
            snap("rm");
        }
    }
}

/// With a cluster of its own, whose OSD keeps its bytes.
#[test]
fn fuse_no_write_is_lost_when_the_cluster_dies_too() {
    let name = "rbd_life::fuse_no_write_is_lost_when_the_cluster_dies_too";
    let Some(cluster) = own(name, "bluestore") else { return };
    let victims = ["osd", "helper", "mon", "worker", "server"];
    campaign(&cluster, &scratch(), "rbd/all", &victims, kills(5));
}

#[test]
fn fuse_a_program_that_hangs_is_replaced() {
    let Some(cluster) = fuse("rbd_life::fuse_a_program_that_hangs_is_replaced") else { return };
    let place = scratch();
    cluster.rbd(&["create", "--size", "8M", "rbd/hung"]);
    let disk = open(&attach(cluster, &place, &["rbd:rbd/hung"]));
    disk.write_all_at(&Block::of(1).0, 0).unwrap();
    let hung = helpers(&only(&place)["server_pid"])[0];
    tool(Command::new("kill").args(["-STOP", &hung.to_string()]));
    let begun = Instant::now();
    disk.write_all_at(&Block::of(2).0, 0).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    assert!(!alive(hung), "it is ended, or it could write later");
    let mut found = Block::of(0);
    disk.read_exact_at(&mut found.0, 0).unwrap();
    assert!(found.0 == Block::of(2).0);
    drop(disk);
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_a_key_that_is_revoked_and_given_back() {
    let Some(cluster) = fuse("rbd_life::fuse_a_key_that_is_revoked_and_given_back") else { return };
    let place = scratch();
    cluster.rbd(&["create", "--size", "8M", "rbd/revoked"]);
    let ring = place.path("ring");
    cluster.user("client.guest", "profile rbd", &ring);
    let conf = cluster.conf_with(&place, "keyring", ring.to_str().unwrap());
    let words = ["attach", "--via", "fuse", "--ceph-conf", &conf, "--ceph-id", "guest", "rbd:rbd/revoked"];
    let disk = open(Path::new(place.ok(words).trim()));
    disk.write_all_at(&Block::of(1).0, 0).unwrap();
    cluster.ceph(&["auth", "rm", "client.guest"]);
    kill(helpers(&only(&place)["server_pid"])[0]);
    thread::scope(|scope| {
        let written = scope.spawn(|| disk.write_all_at(&Block::of(2).0, 0));
        let waits = || only(&place)["away"].as_str().is_some_and(|away| away.contains("client.guest"));
        assert!(wait_until(Duration::from_secs(30), waits), "{:?}", only(&place));
        assert!(!written.is_finished(), "it waits for the key");
        cluster.ceph(&["auth", "import", "-i", ring.to_str().unwrap()]);
        written.join().unwrap().unwrap();
    });
    assert!(wait_until(Duration::from_secs(10), || only(&place)["away"].is_null()), "{:?}", only(&place));
    drop(disk);
    place.ok(["detach", "--all"]);
}

/// The deadline is that of the device: programs that give way to each other do not begin it anew.
#[test]
fn fuse_requests_fail_once_a_key_was_revoked_for_too_long() {
    let Some(cluster) = fuse("rbd_life::fuse_requests_fail_once_a_key_was_revoked_for_too_long") else {
        return;
    };
    let place = scratch();
    cluster.rbd(&["create", "--size", "8M", "rbd/late"]);
    let ring = place.path("ring");
    cluster.user("client.late", "profile rbd", &ring);
    let conf = cluster.conf_with(&place, "keyring", ring.to_str().unwrap());
    let mut words = vec!["attach", "--via", "fuse", "--ceph-conf", &conf, "--ceph-id", "late"];
    words.extend(["--origin-timeout", "8", "rbd:rbd/late"]);
    let disk = open(Path::new(place.ok(words).trim()));
    cluster.ceph(&["auth", "rm", "client.late"]);
    kill(helpers(&only(&place)["server_pid"])[0]);
    thread::scope(|scope| {
        let written = scope.spawn(|| disk.write_all_at(&Block::of(1).0, 0));
        let ended = wait_until(Duration::from_secs(30), || written.is_finished());
        cluster.ceph(&["auth", "import", "-i", ring.to_str().unwrap()]);
        assert_eq!(written.join().unwrap().map_err(|error| error.raw_os_error()), Err(Some(5)));
        assert!(ended, "it waits for more than its 8 s");
    });
    // It is looked for all the same, and seen when it is back.
    assert!(wait_until(Duration::from_secs(20), || only(&place)["away"].is_null()), "{:?}", only(&place));
    disk.write_all_at(&Block::of(2).0, 0).unwrap();
    drop(disk);
    place.ok(["detach", "--all"]);
}

/// Its lock is not waited for, once the cluster counts it as dead.
#[test]
fn fuse_the_image_of_a_host_that_died_is_taken_over() {
    let Some(cluster) = fuse("rbd_life::fuse_the_image_of_a_host_that_died_is_taken_over") else { return };
    let (dead, other) = (scratch(), scratch());
    cluster.rbd(&["create", "--size", "8M", "rbd/host"]);
    let disk = open(&attach(cluster, &dead, &["rbd:rbd/host"]));
    disk.write_all_at(&Block::of(1).0, 0).unwrap();
    drop(disk);
    let device = only(&dead);
    // All of it stands still, as a host without power; it is ended at the end of this test.
    let helper = helpers(&device["server_pid"])[0].into();
    let all = [&helper, &device["server_pid"], &device["worker_pid"]];
    let signal = |name| {
        all.iter().for_each(|pid| drop(tool(Command::new("kill").args([name, pid.to_string().as_str()]))))
    };
    signal("-STOP");
    let conf = cluster.conf();
    let words = ["attach", "--via", "fuse", "--ceph-conf", conf.to_str().unwrap(), "rbd:rbd/host"];
    assert!(other.run(words).err.contains("is in use"), "it may live");
    let taken = wait_until(Duration::from_secs(60), || other.run(words).code == 0);
    signal("-CONT");
    assert!(taken, "{:?}", other.run(words));
    let disk = open(Path::new(text(&only(&other), "device")));
    let mut found = Block::of(0);
    disk.read_exact_at(&mut found.0, 0).unwrap();
    assert!(found.0 == Block::of(1).0);
    disk.write_all_at(&Block::of(2).0, 0).unwrap();
    // The one that was dead is lost, and writes nothing.
    let lost = || only(&dead)["away"].as_str().is_some_and(|away| away.starts_with("lost"));
    let late = open(Path::new(text(&only(&dead), "device")));
    assert!(late.write_all_at(&Block::of(3).0, 0).is_err());
    assert!(wait_until(Duration::from_secs(20), lost), "{:?}", only(&dead));
    disk.read_exact_at(&mut found.0, 0).unwrap();
    assert!(found.0 == Block::of(2).0);
    drop((disk, late));
    dead.ok(["detach", "--all"]);
    other.ok(["detach", "--all"]);
}

/// Writes wait, reads do not, and the list says why.
#[test]
fn fuse_writes_wait_while_a_pool_is_full() {
    let name = "rbd_life::fuse_writes_wait_while_a_pool_is_full";
    let Some(cluster) = own(name, "memstore") else { return };
    let place = scratch();
    for image in ["rbd/full", "rbd/other"] {
        cluster.rbd(&["create", "--size", "8M", image]);
    }
    let disk = open(&attach(&cluster, &place, &["--name", "full", "rbd:rbd/full"]));
    for block in 0..16 {
        disk.write_all_at(&Block::of(block).0, block * 4096).unwrap();
    }
    let becomes_full = |is_full: bool| {
        let ratio = if is_full { "0.000001" } else { "0.9" };
        for which in ["set-nearfull-ratio", "set-backfillfull-ratio", "set-full-ratio"] {
            cluster.ceph(&["osd", which, ratio]);
        }
        let said = || cluster.ceph(&["osd", "pool", "ls", "detail"]).contains(",full");
        assert!(wait_until(Duration::from_secs(30), || said() == is_full));
    };
    becomes_full(true);
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        let written = scope.spawn(|| disk.write_all_at(&Block::of(100).0, 0));
        let reads = scope.spawn(|| {
            let mut reads = 0;
            while !ends.load(Ordering::Relaxed) {
                let mut found = Block::of(0);
                disk.read_exact_at(&mut found.0, 15 * 4096).unwrap();
                assert!(found.0 == Block::of(15).0);
                reads += 1;
            }
            reads
        });
        let full = || only(&place)["away"].as_str().is_some_and(|away| away.contains("\"rbd\" is full"));
        let said = wait_until(Duration::from_secs(30), full);
        ends.store(true, Ordering::Relaxed);
        assert!(said, "{:?}", only(&place));
        assert!(reads.join().unwrap() > 100, "reads go on");
        assert!(!written.is_finished(), "it waits for room");
        // Another device can still read it, and none is made that would wait at once.
        let conf = cluster.conf();
        let ran = place.run(["attach", "--ceph-conf", conf.to_str().unwrap(), "rbd:rbd/other"]);
        assert!(ran.code == 1 && ran.err.contains("the pool \"rbd\" is full"), "{ran:?}");
        let second = attach(&cluster, &place, &["--name", "second", "--read-only", "rbd:rbd/full"]);
        let mut found = Block::of(0);
        fs::File::open(&second).unwrap().read_exact_at(&mut found.0, 15 * 4096).unwrap();
        assert!(found.0 == Block::of(15).0);
        place.ok(["detach", "second"]);
        becomes_full(false);
        written.join().unwrap().unwrap();
    });
    assert!(wait_until(Duration::from_secs(10), || only(&place)["away"].is_null()), "{:?}", only(&place));
    let mut found = Block::of(0);
    disk.read_exact_at(&mut found.0, 0).unwrap();
    assert!(found.0 == Block::of(100).0);
    drop(disk);
    place.ok(["detach", "--all"]);
}

/// librbd holds its reads back until the cluster answers, and nobody waits for them.
#[test]
fn fuse_a_reader_that_died_keeps_no_device_of_a_silent_cluster() {
    let Some(cluster) =
        own("rbd_life::fuse_a_reader_that_died_keeps_no_device_of_a_silent_cluster", "memstore")
    else {
        return;
    };
    let place = scratch();
    cluster.rbd(&["create", "--size", "8M", "rbd/silent"]);
    let path = attach(&cluster, &place, &["rbd:rbd/silent"]);
    open(&path).write_all_at(&Block::of(1).0, 0).unwrap();
    cluster.say("kill-osd");
    let mut reader = Command::new("dd");
    reader.arg(format!("if={}", path.display()));
    let mut reader = reader.args(["of=/dev/null", "iflag=direct", "bs=4k", "count=1"]).spawn().unwrap();
    thread::sleep(Duration::from_secs(1));
    assert_eq!(reader.try_wait().unwrap(), None, "it waits");
    reader.kill().unwrap();
    let begun = Instant::now();
    place.ok(["detach", "--all"]);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(place.devices().is_empty());
    reader.wait().unwrap();
}

/// Requests fail at once, the list says why, the log says it once, and the device can be detached.
#[test]
fn fuse_a_device_whose_pool_is_deleted_is_lost() {
    let name = "rbd_life::fuse_a_device_whose_pool_is_deleted_is_lost";
    let Some(cluster) = own(name, "memstore") else { return };
    let place = scratch();
    cluster.rbd(&["create", "--size", "8M", "rbd/a"]);
    let disk = open(&attach(&cluster, &place, &["rbd:rbd/a"]));
    disk.write_all_at(&Block::of(1).0, 0).unwrap();
    disk.sync_all().unwrap();
    cluster.ceph(&["osd", "pool", "rm", "rbd", "rbd", "--yes-i-really-really-mean-it"]);
    let mut found = Block::of(0);
    let fails = || disk.read_exact_at(&mut found.0, 0).is_err();
    assert!(wait_until(Duration::from_secs(30), fails), "{:?}", only(&place));
    let lost = || only(&place)["away"].as_str().is_some_and(|away| away.starts_with("lost since "));
    assert!(wait_until(Duration::from_secs(10), lost), "{:?}", only(&place));
    for _ in 0..20 {
        assert!(disk.write_all_at(&Block::of(2).0, 4096).is_err());
        thread::sleep(Duration::from_millis(50));
    }
    let log = fs::read_to_string(place.runtime().join("log")).unwrap();
    assert_eq!(log.matches("its image is another's").count(), 1, "{log}");
    drop(disk);
    place.ok(["detach", "--all"]);
    assert!(place.devices().is_empty());
}

#[test]
fn fuse_a_device_follows_the_length_of_its_image() {
    let Some(cluster) = fuse("rbd_life::fuse_a_device_follows_the_length_of_its_image") else { return };
    let place = scratch();
    cluster.rbd(&["create", "--size", "8M", "rbd/long"]);
    let path = attach(cluster, &place, &["rbd:rbd/long"]);
    let is_long = |size: u64| {
        let said = || only(&place)["size"].as_u64() == Some(size);
        assert!(wait_until(Duration::from_secs(20), said), "{:?}", only(&place));
        let seen = || fs::File::open(&path).unwrap().seek(SeekFrom::End(0)).unwrap();
        assert!(wait_until(Duration::from_secs(5), || seen() == size), "{}", seen());
    };
    cluster.rbd(&["resize", "--no-progress", "--size", "16M", "rbd/long"]);
    is_long(16 << 20);
    let disk = open(&path);
    disk.write_all_at(&Block::of(1).0, 12 << 20).unwrap();
    // Processes that follow know it, too.
    kill(&only(&place)["worker_pid"]);
    kill(helpers(&only(&place)["server_pid"])[0]);
    let mut found = Block::of(0);
    disk.read_exact_at(&mut found.0, 12 << 20).unwrap();
    assert!(found.0 == Block::of(1).0);
    cluster.rbd(&["resize", "--no-progress", "--allow-shrink", "--size", "4M", "rbd/long"]);
    is_long(4 << 20);
    kill(&only(&place)["server_pid"]);
    disk.write_all_at(&Block::of(2).0, 0).unwrap();
    drop(disk);
    place.ok(["detach", "--all"]);
}

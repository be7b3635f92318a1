//! Images of a real Ceph cluster (`scripts/ceph.sh`): read by commands, attached, and served while everything
//! dies that can. One cluster for all tests of this file, with images of their own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use becket_testkit::{Ran, Scratch, require_plain_machine, tool, wait_until};
use common::ceph::{Cluster, attach, cluster, fuse, helpers};
use common::nbd_server::Server;
use common::one::{Block, kill, only};
use common::page::direct as open;
use common::{scratch, text};
use serde_json::Value;

/// An image of an ext4 of 32 MiB with one file.
fn ext4(cluster: &Cluster, place: &Scratch, image: &str) -> PathBuf {
    let tree = place.dir("tree");
    fs::create_dir_all(tree.join("dir")).unwrap();
    fs::write(tree.join("dir/file"), "from a cluster").unwrap();
    let path = place.path("d.img");
    let _ = fs::remove_file(&path);
    tool(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&tree).arg(&path).arg("32M"));
    cluster.rbd(&["import", "--no-progress", path.to_str().unwrap(), image]);
    path
}

#[track_caller]
fn fails(ran: &Ran, why: &str) {
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains(why), "{why:?} is not in {ran:?}");
}

#[test]
fn an_image_is_read_without_a_device() {
    let Some(cluster) = cluster("rbd::an_image_is_read_without_a_device") else { return };
    let place = scratch();
    let image = ext4(cluster, &place, "rbd/read");
    cluster.rbd(&["snap", "create", "--no-progress", "rbd/read@s1"]);
    cluster.rbd(&["namespace", "create", "rbd/ns"]);
    cluster.rbd(&["import", "--no-progress", image.to_str().unwrap(), "rbd/ns/inner"]);
    let conf = cluster.conf();
    let with = ["--ceph-conf", conf.to_str().unwrap()];
    for name in ["rbd:rbd/read", "rbd:rbd/read@s1", "rbd:rbd/ns/inner"] {
        let words = |words: &[&str]| -> Vec<String> {
            words.iter().chain(&with).map(|word| (*word).to_owned()).collect()
        };
        let inside = format!("{name}#dir/file");
        assert_eq!(place.ok(words(&["cat", &inside])), "from a cluster");
        assert!(place.ok(words(&["ls", &format!("{name}#dir")])).contains("file"));
        assert!(place.ok(words(&["inspect", name])).contains("ext4"));
        let copied = place.path("copied");
        place.ok(words(&["copy", "--force", name, copied.to_str().unwrap()]));
        assert!(fs::read(&copied).unwrap() == fs::read(&image).unwrap(), "the copy differs");
        let stored = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&copied).unwrap()) * 512;
        assert!(stored < 16 << 20, "a copy keeps holes: {stored} bytes are stored");
    }
    let named = format!("rbd:rbd/read?conf={}#dir/file", conf.display());
    assert_eq!(place.ok(["cat", &named]), "from a cluster");
    let by_variable = place.becket().env("CEPH_CONF", &conf).args(["cat", "rbd:rbd/read#dir/file"]).output();
    assert_eq!(by_variable.unwrap().stdout, b"from a cluster");
}

/// With the image's lock, and with no other writer.
#[test]
fn fuse_a_copy_is_written_to_an_image() {
    let Some(cluster) = fuse("rbd::fuse_a_copy_is_written_to_an_image") else { return };
    let place = scratch();
    let image = place.path("a.img");
    fs::write(&image, becket_testkit::image::random_bytes(3 << 20, 1)).unwrap();
    let conf = cluster.conf();
    let copy = |to: &str| {
        let words = ["copy", "--force", "--ceph-conf", conf.to_str().unwrap(), image.to_str().unwrap(), to];
        place.run(words)
    };
    cluster.rbd(&["create", "--size", "3145728B", "rbd/copied"]);
    let ran = copy("rbd:rbd/copied");
    assert_eq!(ran.code, 0, "{ran:?}");
    let out = place.path("out.img");
    cluster.rbd(&["export", "--no-progress", "rbd/copied", out.to_str().unwrap()]);
    assert!(fs::read(&out).unwrap() == fs::read(&image).unwrap());
    let free = || cluster.rbd(&["lock", "ls", "rbd/copied"]).trim().is_empty();
    assert!(wait_until(Duration::from_secs(8), free), "the lock is given back");
    attach(cluster, &place, &["rbd:rbd/copied"]);
    fails(&copy("rbd:rbd/copied"), "the image is in use");
    place.ok(["detach", "--all"]);
    cluster.rbd(&["snap", "create", "--no-progress", "rbd/copied@s"]);
    fails(&copy("rbd:rbd/copied@s"), "a snapshot is only read");
    fails(&copy("rbd:rbd/none@s"), "rbd has no image \"none@s\"");
}

/// It has its name once all of it is there, and is gone where it cannot be completed.
#[test]
fn a_copy_makes_the_image_that_is_missing() {
    let name = "rbd::a_copy_makes_the_image_that_is_missing";
    if !require_plain_machine(name, &["nbdkit"]) {
        return;
    }
    let Some(cluster) = cluster(name) else { return };
    let place = scratch();
    let (image, out) = (place.path("a.img"), place.path("out.img"));
    // Data, a long hole, and an end inside of a sector.
    let file = fs::File::create(&image).unwrap();
    file.write_all_at(&becket_testkit::image::random_bytes(48 << 20, 1), 0).unwrap();
    file.write_all_at(b"end", (200 << 20) + 5).unwrap();
    let (conf, image_name) = (cluster.conf(), image.to_str().unwrap());
    let conf = conf.to_str().unwrap();
    let copy = |from: &str, to: &str| place.run(["copy", "--ceph-conf", conf, from, to]);
    let ran = copy(image_name, "rbd:rbd/made");
    assert_eq!(ran.code, 0, "{ran:?}");
    cluster.rbd(&["export", "--no-progress", "rbd/made", out.to_str().unwrap()]);
    assert!(fs::read(&out).unwrap() == fs::read(&image).unwrap());
    let used: Value = serde_json::from_str(&cluster.rbd(&["du", "--format", "json", "rbd/made"])).unwrap();
    assert!(used["images"][0]["used_size"].as_u64().unwrap() <= 56 << 20, "{used}");
    fails(&copy(image_name, "rbd:rbd/made"), "it exists");
    fails(&copy(image_name, "rbd:none/made"), "no pool named \"none\"");
    // It can be locked also where new images of the cluster cannot.
    let (small, other) = (place.path("small.img"), place.path("plain.conf"));
    fs::write(&small, [1; 4096]).unwrap();
    let text = fs::read_to_string(conf).unwrap();
    fs::write(&other, text.replacen("[global]", "[global]\nrbd default features = 1", 1)).unwrap();
    let words = ["copy", "--ceph-conf", other.to_str().unwrap(), small.to_str().unwrap(), "rbd:rbd/plain"];
    place.ok(words);
    let info = cluster.rbd(&["info", "rbd/plain"]);
    assert!(info.contains("features: layering, exclusive-lock"), "{info}");

    // A source that takes twelve seconds: the copy is interrupted, killed, or finds its name taken.
    let socket = place.path("s");
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-r", "--filter=rate", "-U"]).arg(&socket).args(["file", image_name, "rate=32M"]);
    let server = Server::start(command, socket);
    let names = || cluster.rbd(&["ls", "rbd"]);
    let under_way = || names().contains(".becket-");
    for end in ["TERM", "KILL", "taken"] {
        let mut ours = place.becket();
        ours.args(["copy", "--ceph-conf", conf, &server.uri(""), "rbd:rbd/cut"]);
        let child = ours.stderr(Stdio::piped()).spawn().unwrap();
        assert!(wait_until(Duration::from_secs(20), under_way), "{}", names());
        match end {
            "taken" => drop(cluster.rbd(&["create", "--size", "1M", "rbd/cut"])),
            signal => drop(tool(Command::new("kill").args(["-s", signal, &child.id().to_string()]))),
        }
        let ended = child.wait_with_output().unwrap();
        assert!(!ended.status.success(), "{end}: {ended:?}");
        assert!(wait_until(Duration::from_secs(20), || !under_way()), "{end}: {}", names());
        let (said, taken) = (String::from_utf8_lossy(&ended.stderr), end == "taken");
        assert!(!taken || said.contains("exists"), "{said}");
        assert_eq!(names().lines().any(|name| name == "cut"), taken, "{end}: {}", names());
    }
}

#[test]
fn what_stands_against_an_image_is_said() {
    let Some(cluster) = cluster("rbd::what_stands_against_an_image_is_said") else { return };
    let place = scratch();
    cluster.rbd(&["create", "--size", "8M", "rbd/errors"]);
    cluster.rbd(&["create", "--size", "8M", "--image-feature", "layering", "rbd/unlocked"]);
    let conf = cluster.conf();
    let run = |words: &[&str]| place.run(words.iter().chain(&["--ceph-conf", conf.to_str().unwrap()]));
    fails(&run(&["ls", "rbd:none/x"]), "no pool named \"none\"");
    fails(&run(&["ls", "rbd:rbd/none"]), "rbd has no image \"none\"");
    fails(&run(&["ls", "rbd:rbd/errors@none"]), "rbd has no image \"errors@none\"");
    fails(&run(&["ls", "rbd:errors"]), "it names no pool");
    fails(&run(&["ls", "rbd:rbd/errors", "--ceph-id", "nobody"]), "client.nobody");
    fails(&place.run(["ls", "rbd:rbd/errors", "--ceph-conf", "/none"]), "/none: the configuration");
    let attach = |words: &[&str]| run(&[&["attach", "--via", "fuse"][..], words].concat());
    fails(&attach(&["rbd:rbd/unlocked"]), "lacks the feature exclusive-lock");
    for via in ["dm", "loop"] {
        fails(&run(&["attach", "--via", via, "rbd:rbd/errors"]), "the image is on a server");
    }
    // A key that is none.
    let ring = place.path("ring");
    fs::write(&ring, "[client.wrong]\n\tkey = AQCnHORmm0TDFRAAmDlAj5eDTdRvAWEm0Bm4Tg==\n").unwrap();
    let other = cluster.conf_with(&place, "keyring", ring.to_str().unwrap());
    let other = other.as_str();
    let wrong = place.run(["ls", "rbd:rbd/errors", "--ceph-conf", other, "--ceph-id", "wrong"]);
    fails(&wrong, "does not accept the key of client.wrong");
    // One that may only read.
    cluster.user("client.reader", "profile rbd-read-only", &ring);
    let by_reader = ["--ceph-conf", other, "--ceph-id", "reader"];
    let words = |words: &[&str]| place.run(words.iter().chain(&by_reader));
    fails(&words(&["attach", "--via", "fuse", "rbd:rbd/errors"]), "client.reader may not write rbd/errors");
    assert_eq!(words(&["inspect", "rbd:rbd/errors"]).code, 0);
    // No monitor.
    let gone = cluster.conf_with(&place, "mon host", "[v2:127.0.0.1:1]");
    let begun = Instant::now();
    fails(&place.run(["ls", "rbd:rbd/errors", "--ceph-conf", &gone]), "no monitor");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}

#[test]
fn fuse_an_image_is_mounted_and_written() {
    let Some(cluster) = fuse("rbd::fuse_an_image_is_mounted_and_written") else { return };
    let place = scratch();
    ext4(cluster, &place, "rbd/mounted");
    let disk = attach(cluster, &place, &["rbd:rbd/mounted"]);
    let device = only(&place);
    assert_eq!(text(&device, "image"), format!("rbd:rbd/mounted?conf={}", cluster.conf().display()));
    let point = place.dir("mnt");
    tool(Command::new("mount").args([&disk, &point]));
    assert_eq!(fs::read_to_string(point.join("dir/file")).unwrap(), "from a cluster");
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|number| (number / 7) as u8).collect();
    fs::write(point.join("new"), &bytes).unwrap();
    fs::File::open(point.join("new")).unwrap().sync_all().unwrap();
    tool(Command::new("fstrim").arg(&point));
    tool(Command::new("umount").arg(&point));
    let begun = Instant::now();
    place.ok(["detach", disk.to_str().unwrap()]);
    // The lock is free at once, and nobody watches.
    let free = || cluster.rbd(&["lock", "ls", "rbd/mounted"]).trim().is_empty();
    assert!(wait_until(Duration::from_secs(8), free), "{}", cluster.rbd(&["lock", "ls", "rbd/mounted"]));
    assert!(begun.elapsed() < Duration::from_secs(9));
    let out = place.path("out.img");
    cluster.rbd(&["export", "--no-progress", "rbd/mounted", out.to_str().unwrap()]);
    tool(Command::new("e2fsck").args(["-fn"]).arg(&out));
    place.ok(["cat", &format!("{}/new", out.display())]);
    // A snapshot is only read.
    cluster.rbd(&["snap", "create", "--no-progress", "rbd/mounted@s"]);
    let disk = attach(cluster, &place, &["rbd:rbd/mounted@s"]);
    assert_eq!(only(&place)["read_only"], true);
    assert!(fs::read(&disk).unwrap() == fs::read(&out).unwrap());
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_two_hosts_never_write_one_image() {
    let Some(cluster) = fuse("rbd::fuse_two_hosts_never_write_one_image") else { return };
    let (one, other) = (scratch(), scratch());
    cluster.rbd(&["create", "--size", "8M", "rbd/two"]);
    let disk = open(&attach(cluster, &one, &["rbd:rbd/two"]));
    disk.write_all_at(&Block::of(1).0, 0).unwrap();
    let conf = cluster.conf();
    let second = other.run(["attach", "--via", "fuse", "--ceph-conf", conf.to_str().unwrap(), "rbd:rbd/two"]);
    fails(&second, "is in use: the client 127.0.0.1:0/");
    // Reading is no use of it.
    attach(cluster, &other, &["--read-only", "rbd:rbd/two"]);
    other.ok(["detach", "--all"]);
    disk.write_all_at(&Block::of(2).0, 0).unwrap();

    // An administrator takes the lock away, and the other host gets the image.
    let locks: Value =
        serde_json::from_str(&cluster.rbd(&["lock", "ls", "--format", "json", "rbd/two"])).unwrap();
    let lock = &locks[0];
    cluster.rbd(&["lock", "rm", "rbd/two", text(lock, "id"), text(lock, "locker")]);
    let begun = Instant::now();
    let shown = || only(&one)["away"].as_str().is_some_and(|away| away.starts_with("lost since 2"));
    assert!(wait_until(Duration::from_secs(20), shown), "{:?}", only(&one));
    assert!(begun.elapsed() < Duration::from_secs(5), "the loser hears of it after {:?}", begun.elapsed());
    let taken = open(&attach(cluster, &other, &["rbd:rbd/two"]));
    taken.write_all_at(&Block::of(3).0, 0).unwrap();
    let failed = disk.write_all_at(&Block::of(4).0, 0).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(5), "{failed}");
    // Nor by another worker or another program of the loser.
    let device = only(&one);
    kill(&device["worker_pid"]);
    assert!(disk.write_all_at(&Block::of(4).0, 0).is_err());
    kill(helpers(&device["server_pid"])[0]);
    assert!(disk.write_all_at(&Block::of(4).0, 0).is_err());
    let mut found = Block::of(0);
    taken.read_exact_at(&mut found.0, 0).unwrap();
    assert!(found.0 == Block::of(3).0);
    drop((disk, taken));
    one.ok(["detach", "--all"]);
    other.ok(["detach", "--all"]);
}

/// A backing file is a file: what an image names is never connected to.
#[test]
fn no_image_names_an_image_of_a_cluster() {
    let name = "rbd::no_image_names_an_image_of_a_cluster";
    if !require_plain_machine(name, &["qemu-img"]) {
        return;
    }
    let place = scratch();
    let image = place.path("evil.qcow2");
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", "rbd:rbd/secret"]);
    tool(create.arg(&image).arg("1M"));
    let ran = place.run(["inspect", image.to_str().unwrap()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("rbd:rbd/secret"), "{ran:?}");
}

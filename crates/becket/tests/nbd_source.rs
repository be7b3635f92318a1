//! Images on NBD servers: read by commands, attached, and served while servers and workers die.
//! Every server listens at a unix socket in the test's own directory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{fs, os::unix::fs::FileExt as _, path::Path, process::Command, thread, time::Duration};

use becket_testkit::{
    Scratch, require_fuse, require_plain_machine, require_root, require_tools, tool, wait_until,
};
use common::nbd_server::{Server, attach, ext4};
use common::one::{Block, kill, only};
use common::page::direct as open;
use common::{scratch, text};

/// Whether the only device is served, and its server there.
fn is_live(place: &Scratch) -> bool {
    let device = only(place);
    text(&device, "state") == "live" && device["away"].is_null()
}

#[test]
fn an_image_on_a_server_is_read_without_a_device() {
    let name = "nbd_source::an_image_on_a_server_is_read_without_a_device";
    if !require_plain_machine(name, &["mke2fs", "nbdkit", "qemu-nbd", "qemu-img"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let qcow2 = place.path("e.qcow2");
    tool(Command::new("qemu-img").args(["convert", "-O", "qcow2"]).args([&image, &qcow2]));
    let servers = [
        (Server::nbdkit(&image, &[]), ""),
        (Server::qemu(&image, &["-e", "4", "-r"]), "disk"),
        // The server gives out the file's own bytes, and becket unpacks them.
        (Server::nbdkit(&qcow2, &["-r"]), ""),
    ];
    for (server, export) in &servers {
        let uri = server.uri(export);
        let inside = format!("{uri}#dir/file");
        assert_eq!(place.ok(["cat", &inside]), "from afar");
        assert!(place.ok(["ls", &format!("{uri}#dir")]).contains("file"));
        assert!(place.ok(["inspect", &uri]).contains("ext4"));
        assert!(place.ok(["map", &uri]).contains("data"));
        let copied = place.path("copied");
        place.ok(["copy", "--force", &uri, copied.to_str().unwrap()]);
        assert!(fs::read(&copied).unwrap() == fs::read(&image).unwrap(), "the copy differs");
        place.ok(["cp", "--force", &inside, place.path("file").to_str().unwrap()]);
        assert_eq!(fs::read_to_string(place.path("file")).unwrap(), "from afar");
    }
    let gone = place.run(["ls", &servers[1].0.uri("other")]);
    assert_eq!(gone.code, 1, "{gone:?}");
    assert!(gone.err.contains("no export named \"other\"") && gone.err.contains("nbdinfo"), "{gone:?}");
    let wrong = place.run(["ls", "nbd+unix:///x"]);
    assert!(wrong.err.contains("it names no socket"), "{wrong:?}");
}

/// Starts a server of an image; the name of its export.
type Start = fn(&Path) -> (Server, &'static str);

#[test]
fn fuse_a_device_on_a_server_is_written_and_mounted() {
    let name = "nbd_source::fuse_a_device_on_a_server_is_written_and_mounted";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit", "qemu-nbd", "fio", "e2fsck"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    // Two of them listen at the same place: the next one starts when the last one has ended.
    let servers: [Start; 3] = [
        |image| (Server::nbdkit(image, &[]), ""),
        // One connection, and no promise about several.
        |image| (Server::qemu(image, &[]), "disk"),
        // Writes of zeroes and trims have to be done by hand.
        |image| {
            (Server::nbdkit(image, &["--filter=nozero", "--filter=fua", "--filter=blocksize-policy"]), "")
        },
    ];
    for start in servers {
        let (server, export) = start(&image);
        let disk = attach(&place, &[&server.uri(export)]);
        let device = only(&place);
        assert_eq!(text(&device, "image"), server.uri(export));
        assert_eq!(device["isolated"], true);
        if export == "disk" {
            assert_eq!(device["queues"], 1, "without a promise, a flush covers one connection");
        }
        let point = place.dir("mnt");
        tool(Command::new("mount").args([&disk, &point]));
        assert_eq!(fs::read_to_string(point.join("dir/file")).unwrap(), "from afar");
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|number| (number / 7) as u8).collect();
        fs::write(point.join("new"), &bytes).unwrap();
        fs::File::open(point.join("new")).unwrap().sync_all().unwrap();
        fs::remove_file(point.join("new")).unwrap();
        fs::write(point.join("new"), &bytes).unwrap();
        becket_testkit::umount(&point);
        place.ok(["detach", disk.to_str().unwrap()]);
        assert!(place.devices().is_empty());
        drop(server);
        tool(Command::new("e2fsck").args(["-fn"]).arg(&image));
        let again = place.run(["cat", &format!("{}/new", image.display())]);
        assert_eq!(again.code, 0, "{again:?}");
    }
}

#[test]
fn fuse_a_server_s_socket_may_be_on_any_mount_and_keeps_none_in_use() {
    let name = "nbd_source::fuse_a_server_s_socket_may_be_on_any_mount_and_keeps_none_in_use";
    if !require_fuse(name) || !require_root(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let point = place.dir("mounted");
    let mount = || tool(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&point));
    // becket's server runs before the mount is there.
    let other = place.path("other.img");
    fs::write(&other, [0; 1 << 20]).unwrap();
    let other = attach(&place, &[other.to_str().unwrap()]);
    mount();
    // A link leads there, too.
    let link = place.path("link");
    std::os::unix::fs::symlink(&point, &link).unwrap();
    let mut command = Command::new("nbdkit");
    let socket = link.join("s");
    command.args(["-f", "-U"]).arg(&socket).arg("file").arg(&image);
    let mut server = Server::start(command, socket);
    let disk = attach(&place, &[&server.uri("")]);
    let device = open(&disk);
    device.write_all_at(&Block::of(1).0, 8192).unwrap();
    device.sync_all().unwrap();
    // Another mount takes its place while the server is away.
    server.die();
    becket_testkit::umount(&point);
    mount();
    server.again();
    let reads = || {
        let mut block = Block::of(0);
        device.read_exact_at(&mut block.0, 8192).unwrap();
        assert!(block.0 == Block::of(1).0);
    };
    reads();
    // Guards that take a dead supervisor's place, and start connectors of their own, see it, too.
    for _ in 0..2 {
        let all = place.devices();
        let of_it = all.iter().find(|device| text(device, "image").starts_with("nbd")).unwrap();
        kill(&of_it["server_pid"]);
        kill(&of_it["worker_pid"]);
        reads();
        let lives = || place.devices().iter().all(|device| text(device, "state") == "live");
        assert!(wait_until(Duration::from_secs(30), lives), "{:?}", place.devices());
    }
    // The dead had nothing unflushed, but nobody is left who knows that. One flush says so, or `detach` does.
    let _ = device.sync_all();
    drop(device);
    place.ok(["detach", disk.to_str().unwrap()]);
    place.ok(["detach", other.to_str().unwrap()]);
    drop(server);
    becket_testkit::umount(&point);
}

/// The command that starts becket's server may run in a mount namespace that ends with it, mounts included.
#[test]
fn fuse_a_server_is_found_when_the_namespace_is_gone_in_which_becket_s_began() {
    let name = "nbd_source::fuse_a_server_is_found_when_the_namespace_is_gone_in_which_becket_s_began";
    if !require_fuse(name) || !require_root(name) || !require_tools(name, &["mke2fs", "nbdkit", "unshare"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let other = place.path("other.img");
    fs::write(&other, [0; 1 << 20]).unwrap();
    let mut begins = Command::new("unshare");
    begins.args(["-m", "--"]).arg(place.becket().get_program()).args(["attach", "--via", "fuse"]).arg(&other);
    place.prepare(&mut begins);
    let begun = place.finish(&mut begins);
    assert_eq!(begun.code, 0, "{begun:?}");
    let mut command = Command::new("nbdkit");
    // On a mount that each of becket's processes keeps.
    let socket = Path::new("/dev").join(format!("becket-test-{}", std::process::id()));
    command.args(["-f", "-U"]).arg(&socket).arg("file").arg(&image);
    let server = Server::start(command, socket);
    let disk = attach(&place, &[&server.uri("")]);
    assert!(place.ok(["list"]).contains("nbd+unix"));
    place.ok(["detach", disk.to_str().unwrap()]);
    place.ok(["detach", "--all"]);
    fs::remove_file(&server.socket).unwrap();
}

#[test]
fn fuse_a_server_that_dies_is_waited_for_and_one_flush_fails() {
    let name = "nbd_source::fuse_a_server_that_dies_is_waited_for_and_one_flush_fails";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let mut server = Server::nbdkit(&image, &[]);
    let disk = open(&attach(&place, &["--queues", "2", &server.uri("")]));
    disk.write_all_at(&Block::of(1).0, 8192).unwrap();
    disk.sync_all().unwrap();
    // All is flushed: a break costs nothing.
    server.die();
    server.again();
    disk.write_all_at(&Block::of(2).0, 4096).unwrap();
    // Written, and not flushed.
    server.die();
    let waits = thread::spawn({
        let disk = disk.try_clone().unwrap();
        move || {
            let mut block = Block::of(0);
            disk.read_exact_at(&mut block.0, 8192).map(|()| block)
        }
    });
    let shown = || only(&place)["away"].as_str().is_some_and(|away| away.starts_with("reconnecting since 2"));
    assert!(wait_until(Duration::from_secs(20), shown), "{:?}", only(&place));
    assert!(place.ok(["list"]).contains("reconnecting"));
    assert!(!waits.is_finished(), "it waits");
    server.again();
    assert!(waits.join().unwrap().unwrap().0 == Block::of(1).0);
    assert!(wait_until(Duration::from_secs(20), || only(&place)["away"].is_null()));
    assert_eq!(disk.sync_all().unwrap_err().raw_os_error(), Some(5), "the server may have lost it");
    disk.sync_all().unwrap();
    disk.write_all_at(&Block::of(3).0, 4096).unwrap();
    disk.sync_all().unwrap();
    // Whichever queues were idle at a death or not: of each, one flush fails, and each write is there.
    for round in 4..12 {
        let readers: Vec<_> = (0..4).map(|_| disk.try_clone().unwrap()).collect();
        let threads = readers.into_iter().map(|disk| {
            thread::spawn(move || (0..8).try_for_each(|at| disk.read_exact_at(&mut Block::of(0).0, at << 16)))
        });
        let threads: Vec<_> = threads.collect();
        disk.write_all_at(&Block::of(round).0, 4096).unwrap();
        server.die();
        server.again();
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        disk.write_all_at(&Block::of(round).0, 8192).unwrap();
        assert_eq!(disk.sync_all().unwrap_err().raw_os_error(), Some(5), "round {round}");
        disk.sync_all().unwrap();
        disk.write_all_at(&Block::of(round).0, 12288).unwrap();
        disk.sync_all().unwrap();
    }
    drop(disk);
    place.ok(["detach", "--all"]);
}

/// A server has died with unflushed bytes, and the worker before it could report that.
#[test]
fn fuse_what_a_dead_worker_had_to_report_its_successor_reports() {
    let name = "nbd_source::fuse_what_a_dead_worker_had_to_report_its_successor_reports";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let mut server = Server::nbdkit(&image, &[]);
    let disk = open(&attach(&place, &[&server.uri("")]));
    let live = || is_live(&place);
    let reads = || disk.read_exact_at(&mut Block::of(0).0, 1 << 20).unwrap();
    let dies = || {
        let worker = only(&place)["worker_pid"].clone();
        kill(&worker);
        assert!(wait_until(Duration::from_secs(30), || live() && only(&place)["worker_pid"] != worker));
    };
    disk.write_all_at(&Block::of(1).0, 8192).unwrap();
    server.die();
    server.again();
    reads();
    // The connections that are there now are whole, and still bytes are lost.
    for _ in 0..2 {
        dies();
        reads();
    }
    assert_eq!(disk.sync_all().unwrap_err().raw_os_error(), Some(5), "the first worker had to report it");
    disk.sync_all().unwrap();
    // Once the connector has heard that it was reported, that is over: no later death of a worker costs a
    // flush.
    thread::sleep(Duration::from_secs(8));
    disk.write_all_at(&Block::of(2).0, 8192).unwrap();
    dies();
    disk.sync_all().unwrap();
    drop(disk);
    place.ok(["detach", "--all"]);
}

/// A worker that leaves in order says before it goes that its user has heard of what was lost.
#[test]
fn fuse_what_was_reported_soon_before_an_upgrade_is_reported_once() {
    let name = "nbd_source::fuse_what_was_reported_soon_before_an_upgrade_is_reported_once";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let mut server = Server::nbdkit(&image, &[]);
    let disk = open(&attach(&place, &[&server.uri("")]));
    for round in 1..4 {
        disk.write_all_at(&Block::of(round).0, 8192).unwrap();
        server.die();
        server.again();
        disk.write_all_at(&Block::of(round).0, 4096).unwrap();
        assert_eq!(disk.sync_all().unwrap_err().raw_os_error(), Some(5), "round {round}");
        let before = only(&place)["server_pid"].clone();
        let mut serve = place.becket();
        let mut serve = serve.args(["serve", "--takeover", "--until-idle"]).spawn().unwrap();
        let upgraded = || is_live(&place) && only(&place)["server_pid"] != before;
        assert!(wait_until(Duration::from_secs(30), upgraded), "{:?}", only(&place));
        thread::spawn(move || serve.wait());
        disk.write_all_at(&Block::of(round).0, 12288).unwrap();
        disk.sync_all().unwrap();
    }
    drop(disk);
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_no_write_is_lost_when_workers_and_servers_of_ours_die() {
    let name = "nbd_source::fuse_no_write_is_lost_when_workers_and_servers_of_ours_die";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    const BLOCKS: u64 = 64;
    let place = scratch();
    let image = ext4(&place);
    let server = Server::nbdkit(&image, &[]);
    let disk = open(&attach(&place, &[&server.uri("")]));
    let ends = std::sync::atomic::AtomicBool::new(false);
    let rounds = thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut round = 0;
            while !ends.load(std::sync::atomic::Ordering::Relaxed) {
                round += 1;
                for block in 0..BLOCKS {
                    disk.write_all_at(&Block::of(round * BLOCKS + block).0, block * 4096).unwrap();
                }
                // The server lives, so nothing is lost: no flush may fail.
                disk.sync_all().unwrap();
                for block in 0..BLOCKS {
                    let mut found = Block::of(0);
                    disk.read_exact_at(&mut found.0, block * 4096).unwrap();
                    assert!(found.0 == Block::of(round * BLOCKS + block).0, "round {round}, block {block}");
                }
            }
            round
        });
        for victim in ["worker_pid", "worker_pid", "server_pid", "worker_pid"] {
            thread::sleep(Duration::from_millis(300));
            kill(&only(&place)[victim]);
            let live = || is_live(&place);
            assert!(wait_until(Duration::from_secs(30), live), "{:?} after {victim}", only(&place));
        }
        thread::sleep(Duration::from_millis(300));
        ends.store(true, std::sync::atomic::Ordering::Relaxed);
        load.join().unwrap()
    });
    assert!(rounds > 3, "only {rounds} rounds");
    drop(disk);
    place.ok(["detach", "--all"]);
    let found = fs::read(&image).unwrap();
    for block in 0..BLOCKS {
        let at = usize::try_from(block * 4096).unwrap();
        assert!(found[at..at + 4096] == Block::of(rounds * BLOCKS + block).0, "block {block}");
    }
}

#[test]
fn fuse_an_overlay_takes_what_is_written_over_a_server() {
    let name = "nbd_source::fuse_an_overlay_takes_what_is_written_over_a_server";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit", "qemu-img"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let before = fs::read(&image).unwrap();
    let server = Server::nbdkit(&image, &["-r"]);
    let (uri, overlay) = (server.uri(""), place.path("o.qcow2"));
    let point = place.dir("mnt");
    for round in 0..2 {
        let disk = attach(&place, &[&uri, "--cow", overlay.to_str().unwrap()]);
        tool(Command::new("mount").args([&disk, &point]));
        assert_eq!(point.join("new").exists(), round == 1);
        fs::write(point.join("new"), "written").unwrap();
        assert_eq!(fs::read_to_string(point.join("dir/file")).unwrap(), "from afar");
        becket_testkit::umount(&point);
        place.ok(["detach", disk.to_str().unwrap()]);
    }
    // One of QEMU's names the server; it is connected to when the user names it, too.
    let theirs = place.path("theirs.qcow2");
    let mut command = Command::new("qemu-img");
    tool(command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &uri]).arg(&theirs));
    let theirs = theirs.to_str().unwrap();
    tool(Command::new("qemu-io").args(["-f", "qcow2", "-c", "write -P 7 0 4k", theirs]));
    let alone = place.run(["attach", theirs]);
    let way = format!("becket attach '{uri}' --cow {theirs}");
    assert!(alone.code == 1 && alone.err.contains(&way), "{alone:?}");
    let disk = open(&attach(&place, &[&uri, "--cow", theirs]));
    let mut found = Block::of(0);
    disk.read_exact_at(&mut found.0, 0).unwrap();
    assert!(found.0 == [7; 4096]);
    disk.read_exact_at(&mut found.0, 1 << 20).unwrap();
    assert!(found.0 == before[1 << 20..][..4096]);
    drop(disk);
    place.ok(["detach", "--all"]);
    assert!(fs::read(&image).unwrap() == before, "the image is only read");
    let other = place.run(["attach", &uri, "--cow", image.to_str().unwrap()]);
    assert!(other.code == 1 && other.err.contains("is not an overlay"), "{other:?}");
}

#[test]
fn blocks_that_no_device_can_have_are_refused_and_copied() {
    let name = "nbd_source::blocks_that_no_device_can_have_are_refused_and_copied";
    if !require_plain_machine(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let policy = ["blocksize-minimum=8192", "blocksize-preferred=65536", "blocksize-maximum=1M"];
    let policy = [&policy[..], &["blocksize-error-policy=error"]].concat();
    let server = Server::nbdkit_by(&image, &["--filter=blocksize-policy"], &policy);
    let uri = server.uri("");
    for words in [
        &["attach", "--via", "fuse", &uri][..],
        &["export", "--nbd", &format!("unix:{}", place.path("s").display()), &uri],
    ] {
        let ran = place.run(words);
        assert_eq!(ran.code, 1, "{ran:?}");
        for says in ["multiples of 8192 bytes", "at most 4096", "becket copy"] {
            assert!(ran.err.contains(says), "{says}: {ran:?}");
        }
    }
    let copy = place.path("copy");
    place.ok(["copy", &uri, copy.to_str().unwrap()]);
    assert!(fs::read(&copy).unwrap() == fs::read(&image).unwrap());
}

/// The kernel's loop driver comes before FUSE, and can reach no server.
#[test]
fn fuse_a_transport_that_can_reach_the_server_is_chosen() {
    let name = "nbd_source::fuse_a_transport_that_can_reach_the_server_is_chosen";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let server = Server::nbdkit(&ext4(&place), &[]);
    place.ok(["attach", &server.uri("")]);
    let device = only(&place);
    assert!(["ublk", "fuse"].contains(&text(&device, "transport")), "{device:#}");
    place.ok(["detach", "--all"]);
}

#[test]
fn faults_are_not_injected_into_what_a_server_does() {
    let name = "nbd_source::faults_are_not_injected_into_what_a_server_does";
    if !require_plain_machine(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let server = Server::nbdkit(&ext4(&place), &[]);
    let (uri, socket) = (server.uri(""), format!("unix:{}", place.path("s.sock").display()));
    let overlay = place.path("o.qcow2");
    let overlay = overlay.to_str().unwrap();
    for words in [
        vec!["attach", &uri, "--fault", "error=read:EIO:1"],
        vec!["attach", &uri, "--cow", overlay, "--fault", "error=read:EIO:1"],
        vec!["export", &uri, "--nbd", &socket, "--fault", "delay=read:1ms"],
    ] {
        let ran = place.run(&words);
        assert!(ran.code == 1 && ran.err.contains("on an NBD server"), "{words:?}: {ran:?}");
        assert!(ran.err.contains("--filter=error"), "{ran:?}");
        assert!(place.devices().is_empty());
    }
    assert!(!place.path("o.qcow2").exists() && !place.path("s.sock").exists());
}

/// A server that promises nothing about several connections may have kept what a dead worker wrote, or not.
#[test]
fn fuse_without_a_promise_one_flush_fails_after_a_killed_worker() {
    let name = "nbd_source::fuse_without_a_promise_one_flush_fails_after_a_killed_worker";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "qemu-nbd"]) {
        return;
    }
    let place = scratch();
    let server = Server::qemu(&ext4(&place), &[]);
    let disk = open(&attach(&place, &[&server.uri("disk"), "--origin-timeout", "40s"]));
    let live = || is_live(&place);
    disk.write_all_at(&Block::of(1).0, 8192).unwrap();
    disk.sync_all().unwrap();
    disk.write_all_at(&Block::of(2).0, 4096).unwrap();
    kill(&only(&place)["worker_pid"]);
    assert!(wait_until(Duration::from_secs(30), live), "{:?}", only(&place));
    let mut found = Block::of(0);
    disk.read_exact_at(&mut found.0, 4096).unwrap();
    assert_eq!(disk.sync_all().unwrap_err().raw_os_error(), Some(5), "nobody knows whether it was kept");
    disk.sync_all().unwrap();
    disk.write_all_at(&Block::of(3).0, 4096).unwrap();
    disk.sync_all().unwrap();
    drop(disk);
    place.ok(["detach", "--all"]);
}

/// `qemu-nbd` as it is started most often: one client at a time, and it ends with the first one.
#[test]
fn fuse_a_server_of_one_client_serves_that_client() {
    let name = "nbd_source::fuse_a_server_of_one_client_serves_that_client";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "qemu-nbd"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let mut server = Server::qemu_of_one(&image, &[]);
    let disk = open(&attach(&place, &[&server.uri("disk"), "--origin-timeout", "5s"]));
    disk.write_all_at(&Block::of(7).0, 8192).unwrap();
    disk.sync_all().unwrap();
    // It cannot be asked for its length beside that, and the device goes on.
    let ran = place.run(["refresh", text(&place.devices()[0], "name")]);
    assert!(ran.code == 1 && ran.err.contains("cannot be asked how long that is"), "{ran:?}");
    disk.write_all_at(&Block::of(8).0, 16384).unwrap();
    disk.sync_all().unwrap();
    drop(disk);
    place.ok(["detach", "--all"]);
    assert!(wait_until(Duration::from_secs(10), || server.has_ended()), "its client has left");
    assert!(fs::read(&image).unwrap()[16384..20480] == Block::of(8).0);
    assert!(fs::read(&image).unwrap()[8192..12288] == Block::of(7).0);
}

/// Nobody waits for a flush of a server before anything was written: some answer it late, or never.
#[test]
fn fuse_a_server_is_asked_for_no_flush_before_a_write() {
    let name = "nbd_source::fuse_a_server_is_asked_for_no_flush_before_a_write";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let log = place.path("log");
    let server = Server::nbdkit_with_log(&ext4(&place), &log);
    let flushes =
        || fs::read_to_string(&log).unwrap().lines().filter(|line| line.contains(" Flush ")).count();
    let disk = open(&attach(&place, &[&server.uri("")]));
    disk.sync_all().unwrap();
    assert_eq!(flushes(), 0, "{}", fs::read_to_string(&log).unwrap());
    disk.write_all_at(&Block::of(7).0, 8192).unwrap();
    disk.sync_all().unwrap();
    assert!(flushes() > 0, "{}", fs::read_to_string(&log).unwrap());
    drop(disk);
    place.ok(["detach", "--all"]);
}

/// Readers, too, have one connection where the server does not offer several, on whatever CPU they are; a
/// dead worker's is ended before its successor gets one.
#[test]
fn fuse_readers_of_a_server_of_one_client_share_a_connection() {
    let name = "nbd_source::fuse_readers_of_a_server_of_one_client_share_a_connection";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "qemu-nbd"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let server = Server::qemu(&image, &["-r"]);
    let path = attach(&place, &["-r", &server.uri("disk"), "--origin-timeout", "20s"]);
    let all_read = || {
        for cpu in 0..thread::available_parallelism().unwrap().get() {
            let (path, image) = (path.display(), image.display());
            let script =
                format!("taskset -c {cpu} dd if={path} iflag=direct bs=64k status=none | cmp - {image}");
            tool(Command::new("timeout").args(["60", "sh", "-c", &script]));
        }
    };
    all_read();
    kill(&only(&place)["worker_pid"]);
    assert!(wait_until(Duration::from_secs(30), || is_live(&place)), "{:?}", only(&place));
    all_read();
    place.ok(["detach", "--all"]);
}

/// A file system is written while what serves it dies again and again, and holds what was written.
#[test]
fn fuse_a_file_system_over_a_server_is_whole_after_kills() {
    let name = "nbd_source::fuse_a_file_system_over_a_server_is_whole_after_kills";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit", "e2fsck"]) {
        return;
    }
    /// As many files have room.
    const MOST: u32 = 5000;
    let place = scratch();
    let image = ext4(&place);
    fs::File::options().write(true).open(&image).unwrap().set_len(2 << 30).unwrap();
    tool(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4"]).arg(&image));
    let server = Server::nbdkit(&image, &[]);
    let disk = attach(&place, &[&server.uri("")]);
    let point = place.dir("mnt");
    tool(Command::new("mount").args([&disk, &point]));
    let ends = std::sync::atomic::AtomicBool::new(false);
    let path = |number: u32| point.join(format!("dir {}/file {number}", number % 7));
    let bytes =
        |number: u32| becket_testkit::image::random_bytes(number as usize * 777 % 300_000, number.into());
    let mut lives = Ok(());
    let written = thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut number = 0;
            while !ends.load(std::sync::atomic::Ordering::Relaxed) && number < MOST {
                fs::create_dir_all(path(number).parent().unwrap()).unwrap();
                fs::write(path(number), bytes(number)).unwrap();
                if number % 10 == 9 {
                    fs::File::open(path(number)).unwrap().sync_all().unwrap();
                    fs::remove_file(path(number - 5)).unwrap();
                }
                number += 1;
            }
            number
        });
        // A connector that dies cannot vouch for a connection: a flush would fail by rule (0135).
        for victim in ["worker_pid", "worker_pid", "server_pid", "worker_pid", "server_pid"] {
            thread::sleep(Duration::from_millis(500));
            kill(&only(&place)[victim]);
            let live = || is_live(&place);
            if !wait_until(Duration::from_secs(30), live) {
                lives = Err(format!("{:?} after {victim}", only(&place)));
                break;
            }
        }
        thread::sleep(Duration::from_millis(500));
        ends.store(true, std::sync::atomic::Ordering::Relaxed);
        load.join().unwrap()
    });
    lives.unwrap();
    assert!(written > 20, "only {written} files");
    becket_testkit::umount(&point);
    place.ok(["detach", disk.to_str().unwrap()]);
    drop(server);
    tool(Command::new("e2fsck").args(["-fn"]).arg(&image));
    // Read without any device.
    let out = place.dir("out");
    place.ok(["cp", "-r", &format!("{}/.", image.display()), out.to_str().unwrap()]);
    for number in 0..written {
        let name = format!("dir {}/file {number}", number % 7);
        let removed = number % 10 == 4 && number + 5 < written;
        let found = fs::read(out.join(&name)).ok();
        let expected = (!removed).then(|| bytes(number));
        assert!(found == expected, "{name} of {written}: {:?}", found.map(|found| found.len()));
    }
}

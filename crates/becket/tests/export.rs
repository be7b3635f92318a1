//! `becket export --nbd`: its life, its clients, and the deaths of its processes. Foreign clients (libnbd,
//! QEMU) and one of our own, over unix sockets and loopback addresses only.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use becket_testkit::{Scratch, image, require_tools, scaled, tool, wait_until};
use common::nbd::{self, Client};
use common::one::kill;
use common::pki::{as_client, certificates};
use common::{alive, helpers, scratch, text};
use serde_json::Value;

const SIZE: u64 = 8 << 20;

/// An image of random bytes that is exported, and where.
fn exported(place: &Scratch, more: &[&str]) -> (PathBuf, PathBuf) {
    let (path, socket) = (place.path("disk.img"), place.path("s.sock"));
    image::random(&path, SIZE, 7);
    export(place, &path, &socket, more);
    (path, socket)
}

fn export(place: &Scratch, image: &Path, socket: &Path, more: &[&str]) {
    let address = format!("unix:{}", socket.display());
    let mut words = vec!["export", image.to_str().unwrap(), "--nbd", &address];
    words.extend(more);
    place.ok(words);
}

fn device(place: &Scratch) -> Value {
    place.devices()[0].clone()
}

fn pid(device: &Value, key: &str) -> u32 {
    u32::try_from(device[key].as_u64().unwrap_or_else(|| panic!("no {key} in {device:#}"))).unwrap()
}

fn clients(place: &Scratch) -> u64 {
    device(place)["connections"].as_u64().unwrap()
}

#[test]
fn an_export_lives_from_its_command_to_its_detachment() {
    let place = scratch();
    let (image, other, socket) = (place.path("a b.img"), place.path("other.img"), place.path("s.sock"));
    image::random(&image, SIZE, 7);
    image::random(&other, 1 << 20, 8);
    let address = format!("unix:{}", socket.display());
    let said = place.ok(["export", image.to_str().unwrap(), other.to_str().unwrap(), "--nbd", &address]);
    let uris: Vec<&str> = said.lines().collect();
    assert_eq!(uris.len(), 2, "{said}");
    assert!(uris[0].starts_with("nbd+unix:///a%20b.img?socket=/"), "{said}");
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);

    let devices = place.devices();
    assert_eq!(text(&devices[0], "transport"), "nbd");
    assert_eq!((text(&devices[0], "device"), devices[0]["connections"].as_u64()), (uris[0], Some(0)));
    assert_eq!(text(&devices[0]["export"], "name"), "a b.img");
    assert_ne!(devices[0]["worker_pid"], devices[1]["worker_pid"], "each export has a worker of its own");

    let mut client = Client::connect(&socket, "a b.img").unwrap();
    assert_eq!(client.size, SIZE);
    assert_eq!(client.read(4096, 8192).unwrap(), fs::read(&image).unwrap()[4096..12288]);
    // The handshake is as good as an old client's: the first export needs no name.
    assert_eq!(Client::connect(&socket, "").unwrap().size, SIZE);
    assert!(Client::connect(&socket, "none").is_err(), "an export that there is not");

    assert!(wait_until(Duration::from_secs(10), || place.devices()[0]["connections"].as_u64() == Some(1)));
    let ran = place.run(["detach", image.to_str().unwrap()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("1 connected (clients of the export)"), "{ran:?}");
    assert!(ran.err.contains("with --force"), "{ran:?}");
    client.write(0, b"still here").unwrap();

    place.ok(["detach", "--lazy", image.to_str().unwrap()]);
    client.write(0, b"and still").unwrap();
    client.flush().unwrap();
    drop(client);
    assert!(wait_until(Duration::from_secs(20), || place.devices().len() == 1), "it goes with its client");
    assert_eq!(&fs::read(&image).unwrap()[..9], b"and still");
    assert!(Client::connect(&socket, "a b.img").is_err());

    // A client that has gone, or is about to: its worker hears of it a moment later.
    let mut last = Client::connect(&socket, "other.img").unwrap();
    last.read(0, 512).unwrap();
    assert!(wait_until(Duration::from_secs(10), || clients(&place) == 1));
    let leaves = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        drop(last);
    });
    place.ok(["detach", uris[1]]);
    leaves.join().unwrap();
    assert!(!socket.exists(), "the socket goes with the last export");
}

#[test]
fn an_address_is_nobody_elses_and_others_reach_no_plain_one() {
    let place = scratch();
    let (image, socket) = exported(&place, &["--name", "one"]);
    assert_eq!(text(&device(&place), "name"), "one");
    let address = format!("unix:{}", socket.display());
    let ran = place.run(["export", image.to_str().unwrap(), "--shared", "--nbd", &address]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("a program listens at"), "{ran:?}");
    assert!(ran.err.contains("in one command"), "{ran:?}");
    Client::connect(&socket, "one").unwrap().read(0, 512).unwrap();
    let ran = place.run(["export", image.to_str().unwrap(), "--shared", "--nbd", "tcp:0.0.0.0:0"]);
    assert!(ran.code == 1 && ran.err.contains("no TLS"), "{ran:?}");
    let said = place.ok(["export", image.to_str().unwrap(), "-r", "--shared", "--nbd", "tcp:127.0.0.1:0"]);
    let port = said.trim().rsplit_once(':').unwrap().1.split('/').next().unwrap().to_owned();
    let mut tcp = std::net::TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    let mut greeting = [0; 8];
    tcp.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"NBDMAGIC");
    // What a client is refused is said once.
    let ran = place.run(["ls", &format!("nbd://127.0.0.1:{port}/nope")]);
    assert!(ran.code == 1 && ran.err.contains("no export named \"nope\"\n"), "{ran:?}");
    // An image that an export writes is not attached by another, and the error names the export.
    let ran = place.run(["export", image.to_str().unwrap(), "--nbd", "tcp:127.0.0.1:0"]);
    assert!(ran.code == 1 && ran.err.contains("already attached as"), "{ran:?}");
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "--all"]).code == 0));
}

/// A socket that a service manager would have made (`systemd-socket-activate` does the same).
#[test]
fn a_socket_that_listens_already_is_used_and_stays() {
    if !require_tools("a_socket_that_listens_already_is_used_and_stays", &["python3"]) {
        return;
    }
    let place = scratch();
    let (image, socket) = (place.path("disk.img"), place.path("made.sock"));
    image::random(&image, SIZE, 7);
    let script = "import os,socket,sys\n\
        s=socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(8); os.dup2(s.fileno(),3); os.set_inheritable(3,True)\n\
        os.environ.update(LISTEN_PID=str(os.getpid()),LISTEN_FDS='1')\n\
        os.execv(sys.argv[2],sys.argv[2:])";
    let mut command = Command::new("python3");
    command.args(["-c", script]).arg(&socket);
    command.args([env!("CARGO_BIN_EXE_becket"), "export"]).arg(&image).args(["--nbd", "systemd"]);
    place.prepare(&mut command);
    let ran = place.finish(&mut command);
    assert_eq!(ran.code, 0, "{ran:?}");
    Client::connect(&socket, "disk.img").unwrap().read(0, 4096).unwrap();
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "--all"]).code == 0));
    assert!(socket.exists(), "its file belongs to who made it");
}

#[test]
fn clients_are_shown_the_block_size_that_was_asked_for() {
    const NAME: &str = "clients_are_shown_the_block_size_that_was_asked_for";
    if !require_tools(NAME, &["nbdinfo", "qemu-io"]) {
        return;
    }
    for (words, smallest) in [(&[][..], 1), (&["--block-size", "4096"][..], 4096)] {
        let place = scratch();
        let (image, socket) = (place.path("disk.img"), place.path("s.sock"));
        image::random(&image, SIZE, 7);
        export(&place, &image, &socket, words);
        let uri = text(&device(&place), "device").to_owned();
        let said: Value =
            serde_json::from_str(&tool(Command::new("nbdinfo").args(["--json", &uri]))).unwrap();
        assert_eq!(said["exports"][0]["block_size_minimum"], smallest, "{said}");
        // Who does not ask is served at any byte; QEMU widens requests to the size that it is shown.
        tool(Command::new("qemu-io").args(["-f", "raw", "-c", "read 512 512", "-c", "write 512 512", &uri]));
    }
}

#[test]
fn foreign_clients_read_and_write_what_is_in_the_image() {
    const NAME: &str = "foreign_clients_read_and_write_what_is_in_the_image";
    if !require_tools(NAME, &["nbdinfo", "nbdcopy", "qemu-img", "qemu-io"]) {
        return;
    }
    let place = scratch();
    let (image, socket) = (place.path("disk.img"), place.path("s.sock"));
    image::random(&image, SIZE, 7);
    fs::File::options().write(true).open(&image).unwrap().set_len(64 << 20).unwrap();
    export(&place, &image, &socket, &[]);
    let uri = text(&device(&place), "device").to_owned();
    let map: Value =
        serde_json::from_str(&tool(Command::new("nbdinfo").args(["--map", "--json", &uri]))).unwrap();
    let kinds: Vec<_> =
        map.as_array().unwrap().iter().map(|run| (run["length"].clone(), run["type"].clone())).collect();
    assert_eq!(kinds, [(SIZE.into(), 0.into()), (((64 << 20) - SIZE).into(), 3.into())], "{map}");
    let copy = place.path("copy.img");
    tool(Command::new("nbdcopy").arg(&uri).arg(&copy));
    assert!(fs::read(&copy).unwrap() == fs::read(&image).unwrap());
    tool(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw", copy.to_str().unwrap(), &uri]));
    let mut words = vec!["-f", "raw"];
    for command in [
        "write -P 0x55 1M 3M",
        "write -P 7 100 300",
        "read -P 7 100 300",
        "read -P 0x55 1M 3M",
        "flush",
        "discard 8M 1M",
        "write -z 9M 1M",
        "read -P 0 9M 1M",
        "write -f -P 3 20M 512",
    ] {
        words.extend(["-c", command]);
    }
    let said = tool(Command::new("qemu-io").args(&words).arg(&uri));
    assert!(!said.contains("failed"), "{said}");
    let bytes = fs::read(&image).unwrap();
    assert!(bytes[1 << 20..4 << 20].iter().all(|byte| *byte == 0x55));
    assert!(bytes[100..400].iter().all(|byte| *byte == 7));
    assert!(bytes[9 << 20..10 << 20].iter().all(|byte| *byte == 0));
    assert!(bytes[20 << 20..][..512].iter().all(|byte| *byte == 3));
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "--all"]).code == 0));
}

/// A reply without structure is one piece, however long; others may come before and after it.
/// Direct writes and writes through the page cache side by side: the kernel gives up what the cache has, and
/// every flush would fail.
#[test]
fn writes_at_any_byte_leave_flushes_whole() {
    let place = scratch();
    let (image, socket) = exported(&place, &[]);
    let mut model = fs::read(&image).unwrap();
    thread::scope(|scope| {
        let lanes: Vec<_> = model.chunks_mut(SIZE as usize / 4).enumerate().collect();
        for (lane, bytes) in lanes {
            let socket = &socket;
            scope.spawn(move || {
                let mut client = Client::connect(socket, "disk.img").unwrap();
                let start = lane as u64 * (SIZE / 4);
                for (turn, (at, len)) in
                    (0..60).zip([(512, 300_000), (4096, 8192), (1024, 512), (70_001, 3)].into_iter().cycle())
                {
                    let at = at + turn * 4096;
                    let data = vec![turn as u8; len];
                    client.write(start + at, &data).unwrap();
                    bytes[at as usize..][..len].copy_from_slice(&data);
                    if turn % 7 == 0 {
                        client.flush().unwrap();
                    }
                }
                client.flush().unwrap();
            });
        }
    });
    place.ok(["detach", "disk.img"]);
    assert!(fs::read(&image).unwrap() == model);
}

#[test]
fn long_reads_with_simple_replies_are_whole() {
    let place = scratch();
    let (image, socket) = exported(&place, &["--depth", "4"]);
    let bytes = fs::read(&image).unwrap();
    let mut client = Client::connect(&socket, "disk.img").unwrap();
    assert!(client.read(1, 3 << 20).unwrap() == bytes[1..][..3 << 20]);
    // Many at once: long and short, in any order.
    let sizes = [100u32, 1 << 20, 4096, 700_000, 300_000, 1, 262_144, 262_145, 512];
    for (cookie, size) in (1000u64..).zip(sizes) {
        client.socket.write_all(&nbd::request(0, nbd::READ, cookie, cookie, size)).unwrap();
    }
    let mut seen = Vec::new();
    for _ in sizes {
        let (error, cookie) = client.reply().unwrap();
        assert_eq!(error, 0);
        let size = sizes[usize::try_from(cookie - 1000).unwrap()] as usize;
        let mut data = vec![0; size];
        client.socket.read_exact(&mut data).unwrap();
        assert!(data == bytes[usize::try_from(cookie).unwrap()..][..size], "request {cookie}");
        seen.push(cookie);
    }
    seen.sort_unstable();
    assert_eq!(seen, (1000..1000 + sizes.len() as u64).collect::<Vec<_>>());
    let long: Vec<u8> = (0..2 << 20).map(|at| (at % 251) as u8).collect();
    client.write(12345, &long).unwrap();
    assert!(client.read(12345, 2 << 20).unwrap() == long);
    client.flush().unwrap();
    assert!(fs::read(&image).unwrap()[12345..][..2 << 20] == long);
}

#[test]
fn what_a_client_must_not_send_harms_only_itself() {
    let place = scratch();
    let (image, socket) = exported(&place, &[]);
    let mut good = Client::connect(&socket, "disk.img").unwrap();
    let connect = || Client::connect(&socket, "disk.img").unwrap();
    let mut client = connect();
    const INVALID: u32 = 22;
    const NO_SPACE: u32 = 28;
    for (what, command, flags, offset, len, wanted) in [
        ("beyond the end", nbd::READ, 0, SIZE - 512, 1024, INVALID),
        ("far beyond it", nbd::READ, 0, u64::MAX - 10, 512, INVALID),
        ("of no byte", nbd::READ, 0, 0, 0, INVALID),
        ("with a reserved flag", nbd::READ, 1 << 9, 0, 512, INVALID),
        ("of a command that there is not", 77, 0, 0, 512, INVALID),
        ("that trims beyond the end", nbd::TRIM, 0, SIZE, 512, INVALID),
        ("that zeroes beyond the end", nbd::ZERO, 0, SIZE, 512, NO_SPACE),
        ("of more than is allowed", nbd::READ, 0, 0, (32 << 20) + 1, INVALID),
    ] {
        assert_eq!(client.call(command, flags, offset, len, &[]).unwrap(), wanted, "a request {what}");
    }
    let data = vec![1; 4096];
    assert_eq!(client.call(nbd::WRITE, 0, SIZE - 512, 4096, &data).unwrap(), NO_SPACE);
    assert_eq!(client.read(0, 512).unwrap(), fs::read(&image).unwrap()[..512], "its data were passed over");
    // No request at all, a half one, one whose data do not come, and a flood of data that was refused.
    client.socket.write_all(&[0xff; 64]).unwrap();
    assert!(client.ended());
    connect().socket.write_all(&nbd::request(0, nbd::READ, 1, 0, 512)[..11]).unwrap();
    connect().socket.write_all(&nbd::request(0, nbd::WRITE, 1, 0, 1 << 20)).unwrap();
    let mut client = connect();
    client.socket.write_all(&nbd::request(0, nbd::WRITE, 1, 0, u32::MAX)).unwrap();
    assert!(client.ended());
    // One that asks and never reads.
    let mut deaf = connect();
    deaf.socket.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    while deaf.socket.write_all(&nbd::request(0, nbd::READ, 1, 0, 1 << 20)).is_ok() {}
    let before = good.read(0, 4096).unwrap();
    good.write(0, &before).unwrap();
    let mut client = connect();
    client.socket.write_all(&nbd::request(0, nbd::DISCONNECT, 1, 0, 0)).unwrap();
    assert!(client.ended(), "it said goodbye");
    drop((deaf, good));
    assert!(wait_until(Duration::from_secs(20), || clients(&place) == 0), "each of them is gone");
}

#[test]
fn half_open_and_slow_clients_keep_nobody_waiting() {
    let place = scratch();
    let (_, socket) = exported(&place, &["--max-connections", "2"]);
    let doorman = helpers(pid(&device(&place), "server_pid"), "doorman")[0];
    // Silent ones, ones in the middle of an option, ones with options that never end.
    let strangers: Vec<UnixStream> = (0..300)
        .map(|number| {
            let mut stream = UnixStream::connect(&socket).unwrap();
            let words = [3u32.to_be_bytes().to_vec(), nbd::option(7, &[0; 2000])].concat();
            let len = [0, 4, 30, words.len()][number % 4];
            let _ = stream.write_all(&words[..len]);
            stream
        })
        .collect();
    let begin = Instant::now();
    let mut one = Client::connect(&socket, "disk.img").unwrap();
    let mut two = Client::connect(&socket, "disk.img").unwrap();
    one.read(0, 512).unwrap();
    two.read(0, 512).unwrap();
    assert!(begin.elapsed() < scaled(Duration::from_secs(10)), "{:?}", begin.elapsed());
    drop(strangers);
    // A third waits for one of the two to go.
    let waiting = UnixStream::connect(&socket).unwrap();
    waiting.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    assert!((&waiting).read(&mut [0; 18]).is_err(), "there are as many as may be");
    drop(one);
    waiting.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    (&waiting).read_exact(&mut [0; 18]).unwrap();
    // One that says too much is sent away before its time is up.
    drop(waiting);
    let mut chatty = nbd::greeted(&socket).unwrap();
    let flood = nbd::option(99, &[0; 1000]).repeat(1000);
    assert!(chatty.write_all(&flood).is_err() || chatty.read_to_end(&mut Vec::new()).is_ok());
    assert!(alive(doorman));
    two.read(0, 512).unwrap();
}

#[test]
fn a_killed_worker_costs_the_connections_and_nothing_else() {
    let place = scratch();
    let (image, socket) = exported(&place, &[]);
    let mut client = Client::connect(&socket, "disk.img").unwrap();
    for round in 1..=3u8 {
        client.write(0, &[round; 65536]).unwrap();
        client.flush().unwrap();
        let recorded = || device(&place)["recoveries"] == u64::from(round - 1);
        assert!(wait_until(Duration::from_secs(10), recorded));
        kill(pid(&device(&place), "worker_pid"));
        assert!(client.ended(), "half a reply cannot be resumed");
        client = Client::connect(&socket, "disk.img").unwrap();
        assert!(client.read(0, 65536).unwrap() == [round; 65536], "what was flushed is there");
    }
    // Its record is written after its clients are let in again.
    assert!(wait_until(Duration::from_secs(10), || device(&place)["recoveries"] == 3));
    assert_eq!(fs::read(&image).unwrap()[..65536], [3; 65536]);
}

#[test]
fn a_killed_doorman_is_replaced_and_open_connections_live() {
    let place = scratch();
    let (_, socket) = exported(&place, &[]);
    let mut client = Client::connect(&socket, "disk.img").unwrap();
    let server = pid(&device(&place), "server_pid");
    let doorman = helpers(server, "doorman")[0];
    kill(doorman);
    client.write(0, b"alive").unwrap();
    assert!(wait_until(Duration::from_secs(10), || helpers(server, "doorman")
        .iter()
        .any(|pid| *pid != doorman)));
    Client::connect(&socket, "disk.img").unwrap().read(0, 512).unwrap();
    client.read(0, 512).unwrap();
}

#[test]
fn a_killed_supervisor_is_followed_by_one_that_lets_clients_in() {
    let place = scratch();
    let (_, socket) = exported(&place, &[]);
    let mut client = Client::connect(&socket, "disk.img").unwrap();
    client.write(0, b"before").unwrap();
    let worker = device(&place)["worker_pid"].clone();
    kill(pid(&device(&place), "server_pid"));
    client.write(4096, b"between").unwrap();
    // A client that the doorman accepted before it saw that its supervisor is gone has to come again.
    let mut other = None;
    let served = || {
        let mut client = Client::connect(&socket, "disk.img").ok();
        let read = client.as_mut().and_then(|client| client.read(4096, 7).ok());
        other = client.zip(read);
        other.is_some()
    };
    assert!(wait_until(Duration::from_secs(10), served));
    let (other, read) = other.unwrap();
    assert_eq!(&read, b"between");
    client.flush().unwrap();
    let device = device(&place);
    assert_eq!((text(&device, "state"), &device["worker_pid"]), ("live", &worker));
    assert!(wait_until(Duration::from_secs(10), || clients(&place) == 2), "it knows of those before it");
    let ran = place.run(["detach", "disk.img"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    drop((client, other));
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "nbd0"]).code == 0));
    assert!(!socket.exists());
}

/// Reads and writes that are verified, until it is asked to stop; returns how many there were.
fn load(socket: &Path, place: u64, stop: &AtomicBool) -> u64 {
    let mut client = Client::connect(socket, "disk.img").unwrap();
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        let byte = (rounds % 250) as u8 + 1;
        let len = [512, 4096, 100_000][usize::try_from(rounds % 3).unwrap()];
        client.write(place, &vec![byte; len]).unwrap();
        assert!(client.read(place, len as u32).unwrap().iter().all(|it| *it == byte), "round {rounds}");
        if rounds % 16 == 0 {
            client.flush().unwrap();
        }
        rounds += 1;
    }
    rounds
}

#[test]
fn upgrades_under_load_drop_no_connection() {
    const UPGRADES: usize = 10;
    let place = scratch();
    let (_, socket) = exported(&place, &[]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let loads: Vec<_> = (0..4u64)
            .map(|number| {
                let (socket, stop) = (&socket, &stop);
                scope.spawn(move || load(socket, number << 20, stop))
            })
            .collect();
        for _ in 0..UPGRADES {
            let before = device(&place)["worker_pid"].clone();
            let mut serve = place.becket();
            serve.args(["serve", "--takeover", "--until-idle"]);
            let mut serve = serve.spawn().unwrap();
            let moved = || place.devices().first().is_some_and(|device| device["worker_pid"] != before);
            assert!(wait_until(Duration::from_secs(30), moved), "another worker serves it");
            let rounds = loads.iter().filter(|load| load.is_finished()).count();
            assert_eq!(rounds, 0, "a connection was dropped");
            // It is replaced by the next one, or ends with the export.
            std::thread::spawn(move || serve.wait());
        }
        stop.store(true, Ordering::Relaxed);
        for load in loads {
            assert!(load.join().unwrap() > 10);
        }
    });
    assert!(wait_until(Duration::from_secs(20), || clients(&place) == 0));
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "--all"]).code == 0));
}

#[test]
fn live_changes_are_seen_by_clients() {
    let place = scratch();
    let (image, socket) = exported(&place, &[]);
    let mut client = Client::connect(&socket, "disk.img").unwrap();
    place.ok(["set", "nbd0", "--read-only", "on"]);
    assert_eq!(client.call(nbd::WRITE, 0, 0, 512, &[1; 512]).unwrap(), 1, "EPERM");
    let other = Client::connect(&socket, "disk.img").unwrap();
    assert_eq!(other.flags & 2, 2, "clients that come now see it");
    place.ok(["set", "nbd0", "--read-only", "off"]);
    client.write(0, &[1; 512]).unwrap();
    fs::File::options().write(true).open(&image).unwrap().set_len(2 * SIZE).unwrap();
    let again = "clients that are connected see the new size when they connect again";
    let refreshed = place.run(["refresh", "nbd0"]);
    assert!(refreshed.code == 0 && refreshed.err.contains(&format!("warning: {again}")), "{refreshed:?}");
    assert!(!place.run(["refresh", "nbd0"]).err.contains(again), "nothing has changed");
    assert_eq!(Client::connect(&socket, "disk.img").unwrap().size, 2 * SIZE);
    let limited = place.json(["set", "nbd0", "--force", "--size-limit", &(SIZE + 4096).to_string()]);
    assert_eq!(limited["devices"][0]["warnings"], serde_json::json!([again]), "{limited:#}");
    place.ok(["set", "nbd0", "--size-limit", "none"]);
    client.write(SIZE, &[9; 512]).unwrap();
    assert_eq!(client.read(SIZE, 512).unwrap(), [9; 512]);
    let stat = place.json(["stat", "nbd0"]);
    assert!(stat.to_string().contains("operations"), "{stat}");
}

#[test]
fn images_of_every_kind_are_exported() {
    const NAME: &str = "images_of_every_kind_are_exported";
    if !require_tools(NAME, &["qemu-img", "xz", "sfdisk"]) {
        return;
    }
    let place = scratch();
    let raw = place.path("raw.img");
    image::random(&raw, SIZE, 7);
    let bytes = fs::read(&raw).unwrap();
    let qcow2 = place.path("disk.qcow2");
    tool(Command::new("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2"]).args([&raw, &qcow2]));
    let packed = place.path("packed.img.xz");
    fs::copy(&raw, place.path("packed.img")).unwrap();
    tool(Command::new("xz").args(["--block-size=1MiB", "-k"]).arg(place.path("packed.img")));
    let parted = place.path("parted.img");
    image::gpt(&parted, 16 << 20);
    let cow = place.path("over.qcow2");
    let first = place.path("parted.img/p1");
    for (image, more, name) in [
        (&qcow2, vec![], "disk.qcow2"),
        (&packed, vec![], "packed.img.xz"),
        (&raw, vec!["--cow", cow.to_str().unwrap()], "raw.img"),
        (&raw, vec!["-r", "--offset", "1MiB", "--size-limit", "1MiB"], "raw.img"),
        (&first, vec!["-r"], "p1"),
    ] {
        let socket = place.path("s.sock");
        export(&place, image, &socket, &more);
        let mut client = Client::connect(&socket, name).unwrap();
        let read = client.read(0, 65536).unwrap();
        match (name, more.contains(&"--offset")) {
            ("p1", _) => {}
            (_, true) => assert!(client.size == 1 << 20 && read == bytes[1 << 20..][..65536]),
            _ => assert!(read == bytes[..65536], "{name}"),
        }
        if more.contains(&"--cow") || name == "disk.qcow2" {
            client.write(300_000, &[5; 4096]).unwrap();
            client.flush().unwrap();
            assert_eq!(client.read(300_000, 4096).unwrap(), [5; 4096]);
        }
        drop(client);
        assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "--all"]).code == 0));
    }
    assert!(fs::read(&raw).unwrap() == bytes, "--cow leaves the image alone");
}

#[test]
fn over_tls_the_right_clients_come_in_and_no_others() {
    const NAME: &str = "over_tls_the_right_clients_come_in_and_no_others";
    if !require_tools(NAME, &["certtool", "nbdinfo", "nbdcopy"]) {
        return;
    }
    let place = scratch();
    let pki = certificates(&place);
    let tls = pki.to_str().unwrap();
    let connect = |socket: &Path, who: &str, authority: &str| {
        let dir = as_client(&place, &pki, who, authority);
        let uri =
            format!("nbds+unix:///disk.img?socket={}&tls-certificates={}", socket.display(), dir.display());
        let mut command = Command::new("timeout");
        command.args(["30", "nbdinfo", "--size", &uri]).output().unwrap()
    };
    // Any client that trusts the server's authority.
    let (image, socket) = exported(&place, &["--tls", tls]);
    assert!(text(&device(&place), "device").starts_with("nbds+unix:///disk.img?"));
    let ran = connect(&socket, "nobody", "ca");
    assert_eq!(String::from_utf8_lossy(&ran.stdout).trim(), SIZE.to_string(), "{ran:?}");
    // libnbd checks the server's certificate over TCP only.
    let said = place.ok([
        "export",
        image.to_str().unwrap(),
        "-r",
        "--shared",
        "--tls",
        tls,
        "--nbd",
        "tcp:127.0.0.1:0",
    ]);
    for (authority, trusts) in [("ca", true), ("other", false)] {
        let dir = as_client(&place, &pki, "nobody", authority);
        let uri = format!("{}?tls-certificates={}", said.trim(), dir.display());
        let ran = Command::new("timeout").args(["30", "nbdinfo", "--size", &uri]).output().unwrap();
        assert_eq!(ran.status.success(), trusts, "{uri}: {ran:?}");
    }
    let copy = place.path("copy.img");
    let dir = as_client(&place, &pki, "nobody", "ca");
    let uri = format!("nbds+unix:///disk.img?socket={}&tls-certificates={}", socket.display(), dir.display());
    tool(Command::new("nbdcopy").arg(&uri).arg(&copy));
    assert!(fs::read(&copy).unwrap() == fs::read(&image).unwrap(), "8 MiB come over TLS as they are");
    let new = place.path("new.img");
    image::random(&new, SIZE, 99);
    tool(Command::new("nbdcopy").arg("--flush").arg(&new).arg(&uri));
    assert!(fs::read(&new).unwrap() == fs::read(&image).unwrap(), "and go over it");
    // Without TLS nothing is answered, in either way.
    assert!(Client::connect(&socket, "disk.img").is_err());
    let mut plain = nbd::greeted(&socket).unwrap();
    plain.write_all(&nbd::option(3, &[])).unwrap();
    let mut reply = [0; 20];
    plain.read_exact(&mut reply).unwrap();
    assert_eq!(reply[12..16], 0x8000_0005u32.to_be_bytes(), "TLS is required");
    // TLS that is none, that is cut, and that comes slowly.
    plain.write_all(&nbd::option(5, &[])).unwrap();
    plain.read_exact(&mut reply).unwrap();
    plain.write_all(b"\x16\x03\x01\xff\xffnot a hello").unwrap();
    let mut cut = nbd::greeted(&socket).unwrap();
    cut.write_all(&nbd::option(5, &[])).unwrap();
    cut.write_all(b"\x16\x03\x01\x02\x00\x01").unwrap();
    drop(cut);
    assert!(plain.read_to_end(&mut Vec::new()).is_ok(), "it is sent away, at its deadline at the latest");
    assert!(connect(&socket, "nobody", "ca").status.success());
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "--all"]).code == 0));

    // Clients with a certificate of the authority.
    let again = |more: &[&str]| {
        let mut words = vec!["--tls", tls, "--tls-verify"];
        words.extend(more);
        export(&place, &image, &socket, &words);
    };
    again(&[]);
    assert!(connect(&socket, "client", "ca").status.success());
    for who in ["nobody", "expired", "stranger"] {
        assert!(!connect(&socket, who, "ca").status.success(), "{who}");
    }
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "--all"]).code == 0));
    again(&["--tls-allow", "another"]);
    let ran = connect(&socket, "client", "ca");
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(
        !ran.status.success() && said.contains("policy"),
        "its name is not allowed, which it hears: {said}"
    );
    let uri = format!(
        "nbds+unix:///disk.img?socket={}&tls-certificates={}",
        socket.display(),
        as_client(&place, &pki, "client", "ca").display()
    );
    let ran = place.run(["map", &uri]);
    assert!(ran.code == 1 && ran.err.contains("none of the names that are allowed"), "{ran:?}");
    let log = fs::read_to_string(place.runtime().join("log")).unwrap();
    let refusals: Vec<_> = log.lines().filter(|line| line.contains("a client is refused")).collect();
    assert!(refusals.len() >= 2 && refusals.iter().all(|line| line.len() < 300), "{refusals:?}");
    assert!(refusals[0].contains("backup"), "{refusals:?}");
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "--all"]).code == 0));
    again(&["--tls-allow", "another", "--tls-allow", "Backup"]);
    assert!(connect(&socket, "client", "ca").status.success());
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "--all"]).code == 0));

    // Files that are of no use are found before anything is exported.
    fs::write(pki.join("server-key.pem"), "no key").unwrap();
    let address = format!("unix:{}", socket.display());
    let ran = place.run(["export", image.to_str().unwrap(), "--nbd", &address, "--tls", tls]);
    assert!(ran.code == 1 && ran.err.contains("server-key.pem"), "{ran:?}");
    assert!(place.devices().is_empty() && !socket.exists());
}

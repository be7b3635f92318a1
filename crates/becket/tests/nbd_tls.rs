//! Images on NBD servers over TLS: who is trusted, what is refused, and what a death costs.
//! Every server listens at a unix socket in the test's own directory, or at a loopback address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::{fs::FileExt as _, net::UnixListener},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::Duration,
};

use becket_testkit::{Scratch, require_fuse, require_plain_machine, require_tools, wait_until};
use common::nbd_server::{Server, attach, ext4};
use common::one::{Block, kill, only};
use common::page::direct as open;
use common::pki::{as_client, certificates};
use common::{helpers, scratch, text};

/// A server of nbdkit's that takes clients over TLS only.
fn nbdkit(image: &Path, pki: &Path, words: &[&str]) -> Server {
    let dir = format!("--tls-certificates={}", pki.display());
    let mut all = vec!["--tls=require", &dir];
    all.extend(words);
    Server::nbdkit(image, &all)
}

/// The same of QEMU's, which wants to know its clients.
fn qemu(image: &Path, pki: &Path) -> Server {
    Server::qemu(image, &["--object", &object(pki), "--tls-creds", "t", "-e", "8"])
}

fn object(pki: &Path) -> String {
    format!("tls-creds-x509,id=t,endpoint=server,verify-peer=yes,dir={}", pki.display())
}

fn uri(server: &Server, export: &str, dir: &Path) -> String {
    let plain = server.uri(export).replace("nbd+unix", "nbds+unix");
    format!("{plain}&tls-certificates={}", dir.display())
}

/// A place with an image, its certificates, and a client's directories with and without a certificate.
fn prepared(place: &Scratch) -> (PathBuf, PathBuf, PathBuf, PathBuf) {
    let pki = certificates(place);
    let (known, nobody) = (as_client(place, &pki, "client", "ca"), as_client(place, &pki, "nobody", "ca"));
    (ext4(place), pki, known, nobody)
}

#[test]
fn an_image_over_tls_is_read_without_a_device() {
    let name = "nbd_tls::an_image_over_tls_is_read_without_a_device";
    if !require_plain_machine(name, &["mke2fs", "nbdkit", "qemu-nbd", "certtool"]) {
        return;
    }
    let place = scratch();
    let (image, pki, known, nobody) = prepared(&place);
    let of_nbdkit = nbdkit(&image, &pki, &["-r"]);
    let of_qemu = qemu(&image, &pki);
    for uri in [uri(&of_nbdkit, "", &nobody), uri(&of_nbdkit, "", &known), uri(&of_qemu, "disk", &known)] {
        assert_eq!(place.ok(["cat", &format!("{uri}#dir/file")]), "from afar");
        assert!(place.ok(["inspect", &uri]).contains("ext4"));
        assert!(place.ok(["map", &uri]).contains("data"));
        let copied = place.path("copied");
        place.ok(["copy", "--force", &uri, copied.to_str().unwrap()]);
        assert!(fs::read(&copied).unwrap() == fs::read(&image).unwrap(), "the copy differs");
    }
    // And written to one.
    let target = place.path("target.img");
    becket_testkit::image::sparse(&target, 48 << 20);
    let writable = qemu(&target, &pki);
    let copied = place.path("copied");
    place.ok(["copy", "--force", copied.to_str().unwrap(), &uri(&writable, "disk", &known)]);
    drop(writable);
    let bytes = fs::read(&image).unwrap();
    assert!(fs::read(&target).unwrap()[..bytes.len()] == bytes, "the copy on the server differs");
    // Our own export, over TCP: the host is the name in the certificate.
    let tls = pki.to_str().unwrap();
    let said = place.ok([
        "export",
        image.to_str().unwrap(),
        "--shared",
        "-r",
        "--tls",
        tls,
        "--tls-verify",
        "--nbd",
        "tcp:127.0.0.1:0",
    ]);
    let ours = format!("{}?tls-certificates={}", said.trim(), known.display());
    assert!(ours.starts_with("nbds://127.0.0.1:"), "{ours}");
    assert_eq!(place.ok(["cat", &format!("{ours}#dir/file")]), "from afar");
    let ours = ours.replace("127.0.0.1", "localhost");
    assert_eq!(place.ok(["cat", &format!("{ours}#dir/file")]), "from afar");
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "--all"]).code == 0));
}

#[test]
fn what_cannot_be_trusted_is_refused_with_a_reason() {
    let name = "nbd_tls::what_cannot_be_trusted_is_refused_with_a_reason";
    if !require_plain_machine(name, &["mke2fs", "nbdkit", "qemu-nbd", "certtool"]) {
        return;
    }
    let place = scratch();
    let (image, pki, known, nobody) = prepared(&place);
    let refused = |uri: &str, says: &str, helps: &str| {
        let ran = place.run(["ls", uri]);
        assert_eq!(ran.code, 1, "{uri}: {ran:?}");
        assert!(ran.err.contains(says) && ran.err.contains(helps), "{uri}: {ran:?}");
    };
    let secure = nbdkit(&image, &pki, &["-r"]);
    let trusted = uri(&secure, "", &nobody);
    place.ok(["ls", &trusted]);
    // Never without TLS by itself, in either direction.
    refused(&secure.uri(""), "over TLS only", "use nbds://");
    drop(secure);
    let plain = Server::nbdkit(&image, &["-r"]);
    refused(&trusted, "the server has no TLS", "does not go on without TLS");
    drop(plain);
    let secure = nbdkit(&image, &pki, &["-r"]);
    // A stranger's authority, and that of nobody: the system's own.
    let other = as_client(&place, &pki, "nobody", "other");
    refused(&uri(&secure, "", &other), "of no authority that is trusted", "tls-certificates=DIR");
    let system = secure.uri("").replace("nbd+unix", "nbds+unix");
    refused(&system, "of no authority that is trusted", "tls-certificates=DIR");
    // Another name than the certificate's.
    refused(
        &format!("{trusted}&tls-hostname=elsewhere.example"),
        "is not for \"elsewhere.example\"",
        "tls-hostname",
    );
    place.ok(["ls", &format!("{trusted}&tls-hostname=localhost")]);
    // A directory without what is needed.
    let half = place.dir("half");
    refused(&uri(&secure, "", &half), "half/ca-cert.pem cannot be used", "tls-certificates=DIR");
    fs::copy(nobody.join("ca-cert.pem"), half.join("ca-cert.pem")).unwrap();
    fs::copy(known.join("client-cert.pem"), half.join("client-cert.pem")).unwrap();
    refused(&uri(&secure, "", &half), "half/client-key.pem cannot be used", "tls-certificates=DIR");
    fs::copy(nobody.join("ca-cert.pem"), half.join("client-key.pem")).unwrap();
    refused(&uri(&secure, "", &half), "client-key.pem: ", "tls-certificates=DIR");
    refused(
        &uri(&secure, "", &place.path("none")),
        "none/ca-cert.pem cannot be used",
        "tls-certificates=DIR",
    );
    refused(&format!("{trusted}&tls-psk-file=/f"), "no pre-shared keys", "");
    // A server that wants to know its clients.
    let qemu = qemu(&image, &pki);
    refused(&uri(&qemu, "disk", &nobody), "the server", "client-cert.pem");
    let stranger = as_client(&place, &pki, "stranger", "ca");
    refused(&uri(&qemu, "disk", &stranger), "the server", "client-cert.pem");
    place.ok(["ls", &uri(&qemu, "disk", &known)]);
}

/// Somebody in between who would have the client go on in the clear.
#[test]
fn a_downgrade_is_seen_and_nothing_goes_in_the_clear() {
    let name = "nbd_tls::a_downgrade_is_seen_and_nothing_goes_in_the_clear";
    if !require_tools(name, &["certtool"]) {
        return;
    }
    let place = scratch();
    let pki = certificates(&place);
    let nobody = as_client(&place, &pki, "nobody", "ca");
    let greeting = [&b"NBDMAGIC"[..], &0x4948_4156_454f_5054_u64.to_be_bytes(), &3u16.to_be_bytes()].concat();
    let reply = |kind: u32| {
        let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
        [&magic[..], &5u32.to_be_bytes(), &kind.to_be_bytes(), &0u32.to_be_bytes()].concat()
    };
    let oldest = [&b"NBDMAGIC"[..], &0x0000_4202_8186_1253_u64.to_be_bytes(), &[0; 10]].concat();
    let acknowledged = [greeting.clone(), reply(1)].concat();
    let cases = [
        ("policy", [greeting.clone(), reply(0x8000_0002)].concat(), "the server has no TLS"),
        ("oldest", oldest, "only the oldest form"),
        (
            "plain",
            [acknowledged.clone(), reply(1), reply(1), b"plain text".to_vec()].concat(),
            "does not speak TLS",
        ),
        (
            "alert",
            [acknowledged.clone(), b"\x15\x03\x03\x00\x02\x02\x28".to_vec()].concat(),
            "refuses this client",
        ),
        ("end", acknowledged, "in the middle of TLS"),
    ];
    for (what, says, wanted) in cases {
        let socket = place.path(&format!("{what}.sock"));
        let listener = UnixListener::bind(&socket).unwrap();
        let server = thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            client.write_all(&says).unwrap();
            // It ends what it says, and hears what else there is.
            client.shutdown(std::net::Shutdown::Write).unwrap();
            let mut heard = Vec::new();
            let _ = client.read_to_end(&mut heard);
            heard
        });
        let uri = format!(
            "nbds+unix:///secret-name?socket={}&tls-certificates={}",
            socket.display(),
            nobody.display()
        );
        let ran = place.run(["ls", &uri]);
        let heard = server.join().unwrap();
        assert!(ran.code == 1 && ran.err.contains(wanted), "{what}: {ran:?}");
        let clear = String::from_utf8_lossy(&heard);
        assert!(!clear.contains("secret-name"), "{what}: the export's name went in the clear: {heard:?}");
    }
}

/// Ends a load also where the test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// No device is made that would wait at once. Over TLS its first connection is another one than that by which
/// its image was opened, and here that one's end has ended the server.
#[test]
fn fuse_a_server_that_went_away_meanwhile_is_an_error() {
    let name = "nbd_tls::fuse_a_server_that_went_away_meanwhile_is_an_error";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "qemu-nbd", "certtool"]) {
        return;
    }
    let place = scratch();
    let (image, pki, known, _) = prepared(&place);
    let mut server = Server::qemu_of_one(&image, &["--object", &object(&pki), "--tls-creds", "t"]);
    let uri = uri(&server, "disk", &known);
    let ran = place.run(["attach", "--via", "fuse", "--origin-timeout", "30s", &uri]);
    assert!(ran.code == 1 && ran.out.is_empty(), "{ran:?}");
    assert!(
        ran.err.contains("its device cannot be connected to the server: ")
            && ran.err.contains("--persistent"),
        "{ran:?}"
    );
    assert!(wait_until(Duration::from_secs(10), || server.has_ended()));
    assert!(place.devices().is_empty());
    // What was begun for it keeps nobody's place.
    let server = Server::qemu(&image, &[]);
    let disk = open(&attach(&place, &[&server.uri("disk")]));
    disk.read_exact_at(&mut Block::of(0).0, 0).unwrap();
    drop(disk);
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_nothing_stays_of_a_device_over_tls_that_is_detached() {
    let name = "nbd_tls::fuse_nothing_stays_of_a_device_over_tls_that_is_detached";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit", "certtool"]) {
        return;
    }
    let place = scratch();
    let (image, pki, known, _) = prepared(&place);
    let server = nbdkit(&image, &pki, &["--tls-verify-peer"]);
    // It keeps becket's server.
    let other = place.path("other.img");
    fs::File::create(&other).unwrap().set_len(1 << 20).unwrap();
    attach(&place, &[other.to_str().unwrap()]);
    let supervisor = u32::try_from(only(&place)["server_pid"].as_u64().unwrap()).unwrap();
    for _ in 0..3 {
        let disk = attach(&place, &[&uri(&server, "", &known)]);
        open(&disk).read_exact_at(&mut Block::of(0).0, 0).unwrap();
        assert_eq!(helpers(supervisor, "connector").len(), 1);
        place.ok(["detach", disk.to_str().unwrap()]);
        assert!(wait_until(Duration::from_secs(10), || helpers(supervisor, "connector").is_empty()));
    }
    place.ok(["detach", "--all"]);
    let ended = || !Path::new(&format!("/proc/{supervisor}")).exists();
    assert!(wait_until(Duration::from_secs(20), ended), "becket's server stays");
}

#[test]
fn fuse_a_device_over_tls_outlives_what_serves_it() {
    let name = "nbd_tls::fuse_a_device_over_tls_outlives_what_serves_it";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit", "certtool"]) {
        return;
    }
    const BLOCKS: u64 = 64;
    let place = scratch();
    let (image, pki, known, _) = prepared(&place);
    let mut server = nbdkit(&image, &pki, &["--tls-verify-peer"]);
    let uri = uri(&server, "", &known);
    let disk = open(&attach(&place, &[&uri, "--origin-timeout", "40s"]));
    assert_eq!(text(&only(&place), "image"), uri);
    let number = |key: &str| u32::try_from(only(&place)[key].as_u64().unwrap()).unwrap();
    // The worker holds the key for its successor and has no right to read it.
    let mut envelopes = 0;
    for entry in fs::read_dir(format!("/proc/{}/fd", number("worker_pid"))).unwrap().flatten() {
        if fs::read_link(entry.path()).is_ok_and(|file| file.to_string_lossy().contains("becket-tls")) {
            let info = entry.path().to_string_lossy().replace("/fd/", "/fdinfo/");
            let info = fs::read_to_string(info).unwrap();
            assert!(
                info.lines().any(|line| line.starts_with("flags:") && line.ends_with("12000000")),
                "{info}"
            );
            envelopes += 1;
        }
    }
    assert_eq!(envelopes, 1);

    let ends = AtomicBool::new(false);
    let failures = AtomicU32::new(0);
    let rounds = thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut round = 0;
            while !ends.load(Ordering::Relaxed) {
                round += 1;
                for block in 0..BLOCKS {
                    disk.write_all_at(&Block::of(round * BLOCKS + block).0, block * 4096).unwrap();
                }
                if disk.sync_all().is_err() {
                    failures.fetch_add(1, Ordering::Relaxed);
                    // What may be lost is written again.
                    continue;
                }
                for block in 0..BLOCKS {
                    let mut found = Block::of(0);
                    disk.read_exact_at(&mut found.0, block * 4096).unwrap();
                    assert!(found.0 == Block::of(round * BLOCKS + block).0, "round {round}, block {block}");
                }
            }
            round
        });
        let stop = Ends(&ends);
        let live = |after: &str| {
            let live = || text(&only(&place), "state") == "live" && only(&place)["away"].is_null();
            assert!(wait_until(Duration::from_secs(30), live), "{:?} after {after}", only(&place));
            thread::sleep(Duration::from_millis(500));
        };
        // The connection is the connector's, which outlives a supervisor: no flush fails.
        for victim in ["worker_pid", "server_pid", "worker_pid", "server_pid"] {
            thread::sleep(Duration::from_millis(300));
            kill(&only(&place)[victim]);
            live(victim);
            assert_eq!(failures.load(Ordering::Relaxed), 0, "after {victim}");
        }
        let before = number("server_pid");
        let mut serve = place.becket();
        let mut serve = serve.args(["serve", "--takeover", "--until-idle"]).spawn().unwrap();
        assert!(wait_until(Duration::from_secs(30), || number("server_pid") != before));
        thread::spawn(move || serve.wait());
        live("the takeover");
        assert_eq!(failures.load(Ordering::Relaxed), 0, "after the takeover");
        // Its own death, and that of the server, may lose what was not flushed.
        for _ in 0..2 {
            for connector in helpers(number("server_pid"), "connector") {
                kill(connector);
            }
            live("the connector");
            server.die();
            server.again();
            live("the NBD server");
        }
        drop(stop);
        load.join().unwrap()
    });
    let failed = failures.into_inner();
    // Each death of a connector or a server may cost one that was under way, and the next.
    assert!(rounds > 8 && failed <= 9, "{rounds} rounds, {failed} failed flushes");
    disk.sync_all().unwrap();
    drop(disk);
    place.ok(["detach", "--all"]);
    let found = fs::read(&image).unwrap();
    for block in 0..BLOCKS {
        let at = usize::try_from(block * 4096).unwrap();
        assert!(found[at..at + 4096] == Block::of(rounds * BLOCKS + block).0, "block {block}");
    }
}

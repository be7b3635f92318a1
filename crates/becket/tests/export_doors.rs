//! Who may come in where an export listens: revoked certificates, addresses of both families.
//! Loopback addresses only.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use becket_testkit::{Scratch, image, require_tools, tool, wait_until};
use common::pki::{as_client, certificates};
use common::scratch;

const SIZE: u64 = 8 << 20;

fn gone(place: &Scratch) {
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "--all"]).code == 0));
}

#[test]
fn a_revoked_certificate_lets_nobody_in() {
    if !require_tools("a_revoked_certificate_lets_nobody_in", &["certtool", "nbdinfo"]) {
        return;
    }
    let place = scratch();
    let pki = certificates(&place);
    let path = |name: &str| pki.join(name).to_str().unwrap().to_owned();
    let disk = place.path("disk.img");
    image::random(&disk, SIZE, 7);
    let dir = as_client(&place, &pki, "client", "ca");
    let comes_in = || {
        let said = place.ok([
            "export",
            disk.to_str().unwrap(),
            "--tls",
            pki.to_str().unwrap(),
            "--tls-verify",
            "--nbd",
            "tcp:127.0.0.1:0",
        ]);
        let uri = format!("{}?tls-certificates={}", said.trim(), dir.display());
        let ran = Command::new("timeout").args(["30", "nbdinfo", "--size", &uri]).output().unwrap();
        gone(&place);
        ran.status.success()
    };
    assert!(comes_in(), "there is no list");
    fs::write(pki.join("crl.template"), "crl_next_update = 30\ncrl_number = 1\n").unwrap();
    let list = |revoked: &[&str]| {
        let mut certtool = Command::new("certtool");
        certtool.args(["--generate-crl", "--no-text", "--template", &path("crl.template")]);
        certtool.args([
            "--load-ca-privkey",
            &path("ca-key.pem"),
            "--load-ca-certificate",
            &path("ca-cert.pem"),
        ]);
        for name in revoked {
            certtool.args(["--load-certificate", &path(name)]);
        }
        fs::write(pki.join("ca-crl.pem"), tool(&mut certtool)).unwrap();
    };
    list(&["expired-cert.pem"]);
    assert!(comes_in(), "another one is revoked");
    list(&["client-cert.pem"]);
    assert!(!comes_in(), "it is revoked");
    fs::write(pki.join("ca-crl.pem"), "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n").unwrap();
    let words = [
        "export",
        disk.to_str().unwrap(),
        "--tls",
        pki.to_str().unwrap(),
        "--tls-verify",
        "--nbd",
        "tcp:127.0.0.1",
    ];
    let ran = place.run(words);
    assert!(
        ran.code == 1 && place.devices().is_empty(),
        "a list that cannot be read lets nobody in: {ran:?}"
    );
}

#[test]
fn an_address_of_either_family_is_served_and_printed() {
    if !require_tools("an_address_of_either_family_is_served_and_printed", &["nbdinfo"]) {
        return;
    }
    let place = scratch();
    let disk = place.path("disk.img");
    image::random(&disk, SIZE, 7);
    let export = |address: &str, more: &[&str]| {
        let mut words = vec!["export", disk.to_str().unwrap(), "-r", "--nbd", address];
        words.extend(more);
        place.run(words)
    };
    let size = |uri: &str| {
        tool(Command::new("timeout").args(["30", "nbdinfo", "--size", uri])).trim().parse::<u64>().unwrap()
    };
    let mut addresses = vec![("tcp:127.0.0.1:0", "nbd://127.0.0.1:"), ("tcp:localhost:0", "nbd://")];
    if TcpListener::bind("[::1]:0").is_ok() {
        addresses.push(("tcp:[::1]:0", "nbd://[::1]:"));
    }
    for (address, begins) in addresses {
        let ran = export(address, &[]);
        let uri = ran.out.trim();
        assert!(ran.code == 0 && uri.starts_with(begins) && !uri.contains(":0/"), "{ran:?}");
        assert_eq!(size(uri), SIZE, "the URI that is printed has the port that is real");
        assert!(place.ok(["list"]).contains(uri));
        gone(&place);
    }
    // Every address of the machine: only by the user's word, and it is reached by each.
    for address in ["tcp:0.0.0.0:0", "tcp:[::]:0"] {
        let ran = export(address, &[]);
        assert!(ran.code == 1, "{ran:?}");
        if !address.contains('[') || TcpListener::bind("[::]:0").is_ok() {
            assert!(ran.err.contains("there is no TLS"), "{ran:?}");
        }
    }
    let ran = export("tcp:0.0.0.0:0", &["--insecure"]);
    let port = ran.out.rsplit_once(':').unwrap().1.split('/').next().unwrap().to_owned();
    TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    gone(&place);
    for address in ["tcp:", "tcp:[::1", "tcp:127.0.0.1:99999", "tcp:no.such.host.invalid:1"] {
        let ran = export(address, &[]);
        assert!(ran.code == 1 && ran.err.contains("cannot listen at"), "{address}: {ran:?}");
    }
    assert!(place.devices().is_empty());
}

/// libnbd's shell as a client that writes and reads all the time, over TLS, while the server is replaced.
#[test]
fn an_upgrade_drops_no_client_over_tls() {
    let name = "an_upgrade_drops_no_client_over_tls";
    if !require_tools(name, &["certtool"]) || !require_nbdsh(name) {
        return;
    }
    let place = scratch();
    let pki = certificates(&place);
    let disk = place.path("disk.img");
    image::random(&disk, SIZE, 7);
    let said = place.ok([
        "export",
        disk.to_str().unwrap(),
        "--tls",
        pki.to_str().unwrap(),
        "--tls-verify",
        "--nbd",
        "tcp:127.0.0.1:0",
    ]);
    let uri =
        format!("{}?tls-certificates={}", said.trim(), as_client(&place, &pki, "client", "ca").display());
    let stop = place.path("stop");
    let script = "import os, sys\n\
        h.set_uri_allow_local_file(True); h.connect_uri(sys.argv[1]); n = 0\n\
        while not os.path.exists(sys.argv[2]):\n\
        \x20   n += 1; block = n.to_bytes(8, 'big') * 8192; at = n % 64 * 65536\n\
        \x20   h.pwrite(block, at); h.flush(); assert h.pread(65536, at) == block\n\
        print(n)";
    let mut client =
        nbdsh(&["-c", &format!("import sys; sys.argv = ['', '{uri}', '{}']", stop.display()), "-c", script]);
    let mut client = client.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let worker = || place.devices()[0]["worker_pid"].clone();
    assert!(wait_until(Duration::from_secs(20), || place.devices()[0]["connections"].as_u64() == Some(1)));
    for _ in 0..3 {
        let before = worker();
        let mut serve = place.becket();
        let mut serve = serve.args(["serve", "--takeover", "--until-idle"]).spawn().unwrap();
        assert!(wait_until(Duration::from_secs(30), || worker() != before), "another worker serves it");
        std::thread::spawn(move || serve.wait());
        std::thread::sleep(Duration::from_millis(300));
        assert!(client.try_wait().unwrap().is_none(), "the connection was dropped");
    }
    fs::write(&stop, "").unwrap();
    let done = client.wait_with_output().unwrap();
    let rounds = String::from_utf8_lossy(&done.stdout).trim().parse::<u32>().unwrap_or(0);
    assert!(done.status.success() && rounds > 20, "{done:?}");
    gone(&place);
}

/// nbdsh with the system's own Python, which is the one that has libnbd.
fn nbdsh(words: &[&str]) -> Command {
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-m", "nbd"]).args(words);
    command
}

fn require_nbdsh(name: &str) -> bool {
    let works = nbdsh(&["--version"]).output().is_ok_and(|ran| ran.status.success());
    works || require_tools(name, &["nbdsh-with-a-python-that-has-libnbd"])
}

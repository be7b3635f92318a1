//! The kernel's own NBD client over an export, with a file system on it, while those who serve it are killed
//! and replaced.
//! The client is set up by generic netlink (linux/nbd-netlink.h), which can give it a new connection;
//! nbd-client cannot, so its device would fail what was under way.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use becket_testkit::{in_a_guest, skip, tool, umount, wait_until};
use common::disturb::{Disturbance, How, SUPERVISOR, WORKER};
use common::load::Random;
use common::nbd::Client;
use common::scratch;
use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socket_with};

const PATIENCE: Duration = Duration::from_secs(120);
const SIZE: u64 = 128 << 20;
/// Bytes of a file.
const FILE: usize = 256 << 10;

/// `NBD_CMD_*` and `NBD_ATTR_*`.
const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;
const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const DEAD_CONN_TIMEOUT: u16 = 8;

/// The kernel's NBD driver.
struct Driver {
    socket: OwnedFd,
    family: u16,
}

/// An attribute with its padding.
fn attribute(kind: u16, data: &[u8]) -> Vec<u8> {
    let mut bytes = [(data.len() as u16 + 4).to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

impl Driver {
    fn open() -> Driver {
        let kind = (AddressFamily::NETLINK, SocketType::RAW);
        let socket = socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, Some(GENERIC)).unwrap();
        let mut driver = Driver { socket, family: 16 };
        // CTRL_CMD_GETFAMILY with CTRL_ATTR_FAMILY_NAME; its answer has CTRL_ATTR_FAMILY_ID.
        let answer = driver.ask(3, &attribute(2, b"nbd\0")).unwrap();
        let id = attribute(1, &[0; 2])[..4].to_vec();
        let at = answer[20..].windows(4).position(|bytes| bytes == id).unwrap() + 24;
        driver.family = u16::from_ne_bytes(answer[at..at + 2].try_into().unwrap());
        driver
    }

    /// Sends a command and waits until it is acknowledged; the last answer before that.
    fn ask(&self, command: u8, attributes: &[u8]) -> io::Result<Vec<u8>> {
        let len = 20 + attributes.len() as u32;
        let words = [len.to_ne_bytes(), [0; 4], 1u32.to_ne_bytes(), [0; 4], [command, 1, 0, 0]];
        let mut message = words.concat();
        // NLM_F_REQUEST and NLM_F_ACK.
        message[4..8].copy_from_slice(&[self.family.to_ne_bytes(), 5u16.to_ne_bytes()].concat());
        message.extend(attributes);
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::net::sendto(&self.socket, &message, SendFlags::empty(), &kernel)?;
        let mut last = Vec::new();
        loop {
            let mut answer = vec![0; 8192];
            let (got, _) = rustix::net::recv(&self.socket, &mut answer[..], RecvFlags::empty())?;
            answer.truncate(got);
            let mut rest = &answer[..];
            while rest.len() >= 20 {
                let len = u32::from_ne_bytes(rest[..4].try_into().unwrap()) as usize;
                // NLMSG_ERROR.
                if rest[4..6] == 2u16.to_ne_bytes() {
                    let error = i32::from_ne_bytes(rest[16..20].try_into().unwrap());
                    return if error == 0 { Ok(last) } else { Err(io::Error::from_raw_os_error(-error)) };
                }
                last = rest[..len].to_vec();
                rest = &rest[len.next_multiple_of(4).min(rest.len())..];
            }
        }
    }

    /// Attributes of the first device with a connection.
    fn with(client: &Client) -> Vec<u8> {
        client.socket.set_read_timeout(None).unwrap();
        client.socket.set_write_timeout(None).unwrap();
        let item = attribute(1, &attribute(1, &(client.socket.as_raw_fd() as u32).to_ne_bytes()));
        [attribute(INDEX, &[0; 4]), attribute(SOCKETS, &item)].concat()
    }

    fn connect(&self, client: &Client) {
        let number = |kind, number: u64| attribute(kind, &number.to_ne_bytes());
        let mut attributes = Driver::with(client);
        attributes.extend(number(SIZE_BYTES, client.size));
        attributes.extend(number(BLOCK_SIZE_BYTES, 4096));
        attributes.extend(number(SERVER_FLAGS, client.flags.into()));
        // After so many seconds what was under way goes over the new connection; so long one is waited for.
        attributes.extend(number(TIMEOUT, 3));
        attributes.extend(number(DEAD_CONN_TIMEOUT, 600));
        self.ask(CONNECT, &attributes).unwrap();
    }
}

/// Connects to the export once it is served, and gives the connection to the kernel once that has noticed the
/// end of the last one.
fn reconnect(driver: &Driver, socket: &Path) {
    let mut client = None;
    let mut came = || {
        client = Client::connect(socket, "disk").ok();
        client.is_some()
    };
    assert!(wait_until(PATIENCE, &mut came), "the export is not served");
    let client = client.unwrap();
    let mut said = None;
    let given = || said.insert(driver.ask(RECONFIGURE, &Driver::with(&client))).is_ok();
    assert!(wait_until(PATIENCE, given), "{said:?}");
}

fn bytes_of(number: usize) -> Vec<u8> {
    number.to_le_bytes().repeat(FILE / 8)
}

fn write_one(dir: &Path, number: usize) -> io::Result<()> {
    let mut file = File::create(dir.join(format!("{}", number % 64)))?;
    file.write_all(&bytes_of(number))?;
    file.sync_all()
}

#[test]
fn kernel_nbd_client_goes_on_with_its_file_system() {
    let name = "export_kernel::kernel_nbd_client_goes_on_with_its_file_system";
    if !in_a_guest() || !Command::new("modprobe").arg("nbd").status().is_ok_and(|status| status.success()) {
        return skip(name, "needs the kernel's NBD client");
    }
    let place = scratch();
    let image = place.path("a.img");
    File::create(&image).unwrap().set_len(SIZE).unwrap();
    let socket = place.path("s");
    let address = format!("unix:{}", socket.display());
    place.ok(["export", image.to_str().unwrap(), "--nbd", &address, "--name", "disk"]);

    let driver = Driver::open();
    driver.connect(&Client::connect(&socket, "disk").unwrap());
    let device = PathBuf::from("/dev/nbd0");
    tool(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&device));
    let dir = place.path("files");
    std::fs::create_dir(&dir).unwrap();
    tool(Command::new("mount").arg(&device).arg(&dir));

    let (stop, written) = (AtomicBool::new(false), AtomicUsize::new(0));
    let kills: usize = std::env::var("BECKET_TEST_KILLS").map_or(4, |kills| kills.parse().unwrap());
    let mut random = Random::new(7);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                write_one(&dir, written.load(Ordering::Relaxed)).unwrap();
                written.fetch_add(1, Ordering::Relaxed);
            }
        });
        let goes_on = |what: &str| {
            let before = written.load(Ordering::Relaxed);
            let more = || writer.is_finished() || written.load(Ordering::Relaxed) > before + 3;
            let fine = wait_until(PATIENCE, more) && !writer.is_finished();
            stop.fetch_or(!fine, Ordering::Relaxed);
            assert!(fine, "after {what}");
        };
        goes_on("the start");
        for _ in 0..kills {
            let killed = Disturbance { whom: WORKER, how: How::Signal("KILL") };
            killed.happen(&place, "disk", &mut random);
            reconnect(&driver, &socket);
            goes_on(&killed.name());
        }
        // These leave the connection as it is.
        for how in [How::Signal("KILL"), How::Replaced] {
            let one = Disturbance { whom: SUPERVISOR, how };
            one.happen(&place, "disk", &mut random);
            goes_on(&one.name());
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    });
    umount(&dir);
    driver.ask(DISCONNECT, &attribute(INDEX, &[0; 4])).unwrap();
    assert!(wait_until(PATIENCE, || place.devices()[0]["connections"] == 0), "it is disconnected");
    place.ok(["detach", "disk"]);

    tool(Command::new("e2fsck").args(["-f", "-n"]).arg(&image));
    let device = place.attach(&image, &["--read-only"]);
    tool(Command::new("mount").args(["-o", "ro"]).arg(&device).arg(&dir));
    let written = written.into_inner();
    for number in written.saturating_sub(64)..written {
        let found = std::fs::read(dir.join(format!("{}", number % 64))).unwrap();
        assert!(found == bytes_of(number), "file {number} of {written}");
    }
    umount(&dir);
}

//! Exports under clients of others: fio's NBD engine, and programs of libnbd's shell.
//! Each export is at a unix socket in the test's own directory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::fs;
use std::process::Command;

use becket_testkit::{Scratch, image, require_plain_machine, require_tools, tool};
use common::{scratch, text};

const SIZE: u64 = 32 << 20;

/// An image with random bytes in its first quarter, exported; its URI.
fn exported(place: &Scratch, more: &[&str]) -> String {
    let image = place.path("disk.img");
    image::random(&image, SIZE / 4, 7);
    fs::File::options().write(true).open(&image).unwrap().set_len(SIZE).unwrap();
    let socket = format!("unix:{}", place.path("s.sock").display());
    let words = ["export", "--nbd", &socket].into_iter().chain(more.iter().copied()).chain(["disk.img"]);
    place.ok(words.collect::<Vec<_>>());
    text(&place.devices()[0], "device").to_owned()
}

#[test]
fn fio_writes_at_random_and_verifies_what_it_wrote() {
    const NAME: &str = "export_clients::fio_writes_at_random_and_verifies_what_it_wrote";
    if !require_tools(NAME, &["fio"]) {
        return;
    }
    let place = scratch();
    let uri = exported(&place, &[]);
    let said = tool(Command::new("fio").current_dir(place.path("")).args([
        "--name=nbd",
        "--ioengine=nbd",
        &format!("--uri={uri}"),
        "--rw=randrw",
        "--bsrange=512-128k",
        "--blockalign=512",
        "--iodepth=32",
        "--size=32M",
        "--io_size=128M",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--fsync=64",
        "--output-format=json",
    ]));
    let report: serde_json::Value = serde_json::from_str(&said[said.find('{').unwrap()..]).unwrap();
    let job = &report["jobs"][0];
    assert_eq!(job["error"], 0, "{job}");
    assert!(job["write"]["total_ios"].as_u64().unwrap() > 500, "{job}");
    place.ok(["detach", "--all"]);
}

/// What libnbd's own shell sees: of the handshake, of each command, and of ranges that are none.
const SHELL: &str = r#"
import errno
size = 32 << 20
assert h.get_size() == size and not h.is_read_only()
assert h.get_protocol() == "newstyle-fixed" and h.get_structured_replies_negotiated()
assert h.can_flush() and h.can_fua() and h.can_trim() and h.can_zero() and h.can_fast_zero()
assert h.can_multi_conn() and h.can_cache() and h.can_df()
assert h.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
runs = []
h.block_status(size, 0, lambda name, at, entries, error: runs.extend(entries) or 0)
assert runs == [size // 4, 0, size - size // 4, 3], runs
h.pwrite(b"x" * 70000, 12345, nbd.CMD_FLAG_FUA)
assert h.pread(70000, 12345) == b"x" * 70000
pieces = []
h.pread_structured(1 << 16, 0, lambda data, at, status, error: pieces.append(len(data)), nbd.CMD_FLAG_DF)
assert pieces == [1 << 16], pieces
h.zero(4096, 16384, nbd.CMD_FLAG_NO_HOLE)
assert h.pread(4096, 16384) == bytes(4096)
h.trim(1 << 20, 2 << 20)
h.zero(1 << 20, 3 << 20, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(1 << 20, 3 << 20) == bytes(1 << 20)
h.cache(1 << 20, 0)
h.flush()
h.set_strict_mode(0)
def fails(what, *wanted):
    try:
        what()
    except nbd.Error as error:
        assert error.errnum in wanted, error
    else:
        raise AssertionError("it is allowed")
fails(lambda: h.pread(512, size), errno.EINVAL)
fails(lambda: h.pwrite(b"y" * 1024, size - 512), errno.ENOSPC)
fails(lambda: h.zero(1024, size - 512), errno.ENOSPC)
fails(lambda: h.trim(1024, size - 512), errno.EINVAL)
fails(lambda: h.pread(512, 0, 1 << 14), errno.EINVAL)
# Sixty-four under way, answered in any order.
buffers = [nbd.Buffer(4096) for _ in range(64)]
cookies = [h.aio_pread(buffer, 4096 * number) for number, buffer in enumerate(buffers)]
while cookies := [cookie for cookie in cookies if not h.aio_command_completed(cookie)]:
    h.poll(-1)
for number, buffer in enumerate(buffers):
    assert buffer.to_bytearray() == h.pread(4096, 4096 * number)
print("all of it")
"#;

/// Runs a program in it, by the system's Python, which has the module.
fn shell(words: &[&str]) -> String {
    tool(Command::new("nbdsh").args(words).env("PATH", "/usr/bin:/bin"))
}

#[test]
fn the_shell_of_libnbd_finds_what_the_protocol_promises() {
    const NAME: &str = "export_clients::the_shell_of_libnbd_finds_what_the_protocol_promises";
    if !require_plain_machine(NAME, &["nbdsh"]) {
        return;
    }
    let place = scratch();
    let uri = exported(&place, &[]);
    let said = shell(&["--base-allocation", "-u", &uri, "-c", SHELL]);
    assert_eq!(said.trim(), "all of it");
    place.ok(["detach", "--all"]);
    let plain = fs::read(place.path("disk.img")).unwrap();
    assert!(plain[12345..16384].iter().chain(&plain[20480..82345]).all(|byte| *byte == b'x'));

    // What is for reading only says so, and is.
    let uri = exported(&place, &["--read-only"]);
    let program = "assert h.is_read_only()\nh.set_strict_mode(0)\n\
                   try:\n    h.pwrite(b'z' * 512, 0)\n    print('written')\n\
                   except nbd.Error as error:\n    print(error.errno)\n";
    let said = shell(&["-u", &uri, "-c", program]);
    assert_eq!(said.trim(), "EPERM");
    place.ok(["detach", "--all"]);
}

/// What a client asks for by its name is not what becket's devices are called.
#[test]
fn a_client_finds_an_export_of_any_name() {
    const NAME: &str = "export_clients::a_client_finds_an_export_of_any_name";
    if !require_plain_machine(NAME, &["nbdinfo"]) {
        return;
    }
    let place = scratch();
    let long = "ä/".repeat(1365) + "z";
    for (name, shown) in [
        ("my disk/äö", "my%20disk%2F%C3%A4%C3%B6"),
        ("-?#%&'\"\\\u{202e}", "-%3F%23%25%26%27%22%5C%E2%80%AE"),
        ("", ""),
        (&*long, ""),
        ("plain", "plain"),
    ] {
        let uri = exported(&place, &[&format!("--name={name}")]);
        let device = &place.devices()[0];
        assert!(uri.starts_with(&format!("nbd+unix:///{shown}")), "{uri}");
        assert_eq!(text(&device["export"], "name"), name);
        assert_eq!(text(device, "name"), if name == "plain" { "plain" } else { "nbd0" });
        let said = tool(Command::new("nbdinfo").args(["--json", &uri]));
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        let export = &said["exports"][0];
        assert_eq!(
            (text(export, "export-name"), export["export-size"].as_u64()),
            (name, Some(SIZE)),
            "{said}"
        );
        let said = tool(Command::new("nbdinfo").args(["--list", "--json", &uri]));
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(text(&said["exports"][0], "export-name"), name, "{said}");
        let listed = place.ok(["list"]);
        assert!(listed.contains(&uri) && !listed.contains('\u{202e}'), "{listed}");
        place.ok(["detach", &uri]);
    }
    let image = place.path("disk.img");
    let image = image.to_str().unwrap();
    let socket = format!("unix:{}", place.path("s.sock").display());
    for (name, why) in [("a\nb", "control character"), (&*"x".repeat(4097), "4097 bytes")] {
        let ran = place.run(["export", image, "--nbd", &socket, "--name", name]);
        assert!(ran.code == 2 && ran.err.contains(why), "{ran:?}");
    }
    // A virtual machine asks for none: there the name is becket's alone.
    let ran = place.run(["export", image, "--vhost-user", &socket, "--name", "my disk"]);
    assert!(ran.code == 1 && ran.err.contains("only letters, digits"), "{ran:?}");
    assert!(place.devices().is_empty());
}

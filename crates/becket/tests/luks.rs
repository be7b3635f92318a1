//! LUKS volumes that cryptsetup opens on becket's devices: `--key-file`.
//! Every mapping that a test makes is closed again, by becket.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Scratch, image, require_dm, require_plain_machine, require_tools, tool, wait_until};
use common::scratch;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A LUKS volume in an image, and its key.
fn volume(place: &Scratch) {
    fs::write(place.path("key"), image::random_bytes(32, 1)).unwrap();
    fs::write(place.path("wrong"), image::random_bytes(32, 2)).unwrap();
    fs::File::create(place.path("a.img")).unwrap().set_len(24 << 20).unwrap();
    let format =
        ["-q", "luksFormat", "--type", "luks2", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
    tool(
        Command::new("cryptsetup")
            .args(format)
            .arg("--key-file")
            .args([place.path("key"), place.path("a.img")]),
    );
}

fn ready(name: &str) -> bool {
    require_dm(name) && require_tools(name, &["cryptsetup", "mkfs.ext4"])
}

#[test]
fn dm_luks_a_volume_is_opened_with_its_key_and_closed_with_its_device() {
    if !ready("luks::dm_luks_a_volume_is_opened_with_its_key_and_closed_with_its_device") {
        return;
    }
    let place = scratch();
    volume(&place);
    let attach = |more: &[&str]| {
        let words = ["attach", "--name", "vol", "--key-file", "key"];
        place.ok(words.iter().chain(more).chain(&["a.img"])).trim_end().to_owned()
    };
    let node = attach(&[]);
    assert_eq!(node, "/dev/mapper/luks-vol");
    let plain = image::random_bytes(1 << 20, 3);
    let disk = fs::File::options().read(true).write(true).open(&node).unwrap();
    disk.write_all_at(&plain, 4096).unwrap();
    disk.sync_all().unwrap();
    // Who has it open is in the way, and is named.
    let ran = place.run(["detach", "vol"]);
    assert!(ran.code == 1 && ran.err.contains("in use"), "{ran:?}");
    drop(disk);
    place.ok(["detach", "vol"]);
    assert!(!Path::new(&node).exists() && place.devices().is_empty());
    let stored = fs::read(place.path("a.img")).unwrap();
    assert!(!stored.windows(4096).any(|part| part == &plain[..4096]), "it is encrypted");

    // Again, for reading only; its own node stands for it, too.
    let node = attach(&["--read-only"]);
    let disk = fs::File::open(&node).unwrap();
    let mut read = vec![0; plain.len()];
    disk.read_exact_at(&mut read, 4096).unwrap();
    assert!(read == plain);
    let for_reading = tool(Command::new("blockdev").arg("--getro").arg(&node));
    assert_eq!(for_reading.trim(), "1");
    drop(disk);
    place.ok(["detach", &node]);
    assert!(!Path::new(&node).exists() && place.devices().is_empty());
    let opened = &place.json(["attach", "--name", "vol", "--key-file", "key", "a.img"])["opened"][0];
    assert_eq!((&opened["name"], &opened["device"]), (&"vol".into(), &"/dev/mapper/luks-vol".into()));
    place.ok(["detach", "--all"]);
    assert!(!Path::new(&node).exists());
}

#[test]
fn dm_luks_what_cannot_be_opened_leaves_nothing() {
    if !ready("luks::dm_luks_what_cannot_be_opened_leaves_nothing") {
        return;
    }
    let place = scratch();
    volume(&place);
    fs::File::create(place.path("plain.img")).unwrap().set_len(1 << 20).unwrap();
    // Names of volumes are the machine's: one that is taken is said.
    let taken = ["--name", "twice", "--key-file", "key", "a.img"];
    place.ok(["attach"].iter().chain(&taken));
    let other = scratch();
    volume(&other);
    let ran = other.run(["attach"].iter().chain(&taken));
    assert!(ran.code == 1 && ran.err.contains("another volume is open as luks-twice"), "{ran:?}");
    assert!(other.devices().is_empty());
    place.ok(["detach", "twice"]);
    for (image, key, why) in [
        ("a.img", "wrong", "No key available"),
        ("a.img", "none", "Failed to open key file"),
        ("plain.img", "key", "not a valid LUKS device"),
    ] {
        let ran = place.run(["attach", "--key-file", key, image]);
        assert!(ran.code == 1 && ran.err.contains(why) && ran.err.contains("hint: "), "{ran:?}");
        assert!(place.devices().is_empty(), "{image} {key}");
    }
}

#[test]
fn dm_luks_a_mount_and_a_command_keep_it_as_long_as_they_last() {
    if !ready("luks::dm_luks_a_mount_and_a_command_keep_it_as_long_as_they_last") {
        return;
    }
    let place = scratch();
    volume(&place);
    fs::create_dir(place.path("mnt")).unwrap();
    let key = ["--name", "lasting", "--key-file", "key"];
    let gone = || {
        let gone = || !Path::new("/dev/mapper/luks-lasting").exists() && place.devices().is_empty();
        assert!(wait_until(Duration::from_secs(20), gone), "{:?}", place.devices());
    };
    place.ok(["run"].iter().chain(&key).chain(&["a.img", "--", "mkfs.ext4", "-q", "{}"]));
    gone();
    for by in ["umount", "becket umount"] {
        place.ok(["mount"].iter().chain(&key).chain(&["a.img", "mnt"]));
        fs::write(place.path("mnt/file"), by).unwrap();
        match by {
            "umount" => drop(tool(Command::new("umount").arg(place.path("mnt")))),
            _ => drop(place.ok(["umount", "mnt"])),
        }
        gone();
    }
    place.ok(["mount"].iter().chain(&key).chain(&["--read-only", "a.img", "mnt"]));
    assert_eq!(fs::read_to_string(place.path("mnt/file")).unwrap(), "becket umount");
    place.ok(["umount", "mnt"]);
    gone();
}

/// Where the kernel cannot, that is said before anything is attached.
#[test]
fn without_dm_crypt_it_says_so() {
    if !require_plain_machine("luks::without_dm_crypt_it_says_so", &[]) {
        return;
    }
    if Path::new("/sys/class/misc/device-mapper").exists() {
        return becket_testkit::skip("luks::without_dm_crypt_it_says_so", "this kernel has device-mapper");
    }
    let place = scratch();
    fs::File::create(place.path("a.img")).unwrap().set_len(1 << 20).unwrap();
    for words in [&["attach", "a.img"][..], &["run", "a.img", "--", "true"], &["mount", "a.img", "."]] {
        let ran = place.run([words[0], "--key-file", "key"].iter().chain(&words[1..]));
        assert!(ran.code == 1 && ran.err.contains("CONFIG_BLK_DEV_DM"), "{ran:?}");
        assert!(ran.err.contains("becket doctor"), "{ran:?}");
    }
    assert!(place.devices().is_empty());
}

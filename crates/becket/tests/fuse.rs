//! FUSE: a loop device over a file that becket serves. In use, with its image cut, compressed; its end.
//! What every transport must do is the conformance suite's; deaths under load are in `survival.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Scratch, crc_whole, image, require_fuse, require_tools, tool, wait_until};
use common::{Use, a_mount_is_named, alive, scratch, text};
use serde_json::{Value, json};
use std::{
    fs,
    os::unix::fs::{FileExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

fn attach(place: &Scratch, image: &Path) -> (PathBuf, Value) {
    let device = place.attach(image, &["--via", "fuse"]);
    let info = place.devices().remove(0);
    assert_eq!((text(&info, "transport"), text(&info, "device")), ("fuse", device.to_str().unwrap()));
    (device, info)
}

/// The children of a process.
fn children(parent: u32) -> Vec<u32> {
    let is_child = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().any(|line| line.strip_prefix("PPid:\t") == Some(&parent.to_string()))
    };
    let pids = fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_child).collect()
}

/// Reads a page; past the page cache, because it was not read before.
fn read(device: &Path, at: u64) -> std::io::Result<Vec<u8>> {
    let mut page = vec![0; 4096];
    let file = fs::File::open(device)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)?;
    file.read_exact_at(&mut page, at).map(|()| page)
}

#[test]
fn fuse_device_in_use_stays_and_goes_with_its_last_user() {
    if !require_fuse("fuse::fuse_device_in_use_stays_and_goes_with_its_last_user") {
        return;
    }
    let place = scratch();
    let path = place.path("a.img");
    image::random(&path, MIB, 1);
    let (device, info) = attach(&place, &path);
    let used = Use::of(&device);
    let holder = fs::File::open(&device).unwrap();
    let ran = place.run(["detach", "--json", device.to_str().unwrap()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_eq!(text(&ran.json()["errors"][0], "kind"), "busy");
    assert_eq!(ran.json()["errors"][0]["users"][0]["pid"], json!(std::process::id()), "{ran:?}");
    assert_eq!(crc_whole(&device), crc_whole(&path), "it is unharmed");

    place.ok(["detach", "--lazy", device.to_str().unwrap()]);
    assert!(used.lasts(), "its user still has it");
    let mut page = [0; 4096];
    holder.read_exact_at(&mut page, MIB - 4096).expect("it is served until its last user lets go");
    drop(holder);
    assert!(wait_until(PATIENCE, || !used.lasts() && place.devices().is_empty()), "{:?}", place.devices());
    let worker = u32::try_from(info["worker_pid"].as_u64().unwrap()).unwrap();
    assert!(wait_until(PATIENCE, || !alive(worker)), "no worker is left without a device");
}

#[test]
fn fuse_mounted_file_system_is_named() {
    let name = "fuse::fuse_mounted_file_system_is_named";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "mount"]) {
        return;
    }
    let place = scratch();
    image::ext4(&place.path("fs.img"), 8 * MIB, &place.dir("empty"));
    let (device, _) = attach(&place, &place.path("fs.img"));
    a_mount_is_named(&place, "fs.img", &device);
}

/// What is not there any more is an error, and nothing else is; neither process minds.
#[test]
fn fuse_image_that_was_cut_is_an_error_where_it_was_cut() {
    if !require_fuse("fuse::fuse_image_that_was_cut_is_an_error_where_it_was_cut") {
        return;
    }
    let place = scratch();
    let path = place.path("a.img");
    image::random(&path, 4 * MIB, 1);
    let (device, info) = attach(&place, &path);
    let before = fs::read(&path).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(2 * MIB).unwrap();
    let error = read(&device, 3 * MIB).expect_err("bytes that are not there");
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    assert_eq!(read(&device, MIB).unwrap(), before[MIB as usize..][..4096]);
    file.set_len(4 * MIB).unwrap();
    assert_eq!(read(&device, 3 * MIB).unwrap(), [0; 4096], "it has grown again, and is empty there");
    let now = place.devices().remove(0);
    assert_eq!((&now["worker_pid"], &now["state"]), (&info["worker_pid"], &json!("live")));
    place.ok(["detach", device.to_str().unwrap()]);
}

/// Detaching the loop device detaches the whole: nothing is left that serves it.
#[test]
fn fuse_device_that_losetup_detached_leaves_nothing() {
    let name = "fuse::fuse_device_that_losetup_detached_leaves_nothing";
    if !require_fuse(name) || !require_tools(name, &["losetup"]) {
        return;
    }
    let place = scratch();
    let path = place.path("a.img");
    image::random(&path, MIB, 1);
    let (device, info) = attach(&place, &path);
    tool(Command::new("losetup").arg("--detach").arg(&device));
    assert!(wait_until(PATIENCE, || place.devices().is_empty()), "{:?}", place.devices());
    let worker = u32::try_from(info["worker_pid"].as_u64().unwrap()).unwrap();
    assert!(wait_until(PATIENCE, || !alive(worker)), "no worker is left without a device");
    // Its locks are gone with it.
    let (device, _) = attach(&place, &path);
    place.ok(["detach", device.to_str().unwrap()]);
}

/// A thread that is being killed while it takes a request must not lose it: the kernel would count it as
/// answered.
#[test]
fn fuse_write_back_does_not_notice_who_is_killed() {
    if !require_fuse("fuse::fuse_write_back_does_not_notice_who_is_killed") {
        return;
    }
    let place = scratch();
    let path = place.path("a.img");
    for round in 0..6 {
        image::sparse(&path, 32 * MIB);
        let (device, info) = attach(&place, &path);
        let bytes = image::random_bytes(32 << 20, round);
        let file = fs::OpenOptions::new().write(true).open(&device).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        std::thread::scope(|scope| {
            let written = scope.spawn(|| file.sync_all());
            // When the requests have begun to flow, each time a little later.
            std::thread::sleep(Duration::from_millis(3 + 4 * round));
            tool(Command::new("kill").args(["-KILL", &info["worker_pid"].to_string()]));
            written.join().unwrap().expect("it is written by the next one");
        });
        assert!(fs::read(&path).unwrap() == bytes, "round {round}: what was synced is not in the image");
        drop(file);
        place.ok(["detach", device.to_str().unwrap()]);
    }
}

/// A compressed image neither takes another's place nor leaves it: both are said, and the device goes on.
#[test]
fn fuse_compressed_image_stays_where_it_is() {
    let name = "fuse::fuse_compressed_image_stays_where_it_is";
    if !require_fuse(name) || !require_tools(name, &["xz"]) {
        return;
    }
    let place = scratch();
    let (packed, plain) = (place.path("a.img"), place.path("b.img"));
    image::random(&packed, MIB, 1);
    image::random(&plain, MIB, 2);
    tool(Command::new("xz").args(["--keep", "--block-size=65536"]).arg(&packed));
    for (image, other, shown) in [("a.img.xz", "b.img", &packed), ("b.img", "a.img.xz", &plain)] {
        let (device, _) = attach(&place, &place.path(image));
        let node = device.to_str().unwrap();
        let ran = place.run(["set", "--json", "--read-only", "on", "--image", other, node]);
        assert_eq!((ran.code, text(&ran.json()["errors"][0], "kind")), (1, "unsupported"), "{ran:?}");
        assert!(text(&ran.json()["errors"][0], "hint").contains("detach"), "{ran:?}");
        assert_eq!(crc_whole(&device), crc_whole(shown));
        place.ok(["detach", node]);
    }
}

/// Without a server a device is lost. Its users get errors, and it can still be detached.
#[test]
fn fuse_device_without_any_server_is_lost_and_can_be_detached() {
    if !require_fuse("fuse::fuse_device_without_any_server_is_lost_and_can_be_detached") {
        return;
    }
    let place = scratch();
    let path = place.path("a.img");
    image::random(&path, MIB, 1);
    let (device, info) = attach(&place, &path);
    let used = Use::of(&device);
    let pid = |of: &str| u32::try_from(info[of].as_u64().unwrap()).unwrap();
    // The server's successor first, which is its child.
    let guards = children(pid("server_pid"));
    let mut all: Vec<u32> = guards.into_iter().chain([pid("server_pid"), pid("worker_pid")]).collect();
    // The worker is a child of the server, too; the second signal might find it gone.
    all.sort_unstable();
    all.dedup();
    assert!(all.len() > 2, "{all:?}");
    tool(Command::new("kill").arg("-KILL").args(all.iter().map(u32::to_string)));
    assert!(wait_until(PATIENCE, || !all.iter().any(|pid| alive(*pid))));
    let lost = || place.devices().first().is_some_and(|info| text(info, "state") == "lost");
    assert!(wait_until(PATIENCE, lost), "{:?}", place.devices());
    assert!(read(&device, 0).is_err(), "nobody reads for it");
    place.ok(["detach", device.to_str().unwrap()]);
    assert!(wait_until(PATIENCE, || !used.lasts()));
    assert!(place.devices().is_empty());
}

/// Whether this test can be an ordinary user.
fn require_user(name: &str) -> bool {
    require_fuse(name)
        && require_tools(name, &["setpriv", "unshare", "fusermount3", "sfdisk", "mke2fs", "debugfs"])
}

/// Makes bash run something as an ordinary user, in the user's own directory with `$BECKET`, where /dev/fuse
/// has that mode. Mounts are in a namespace of their own, so they go with the last process.
fn as_user(place: &Scratch, mode: &str, script: &str) -> std::process::Output {
    const NOBODY: u32 = 65534;
    let (home, program, node) = (place.dir("home"), place.path("program"), place.path("node"));
    fs::copy(env!("CARGO_BIN_EXE_becket"), &program).unwrap();
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    let user = "mknod -m $1 $2 c 10 229 && mount --bind $2 /dev/fuse && \
                exec setpriv --reuid 65534 --regid 65534 --clear-groups bash -euc \"$3\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "bash", "-euc", user, "bash", mode]);
    command.arg(&node).arg(script).current_dir(&home);
    command.env("BECKET", &program).env("BECKET_RUNTIME_DIR", home.join("run")).output().unwrap()
}

#[test]
fn fuse_gives_files_to_who_is_not_root() {
    if !require_user("fuse::fuse_gives_files_to_who_is_not_root") {
        return;
    }
    let place = scratch();
    let ran = as_user(
        &place,
        "666",
        r#"
        PATH=$PATH:/usr/sbin:/sbin
        truncate -s 20M disk.img
        printf 'label: gpt\nsize=8M\nsize=8M\n' | sfdisk -q disk.img
        file=$("$BECKET" attach disk.img 2>warned)
        grep -q 'a file and no block device' warned
        dir=${file%/*}
        [[ $(ls "$dir" | tr '\n' ' ') == 'image p1 p2 ' && $(stat -c %s "$dir/p1") == 8388608 ]]
        mke2fs -q -t ext4 "$dir/p1"
        debugfs -w -R 'write warned here' "$dir/p1" 2>said
        debugfs -R 'cat here' "$dir/p1" 2>said | cmp - warned
        e2fsck -fn "$dir/p1" >said 2>&1
        # What it becomes is asked of becket, and of no disk of the kernel.
        ! "$BECKET" set disk.img --size-limit 1M 2>said
        grep -q "p1 ends at byte .* behind the new end" said
        "$BECKET" set disk.img --read-only on
        [[ $(stat -c %a "$file" "$dir/p1" | tr '\n' ' ') == '400 400 ' ]]
        ! dd if=warned of="$file" conv=notrunc status=none 2>said
        "$BECKET" set disk.img --read-only off
        [[ $(stat -c %a "$file" "$dir/p1" | tr '\n' ' ') == '600 600 ' ]]
        # In use it stays.
        exec 7<"$dir/p1"
        ! "$BECKET" detach disk.img 2>said
        grep -q "open by bash" said
        ! "$BECKET" detach --dry-run disk.img >said
        grep -q "would not detach .* open by bash" said
        cp disk.img other.img
        ! "$BECKET" set disk.img --image other.img 2>said
        grep -q "is in use and would show another image: open by bash" said
        exec 7<&-
        "$BECKET" detach disk.img
        # Opened for writing when that is wanted later.
        file=$("$BECKET" attach -r disk.img 2>said)
        "$BECKET" set disk.img --read-only off
        [[ $(stat -c %a "$file") == 600 ]]
        dd if="$file" of="$file" bs=512 count=1 conv=notrunc status=none
        "$BECKET" detach disk.img
        [[ ! -e $dir && $("$BECKET" list 2>&1) == *'nothing is attached'* ]]
        # What was written is in the image.
        dd if=disk.img of=p1 bs=1M skip=1 count=8 status=none
        debugfs -R 'cat here' p1 2>said | cmp - warned
        "$BECKET" run -r disk.img -- cmp {} disk.img
        echo whole
        "#,
    );
    assert!(ran.status.success() && ran.stdout.ends_with(b"whole\n"), "{ran:?}");
}

#[test]
fn fuse_that_a_user_cannot_have_is_reported_with_a_way_out() {
    if !require_user("fuse::fuse_that_a_user_cannot_have_is_reported_with_a_way_out") {
        return;
    }
    let place = scratch();
    let said = |mode, script| {
        let ran = as_user(&place, mode, script);
        let _ = fs::remove_file(place.path("node"));
        assert!(!ran.status.success(), "{ran:?}");
        String::from_utf8(ran.stderr).unwrap()
    };
    let without_helper = said("666", "truncate -s 1M a.img; PATH=/nowhere $BECKET attach a.img");
    for word in ["fusermount3", "apt install fuse3"] {
        assert!(without_helper.contains(word), "{word} is not in {without_helper}");
    }
    let not_set_uid = said(
        "666",
        "truncate -s 1M a.img; mkdir bin; cp $(command -v fusermount3) bin/; PATH=$PWD/bin $BECKET attach --via fuse a.img",
    );
    for word in ["bin/fusermount3 is not one", "apt install --reinstall fuse3"] {
        assert!(not_set_uid.contains(word), "{word} is not in {not_set_uid}");
    }
    let bound = said("666", "truncate -s 1M a.img; setpriv --no-new-privs $BECKET attach --via fuse a.img");
    for word in ["no_new_privs", "hint: ", "as root"] {
        assert!(bound.contains(word), "{word} is not in {bound}");
    }
    let refused = said("600", "truncate -s 1M a.img; $BECKET attach --via fuse a.img");
    for word in ["may not open /dev/fuse", "chmod 666 /dev/fuse"] {
        assert!(refused.contains(word), "{word} is not in {refused}");
    }
}

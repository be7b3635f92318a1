//! Backings that really fail: block devices that fail, go away and come back (device-mapper's error and
//! flakey targets), and files whose owner has no room left (quota). Faults of becket's own making are in
//! `faults.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use becket_testkit::{Scratch, image, require_dm, require_tools, require_ublk, scaled, tool};
use common::page::{EIO, ENOSPC, PAGE, direct, read, sync, write};
use common::{
    below::{Below, Mapped, undo},
    scratch,
};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;
const SECTORS: u64 = SIZE / 512;

/// A block device whose table can be exchanged, over a loop device of random bytes.
struct Changing {
    mapped: Mapped,
    lower: Below,
    content: Vec<u8>,
}

impl Changing {
    /// Over an image; in the table `LOWER` stands for the loop device. Dropped after the place and its
    /// devices.
    fn new(word: &str, table: &str) -> (Changing, Scratch) {
        let place = scratch();
        let content = image::random_bytes(SIZE as usize, 11);
        fs::write(place.path("bottom"), &content).unwrap();
        let lower = Below::new(&place.path("bottom"), &[]);
        let mapped = Mapped::new(word, &over(&lower, table));
        (Changing { mapped, lower, content }, place)
    }

    fn device(&self) -> PathBuf {
        self.mapped.device()
    }

    /// Nothing goes further from now on, and nothing ends.
    fn hang(&self) {
        self.mapped.dmsetup("suspend", &["--noflush", "--nolockfs", "--noudevsync"]);
    }

    fn go_on(&self) {
        self.mapped.dmsetup("resume", &["--noudevsync"]);
    }

    /// Becomes something else, with what is under way in the middle.
    fn become_another(&self, table: &str) {
        self.hang();
        self.mapped.dmsetup("load", &["--table", &over(&self.lower, table)]);
        self.go_on();
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        // A test may have failed while it hung.
        self.go_on();
    }
}

fn over(lower: &Below, table: &str) -> String {
    table.replace("LOWER", lower.path())
}

fn linear() -> String {
    format!("0 {SECTORS} linear LOWER 0")
}

/// Fails whatever comes, flushes too; with `features`, only some of it.
fn down(features: &str) -> String {
    format!("0 {SECTORS} flakey LOWER 0 0 1000000 {features}").trim_end().to_owned()
}

fn ready(name: &str) -> bool {
    require_dm(name) && require_ublk(name) && require_tools(name, &["dmsetup"])
}

/// A device over ublk: the kernel's device-mapper could take a block device, too.
fn attach(place: &Scratch, image: &Path, name: &str) -> PathBuf {
    place.attach(image, &["--via", "ublk", "--name", name])
}

#[test]
fn dm_bad_sectors_below_are_bad_sectors_above_and_nothing_else() {
    if !ready("dm_bad_sectors_below_are_bad_sectors_above_and_nothing_else") {
        return;
    }
    let bad = 2 * MIB / 512;
    let table = format!(
        "0 {bad} linear LOWER 0\n{bad} 8 error\n{} {} linear LOWER {}",
        bad + 8,
        SECTORS - bad - 8,
        bad + 8
    );
    let (below, place) = Changing::new("bad", &table);
    let file = direct(&attach(&place, &below.device(), "top"));
    for at in (0..SIZE).step_by(PAGE * 16) {
        let wanted = if at == 2 * MIB { Err(EIO) } else { Ok(&below.content[at as usize..][..PAGE]) };
        assert_eq!(
            read(&file, at).as_ref().map(|page| &page.0[..]).map_err(|errno| *errno),
            wanted,
            "at {at}"
        );
    }
    assert_eq!(write(&file, 2 * MIB, 1), Err(EIO));
    assert_eq!(write(&file, 2 * MIB + PAGE as u64, 2), Ok(()));
    file.sync_all().expect("no write that was acknowledged is lost");
    drop(file);
    place.ok(["detach", "top"]);
    let left = fs::read(place.path("bottom")).unwrap();
    assert!(left[2 * MIB as usize..][..PAGE] == below.content[2 * MIB as usize..][..PAGE]);
    assert_eq!(left[2 * MIB as usize + PAGE..][..PAGE], [2; PAGE]);
}

#[test]
fn dm_a_backing_that_goes_away_fails_its_own_device_alone_until_it_comes_back() {
    if !ready("dm_a_backing_that_goes_away_fails_its_own_device_alone_until_it_comes_back") {
        return;
    }
    let (below, place) = Changing::new("away", &linear());
    let other_content = image::random_bytes(SIZE as usize, 12);
    fs::write(place.path("other"), &other_content).unwrap();
    let device = attach(&place, &below.device(), "top");
    let (top, other) = (direct(&device), direct(&attach(&place, &place.path("other"), "other")));
    write(&top, 0, 1).unwrap();
    top.sync_all().unwrap();

    below.become_another(&down(""));
    for round in 0..20 {
        let at = round * 7 * PAGE as u64;
        assert_eq!(read(&top, at).err(), Some(EIO));
        assert_eq!(write(&top, at, 9), Err(EIO));
        assert_eq!(read(&other, at).unwrap().0, other_content[at as usize..][..PAGE]);
        write(&other, at, 3).unwrap();
    }
    other.sync_all().expect("the other device has nothing to do with it");
    assert_eq!(place.devices().len(), 2);

    below.become_another(&linear());
    assert_eq!(read(&top, 0).unwrap().0, [1; PAGE]);
    write(&top, PAGE as u64, 4).unwrap();
    top.sync_all().expect("no sync has failed meanwhile: nothing that was acknowledged is lost");
    assert_eq!(read(&top, 7 * PAGE as u64).unwrap().0, below.content[7 * PAGE..][..PAGE]);

    // A sync that fails is another matter: data that it covered may be lost, whatever comes later.
    write(&top, 0, 5).unwrap();
    below.become_another(&down(""));
    assert_eq!(sync(&top), Err(EIO));
    below.become_another(&linear());
    assert_eq!(sync(&top), Err(EIO), "until it is attached anew");
    assert_eq!(read(&top, 0).unwrap().0, [5; PAGE]);
    drop((top, other));
    for name in ["top", "other"] {
        place.ok(["detach", name]);
    }
    let top = direct(&attach(&place, &below.device(), "top"));
    write(&top, 0, 6).unwrap();
    top.sync_all().unwrap();
    drop(top);
    below.become_another(&down(""));
    // One that is gone for good does not prevent detaching.
    place.ok(["detach", "top"]);
    below.become_another(&linear());
}

/// How a file system reacts: those that can write no more refuse to, and what was synced is there afterwards.
#[test]
fn dm_a_file_system_over_a_backing_that_takes_no_writes_is_whole_afterwards() {
    let name = "dm_a_file_system_over_a_backing_that_takes_no_writes_is_whole_afterwards";
    if !ready(name) || !require_tools(name, &["mkfs.ext4", "e2fsck"]) {
        return;
    }
    let (below, place) = Changing::new("flaky", &linear());
    let device = attach(&place, &below.device(), "top");
    let point = place.dir("mnt");
    tool(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&device));
    tool(Command::new("mount").args(["-o", "errors=remount-ro"]).arg(&device).arg(&point));
    let synced = |name: &str| -> io::Result<()> {
        let file = File::create(point.join(name))?;
        file.write_all_at(&[7; 100_000], 0)?;
        file.sync_all()
    };
    synced("before").unwrap();
    below.become_another(&down("1 error_writes"));
    assert!(synced("meanwhile").is_err(), "it cannot have been written");
    assert_eq!(fs::read(point.join("before")).unwrap(), [7; 100_000], "reads go on");
    below.become_another(&linear());
    becket_testkit::umount(&point);
    place.ok(["detach", "top"]);
    let device = attach(&place, &below.device(), "top");
    tool(Command::new("mount").arg(&device).arg(&point));
    assert_eq!(fs::read(point.join("before")).unwrap(), [7; 100_000]);
    synced("afterwards").unwrap();
    becket_testkit::umount(&point);
    tool(Command::new("e2fsck").args(["-f", "-n"]).arg(&device));
    place.ok(["detach", "top"]);
}

#[test]
fn dm_a_backing_that_hangs_is_not_asked_when_its_device_goes() {
    if !ready("dm_a_backing_that_hangs_is_not_asked_when_its_device_goes") {
        return;
    }
    let (below, place) = Changing::new("hangs", &linear());
    let device = attach(&place, &below.device(), "top");
    below.hang();
    let hanging = thread::spawn({
        let top = direct(&device);
        move || read(&top, MIB).map(|page| page.0.to_vec())
    });
    thread::sleep(scaled(Duration::from_millis(500)));
    assert!(!hanging.is_finished(), "nobody could have answered");
    let ran = place.run(["detach", "top"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("in use"), "{ran:?}");
    assert_eq!(place.devices().len(), 1, "list does not hang either");
    below.go_on();
    assert_eq!(hanging.join().unwrap().unwrap(), below.content[MIB as usize..][..PAGE]);
    below.hang();
    // It is unused: what it lies on is not asked.
    place.ok(["detach", "top"]);
    assert!(place.devices().is_empty());
    below.go_on();
}

/// What the owner of the images may have.
const ALLOWED: u64 = MIB;
const OWNER: u32 = 1234;
const PROJECT: u32 = 77;

/// An XFS with quota.
struct Quota {
    point: PathBuf,
}

impl Quota {
    fn new(place: &Scratch) -> Quota {
        let (disk, point) = (place.path("disk"), place.dir("quota"));
        image::sparse(&disk, 320 * MIB);
        tool(Command::new("mkfs.xfs").arg("-q").arg(&disk));
        tool(Command::new("mount").args(["-o", "loop,uquota,pquota"]).arg(&disk).arg(&point));
        Quota { point }
    }

    /// The owner's and the project's alike.
    fn allow(&self, bytes: u64) {
        self.xfs(&format!("limit -u bhard={bytes} {OWNER}"));
        self.xfs(&format!("limit -p bhard={bytes} {PROJECT}"));
    }

    fn xfs(&self, command: &str) {
        tool(Command::new("xfs_quota").args(["-x", "-c", command]).arg(&self.point));
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        undo(Command::new("umount").arg(&self.point));
    }
}

/// A block device cannot say that it is a quota that is exhausted: there is no room, is what it says.
#[test]
fn dm_quota_an_owner_without_quota_has_no_room() {
    let name = "dm_quota_an_owner_without_quota_has_no_room";
    if !ready(name) || !require_tools(name, &["mkfs.xfs", "xfs_quota"]) {
        return;
    }
    let place = scratch();
    let quota = Quota::new(&place);
    let (own, project) = (quota.point.join("own"), quota.point.join("project"));
    image::sparse(&own, 2 * ALLOWED);
    std::os::unix::fs::chown(&own, Some(OWNER), None).unwrap();
    fs::create_dir(&project).unwrap();
    quota.xfs(&format!("project -s -p {} {PROJECT}", project.display()));
    image::sparse(&project.join("image"), 2 * ALLOWED);
    for image in [own, project.join("image")] {
        quota.allow(ALLOWED);
        let top = direct(&attach(&place, &image, "top"));
        let outcomes: Vec<_> = (0..2 * ALLOWED).step_by(PAGE).map(|at| write(&top, at, 7)).collect();
        let taken = outcomes.iter().take_while(|outcome| outcome.is_ok()).count() as u64 * PAGE as u64;
        assert!((ALLOWED / 2..=ALLOWED).contains(&taken), "{}: {taken} bytes were taken", image.display());
        assert_eq!(outcomes.last(), Some(&Err(ENOSPC)), "{}", image.display());
        top.sync_all().expect("what was taken is synced");
        write(&top, 0, 8).expect("it has its blocks");
        quota.allow(16 * ALLOWED);
        write(&top, 2 * ALLOWED - PAGE as u64, 9).expect("there is room again");
        top.sync_all().unwrap();
        drop(top);
        place.ok(["detach", "top"]);
        let left = fs::read(&image).unwrap();
        assert_eq!((&left[..PAGE], &left[left.len() - PAGE..]), (&[8; PAGE][..], &[9; PAGE][..]));
    }
}

//! What a command may cost, whatever image it is given: 512 MiB of memory and 5 s of processor time. Each
//! reader gets the worst image that we can think of (`images`). Time is not that of the clock, and tests are
//! built with little optimisation: the budget is counted in steps and bytes, and only its last resort, 4 s of
//! processor time, is asked here with a margin for what is done without a budget.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod images;
mod windows;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use becket_testkit::require_plain_machine;

/// Memory of a process, in KiB, and its processor time.
const MEMORY: u64 = 512 << 10;
const TIME: Duration = Duration::from_secs(8);

/// What came of a command.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
    /// The most memory that it had, in KiB, and its processor time.
    peak: u64,
    time: Duration,
}

/// Runs becket and watches it.
fn run(words: &[&str]) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let [out, err] = ["out", "err"].map(|name| dir.path().join(name));
    let to = |path: &Path| Stdio::from(fs::File::create(path).unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_becket"));
    let mut child = command
        .args(words)
        .env("XDG_RUNTIME_DIR", dir.path())
        .stdout(to(&out))
        .stderr(to(&err))
        .spawn()
        .unwrap();
    let process = PathBuf::from(format!("/proc/{}", child.id()));
    let (mut peak, mut ticks) = (0, 0);
    loop {
        let status = fs::read_to_string(process.join("status")).unwrap();
        let high = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        peak = high.map_or(peak, |line| line.trim().trim_end_matches(" kB").parse().unwrap());
        let stat = fs::read_to_string(process.join("stat")).unwrap();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        ticks = ticks.max(fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap());
        // It is not waited for until its times were read.
        if fields[0] == "Z" {
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let code = child.wait().unwrap().code();
    let text = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
    Ran { code, out: text(&out), err: text(&err), peak, time: Duration::from_millis(ticks * 10) }
}

/// Runs commands on an image and paths in it; `spent` says which of them must tell that the budget is used
/// up.
fn commands(image: &Path, asked: &[(&[&str], &str, bool)]) {
    for (words, inside, spent) in asked {
        let path = if inside.is_empty() { image.to_owned() } else { image.join(inside) };
        let ran = run(&[words, &[path.to_str().unwrap()][..]].concat());
        let what = format!("{words:?} {}", path.file_name().unwrap().display());
        let said =
            ran.err.lines().chain(ran.out.lines()).find(|line| line.contains("used up")).unwrap_or("-");
        println!("{what}: {:?}, {} MiB, {:?}: {said}", ran.code, ran.peak >> 10, ran.time);
        assert!(ran.code.is_some_and(|code| code < 2), "{what}: {ran:?}");
        assert!(ran.peak < MEMORY, "{what}: {} MiB", ran.peak >> 10);
        assert!(ran.time < TIME, "{what}: {:?}", ran.time);
        assert_eq!(said != "-", *spent, "{what}: {} {}", ran.err, ran.out.get(..2000).unwrap_or(&ran.out));
        let lifted = ran.err.contains("--no-limits") || said.contains("--no-limits");
        assert!(lifted || !spent, "{what}: {}", ran.err);
    }
}

const INSPECT: &[&str] = &["inspect"];
const LS: &[&str] = &["ls"];
const MAP: &[&str] = &["map", "--json"];
const ATTACH: &[&str] = &["attach", "--read-only"];

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn budget_ext() {
    if !require_plain_machine("budget_ext", &[]) {
        return;
    }
    let dir = dir();
    let lists = images::ext_lists(dir.path());
    commands(&lists, &[(INSPECT, "", true), (LS, "", false), (MAP, "file", true), (ATTACH, "file", true)]);
    commands(&images::ext_pieces(dir.path()), &[(INSPECT, "", false), (MAP, "file", false)]);
    commands(&images::ext_tree(dir.path()), &[(INSPECT, "", true), (MAP, "file", true)]);
    let names = images::ext_names(dir.path());
    let deep = "small/self/".repeat(14);
    commands(
        &names,
        &[(INSPECT, "", false), (LS, "big", true), (MAP, &deep, false), (MAP, "big/none", true)],
    );
}

#[test]
fn budget_iso9660() {
    if !require_plain_machine("budget_iso9660", &[]) {
        return;
    }
    let dir = dir();
    commands(&images::iso_itself(dir.path()), &[(INSPECT, "", true), (LS, "", false)]);
    commands(&images::iso_continuations(dir.path()), &[(INSPECT, "", false), (LS, "", true)]);
    commands(&images::iso_extents(dir.path()), &[(INSPECT, "", false), (LS, "", false), (MAP, "A", false)]);
}

#[test]
fn budget_fat() {
    if !require_plain_machine("budget_fat", &[]) {
        return;
    }
    let dir = dir();
    commands(&images::fat(dir.path()), &[(INSPECT, "", true), (LS, "", false), (MAP, "00000007.IMG", false)]);
}

#[test]
fn budget_erofs() {
    if !require_plain_machine("budget_erofs", &[]) {
        return;
    }
    let dir = dir();
    commands(&images::erofs(dir.path()), &[(INSPECT, "", false), (LS, "", true), (MAP, "link", true)]);
}

#[test]
fn budget_compressed_erofs() {
    if !require_plain_machine("budget_compressed_erofs", &[]) {
        return;
    }
    let dir = dir();
    let hole = windows::erofs(dir.path(), "hole.erofs", false);
    commands(&hole, &[(INSPECT, "", false), (LS, "", false), (MAP, "file", false)]);
    let middle = windows::erofs(dir.path(), "middle.erofs", true);
    commands(&middle, &[(INSPECT, "", false), (LS, "", false), (MAP, "file", false)]);
}

#[test]
fn budget_ntfs() {
    if !require_plain_machine("budget_ntfs", &[]) {
        return;
    }
    let dir = dir();
    let image = windows::ntfs(dir.path());
    let asked = [
        (INSPECT, "", false),
        (LS, "", true),
        (LS, "streams", false),
        (MAP, "streams", false),
        (MAP, "holes", false),
        (MAP, "runs", false),
    ];
    commands(&image, &asked);
}

#[test]
fn budget_exfat() {
    if !require_plain_machine("budget_exfat", &[]) {
        return;
    }
    let dir = dir();
    let image = windows::exfat(dir.path());
    commands(
        &image,
        &[(INSPECT, "", false), (LS, "full", false), (MAP, "circle", false), (MAP, "full/none", false)],
    );
}

#[test]
fn budget_lvm2() {
    if !require_plain_machine("budget_lvm2", &[]) {
        return;
    }
    let dir = dir();
    let striped = "vg/striped";
    commands(&images::lvm2(dir.path()), &[(INSPECT, "", false), (LS, "vg", false), (MAP, striped, false)]);
}

#[test]
fn budget_squashfs() {
    if !require_plain_machine("budget_squashfs", &[]) {
        return;
    }
    let dir = dir();
    commands(&images::squashfs(dir.path()), &[(INSPECT, "", false), (LS, "", false), (MAP, "file", false)]);
}

#[test]
fn budget_partitions() {
    if !require_plain_machine("budget_partitions", &[]) {
        return;
    }
    let dir = dir();
    commands(&images::mbr(dir.path()), &[(INSPECT, "", true), (LS, "", false), (MAP, "p1/p2/p3", false)]);
    commands(&images::gpt(dir.path()), &[(INSPECT, "", true), (LS, "", false), (LS, "by-uuid/x", false)]);
}

#[test]
fn budget_compressed() {
    if !require_plain_machine("budget_compressed", &[]) {
        return;
    }
    let dir = dir();
    for (image, spent) in [
        (images::xz_streams(dir.path()), true),
        (images::xz_padding(dir.path()), true),
        (images::zstd(dir.path()), false),
        (images::bgzf(dir.path()), true),
    ] {
        commands(&image, &[(INSPECT, "", spent), (ATTACH, "x", spent)]);
    }
}

#[test]
fn budget_qcow2_and_vmdk() {
    if !require_plain_machine("budget_qcow2_and_vmdk", &[]) {
        return;
    }
    let dir = dir();
    commands(&images::qcow2_tables(dir.path()), &[(ATTACH, "", true)]);
    commands(&images::qcow2_chain(dir.path()), &[(MAP, "", true)]);
    commands(&images::vmdk(dir.path()), &[(INSPECT, "", false), (MAP, "", false)]);
}

#[test]
fn budget_without_limits_it_goes_on() {
    if !require_plain_machine("budget_without_limits_it_goes_on", &[]) {
        return;
    }
    let dir = dir();
    let lists = images::ext_pieces(dir.path());
    let ran = run(&["map", "--no-limits", lists.join("file").to_str().unwrap()]);
    // The length of a map is not a budget: the process that serves devices has to hold it.
    assert!(ran.code == Some(1) && ran.err.contains("more than 1048576 pieces"), "{ran:?}");
    let names = images::ext_names(dir.path());
    let all = run(&["map", "--no-limits", names.join("big/none").to_str().unwrap()]);
    assert!(all.code == Some(1) && all.err.contains("no entry \"big/none\""), "{all:?}");
}

#[test]
fn budget_a_line_of_beckettab_lifts_the_limits() {
    if !require_plain_machine("budget_a_line_of_beckettab_lifts_the_limits", &[]) {
        return;
    }
    let dir = dir();
    let image = images::ext_names(dir.path()).join("big/none");
    let table = dir.path().join("tab");
    let lines = format!("limited {0} ro\nlifted {0} ro,no-limits\n", image.display());
    fs::write(&table, lines).unwrap();
    let attach = |name| run(&["attach", &format!("--tab={}", table.display()), name]);
    let limited = attach("limited");
    assert!(limited.code == Some(1) && limited.err.contains("used up"), "{limited:?}");
    let lifted = attach("lifted");
    assert!(lifted.code == Some(1) && lifted.err.contains("no entry \"big/none\""), "{lifted:?}");
}

//! What the end-to-end tests share: privileges and skips, a scratch place that cleans up, images, the binary.
//! Never hides a test that cannot run: [`skip`] says so on the screen and in a log that is counted.
//!
//! A failed step here fails the test that called it, so helpers panic with what was tried instead of
//! returning errors.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `BECKET_SKIP_LOG` | file that a line `NAME: WHY` is appended to for every skipped test |
//! | `BECKET_TEST_VIA` | transport to test, as `--via` takes it; `auto` when unset |
//! | `BECKET_TEST_GUEST` | set in the virtual machine: tests that no kernel has a part in are skipped |
//! | `BECKET_TEST_SLOW` | how many times slower than a plain machine this one is; patience grows with it |
//!
//! Patience also grows with the machine's load: a time limit is what a test asks of becket on an idle
//! machine.
#![deny(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

#[allow(unsafe_code, reason = "the kernel's fanotify has no safe wrapper")]
pub mod fanotify;
pub mod image;
pub mod lvm;
pub mod origin;
pub mod proxy;
mod scratch;

pub use scratch::{Ran, Scratch};

use std::{
    env, fs,
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// Says that the test `name` cannot run here, and why; the caller then returns.
pub fn skip(name: &str, why: &str) {
    println!("SKIP {name}: {why}");
    if let Some(log) = env::var_os("BECKET_SKIP_LOG") {
        let mut file =
            fs::OpenOptions::new().append(true).create(true).open(&log).expect("BECKET_SKIP_LOG opens");
        // One write a line: tests run side by side.
        file.write_all(format!("{name}: {why}\n").as_bytes()).expect("BECKET_SKIP_LOG takes a line");
    }
}

/// Whether this test may act as root; when not, it is skipped.
#[must_use]
pub fn require_root(name: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip(name, "needs root");
    }
    root
}

/// Whether all these programs are there; when not, the test is skipped.
#[must_use]
pub fn require_tools(name: &str, tools: &[&str]) -> bool {
    let missing: Vec<&str> = tools.iter().copied().filter(|tool| !on_path(tool)).collect();
    if !missing.is_empty() {
        skip(name, &format!("needs {}", missing.join(", ")));
    }
    missing.is_empty()
}

/// Whether this is the virtual machine, where computing is slow and other users are not affected.
#[must_use]
pub fn in_a_guest() -> bool {
    env::var_os("BECKET_TEST_GUEST").is_some()
}

/// Whether a test that does not depend on the kernel may run: a guest computes slowly, so it is skipped
/// there, because the host has run it. The programs `tools` must be there, too.
#[must_use]
pub fn require_plain_machine(name: &str, tools: &[&str]) -> bool {
    if in_a_guest() {
        skip(name, "no kernel has a part in it");
        return false;
    }
    require_tools(name, tools)
}

/// Whether some transport that makes block devices works here for root; when not, the test is skipped.
#[must_use]
pub fn require_device(name: &str) -> bool {
    if !require_root(name) {
        return false;
    }
    let wanted = via();
    let there: &[&str] = match wanted.as_str() {
        "loop" => &["/dev/loop-control"],
        "ublk" => &["/dev/ublk-control"],
        _ => &["/dev/loop-control", "/dev/ublk-control"],
    };
    let found = there.iter().any(|path| Path::new(path).exists());
    if !found {
        skip(name, &format!("--via {wanted} needs {}", there.join(" or ")));
    }
    found
}

/// Whether the kernel's loop driver is here and this is root; when not, the test is skipped.
#[must_use]
pub fn require_loop(name: &str) -> bool {
    let root = require_root(name);
    let found = root && Path::new("/dev/loop-control").exists();
    if root && !found {
        skip(name, "needs /dev/loop-control");
    }
    found
}

/// Whether FUSE is available, with loop devices to put over its files, and this is root; if not, the test is
/// skipped.
#[must_use]
pub fn require_fuse(name: &str) -> bool {
    let loops = require_loop(name);
    let found = loops && Path::new("/dev/fuse").exists();
    if loops && !found {
        skip(name, "needs /dev/fuse");
    }
    found
}

/// Whether device-mapper is available, with loop devices below it, and this is root; if not, the test is
/// skipped.
#[must_use]
pub fn require_dm(name: &str) -> bool {
    let loops = require_loop(name);
    let found = loops && Path::new("/sys/class/misc/device-mapper").exists();
    if loops && !found {
        skip(name, "needs device-mapper");
    }
    found
}

/// Whether ublk is here; when not, the test is skipped.
#[must_use]
pub fn require_ublk(name: &str) -> bool {
    let found = Path::new("/dev/ublk-control").exists();
    if !found {
        skip(name, "needs ublk");
    }
    found
}

/// The transport that this run of the tests is about, for `--via`.
pub fn via() -> String {
    env::var("BECKET_TEST_VIA").unwrap_or_else(|_| "auto".to_owned())
}

/// `time` as it passes on this machine: more of it where everything is slow.
pub fn scaled(time: Duration) -> Duration {
    let slow = env::var("BECKET_TEST_SLOW")
        .ok()
        .map(|text| text.parse::<u32>().expect("BECKET_TEST_SLOW is a number"));
    time * slow.unwrap_or(1).max(1)
}

/// How long to wait at most for what takes at most `time` on a plain idle machine: longer if everything is
/// slow, and while the processors are busy. For upper limits only.
pub fn patience(time: Duration) -> Duration {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let cpus = thread::available_parallelism().map_or(1.0, |cpus| cpus.get() as f64);
    scaled(time).mul_f64(crowd(&load, cpus))
}

/// How many tasks want each processor, by a /proc/loadavg: now or over the last minute, whichever is more. At
/// least one, and at most [`CROWD`], so that every limit stays one.
fn crowd(loadavg: &str, cpus: f64) -> f64 {
    let mut words = loadavg.split_whitespace();
    let minute = words.next().and_then(|word| word.parse().ok()).unwrap_or(0.0);
    let now = words.nth(2).and_then(|word| word.split_once('/')?.0.parse().ok()).unwrap_or(0.0);
    (f64::max(minute, now) / cpus).clamp(1.0, CROWD)
}

/// See [`crowd`].
const CROWD: f64 = 20.0;

/// Whether `condition` becomes true within `time`, extended by [`patience`] as it is at the end. It is
/// checked at least once, and once at the end.
pub fn wait_until(time: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    loop {
        let waited = begun.elapsed();
        // The load is looked at only when it matters.
        let last = waited >= time && waited >= patience(time);
        if condition() {
            return true;
        }
        if last {
            return false;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// CRC-32 of `len` bytes from `offset` of a file or device; the range must be there.
pub fn crc(path: &Path, offset: u64, len: u64) -> u32 {
    let mut file = fs::File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    file.seek(SeekFrom::Start(offset)).expect("seeks");
    let mut hasher = crc32fast::Hasher::new();
    let mut left = len;
    let mut buffer = vec![0; 256 * 1024];
    while left > 0 {
        let part = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        file.read_exact(&mut buffer[..part]).unwrap_or_else(|error| {
            panic!("{}: {} bytes from the end of {len}: {error}", path.display(), left)
        });
        hasher.update(&buffer[..part]);
        left -= part as u64;
    }
    hasher.finalize()
}

/// CRC-32 of a whole file or device, and its length.
pub fn crc_whole(path: &Path) -> (u32, u64) {
    let mut file = fs::File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let len = file.seek(SeekFrom::End(0)).expect("seeks");
    (crc(path, 0, len), len)
}

/// Unmounts a directory. A process that another test starts in this moment holds all files of this one open
/// until it runs its program, and with them the mount.
pub fn umount(dir: impl AsRef<Path>) {
    let mut said = String::new();
    let gone = wait_until(Duration::from_secs(20), || {
        let output = Command::new("umount").arg(dir.as_ref()).output().expect("umount runs");
        said = String::from_utf8_lossy(&output.stderr).into_owned();
        output.status.success() || !said.contains("busy")
    });
    assert!(gone && said.is_empty(), "{}: {said}", dir.as_ref().display());
}

/// Runs a tool to its end; fails the test with what it said when it fails. Returns its standard output.
pub fn tool(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Whether a program is on the PATH, or where Debian keeps those of root.
fn on_path(tool: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]).any(|dir| dir.join(tool).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_ends_both_ways() {
        let mut asked = 0;
        assert!(wait_until(Duration::from_secs(5), || {
            asked += 1;
            asked == 3
        }));
        assert!(!wait_until(Duration::ZERO, || false));
    }

    #[test]
    fn patience_grows_with_the_load_but_not_for_ever() {
        assert_eq!(crowd("0.10 5.00 6.00 1/100 12345\n", 2.0), 1.0);
        assert_eq!(crowd("7.00 0.00 0.00 1/100 12345\n", 2.0), 3.5);
        assert_eq!(crowd("0.00 0.00 0.00 9/100 12345\n", 2.0), 4.5, "now, and not yet on average");
        assert_eq!(crowd("9000.00 0.00 0.00 9/100 12345\n", 2.0), CROWD);
        assert_eq!(crowd("", 2.0), 1.0);
        assert!(patience(Duration::from_secs(1)) >= scaled(Duration::from_secs(1)));
    }

    #[test]
    fn checksums_are_of_the_range_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, b"xx123456789yy").unwrap();
        // The check value of CRC-32.
        assert_eq!(crc(&path, 2, 9), 0xcbf4_3926);
        assert_eq!(crc_whole(&path).1, 13);
    }
}

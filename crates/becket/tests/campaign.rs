//! Everything at once: four devices under four loads while those who serve them are killed, stopped and starved.
//!
//! CI does it a few times. `cargo xtask campaign` does it for as long as it is told, by BECKET_CAMPAIGN, and stores
//! what the test writes into the file named by BECKET_CAMPAIGN_REPORT.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use becket_testkit::{Scratch, require_device, require_fuse, require_tools, skip, tool, wait_until};
use common::load::{SIZE, Seen, Stop, THREADS, load};
use common::{alive, scratch};
use serde_json::{Value, json};

/// Longer than anything here takes, on a plain machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is done to whom, in turn.
const DISTURBANCES: [Disturbance; 9] = [
    Disturbance { whom: "worker_pid", how: How::Signal("KILL") },
    Disturbance { whom: "server_pid", how: How::Signal("KILL") },
    Disturbance { whom: "worker_pid", how: How::Signal("SEGV") },
    Disturbance { whom: "server_pid", how: How::Signal("SEGV") },
    Disturbance { whom: "worker_pid", how: How::Stopped },
    Disturbance { whom: "server_pid", how: How::Stopped },
    Disturbance { whom: "worker_pid", how: How::Starved },
    Disturbance { whom: "server_pid", how: How::Starved },
    Disturbance { whom: "server_pid", how: How::Both },
];

struct Disturbance {
    whom: &'static str,
    how: How,
}

#[derive(Clone, Copy, PartialEq)]
enum How {
    Signal(&'static str),
    /// SIGSTOP, and after a while SIGCONT.
    Stopped,
    /// The kernel's killer for want of memory is called, with this process as the one that it likes best.
    Starved,
    /// The supervisor is killed, and as soon as its successor serves, the worker.
    Both,
}

impl Disturbance {
    fn name(&self) -> String {
        let whom = if self.whom == "worker_pid" { "worker" } else { "supervisor" };
        match self.how {
            How::Signal(signal) => format!("SIG{signal} of the {whom}"),
            How::Stopped => format!("SIGSTOP and SIGCONT of the {whom}"),
            How::Starved => format!("OOM kill of the {whom}"),
            How::Both => "SIGKILL of the supervisor, then of the worker".to_owned(),
        }
    }

    /// Returns how long the process was kept from running, when its device has come back.
    fn happen(
        &self,
        place: &Scratch,
        device: &str,
        before: &Value,
        random: &mut impl FnMut(u64) -> u64,
    ) -> Duration {
        let pid = &before[self.whom];
        let mut stopped = Duration::ZERO;
        match self.how {
            How::Signal(signal) => {
                send(signal, pid);
                // Rust's own handler takes the first SIGSEGV for a stack that overflowed, and only restores the default.
                let dead = u32::try_from(pid.as_u64().unwrap()).unwrap();
                while signal == "SEGV" && alive(dead) {
                    let _ = Command::new("kill").args(["-SEGV", &pid.to_string()]).output();
                    thread::sleep(Duration::from_millis(20));
                }
            }
            How::Starved => {
                fs::write(format!("/proc/{pid}/oom_score_adj"), "1000").unwrap();
                fs::write("/proc/sysrq-trigger", "f").unwrap();
            }
            How::Stopped => {
                stopped = Duration::from_millis(200 + random(1300));
                send("STOP", pid);
                thread::sleep(stopped);
                send("CONT", pid);
                return stopped;
            }
            How::Both => {
                send("KILL", pid);
                let now = await_device(place, device, |now| now["server_pid"] != before["server_pid"]);
                send("KILL", &now["worker_pid"]);
            }
        }
        let recovered = |now: &Value| now["recoveries"].as_u64() > before["recoveries"].as_u64();
        await_device(place, device, |now| match (self.whom, self.how) {
            ("worker_pid", _) | (_, How::Both) => recovered(now),
            _ => now["server_pid"] != before["server_pid"],
        });
        stopped
    }
}

fn send(signal: &str, pid: &Value) {
    tool(Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]));
}

/// A device, once it is live and `is` holds of it.
fn await_device(place: &Scratch, name: &str, is: impl Fn(&Value) -> bool) -> Value {
    let mut found = None;
    let there = wait_until(PATIENCE, || {
        let mut devices = place.devices().into_iter();
        found = devices.find(|info| info["name"] == name && info["state"] == "live" && is(info));
        found.is_some()
    });
    assert!(there, "{:#?}", place.devices());
    found.unwrap()
}

/// A load that is a script of its own. It goes on until the file `stop` is there, and ends with 0 if it saw nothing wrong; each
/// turn is a line of its file.
struct Script {
    name: &'static str,
    child: Child,
    turns: PathBuf,
}

impl Script {
    fn start(place: &Scratch, name: &'static str, device: &Path, body: &str) -> Script {
        let dir = place.dir(name);
        let text = format!("set -eu\nwhile [ ! -e stop ]; do\n{body}\necho $? >>turns\ndone >log 2>&1");
        let child = Command::new("sh").args(["-c", &text]).arg(device).current_dir(&dir).spawn().unwrap();
        Script { name, child, turns: dir.join("turns") }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.turns.with_file_name("log")).unwrap_or_default()
    }

    fn turns(&self) -> usize {
        fs::read_to_string(&self.turns).map_or(0, |text| text.lines().count())
    }

    /// Lets it end, and tells how many turns it has made.
    fn end(&mut self) -> usize {
        // At least one, however slow this machine is.
        assert!(
            wait_until(PATIENCE, || self.turns() > 0 || self.child.try_wait().unwrap().is_some()),
            "{}",
            self.name
        );
        fs::write(self.turns.with_file_name("stop"), "").unwrap();
        let mut status = None;
        let ended = wait_until(PATIENCE, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        assert!(ended, "{} does not end:\n{}", self.name, self.log());
        assert!(status.unwrap().success(), "{} saw something wrong:\n{}", self.name, self.log());
        self.turns()
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Else the device stays in use.
        let _ = Command::new("umount").arg("--quiet").arg(self.turns.with_file_name("mnt")).output();
    }
}

/// A new file system, a clone in it, and each byte of that read back past the page cache.
const CLONE: &str = "
    mkfs.ext4 -q -F $0; mkdir -p mnt; mount $0 mnt
    git clone -q ../repository mnt/clone
    umount mnt; mount $0 mnt
    git -C mnt/clone fsck --strict --no-progress; diff -r --exclude=.git ../repository mnt/clone
    umount mnt; e2fsck -fn $0 >e2fsck 2>&1";
/// One row a transaction; `acked` holds what was acknowledged, on another file system. Now and then all is read again.
const SQLITE: &str = "
    [ -d mnt ] || { mkfs.ext4 -q -F $0; mkdir mnt; }
    mountpoint -q mnt || mount $0 mnt
    sqlite3 mnt/db 'PRAGMA synchronous=FULL; CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, x BLOB)' >/dev/null
    for i in 1 2 3 4 5 6 7 8; do
        sqlite3 mnt/db 'PRAGMA synchronous=FULL; INSERT INTO t(x) VALUES(randomblob(3000))' >/dev/null; echo >>acked
    done
    umount mnt; mount $0 mnt
    test \"$(sqlite3 mnt/db 'PRAGMA integrity_check; SELECT count(*) FROM t' | tr '\\n' ' ')\" = \"ok $(wc -l <acked) \"
    umount mnt";
const FIO: &str = "
    fio --name=v --filename=$0 --rw=randwrite --bs=4k --size=8M --direct=1 --ioengine=libaio --iodepth=8 \\
        --verify=crc32c --verify_fatal=1 --do_verify=1 --fsync=64";

/// Descriptors and threads of a process. Those of its rings come and go by the kernel's will.
fn held(pid: &Value) -> [usize; 2] {
    let entries = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).into_iter().flatten().flatten();
    let is_ours = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| !name.starts_with("iou-"))
    };
    [entries("fd").count(), entries("task").filter(is_ours).count()]
}

/// Processes that belong to a place.
fn processes(place: &Scratch) -> Vec<String> {
    let mark = format!("BECKET_RUNTIME_DIR={}", place.runtime().display());
    let marked = |pid: &String| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|word| word == mark.as_bytes())
    };
    let all = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
    all.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).filter(marked).collect()
}

fn percentile(sorted: &[u64], p: usize) -> u64 {
    sorted.get((sorted.len() * p).div_ceil(100).saturating_sub(1)).copied().unwrap_or(0)
}

fn times(pauses: &mut [u64]) -> Value {
    pauses.sort_unstable();
    let (p50, p99) = (percentile(pauses, 50), percentile(pauses, 99));
    json!({ "cases": pauses.len(), "p50_ms": p50, "p99_ms": p99, "max_ms": pauses.last() })
}

#[test]
fn a_campaign_is_not_noticed() {
    let name = "campaign::a_campaign_is_not_noticed";
    if !require_device(name) || !require_tools(name, &["fio", "git", "sqlite3", "mkfs.ext4"]) {
        return;
    }
    campaign(name, &becket_testkit::via(), 9);
}

#[test]
fn a_campaign_over_fuse_is_not_noticed() {
    let name = "campaign::a_campaign_over_fuse_is_not_noticed";
    if !require_fuse(name) || !require_tools(name, &["fio", "git", "sqlite3", "mkfs.ext4"]) {
        return;
    }
    campaign(name, "fuse", 4);
}

fn campaign(name: &str, via: &str, usual: usize) {
    let told = std::env::var("BECKET_CAMPAIGN").ok().and_then(|text| text.parse().ok());
    let guest = std::env::var_os("BECKET_TEST_GUEST").is_some();
    if guest && told.is_none() {
        skip(name, "cargo xtask campaign runs it");
        return;
    }
    let rounds = told.unwrap_or(usual);
    // Whoever calls that killer on somebody's own machine may lose more than a worker.
    let disturbances: Vec<&Disturbance> =
        DISTURBANCES.iter().filter(|one| one.how != How::Starved || guest).collect();
    let place = scratch();
    let repository = place.dir("repository");
    for number in 0..20u64 {
        let bytes = becket_testkit::image::random_bytes(30_000, number);
        fs::write(repository.join(number.to_string()), bytes).unwrap();
    }
    let git = |words: &[&str]| {
        let who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"];
        tool(Command::new("git").args(who).args(words).current_dir(&repository).env("HOME", &repository))
    };
    git(&["init", "-q"]);
    git(&["add", "."]);
    git(&["commit", "-q", "-m", "m"]);

    let attach = |name: &str, size: u64| {
        becket_testkit::image::sparse(&place.path(name), size);
        place.ok(["attach", "--via", via, "--name", name, name]);
        place.links().join(name)
    };
    let raw = attach("raw", SIZE as u64);
    if place.devices()[0]["worker_pid"].is_null() {
        skip(name, "this transport has no server");
        return;
    }
    let mut scripts = [
        Script::start(&place, "clone", &attach("clone.img", 64 << 20), CLONE),
        Script::start(&place, "sqlite", &attach("sqlite.img", 32 << 20), SQLITE),
        Script::start(&place, "fio", &attach("fio.img", 8 << 20), FIO),
    ];

    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move |end: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % end
    };
    let seen = Seen::default();
    let mut pauses: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let sizes = || {
        let info = await_device(&place, "raw", |_| true);
        [held(&info["server_pid"]), held(&info["worker_pid"])]
    };
    let mut first = None;
    let model: Vec<u8> = thread::scope(|scope| {
        let loads: Vec<_> = (0..THREADS)
            .map(|part| {
                let (raw, seen) = (&raw, &seen);
                scope.spawn(move || load(raw, part, seen))
            })
            .collect();
        let stop = Stop(&seen);
        for round in 0..rounds {
            thread::sleep(Duration::from_millis(500 + random(3000)));
            let before = await_device(&place, "raw", |_| true);
            seen.longest.store(0, Ordering::Relaxed);
            let disturbance = disturbances[round % disturbances.len()];
            let begun = Instant::now();
            println!("{round}: {}", disturbance.name());
            let stopped = disturbance.happen(&place, "raw", &before, &mut random);
            let operations = seen.operations.load(Ordering::Relaxed);
            let all_again = || seen.operations.load(Ordering::Relaxed) >= operations + 2 * THREADS as u64;
            assert!(wait_until(PATIENCE, all_again), "{}: the load does not go on", disturbance.name());
            let pause = u128::from(seen.longest.load(Ordering::Relaxed) / 1000);
            let pause = pause.saturating_sub(stopped.as_millis()).min(begun.elapsed().as_millis());
            pauses.entry(disturbance.name()).or_default().push(u64::try_from(pause).unwrap());
            for script in &mut scripts {
                assert!(
                    script.child.try_wait().unwrap().is_none(),
                    "{} ended:\n{}",
                    script.name,
                    script.log()
                );
            }
            // After one of each: what is once more there after each is a leak.
            if round + 1 == disturbances.len() {
                first = Some(sizes());
            }
        }
        drop(stop);
        loads.into_iter().flat_map(|load| load.join().unwrap()).collect()
    });
    let [clones, transactions, fio] = scripts.each_mut().map(Script::end);
    // Whatever each of many faults left behind would be far more than a recovery's own, which may still be about.
    let mut last = sizes();
    let settled = wait_until(Duration::from_secs(20), || {
        last = sizes();
        first.is_none_or(|first| (0..2).all(|who| (0..2).all(|what| last[who][what] <= first[who][what] + 3)))
    });
    let mut wrong = seen.wrong_bytes.load(Ordering::Relaxed);
    let differs = |bytes: &[u8]| bytes.iter().zip(&model).filter(|(is, must)| is != must).count() as u64;
    wrong += differs(&fs::read(&raw).unwrap());
    place.ok(["detach", "--all"]);
    wrong += differs(&fs::read(place.path("raw")).unwrap());
    let devices = place.devices().len();
    wait_until(PATIENCE, || processes(&place).is_empty());
    let processes = processes(&place).len();
    let errors = seen.errors.load(Ordering::Relaxed);
    let mut all: Vec<u64> = pauses.values().flatten().copied().collect();
    let report = json!({
        "via": via,
        "kernel": fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim(),
        "rounds": rounds,
        "operations": seen.operations.load(Ordering::Relaxed),
        "errors": errors,
        "wrong_bytes": wrong,
        "clones": clones,
        "transactions": 8 * transactions,
        "fio_runs": fio,
        "devices_left": devices,
        "processes_left": processes,
        "descriptors_and_threads": { "after_one_of_each": first, "at_the_end": last },
        "pause": times(&mut all),
        "faults": pauses.iter_mut().map(|(name, pauses)| (name.clone(), times(pauses))).collect::<BTreeMap<_, _>>(),
    });
    println!("campaign: {report}");
    if let Some(file) = std::env::var_os("BECKET_CAMPAIGN_REPORT") {
        fs::write(file, report.to_string()).unwrap();
    }
    assert!(errors == 0 && wrong == 0, "{:?}", seen.first.lock().unwrap());
    assert_eq!((devices, processes), (0, 0), "left behind");
    assert!(settled, "{first:?} became {last:?}");
}

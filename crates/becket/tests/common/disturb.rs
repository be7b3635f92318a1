//! What is done to those who serve a device: killed, stopped, starved, replaced.
//! It never returns before the device is served again, or has given the test up.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use becket_testkit::{Scratch, in_a_guest, tool, wait_until};
use serde_json::Value;

use super::alive;
use super::load::Random;

/// Longer than anything here takes, on a plain machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// What is done to which process, in turn.
pub(crate) const DISTURBANCES: [Disturbance; 11] = [
    Disturbance { whom: WORKER, how: How::Signal("KILL") },
    Disturbance { whom: SUPERVISOR, how: How::Signal("KILL") },
    Disturbance { whom: WORKER, how: How::Signal("SEGV") },
    Disturbance { whom: SUPERVISOR, how: How::Signal("SEGV") },
    Disturbance { whom: WORKER, how: How::Stopped },
    Disturbance { whom: SUPERVISOR, how: How::Stopped },
    Disturbance { whom: WORKER, how: How::Starved },
    Disturbance { whom: SUPERVISOR, how: How::Starved },
    Disturbance { whom: SUPERVISOR, how: How::Both },
    Disturbance { whom: SUPERVISOR, how: How::Together },
    Disturbance { whom: SUPERVISOR, how: How::Replaced },
];

/// The worker and the supervisor, as `becket list --json` calls them.
pub(crate) const WORKER: &str = "worker_pid";
pub(crate) const SUPERVISOR: &str = "server_pid";

#[derive(Debug)]
pub(crate) struct Disturbance {
    pub(crate) whom: &'static str,
    pub(crate) how: How,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum How {
    Signal(&'static str),
    /// SIGSTOP, and after a while SIGCONT.
    Stopped,
    /// The kernel kills it for want of memory.
    Starved,
    /// The supervisor is killed, and as soon as its successor serves, the worker.
    Both,
    /// Supervisor and worker are killed at once.
    Together,
    /// Another server takes over.
    Replaced,
}

impl Disturbance {
    pub(crate) fn name(&self) -> String {
        let whom = if self.whom == WORKER { "worker" } else { "supervisor" };
        match self.how {
            How::Signal(signal) => format!("SIG{signal} of the {whom}"),
            How::Stopped => format!("SIGSTOP and SIGCONT of the {whom}"),
            How::Starved => format!("OOM kill of the {whom}"),
            How::Both => "SIGKILL of the supervisor, then of the worker".to_owned(),
            How::Together => "SIGKILL of supervisor and worker at once".to_owned(),
            How::Replaced => "takeover by a new server".to_owned(),
        }
    }

    /// Whether it can be done here.
    pub(crate) fn possible(&self) -> bool {
        self.how != How::Starved || in_a_guest() || Group::new().is_some()
    }

    /// Returns how long the process was kept from running, when its device has come back.
    pub(crate) fn happen(&self, place: &Scratch, device: &str, random: &mut Random) -> Duration {
        let before = &await_device(place, device, |_| true);
        let pid = &before[self.whom];
        match self.how {
            How::Signal(signal) => {
                send(signal, pid);
                // Rust's own handler takes the first SIGSEGV for a stack that overflowed, and only restores
                // the default.
                while signal == "SEGV" && alive(number(pid)) {
                    let _ = Command::new("kill").args(["-SEGV", &pid.to_string()]).output();
                    thread::sleep(Duration::from_millis(20));
                }
            }
            How::Starved => starve(number(pid)),
            How::Stopped => {
                let stopped = Duration::from_millis(200 + random.below(1300) as u64);
                send("STOP", pid);
                thread::sleep(stopped);
                send("CONT", pid);
                return stopped;
            }
            How::Both => {
                send("KILL", pid);
                let now = await_device(place, device, |now| now[SUPERVISOR] != before[SUPERVISOR]);
                send("KILL", &now[WORKER]);
            }
            How::Together => {
                let both = [pid, &before[WORKER]].map(ToString::to_string);
                tool(Command::new("kill").arg("-KILL").args(both));
                await_device(place, device, |now| {
                    now[SUPERVISOR] != before[SUPERVISOR] && now[WORKER] != before[WORKER]
                });
            }
            How::Replaced => {
                let mut serve = place.becket();
                serve
                    .args(["serve", "--takeover", "--until-idle"])
                    .stdout(Stdio::null())
                    .stderr(Stdio::null());
                let mut server = serve.spawn().unwrap();
                // It serves until something else happens to it; whenever that is, it is buried.
                thread::spawn(move || server.wait());
                await_device(place, device, |now| now[SUPERVISOR] != before[SUPERVISOR]);
            }
        }
        let recovered = |now: &Value| now["recoveries"].as_u64() > before["recoveries"].as_u64();
        await_device(place, device, |now| match (self.whom, self.how) {
            (WORKER, _) | (_, How::Both | How::Together | How::Replaced) => recovered(now),
            _ => now[SUPERVISOR] != before[SUPERVISOR],
        });
        Duration::ZERO
    }
}

/// A device, once it is live and `is` holds of it.
#[track_caller]
pub(crate) fn await_device(place: &Scratch, name: &str, is: impl Fn(&Value) -> bool) -> Value {
    let mut found = None;
    let there = wait_until(PATIENCE, || {
        let mut devices = place.devices().into_iter();
        found = devices.find(|info| info["name"] == name && info["state"] == "live" && is(info));
        found.is_some()
    });
    assert!(there, "{:#?}", place.devices());
    found.unwrap()
}

pub(crate) fn send(signal: &str, pid: &Value) {
    tool(Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]));
}

fn number(pid: &Value) -> u32 {
    u32::try_from(pid.as_u64().unwrap()).unwrap()
}

/// Makes the kernel's OOM killer kill a process: in a guest of the whole machine, where this hurts no other;
/// elsewhere of a control group that holds the process and one that eats memory.
fn starve(pid: u32) {
    fs::write(format!("/proc/{pid}/oom_score_adj"), "1000").unwrap();
    if in_a_guest() {
        fs::write("/proc/sysrq-trigger", "f").unwrap();
        return;
    }
    let group = Group::new().expect("was asked for");
    group.take_in(pid);
    // It is never killed itself; what it gets is bounded by its group.
    let mut hog = Command::new("sh")
        .args(["-c", "(echo -1000 >/proc/self/oom_score_adj) 2>/dev/null; read go; exec tail /dev/zero"])
        .stdin(Stdio::piped())
        .spawn()
        .map(Hog)
        .unwrap();
    group.take_in(hog.0.id());
    hog.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(wait_until(PATIENCE, || !alive(pid)), "{pid} lives although its memory has run out");
}

struct Hog(Child);

impl Drop for Hog {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A control group with little memory, until this is dropped, and the one that this test is in.
struct Group {
    dir: PathBuf,
    home: PathBuf,
}

impl Group {
    /// `None` where there is none that limits memory, or it is another process's.
    fn new() -> Option<Group> {
        let versions = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", ":memory:/"),
            ("/sys/fs/cgroup", "memory.max", "0::/"),
        ];
        let ours = fs::read_to_string("/proc/self/cgroup").unwrap();
        versions.into_iter().find_map(|(root, limit, mark)| {
            let home = Path::new(root).join(ours.lines().find_map(|line| Some(line.split_once(mark)?.1))?);
            let thread = format!("{:?}", thread::current().id()).replace(['(', ')'], "");
            let dir = Path::new(root).join(format!("becket-test-{}-{thread}", std::process::id()));
            fs::create_dir(&dir).ok()?;
            let group = Group { dir, home };
            fs::write(group.dir.join(limit), "4194304").ok().map(|()| group)
        })
    }

    fn take_in(&self, pid: u32) {
        fs::write(self.dir.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that the victim started while in here must not starve, too.
        let left = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        for pid in left.split_whitespace() {
            let _ = fs::write(self.home.join("cgroup.procs"), pid);
        }
        // A process that was in it may still be on the way out.
        wait_until(Duration::from_secs(10), || fs::remove_dir(&self.dir).is_ok());
    }
}

//! The guard between `becket run` and its command: when either ends, it ends all that the command has
//! started.
//! Signals that end the others never kill it: it has its own process group and reads signals instead of
//! receiving them.

use super::{
    common,
    run::{PASSED_ON, blocked},
};
use crate::{args, cgroup::Cgroup, descendants, failure::Failure, ui::Ui};
use becket_uapi::signal::SignalFd;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, FdFlags, fcntl_setfd},
    process::{Pid, WaitOptions, WaitStatus, getpid, kill_process, set_child_subreaper, setpgid, wait},
};
use std::{io, os::fd::OwnedFd, time::Duration};

/// How long killed processes may take to end. One that waits for a broken disk may take for ever.
const PATIENCE: Duration = Duration::from_secs(5);

/// Returns what `becket run` shall exit with.
pub(crate) fn run(ui: &Ui, args: &args::RunGuard) -> Result<u8, Failure> {
    let cgroup = args.cgroup.clone().map(Cgroup::existing);
    let ended = guard(ui, args).map_err(|error| Failure::io("cannot run the command", &error));
    let mut left = false;
    if let Some(cgroup) = &cgroup {
        left |= cgroup.kill(PATIENCE).is_err();
    }
    // Also with a cgroup: the command may have been unable to join it.
    left |= !descendants::kill_all(PATIENCE);
    if let Some(cgroup) = &cgroup {
        cgroup.remove();
    }
    if left {
        ui.note("warning: a process that the command started does not end although it was killed");
    }
    Ok(ended?.map_or(1, status_of))
}

/// Starts the command and waits for its end, or for that of `becket run` (then `None`).
fn guard(ui: &Ui, args: &args::RunGuard) -> io::Result<Option<WaitStatus>> {
    let alive = becket_device::inherited_fd(args.alive_fd)?;
    fcntl_setfd(&alive, FdFlags::CLOEXEC)?;
    let signals = SignalFd::block(&blocked())?;
    set_child_subreaper(Some(getpid()))?;

    let mut command = common::ourselves("run-exec");
    command.args(ui.json.then_some("--json"));
    command.arg(format!("--guard={}", getpid().as_raw_nonzero()));
    if let Some(cgroup) = &args.cgroup {
        command.arg("--cgroup").arg(cgroup);
    }
    let child = command.arg("--").args(&args.command).spawn()?;
    // The command has inherited the group of `becket run`, the terminal's, which may have no number in our
    // pid namespace. Now we leave it: neither ^C nor a kill of the whole group may take the guard along.
    setpgid(None, None)?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    watch(pid, &alive, &signals)
}

fn watch(command: Pid, alive: &OwnedFd, signals: &SignalFd) -> io::Result<Option<WaitStatus>> {
    loop {
        let mut fds = [PollFd::new(signals, PollFlags::IN), PollFd::new(alive, PollFlags::empty())];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !fds[1].revents().is_empty() {
            return Ok(None);
        }
        while let Some(received) = signals.take()? {
            if PASSED_ON.contains(&received.signal) {
                // Not yet waited for, so the number is still the command's.
                let _ = kill_process(command, received.signal);
            }
        }
        // As a subreaper we also bury the orphans of the command.
        while let Some((pid, status)) = reap()? {
            if pid == command {
                return Ok(Some(status));
            }
        }
    }
}

fn reap() -> io::Result<Option<(Pid, WaitStatus)>> {
    match wait(WaitOptions::NOHANG) {
        Ok(reaped) => Ok(reaped),
        Err(Errno::CHILD | Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// As shells have it: the status, or 128 and the signal that killed.
fn status_of(status: WaitStatus) -> u8 {
    let killed = status.terminating_signal().map(|signal| 128 + signal);
    status.exit_status().or(killed).and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

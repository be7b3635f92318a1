//! `becket run IMAGE -- CMD`: the device exists exactly as long as the command.
//! Never becomes the command's parent: that is the guard, which outlives a killed `becket run`.
//!
//! ```text
//! becket run        holds the lease of the device, passes signals on, waits for the guard
//!  └ run-guard      in a process group of its own; subreaper; ends all when CMD or `becket run` ends
//!     └ run-exec    joins the cgroup, asks to die with the guard, and becomes ...
//!        └ CMD      in the terminal's process group, so that ^C and ^Z reach it as in any pipeline
//! ```

use super::{common, fetched, luks};
use crate::{args, cgroup::Cgroup, failure::Failure, ui::Ui};
use becket_device::{DetachOptions, DeviceInfo, Lease};
use becket_uapi::signal::SignalFd;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, FdFlags, fcntl_setfd},
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal, kill_process},
};
use std::{
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{
            ffi::{OsStrExt as _, OsStringExt as _},
            process::ExitStatusExt as _,
        },
    },
    process::{Child, ExitStatus},
    time::Duration,
};

/// Signals that end a program politely, or notify it: passed on to the command.
pub(super) const PASSED_ON: [Signal; 6] =
    [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::USR1, Signal::USR2];

/// How long a device without users may take to go.
const GONE_WITHIN: Duration = Duration::from_secs(5);

/// Returns the exit status of the command.
pub(crate) fn run(ui: &Ui, args: &args::Run) -> Result<u8, Failure> {
    let asked = common::options(&args.device);
    let signals = signals()?;
    args.device.key_file.iter().try_for_each(|_| luks::ready(&args.image))?;
    let (path, options, _decoded) =
        fetched::for_device(&args.image, &asked, &args.device.image.store, &args.device.image.trace)?;
    let (info, lease) = becket_device::attach_leased(&path, &options)
        .map_err(|error| Failure::device("attach", becket_fetch::named(args.image.as_os_str()), &error))?;
    ui.explain(&info);
    let status = match &args.device.key_file {
        None => guarded(ui, &info, &args.command, &signals),
        Some(key) => luks::open(&info, &info.device, key, &args.image).and_then(|mapping| {
            let opened = DeviceInfo { device: mapping.node(), partitions: Vec::new(), ..info.clone() };
            let status = guarded(ui, &opened, &args.command, &signals);
            let closed = mapping.close(true);
            status.and_then(|status| closed.map(|()| status))
        }),
    };
    release(ui, &info, lease);
    status
}

/// What is sent to this process from now on. Call it before the attach: that may start threads, and a signal
/// goes to any thread that does not block it.
pub(super) fn signals() -> Result<SignalFd, Failure> {
    SignalFd::block(&blocked()).map_err(|error| Failure::io("cannot prepare to run the command", &error))
}

/// Runs the command below its guard until both have ended. In its words, `{}` becomes the device's path, or
/// the URI of an export.
pub(super) fn guarded(
    ui: &Ui,
    info: &DeviceInfo,
    command: &[OsString],
    signals: &SignalFd,
) -> Result<u8, Failure> {
    let command = &substitute(command, info.device.as_os_str());
    let failed = |error: io::Error| Failure::io("cannot run the command", &error);
    let cgroup = match Cgroup::make(&format!("becket-run-{}", std::process::id())) {
        Ok(cgroup) => Some(cgroup),
        Err(error) => {
            if ui.verbose {
                ui.note(format!(
                    "no cgroup for the command ({error}): its guard looks for what it leaves running"
                ));
            }
            None
        }
    };
    let guard = spawn_guard(ui, info, command, cgroup.as_ref()).and_then(|(mut guard, alive)| {
        let status = wait_passing_signals(&mut guard, signals);
        // Only now: closing it signals to the guard that we are gone.
        drop(alive);
        status
    });
    let status = guard.inspect_err(|_| clean_up(cgroup.as_ref())).map_err(failed)?;
    match (status.code(), status.signal()) {
        (Some(code), _) => Ok(u8::try_from(code).unwrap_or(1)),
        (None, signal) => {
            // The command died with its guard; what it left running did not.
            clean_up(cgroup.as_ref());
            let signal = signal.unwrap_or(0);
            Err(Failure::new("guard_killed", format!("the command's guard was killed by signal {signal}"))
                .hint("the command was ended with it; run it again"))
        }
    }
}

fn spawn_guard(
    ui: &Ui,
    info: &DeviceInfo,
    command: &[OsString],
    cgroup: Option<&Cgroup>,
) -> io::Result<(Child, OwnedFd)> {
    // Nothing is ever written to it: while its only writing end is open, we are alive.
    let (guards_end, our_end) = pipe_with(PipeFlags::CLOEXEC)?;
    fcntl_setfd(&guards_end, FdFlags::empty())?;
    let partitions: Vec<&OsStr> =
        info.partitions.iter().map(|partition| partition.device.as_os_str()).collect();
    let mut guard = common::ourselves("run-guard");
    guard.args(ui.json.then_some("--json"));
    guard.arg(format!("--alive-fd={}", guards_end.as_raw_fd()));
    if let Some(cgroup) = cgroup {
        guard.arg("--cgroup").arg(cgroup.dir());
    }
    guard.arg("--").args(command);
    match info.spec.export {
        Some(_) => guard.env("BECKET_URI", &info.device),
        None => guard
            .env("BECKET_DEVICE", &info.device)
            .env("BECKET_PARTITIONS", partitions.join(OsStr::new(" "))),
    };
    Ok((guard.spawn()?, our_end))
}

/// Waits for the guard; what is sent to us meanwhile goes to it, and from it to the command.
fn wait_passing_signals(guard: &mut Child, signals: &SignalFd) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = guard.try_wait()? {
            return Ok(status);
        }
        match poll(&mut [PollFd::new(signals, PollFlags::IN)], None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        while let Some(received) = signals.take()? {
            // A key at the terminal has reached the command by itself.
            if received.signal == Signal::CHILD || received.from_kernel {
                continue;
            }
            if let Some(pid) = i32::try_from(guard.id()).ok().and_then(Pid::from_raw) {
                // It is our child and not yet waited for: the number is still its own.
                let _ = kill_process(pid, received.signal);
            }
        }
    }
}

fn clean_up(cgroup: Option<&Cgroup>) {
    if let Some(cgroup) = cgroup {
        // The guard did it already, or is dead; there is no third way to end them.
        let _ = cgroup.kill(Duration::from_secs(1));
        cgroup.remove();
    }
}

/// Lets the device go, and waits until it is gone.
fn release(ui: &Ui, info: &DeviceInfo, lease: Lease) {
    // Its server would detach it with the lease, and could not say to us what may be lost.
    if info.server_pid.is_some() {
        let options = DetachOptions { lazy: true, timeout: GONE_WITHIN, ..DetachOptions::default() };
        if let Ok(gone) = becket_device::detach(&info.name, &options) {
            ui.unsaved(&gone);
        }
    }
    drop(lease);
    if !common::await_gone(info, GONE_WITHIN) {
        ui.note(format!(
            "warning: {} is still in use; it is detached when its last user closes it",
            info.device.display()
        ));
    }
}

/// The signals that `becket run` and its guard read instead of receiving.
pub(super) fn blocked() -> Vec<Signal> {
    PASSED_ON.into_iter().chain([Signal::CHILD]).collect()
}

/// Puts the device's path in the place of every `{}`.
fn substitute(command: &[OsString], device: &OsStr) -> Vec<OsString> {
    command
        .iter()
        .map(|word| {
            let (mut out, mut rest) = (Vec::new(), word.as_bytes());
            while let Some(at) = rest.windows(2).position(|pair| pair == b"{}") {
                let (before, after) = rest.split_at(at);
                out.extend_from_slice(before);
                out.extend_from_slice(device.as_bytes());
                rest = after.get(2..).unwrap_or_default();
            }
            out.extend_from_slice(rest);
            OsString::from_vec(out)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn braces_become_the_device_everywhere() {
        let words: Vec<OsString> = ["dd", "of={}p1", "{}{}", "{", "{ }", "}{", ""].map(Into::into).to_vec();
        let done = substitute(&words, OsStr::new("/dev/loop0"));
        assert_eq!(done, ["dd", "of=/dev/loop0p1", "/dev/loop0/dev/loop0", "{", "{ }", "}{", ""]);
        // Bytes that are not text pass through unharmed.
        let odd = OsString::from_vec(b"\xff{}\xfe".to_vec());
        assert_eq!(substitute(&[odd], OsStr::new("/d"))[0].as_bytes(), b"\xff/d\xfe");
    }
}

//! Between fork and command: joins the cgroup, asks to die with the guard, and becomes the command.
//! Never returns when all is well.

use super::run::blocked;
use crate::{
    args,
    cgroup::Cgroup,
    failure::{Failure, plain},
};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::{ffi::OsStr, io, os::unix::process::CommandExt as _, process::Command};

/// Returns only why it could not become the command: statuses 126 and 127, as shells have it.
pub(crate) fn run(args: &args::RunExec) -> Result<u8, Failure> {
    let [program, words @ ..] = args.command.as_slice() else {
        return Err(Failure::usage("there is no command to run"));
    };
    let cannot = |error: &io::Error| cannot(program, error);
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| cannot(&error.into()))?;
    // It may have died before we asked.
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(args.guard) {
        return Err(Failure::new("guard_killed", "the command's guard is gone"));
    }
    if let Some(dir) = &args.cgroup {
        // Where we may make a group but not join it, the guard looks for what we leave running.
        let _ = Cgroup::existing(dir.clone()).join();
    }
    becket_uapi::signal::unblock(&blocked()).map_err(|error| cannot(&error))?;
    Err(cannot(&Command::new(program).args(words).exec()))
}

fn cannot(program: &OsStr, error: &io::Error) -> Failure {
    let name = program.display();
    let failure = Failure::new("command", format!("cannot run {name}: {}", plain(error)));
    match error.kind() {
        io::ErrorKind::NotFound => {
            failure.status(127).hint("the command after `--` must be on the PATH, or be given by its path")
        }
        _ => failure.status(126).hint(format!("is {name} a program, and may you execute it?")),
    }
}

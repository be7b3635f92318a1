//! Helper processes, as the process that starts them sees them: started from this very program, or from one
//! beside it, found dead, ended.
//! It never waits for a helper that does not respond, and knows nothing of what is said to one.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tracing::warn;

use crate::contract::protocol;
use crate::system::process::ProcessId;
use crate::system::role::Role;
use crate::system::{isolate, origin};

/// A process that was just started, and is ended again unless it is kept ([`Started::keep`]).
pub(crate) struct Started {
    child: Option<Child>,
    /// Why it is not in the control group where it should be.
    pub(crate) note: Option<String>,
}

impl Started {
    /// Which process it is; `None` when it has ended already.
    pub(crate) fn id(&self) -> Option<ProcessId> {
        ProcessId::of(self.child.as_ref()?.id())
    }

    /// It has proved to be what it should be, and lives on when this is dropped.
    pub(crate) fn keep(mut self) -> Option<Kept> {
        self.child.take().map(Kept)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Ended already, or it does now.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A helper that lives on, and whose end can be waited for.
pub(crate) struct Kept(Child);

impl Kept {
    /// Waits until it has ended.
    ///
    /// # Errors
    /// Those of `wait`.
    pub(crate) fn wait(mut self) -> io::Result<ExitStatus> {
        self.0.wait()
    }

    /// Waits until it has ended, and ends it after that time.
    ///
    /// # Errors
    /// Those of `wait`.
    pub(crate) fn wait_for(mut self, patience: Duration) -> io::Result<ExitStatus> {
        let until = Instant::now() + patience;
        while Instant::now() < until {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.0.kill()?;
        self.0.wait()
    }
}

/// Starts a helper of a role with one end of a SEQPACKET socket as standard input; the other end is returned.
/// `words` follow the role's word. It is moved into the group of that `cgroup.procs`, where one is given.
///
/// # Errors
/// No socket or no process could be made; the text says which.
pub(crate) fn start(
    role: Role,
    words: &[String],
    cgroup: Option<BorrowedFd<'_>>,
) -> io::Result<(Started, OwnedFd)> {
    let program = match role {
        Role::Helper => becket_image::link::helper::program()?,
        _ => "/proc/self/exe".into(),
    };
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"))
    };
    let (ours, theirs) = protocol::pair().map_err(failed("socket"))?;
    let child = origin::environment(&mut Command::new(&program))
        // With an `@` in front systemd spares it when it ends the remaining processes before it unmounts
        // the last file systems: these may be on our devices.
        .arg0("@becket")
        .arg(role.word())
        .args(words)
        .current_dir(isolate::root())
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        // Keys at the terminal of `becket serve` are not for it.
        .process_group(0)
        .spawn()
        .map_err(failed(&program.to_string_lossy()))?;
    let pid = child.id();
    let mut started = Started { child: Some(child), note: None };
    if let Err(error) = cgroup.map_or(Ok(()), |cgroup| join(cgroup, pid)) {
        started.note = Some(format!("it stays in the server's control group: {error}"));
    }
    Ok((started, ours))
}

/// Ends a process at once, whatever it is doing.
pub(crate) fn end(id: ProcessId, what: &str) {
    let pid = i32::try_from(id.pid).ok().and_then(Pid::from_raw);
    let Some(Ok(handle)) = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty())) else { return };
    // Asked once its number cannot be used again under our hands.
    if id.alive()
        && let Err(error) = pidfd_send_signal(&handle, Signal::KILL)
    {
        warn!("{what} {} cannot be ended: {error}", id.pid);
    }
}

/// Moves a process into the group of a `cgroup.procs`.
fn join(cgroup: BorrowedFd<'_>, pid: u32) -> io::Result<()> {
    File::from(cgroup.try_clone_to_owned()?).write_all(pid.to_string().as_bytes())
}

//! The roles of becket's helper processes, and what each of them does before it does anything else.
//! No role opens a way to another one: each has a list of system calls of its own (`system::confine`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use becket_uapi::handover::{close_inherited, inherited_fd};
use becket_uapi::signal::SignalFd;
use rustix::fs::FileType;
use rustix::process::Signal;

use crate::contract::Error;
use crate::system::log;

/// What a helper process is there for. Each is started as `becket WORD` with a socket as standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// Moves bytes between the kernel or clients and the images that it holds.
    Worker,
    /// Talks with clients of an export before they are let in. It holds no image.
    Doorman,
    /// Makes connections to servers of network block devices and hands them on. It holds no image.
    Connector,
    /// The same by a program of its own, which is the server, too: it has the libraries of a cluster.
    Helper,
    /// Answers requests for metrics. It holds a socket that listens, and nothing of becket's.
    Reporter,
    /// Fetches the bytes of one remote source into its store file. It holds nothing else.
    Fetcher,
}

impl Role {
    /// The subcommand, and the role's name in the log.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Role::Worker => "worker",
            Role::Doorman => "doorman",
            Role::Connector => "connector",
            Role::Helper => "helper",
            Role::Reporter => "reporter",
            Role::Fetcher => "fetcher",
        }
    }

    /// Whether it connects to servers that a user has named.
    pub(crate) fn reaches_servers(self) -> bool {
        matches!(self, Role::Connector | Role::Fetcher | Role::Helper)
    }

    /// Whether block I/O waits for this process, so that its own memory must never have to be written or
    /// read back first.
    pub(crate) fn serves_block_io(self) -> bool {
        !matches!(self, Role::Doorman | Role::Reporter)
    }
}

/// What the beginning of a helper has set up.
pub(crate) struct Begun {
    /// The connection to the process that started it.
    pub(crate) control: OwnedFd,
    /// Blocked signals, which are not read on purpose. Keep it as long as the process runs.
    pub(crate) _signals: SignalFd,
}

/// Begins the main of a helper: takes its connection from standard input, and closes everything else that it
/// inherited. Call it before any other thread starts; `harden` and `confine::shut` come next.
///
/// # Errors
/// It was not started by another process of becket.
pub(crate) fn begin(role: Role) -> Result<Begun, Error> {
    let control = control()?;
    log::of_server(role.word(), None);
    close_inherited()
        .map_err(|error| Error::Worker { what: format!("cannot tell what it was handed: {error}") })?;
    // It ends when its work is gone and not when a terminal or a service manager says so: a process that
    // waits for a write could wait for ever. Nor does it end by a write beyond a limit on the size of files:
    // that write fails. Not read on purpose; blocked in all threads.
    let signals = SignalFd::block(&[Signal::INT, Signal::TERM, Signal::HUP, Signal::XFSZ])
        .map_err(|error| Error::Worker { what: format!("could not block signals: {error}") })?;
    Ok(Begun { control, _signals: signals })
}

/// The connection to the process that started this one, moved away from standard input.
fn control() -> Result<OwnedFd, Error> {
    let failed = |error: io::Error| Error::Worker { what: format!("has no connection to a server: {error}") };
    let control = inherited_fd(0).map_err(failed)?;
    let kind = rustix::fs::fstat(&control).map(|stat| FileType::from_raw_mode(stat.st_mode));
    if kind != Ok(FileType::Socket) {
        return Err(Error::Worker { what: "is started by becket's server, not by hand".to_owned() });
    }
    let null = File::open("/dev/null").map_err(failed)?;
    rustix::stdio::dup2_stdin(null.as_fd()).map_err(|error| failed(error.into()))?;
    Ok(control)
}

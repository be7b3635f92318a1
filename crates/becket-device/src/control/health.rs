//! Processes that live and do not respond: found out without waiting for them, and said with what to do.
//! Nothing here ends or replaces one: it may be under a debugger, or its file system may answer again.
//!
//! A call to the supervisor may take long, as a change does that waits for requests under way. So it has no
//! time limit, but a process that waits asks now and then whether the others still respond (`Ping`,
//! on a connection of its own, which waits for no device). A worker answers that in the thread that takes
//! its orders, never in one that moves bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use becket_transport::Kind;

use super::connection;
use crate::contract::messages::Pulse;
use crate::contract::{DeviceId, DeviceInfo, DeviceState, Error, ErrorKind, Part, shape};
use crate::record::device::Device;
use crate::record::runtime::Runtime;
use crate::system::process::ProcessId;

/// How long a worker may take to answer the supervisor, which must in turn answer a client in time.
pub(crate) const WORKER: Duration = Duration::from_millis(1500);
/// How long an answer is waited for before it is asked who responds.
pub(crate) const DOUBT: Duration = Duration::from_millis(1000);

/// How long a process that is not stopped may leave a call unanswered before the call is given up: on a very
/// busy machine an answer can take seconds.
const SILENCE: Duration = Duration::from_secs(15);

/// What a caller makes of a check: a stopped process is an error at once, a silent one after [`SILENCE`].
/// `silent` says since when it has been silent.
pub(crate) fn given_up(checked: io::Result<()>, silent: &mut Option<Instant>) -> io::Result<()> {
    let Err(error) = checked else {
        *silent = None;
        return Ok(());
    };
    let found = error.get_ref().and_then(|found| found.downcast_ref::<Unresponsive>());
    let stopped = found.is_some_and(Unresponsive::stopped);
    let since = *silent.get_or_insert_with(Instant::now);
    if stopped || since.elapsed() >= SILENCE { Err(error) } else { Ok(()) }
}

/// A process that a call waits for and that does not respond.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unresponsive {
    what: &'static str,
    pid: Option<u32>,
    /// How the device is offered, where it is about one: that decides what a worker's death costs.
    kind: Option<Kind>,
}

impl fmt::Display for Unresponsive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unresponsive { what, pid, .. } = self;
        write!(f, "{what}")?;
        if let Some(pid) = pid {
            write!(f, " (process {pid})")?;
        }
        write!(f, " does not respond")?;
        match self.stopped() {
            true => write!(f, ": it is stopped, by a signal or a debugger"),
            false => Ok(()),
        }
    }
}

impl std::error::Error for Unresponsive {}

impl Unresponsive {
    fn stopped(&self) -> bool {
        self.pid.and_then(ProcessId::of).is_some_and(ProcessId::stopped)
    }

    /// What to do, as commands.
    fn hint(&self) -> String {
        let pid = self.pid.map_or_else(|| "PID".to_owned(), |pid| pid.to_string());
        let next = match (self.what, self.kind) {
            (WORKER_NAME, Some(kind)) => shape::of(kind).next_worker,
            (WORKER_NAME, None) => "another worker takes over",
            _ => "another server takes over and no request is lost",
        };
        format!("let it go on: kill -CONT {pid}; or end it: kill -KILL {pid}, then {next}")
    }
}

impl From<Unresponsive> for Error {
    fn from(found: Unresponsive) -> Error {
        Error::Failed { kind: ErrorKind::Timeout, message: found.to_string(), hint: Some(found.hint()) }
    }
}

const WORKER_NAME: &str = "the worker";

/// The error of an order that is not given to a stopped worker.
pub(crate) fn stopped(worker: ProcessId, kind: Kind) -> Error {
    Unresponsive { what: WORKER_NAME, pid: Some(worker.pid), kind: Some(kind) }.into()
}

/// An error where the supervisor or the worker of a device is stopped: it is not even asked.
pub(crate) fn running(device: &Device) -> Result<(), Error> {
    let stopped = |process: Option<ProcessId>| process.filter(|process| process.stopped());
    let kind = Some(device.info.transport);
    let found = match (stopped(device.worker), stopped(device.server)) {
        (Some(worker), _) => Unresponsive { what: WORKER_NAME, pid: Some(worker.pid), kind },
        (None, Some(server)) => Unresponsive { what: "becket's server", pid: Some(server.pid), kind },
        (None, None) => return Ok(()),
    };
    Err(found.into())
}

/// An error where the supervisor or the worker of a device does not respond: for commands that touch the
/// device themselves, and would wait for its requests.
pub(crate) fn responding(runtime: &Runtime, device: &Device) -> Result<(), Error> {
    running(device)?;
    let server = device.server.filter(|server| server.alive()).map(|server| server.pid);
    let concerns = Concerns::Worker(device.worker.map(|worker| worker.pid));
    let mut silent = None;
    let checked = loop {
        let checked = given_up(check(runtime, server, concerns), &mut silent);
        if checked.is_err() || silent.is_none() {
            break checked;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    match checked {
        Ok(()) => Ok(()),
        Err(error) => Err(match error.get_ref().and_then(|found| found.downcast_ref::<Unresponsive>()) {
            Some(found) => Unresponsive { kind: Some(device.info.transport), ..found.clone() }.into(),
            None => Error::Server { what: error.to_string(), log: None },
        }),
    }
}

/// Whom a call to the supervisor waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Concerns {
    /// The supervisor alone.
    Server,
    /// The worker that new devices go to.
    Shared,
    /// The worker with that number.
    Worker(Option<u32>),
}

/// An error when a call cannot be answered, because a process that it depends on does not respond.
pub(crate) fn check(runtime: &Runtime, server: Option<u32>, concerns: Concerns) -> io::Result<()> {
    let dead =
        |what, pid| Err(io::Error::new(io::ErrorKind::TimedOut, Unresponsive { what, pid, kind: None }));
    let pulse = match pulse(runtime, server) {
        // One that is gone is found out by its connection.
        Ok(None) => return Ok(()),
        Ok(Some(pulse)) => pulse,
        Err(()) => return dead("becket's server", server),
    };
    let worker = match concerns {
        Concerns::Server => None,
        Concerns::Shared => pulse.shared,
        Concerns::Worker(worker) => worker,
    };
    match worker.filter(|worker| pulse.unresponsive.contains(worker)) {
        Some(worker) => dead(WORKER_NAME, Some(worker)),
        None => Ok(()),
    }
}

/// What the supervisor says of its workers; `None` where none runs, an error where it does not respond.
fn pulse(runtime: &Runtime, server: Option<u32>) -> Result<Option<Pulse>, ()> {
    if server.and_then(ProcessId::of).is_some_and(ProcessId::stopped) {
        return Err(());
    }
    connection::ping(runtime)
}

/// The process at the other end, if it is known: the socket of a service manager names the manager.
pub(crate) fn peer(stream: &UnixStream) -> Option<u32> {
    becket_uapi::peer::of(stream).ok()?.pid.filter(|pid| *pid > 1)
}

/// How many clients an export has, as far as its supervisor answers.
pub(crate) fn connections(runtime: &Runtime, info: &DeviceInfo) -> Option<u64> {
    let pulse = connection::ping(runtime).ok().flatten()?;
    let its = pulse.connections.into_iter().find(|count| count.export == DeviceId::of(info));
    its.map(|count| count.clients)
}

/// Marks the devices whose supervisor or worker does not respond.
pub(crate) fn examine(runtime: &Runtime, devices: &mut [Device]) {
    let served = |device: &Device| {
        matches!(device.info.state, DeviceState::Live | DeviceState::Orphaned | DeviceState::Detaching)
    };
    let pids = |pick: fn(&Device) -> Option<ProcessId>| -> BTreeSet<u32> {
        let live = devices.iter().filter(|device| served(device)).filter_map(pick);
        live.map(|process| process.pid).collect()
    };
    let (workers, servers) = (pids(|device| device.worker), pids(|device| device.server));
    if workers.is_empty() {
        return;
    }
    let is_stopped = |pid: &u32| ProcessId::of(*pid).is_some_and(ProcessId::stopped);
    let mut unresponsive: BTreeSet<u32> =
        workers.iter().chain(&servers).copied().filter(is_stopped).collect();
    if !servers.iter().any(|server| unresponsive.contains(server)) {
        match connection::ping(runtime) {
            Ok(None) => {}
            Ok(Some(pulse)) => {
                unresponsive.extend(pulse.unresponsive);
                let counts: BTreeMap<DeviceId, u64> =
                    pulse.connections.into_iter().map(|count| (count.export, count.clients)).collect();
                let stored: BTreeMap<String, Part> =
                    pulse.stored.into_iter().map(|stored| (stored.mark, stored.part)).collect();
                for device in devices.iter_mut() {
                    device.info.connections = counts.get(&DeviceId::of(&device.info)).copied();
                    device.info.stored = stored.get(&device.mark.to_string()).copied();
                }
            }
            Err(()) => unresponsive.extend(&servers),
        }
    }
    for device in devices.iter_mut().filter(|device| served(device)) {
        let of = |process: Option<ProcessId>| {
            process.map(|process| process.pid).filter(|pid| unresponsive.contains(pid))
        };
        let kind = Some(device.info.transport);
        let found = match (of(device.worker), of(device.server)) {
            (Some(worker), _) => Unresponsive { what: WORKER_NAME, pid: Some(worker), kind },
            (None, Some(server)) => Unresponsive { what: "becket's server", pid: Some(server), kind },
            (None, None) => continue,
        };
        device.info.state = DeviceState::NotResponding;
        device.info.warnings.insert(0, format!("{found}; {}", found.hint()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_who_does_not_respond_and_what_to_type() {
        let error = stopped(ProcessId { pid: 4242, start: 0 }, Kind::Fuse);
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().contains("the worker (process 4242) does not respond"), "{error}");
        let hint = error.hint().unwrap();
        assert!(hint.contains("kill -CONT 4242") && hint.contains("kill -KILL 4242"), "{hint}");
        assert!(hint.ends_with("another worker takes over and no request is lost"), "{hint}");
        let hint = stopped(ProcessId { pid: 4242, start: 0 }, Kind::Nbd).hint().unwrap();
        assert!(hint.ends_with("connections of clients end, and new ones are served"), "{hint}");
    }
}

//! The supervisor's side of one connection: who is there, what is asked, who answers.
//! It serves only its own user and root, and trusts no parameter before it was parsed as its type.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use becket_engine::Summary;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tracing::{debug, warn};

use super::answers::{self, Answer, NotDone, with};
use super::socket::{Socket, no_longer};
use crate::contract::event::{Batch, Wanted};
use crate::contract::messages::{
    Attach, Counted, DESCRIPTION, Detach, Devices, Foresee, INTERFACE, Nothing, OneDevice, Pulse, Reach,
    Refresh, Set, Stat,
};
use crate::contract::varlink::{Call, Refusal, Reply};
use crate::contract::{DeviceInfo, Error, ErrorKind, ServerStatus};
use crate::system::events::EVENTS;

/// What the supervisor does for its clients.
pub(crate) trait Service: Sync {
    /// A call begins, and lasts until its answer is sent: then what is returned is dropped. The server does
    /// not end before, since a caller that gets no answer calls the next one.
    fn begins(&self) -> Box<dyn Send + '_> {
        Box::new(())
    }
    fn attach(&self, request: Attach, fds: Vec<OwnedFd>) -> Result<DeviceInfo, Error>;
    fn foresee(&self, request: &Foresee) -> Result<(), Error>;
    fn detach(&self, request: &Detach) -> Result<DeviceInfo, Error>;
    fn list(&self) -> Vec<DeviceInfo>;
    fn refresh(&self, request: &Refresh) -> Result<DeviceInfo, Error>;
    fn reach(&self, request: &Reach) -> Result<(), Error>;
    fn set(&self, request: Set, fds: Vec<OwnedFd>) -> Result<DeviceInfo, Error>;
    fn stat(&self, request: &Stat) -> Result<Summary, Error>;
    fn status(&self) -> ServerStatus;
    /// Who does not respond. It waits for no device, and for no worker for long.
    fn ping(&self) -> Pulse {
        Pulse::default()
    }
    fn hand_over(&self) -> Result<(), Error>;
}

/// How long a peer may leave an answer unread that fits no buffer: a server that is to end waits for it, and
/// its successor waits no longer than `supervisor::PATIENCE`.
const READER: Duration = Duration::from_secs(5);

/// Serves one connection until its peer hangs up. `uid` is the user that is served, besides root. `listens`
/// is called once the peer only listens: then the server need not live for it.
pub(crate) fn converse(service: &dyn Service, stream: UnixStream, uid: u32, listens: &dyn Fn()) {
    // A peer that vanishes or sends nonsense ends its connection and nothing else.
    if let Err(error) = exchange(service, stream, uid, listens) {
        warn!("a connection ended: {error}");
    }
}

fn exchange(service: &dyn Service, stream: UnixStream, uid: u32, listens: &dyn Fn()) -> io::Result<()> {
    let peer = becket_uapi::peer::of(&stream)?.uid;
    stream.set_write_timeout(Some(READER))?;
    let mut socket = Socket::new(stream);
    if peer != uid && peer != 0 {
        warn!("refused a connection of user {peer}");
        return socket.send(serde_json::to_vec(&Refusal::PermissionDenied)?, &[], &mut no_longer);
    }
    while let Some((message, fds)) = socket.receive(&mut no_longer)? {
        let call: Call<Box<RawValue>> = serde_json::from_slice(&message)?;
        // It has given up since, and does not expect what it asked for any more.
        if !call.oneway && has_left(socket.stream()) {
            warn!("a call was not carried out: its caller hung up before the answer");
            return Ok(());
        }
        if call.more && call.method.strip_prefix(INTERFACE) == Some(".Events") {
            listens();
            return tell_events(&mut socket, &call);
        }
        let begun = Instant::now();
        let _until_sent = service.begins();
        let answer = answer(service, &call, fds).or_else(|error| serde_json::to_vec(&error))?;
        debug!("{} took {} us", call.method, begun.elapsed().as_micros());
        if !call.oneway {
            socket.send(answer, &[], &mut no_longer)?;
        }
    }
    Ok(())
}

/// How often it is looked whether a peer that only listens is still there.
const LISTENERS: Duration = Duration::from_secs(1);
/// Peers that only listen, at most. Each has a thread.
const MOST_LISTENERS: usize = 64;
static LISTENING: AtomicUsize = AtomicUsize::new(0);

/// Answers a call for events until its peer hangs up. A peer that does not read holds up this thread only.
fn tell_events(socket: &mut Socket, call: &Call<Box<RawValue>>) -> io::Result<()> {
    let others = LISTENING.fetch_add(1, Ordering::SeqCst);
    let ended = match others < MOST_LISTENERS {
        true => socket.stream().set_write_timeout(None).and_then(|()| tell_each(socket, call)),
        false => {
            let message = format!("{MOST_LISTENERS} programs listen to events already");
            let error = Error::Failed { kind: ErrorKind::Server, message, hint: None };
            socket.send(serde_json::to_vec(&NotDone::from(error))?, &[], &mut no_longer)
        }
    };
    LISTENING.fetch_sub(1, Ordering::SeqCst);
    ended
}

fn tell_each(socket: &mut Socket, call: &Call<Box<RawValue>>) -> io::Result<()> {
    let parameters = call.parameters.as_ref().map_or("{}", |parameters| parameters.get());
    let wanted = match serde_json::from_str(parameters) {
        Ok(wanted) => wanted,
        Err(error) => {
            let refusal = Refusal::InvalidParameter { parameter: error.to_string() };
            return socket.send(serde_json::to_vec(&refusal)?, &[], &mut no_longer);
        }
    };
    let mut batch = events(wanted, Duration::ZERO);
    loop {
        let next = batch.last;
        socket.send(
            serde_json::to_vec(&Reply { parameters: batch, continues: true })?,
            &[],
            &mut no_longer,
        )?;
        batch = loop {
            let batch = EVENTS.behind(next, LISTENERS);
            if has_left(socket.stream()) {
                return Ok(());
            }
            if !batch.events.is_empty() || batch.lost > 0 {
                break batch;
            }
        };
    }
}

/// The events that a caller wants, as far as there are any.
fn events(wanted: Wanted, patience: Duration) -> Batch {
    let of_another = wanted.server.is_some_and(|server| server != std::process::id());
    let after = wanted.after.map_or_else(|| EVENTS.last(), |after| if of_another { 0 } else { after });
    EVENTS.behind(after, patience)
}

/// Whether no process holds the other end any more.
fn has_left(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

fn answer(service: &dyn Service, call: &Call<Box<RawValue>>, fds: Vec<OwnedFd>) -> Answer {
    let Call { method, parameters, .. } = call;
    let (interface, name) = method.rsplit_once('.').unwrap_or(("", method));
    let parameters = parameters.as_ref().map_or("{}", |parameters| parameters.get());
    match (interface, name) {
        (INTERFACE, "Attach") => with_device(parameters, |request: Attach| service.attach(request, fds)),
        (INTERFACE, "Foresee") => with(parameters, |request: Foresee| {
            service.foresee(&request)?;
            Ok(Nothing {})
        }),
        (INTERFACE, "Detach") => with_device(parameters, |request: Detach| service.detach(&request)),
        (INTERFACE, "List") => with(parameters, |_: Nothing| Ok(Devices { devices: service.list() })),
        (INTERFACE, "Refresh") => with_device(parameters, |request: Refresh| service.refresh(&request)),
        (INTERFACE, "Reach") => with(parameters, |request: Reach| {
            service.reach(&request)?;
            Ok(Nothing {})
        }),
        (INTERFACE, "Set") => with_device(parameters, |request: Set| service.set(request, fds)),
        (INTERFACE, "Stat") => {
            with(parameters, |request: Stat| Ok(Counted { stats: service.stat(&request)? }))
        }
        (INTERFACE, "HandOver") => with(parameters, |_: Nothing| {
            service.hand_over()?;
            Ok(Nothing {})
        }),
        (INTERFACE, "Events") => with(parameters, |wanted: Wanted| Ok(events(wanted, Duration::ZERO))),
        (INTERFACE, "Ping") => with(parameters, |_: Nothing| Ok(service.ping())),
        (INTERFACE, "Status") => with(parameters, |_: Nothing| Ok(service.status())),
        (INTERFACE, _) => Err(Refusal::MethodNotFound { method: method.clone() }.into()),
        _ => answers::of_service(method, parameters, &[(INTERFACE, DESCRIPTION)]),
    }
}

/// Whether a call without descriptors comes as far as the service.
#[cfg(feature = "fuzzing")]
pub(crate) fn is_understood(service: &dyn Service, call: Call<Box<RawValue>>) -> bool {
    !matches!(answer(service, &call, Vec::new()), Err(NotDone::Refused(_)))
}

/// [`with`] where a device is the answer.
fn with_device<P: DeserializeOwned>(
    parameters: &str,
    act: impl FnOnce(P) -> Result<DeviceInfo, Error>,
) -> Answer {
    with(parameters, |request| Ok(OneDevice { device: act(request)? }))
}

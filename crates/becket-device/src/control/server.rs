//! The supervisor's side of one connection: who is there, what is asked, who answers.
//! It serves only its own user and root, and trusts no parameter before it was parsed as its type.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use becket_engine::Summary;
use futures_lite::future::block_on;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;
use zlink::varlink_service::{self, Info};
use zlink::{Call, Reply};

use super::socket::Waiting;
use crate::contract::ServerStatus;
use crate::contract::messages::{
    Attach, DESCRIPTION, Detach, Devices, Failure, INTERFACE, Message, Nothing, OneDevice, Refresh,
};
use crate::contract::messages::{Counted, Pulse, Set, Stat};
use crate::contract::{DeviceInfo, Error};
use crate::system::log;

const SERVICE: &str = "org.varlink.service";

/// What the supervisor does for its clients.
pub(crate) trait Service: Sync {
    fn attach(&self, request: Attach, fds: Vec<OwnedFd>) -> Result<DeviceInfo, Error>;
    fn detach(&self, request: &Detach) -> Result<DeviceInfo, Error>;
    fn list(&self) -> Vec<DeviceInfo>;
    fn refresh(&self, request: &Refresh) -> Result<DeviceInfo, Error>;
    fn set(&self, request: Set, fds: Vec<OwnedFd>) -> Result<DeviceInfo, Error>;
    fn stat(&self, request: &Stat) -> Result<Summary, Error>;
    fn status(&self) -> ServerStatus;
    /// Who does not respond. It waits for no device, and for no worker for long.
    fn ping(&self) -> Pulse {
        Pulse::default()
    }
    fn hand_over(&self) -> Result<(), Error>;
}

/// Serves one connection until its peer hangs up. `uid` is the user that is served, besides root.
pub(crate) fn converse(service: &dyn Service, stream: UnixStream, uid: u32) {
    // A peer that vanishes or talks nonsense ends its connection and nothing else.
    if let Err(error) = block_on(exchange(service, stream, uid))
        && !matches!(error, zlink::Error::UnexpectedEof)
    {
        log::warn(format_args!("a connection ended: {error}"));
    }
}

async fn exchange(service: &dyn Service, stream: UnixStream, uid: u32) -> zlink::Result<()> {
    let peer_of = stream.try_clone().ok();
    let mut connection = Waiting::connection(stream);
    let peer = connection.peer_credentials().await?.unix_user_id();
    if peer.as_raw() != uid && !peer.is_root() {
        log::warn(format_args!("refused a connection of user {}", peer.as_raw()));
        return connection.send_error(&varlink_service::Error::PermissionDenied, Vec::new()).await;
    }
    loop {
        let (call, fds) = connection.receive_call::<Message<Box<RawValue>>>().await?;
        // It has given up since, and does not expect what it asked for any more.
        if !call.oneway() && peer_of.as_ref().is_some_and(has_left) {
            log::warn(format_args!("a call was not carried out: its caller hung up before the answer"));
            return Ok(());
        }
        let answer = answer(service, &call, fds);
        if call.oneway() {
            continue;
        }
        match answer {
            Answer::Device(device) => connection.send_reply(&Reply::new(Some(device)), Vec::new()).await?,
            Answer::Reply(value) => connection.send_reply(&Reply::new(Some(value)), Vec::new()).await?,
            Answer::Failure(failure) => connection.send_error(&failure, Vec::new()).await?,
            Answer::Refused(error) => connection.send_error(&error, Vec::new()).await?,
        }
    }
}

/// Whether no process holds the other end any more.
fn has_left(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

/// What goes back for one call.
#[derive(Debug, PartialEq)]
enum Answer {
    /// By far the most frequent: on the wire by the shortest way.
    Device(Box<OneDevice>),
    Reply(Value),
    Failure(Failure),
    Refused(varlink_service::Error<'static>),
}

fn answer(service: &dyn Service, call: &Call<Message<Box<RawValue>>>, fds: Vec<OwnedFd>) -> Answer {
    let Message { method, parameters } = call.method();
    let (interface, name) = method.rsplit_once('.').unwrap_or(("", method));
    let parameters = parameters.as_ref().map_or("{}", |parameters| parameters.get());
    match (interface, name) {
        (INTERFACE, "Attach") => with_device(parameters, |request: Attach| service.attach(request, fds)),
        (INTERFACE, "Detach") => with_device(parameters, |request: Detach| service.detach(&request)),
        (INTERFACE, "List") => with(parameters, |_: Nothing| Ok(Devices { devices: service.list() })),
        (INTERFACE, "Refresh") => with_device(parameters, |request: Refresh| service.refresh(&request)),
        (INTERFACE, "Set") => with_device(parameters, |request: Set| service.set(request, fds)),
        (INTERFACE, "Stat") => {
            with(parameters, |request: Stat| Ok(Counted { stats: service.stat(&request)? }))
        }
        (INTERFACE, "HandOver") => with(parameters, |_: Nothing| {
            service.hand_over()?;
            Ok(Nothing {})
        }),
        (INTERFACE, "Ping") => with(parameters, |_: Nothing| Ok(service.ping())),
        (INTERFACE, "Status") => with(parameters, |_: Nothing| Ok(service.status())),
        (SERVICE, "GetInfo") => with(parameters, |_: Nothing| info()),
        (SERVICE, "GetInterfaceDescription") => describe(parameters),
        (INTERFACE | SERVICE, _) => {
            Answer::Refused(varlink_service::Error::MethodNotFound { method: method.clone().into() })
        }
        _ => Answer::Refused(varlink_service::Error::InterfaceNotFound {
            interface: interface.to_owned().into(),
        }),
    }
}

/// Whether a call without descriptors comes as far as the service.
#[cfg(feature = "fuzzing")]
pub(crate) fn is_understood(service: &dyn Service, message: Message<Box<RawValue>>) -> bool {
    !matches!(answer(service, &Call::new(message), Vec::new()), Answer::Refused(_))
}

/// Parses the parameters, acts, and puts what came of it on the wire.
fn with<P: DeserializeOwned, R: Serialize>(
    parameters: &str,
    act: impl FnOnce(P) -> Result<R, Error>,
) -> Answer {
    let unspeakable =
        |error: serde_json::Error| Error::Server { what: format!("cannot answer: {error}"), log: None };
    parsed(parameters, |request| {
        act(request).and_then(|reply| serde_json::to_value(reply).map_err(unspeakable)).map(Answer::Reply)
    })
}

/// The same where a device is the answer.
fn with_device<P: DeserializeOwned>(
    parameters: &str,
    act: impl FnOnce(P) -> Result<DeviceInfo, Error>,
) -> Answer {
    parsed(parameters, |request| act(request).map(|device| Answer::Device(Box::new(OneDevice { device }))))
}

fn parsed<P: DeserializeOwned>(parameters: &str, act: impl FnOnce(P) -> Result<Answer, Error>) -> Answer {
    match serde_json::from_str(parameters) {
        Ok(request) => act(request).unwrap_or_else(|error| Answer::Failure(error.into())),
        Err(error) => {
            let parameter = error.to_string().into();
            Answer::Refused(varlink_service::Error::InvalidParameter { parameter })
        }
    }
}

fn info() -> Result<Info<'static>, Error> {
    Info::new("becket", "becket", env!("CARGO_PKG_VERSION"), "", [INTERFACE, SERVICE])
        .map_err(|error| Error::Server { what: format!("cannot name its interfaces: {error}"), log: None })
}

fn describe(parameters: &str) -> Answer {
    let parameters = serde_json::from_str::<Value>(parameters).unwrap_or_default();
    let interface = parameters.get("interface").and_then(Value::as_str).unwrap_or_default();
    let description = match interface {
        INTERFACE => DESCRIPTION.to_owned(),
        SERVICE => varlink_service::DESCRIPTION.to_string(),
        other => {
            let interface = other.to_owned().into();
            return Answer::Refused(varlink_service::Error::InterfaceNotFound { interface });
        }
    };
    Answer::Reply(serde_json::json!({ "description": description }))
}

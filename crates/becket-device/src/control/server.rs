//! The supervisor's side of one connection: who is there, what is asked, who answers.
//! It serves nobody but its own user and root, and trusts no parameter before it was parsed as its type.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use becket_engine::Summary;
use futures_lite::future::block_on;
use rustix::io::FdFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use zlink::smol::unix::{Connection, Stream};
use zlink::varlink_service::{self, Info};
use zlink::{Call, Reply};

use super::ServerStatus;
use super::{Attach, DESCRIPTION, Detach, Devices, Failure, INTERFACE, Message, Nothing, OneDevice, Refresh};
use super::{Counted, Set, Stat};
use crate::{DeviceInfo, Error, log};

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
    fn hand_over(&self) -> Result<(), Error>;
}

/// Serves one connection until its peer hangs up. `uid` is whom we serve, besides root.
pub(crate) fn converse(service: &dyn Service, stream: UnixStream, uid: u32) {
    // A peer that vanishes or talks nonsense ends its connection and nothing else.
    if let Err(error) = block_on(exchange(service, stream, uid))
        && !matches!(error, zlink::Error::UnexpectedEof)
    {
        log::warn(format_args!("a connection ended: {error}"));
    }
}

async fn exchange(service: &dyn Service, stream: UnixStream, uid: u32) -> zlink::Result<()> {
    let mut connection = Connection::new(Stream::try_from(stream)?);
    let peer = connection.peer_credentials().await?.unix_user_id();
    if peer.as_raw() != uid && !peer.is_root() {
        log::warn(format_args!("refused a connection of user {}", peer.as_raw()));
        return connection.send_error(&varlink_service::Error::PermissionDenied, Vec::new()).await;
    }
    loop {
        let (call, fds) = connection.receive_call::<Message<Value>>().await?;
        // They arrive without this mark, and a worker that is started must not inherit an image and its locks.
        for fd in &fds {
            rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        }
        let answer = answer(service, &call, fds);
        if call.oneway() {
            continue;
        }
        match answer {
            Answer::Reply(value) => connection.send_reply(&Reply::new(Some(value)), Vec::new()).await?,
            Answer::Failure(failure) => connection.send_error(&failure, Vec::new()).await?,
            Answer::Refused(error) => connection.send_error(&error, Vec::new()).await?,
        }
    }
}

/// What goes back for one call.
#[derive(Debug, PartialEq)]
enum Answer {
    Reply(Value),
    Failure(Failure),
    Refused(varlink_service::Error<'static>),
}

fn answer(service: &dyn Service, call: &Call<Message<Value>>, fds: Vec<OwnedFd>) -> Answer {
    let Message { method, parameters } = call.method();
    let (interface, name) = method.rsplit_once('.').unwrap_or(("", method));
    let parameters = parameters.clone().unwrap_or_else(|| Value::Object(serde_json::Map::default()));
    match (interface, name) {
        (INTERFACE, "Attach") => {
            with(parameters, |request: Attach| Ok(OneDevice { device: service.attach(request, fds)? }))
        }
        (INTERFACE, "Detach") => {
            with(parameters, |request: Detach| Ok(OneDevice { device: service.detach(&request)? }))
        }
        (INTERFACE, "List") => with(parameters, |_: Nothing| Ok(Devices { devices: service.list() })),
        (INTERFACE, "Refresh") => {
            with(parameters, |request: Refresh| Ok(OneDevice { device: service.refresh(&request)? }))
        }
        (INTERFACE, "Set") => {
            with(parameters, |request: Set| Ok(OneDevice { device: service.set(request, fds)? }))
        }
        (INTERFACE, "Stat") => {
            with(parameters, |request: Stat| Ok(Counted { stats: service.stat(&request)? }))
        }
        (INTERFACE, "HandOver") => with(parameters, |_: Nothing| {
            service.hand_over()?;
            Ok(Nothing {})
        }),
        (INTERFACE, "Status") => with(parameters, |_: Nothing| Ok(service.status())),
        (SERVICE, "GetInfo") => with(parameters, |_: Nothing| info()),
        (SERVICE, "GetInterfaceDescription") => describe(&parameters),
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
pub(crate) fn is_understood(service: &dyn Service, message: Message<Value>) -> bool {
    !matches!(answer(service, &Call::new(message), Vec::new()), Answer::Refused(_))
}

/// Parses the parameters, acts, and puts what came of it on the wire.
fn with<P, R>(parameters: Value, act: impl FnOnce(P) -> Result<R, Error>) -> Answer
where
    P: DeserializeOwned,
    R: Serialize,
{
    let request = match serde_json::from_value(parameters) {
        Ok(request) => request,
        Err(error) => {
            let parameter = error.to_string().into();
            return Answer::Refused(varlink_service::Error::InvalidParameter { parameter });
        }
    };
    let unspeakable =
        |error: serde_json::Error| Error::Server { what: format!("cannot answer: {error}"), log: None };
    match act(request).and_then(|reply| serde_json::to_value(reply).map_err(unspeakable)) {
        Ok(reply) => Answer::Reply(reply),
        Err(error) => Answer::Failure(error.into()),
    }
}

fn info() -> Result<Info<'static>, Error> {
    Info::new("becket", "becket", env!("CARGO_PKG_VERSION"), "", [INTERFACE, SERVICE])
        .map_err(|error| Error::Server { what: format!("cannot name its interfaces: {error}"), log: None })
}

fn describe(parameters: &Value) -> Answer {
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

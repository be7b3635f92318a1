//! Metrics over HTTP: the command collects, and a reporter, which holds nothing, talks with the clients.
//! It reads no byte of a client.

use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};

use super::doorway::{Listening, written_port};
use crate::contract::report::{ReportOrder, Reported};
use crate::contract::{Error, ErrorKind, protocol, sealed};
use crate::system::helper;
use crate::system::role::Role;

/// Answers requests for metrics at `tcp:HOST:PORT`, `unix:PATH`, `fd:N` or `systemd`, for ever. `ready` gets
/// the address once it listens; `text` makes what a request gets.
///
/// # Errors
/// The address cannot be listened at, or the reporter cannot work or has ended.
pub fn publish(
    address: &str,
    ready: impl FnOnce(&str),
    mut text: impl FnMut() -> Result<String, Error>,
) -> Result<(), Error> {
    if address.strip_prefix("tcp:").is_some_and(|place| written_port(place).is_none()) {
        return Err(Error::Failed {
            kind: ErrorKind::InvalidOption,
            message: format!("{address} has no port"),
            hint: Some("for example tcp:127.0.0.1:10810".to_owned()),
        });
    }
    // Who names an address that others reach wants them to: nothing can be changed there.
    let listening = Listening::at(address, true)?;
    let failed = |error: io::Error| Error::Worker { what: format!("cannot be started: {error}") };
    let lost = || Error::Worker { what: "has ended; its last words are above".to_owned() };
    let (reporter, control) = helper::start(Role::Reporter, &[], None).map_err(failed)?;
    match protocol::receive::<Reported>(&control).map_err(failed)? {
        Some((Reported::Started { notes }, _)) => notes.iter().for_each(|note| tracing::info!("{note}")),
        Some((Reported::Refused { why }, _)) => return Err(Error::Worker { what: why }),
        Some((Reported::Wanted, _)) | None => return Err(lost()),
    }
    let socket: OwnedFd = listening.listener;
    protocol::send(&control, &ReportOrder::Listen, &[socket.as_fd()]).map_err(failed)?;
    drop(socket);
    ready(&listening.address);
    while let Some((asked, _)) = protocol::receive::<Reported>(&control).map_err(failed)? {
        if asked != Reported::Wanted {
            return Err(Error::Worker { what: format!("says what makes no sense: {asked:?}") });
        }
        let text = text()?;
        let file = sealed::file("becket-metrics", |file| file.write_all(text.as_bytes())).map_err(failed)?;
        match protocol::send(&control, &ReportOrder::Text, &[file.as_fd()]) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
            sent => sent.map_err(failed)?,
        }
    }
    drop(reporter);
    Err(lost())
}

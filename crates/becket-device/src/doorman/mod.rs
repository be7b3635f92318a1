//! The doorman: the process that talks with clients of an address until they have agreed on an export.
//! It holds a socket that listens and the server's key, never an image or a device, and starts nothing.
//!
//! What a client and the doorman have agreed on goes with the client's socket to the supervisor. With TLS the
//! doorman stays between the two (`link::relay`), since a kernel without TLS cannot take that over.

mod certificate;
mod guest;
mod hall;
mod talk;
mod tls;

use std::os::fd::OwnedFd;

use crate::contract::export::{DoorOrder, DoorReport};
use crate::contract::protocol;
use crate::contract::sealed;
use crate::contract::{Error, ErrorKind};
use crate::system::role::{self, Begun, Role};
use crate::system::{confine, harden};
use hall::{Hall, Rules};

/// The doorman's main. Standard input is its connection to the supervisor. It returns when the supervisor is
/// gone and the last client that it relays for.
///
/// # Errors
/// It was not started by a supervisor, a precaution failed that could have worked, or its key cannot be used.
pub fn doorman_main() -> Result<(), Error> {
    let Begun { control, _signals } = role::begin(Role::Doorman)?;
    let prepared = harden::harden(Role::Doorman).and_then(|mut notes| {
        notes.extend(confine::shut(Role::Doorman)?);
        notes.extend(confine::filter(Role::Doorman)?);
        Ok(notes)
    });
    let outcome = prepared.and_then(|notes| {
        let failed = |error| Error::Worker { what: format!("cannot hear its server: {error}") };
        protocol::send(&control, &DoorReport::Started { notes }, &[]).map_err(failed)?;
        match protocol::receive::<DoorOrder>(&control).map_err(failed)? {
            Some((order, fds)) => {
                let hall = attend(order, fds)?;
                protocol::send(&control, &DoorReport::Attends, &[]).map_err(failed)?;
                Ok(Some(hall))
            }
            None => Ok(None),
        }
    });
    match outcome {
        Ok(Some(hall)) => hall.run(control),
        Ok(None) => Ok(()),
        Err(error) => {
            // When even this cannot be said, the closed connection says it.
            let _ = protocol::send(&control, &DoorReport::Refused { why: error.to_string() }, &[]);
            Err(error)
        }
    }
}

fn attend(order: DoorOrder, fds: Vec<OwnedFd>) -> Result<Hall, Error> {
    let bad = |what: &str| Error::Failed {
        kind: ErrorKind::InvalidOption,
        message: format!("no client could be let in: {what}"),
        hint: None,
    };
    let DoorOrder::Attend { shown, max_connections, verify, allow, open } = order else {
        return Err(bad("its first order is none"));
    };
    let [listener, words] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| bad("its socket is missing"))?;
    let words = sealed::read_json(&words).map_err(|error| bad(&error.to_string()))?;
    let tls = tls::server(&words, verify).map_err(|error| bad(&error))?;
    rustix::io::ioctl_fionbio(&listener, true).map_err(|error| bad(&error.to_string()))?;
    Ok(Hall::new(listener, shown, Rules { max: max_connections, tls, allow }, open))
}

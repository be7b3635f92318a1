//! The connector: the process that gets the connections of one device to one server, again whenever a worker
//! asks. It reaches the one image that the user named, holds no device, and starts nothing.
//!
//! Most connect to an NBD server ([`dialing`]). A program of its own ([`helper`]) is the server of what it
//! gives out. How workers are answered is the same ([`rounds`]).
//!
//! With TLS it stays between the server and the worker (`link::relay`): then it outlives its supervisor for
//! as long as a worker uses its connections, and its own death ends them.

mod dialing;
pub mod helper;
mod history;
mod maker;
mod rounds;

use std::os::fd::OwnedFd;
use std::time::Duration;

use becket_image::link::Trust;
use becket_image::link::channel::{self, Inherited};

use self::dialing::Dialing;
use self::rounds::{Connector, channel_of, refused};
use crate::contract::link::{Connect, LinkOrder, LinkReport};
use crate::contract::protocol;
use crate::contract::{Error, ErrorKind};
use crate::system::role::{self, Begun, Role};
use crate::system::{confine, harden};

/// How long a predecessor may take to see that its supervisor is gone, and to leave what it knows.
const LEGACY: Duration = Duration::from_secs(3);

/// The connector's main. Standard input is its connection to the supervisor; it returns when that is gone.
///
/// # Errors
/// It was not started by a supervisor, or a precaution failed that could have worked.
pub fn connector_main() -> Result<(), Error> {
    let Begun { control, _signals } = role::begin(Role::Connector)?;
    let prepared = harden::harden(Role::Connector).and_then(|mut notes| {
        notes.extend(confine::shut(Role::Connector)?);
        notes.extend(confine::filter(Role::Connector)?);
        Ok(notes)
    });
    let outcome = prepared.and_then(|notes| {
        let failed = |error| Error::Worker { what: format!("cannot hear its server: {error}") };
        protocol::send(&control, &LinkReport::Started { notes }, &[]).map_err(failed)?;
        match protocol::receive::<LinkOrder>(&control).map_err(failed)? {
            Some((LinkOrder::Connect(order), fds)) => {
                let again = order.again;
                let connector = begin(*order, fds)?;
                if !again {
                    protocol::send(&control, &LinkReport::Connected, &[]).map_err(failed)?;
                }
                Ok(Some(connector))
            }
            _ => Ok(None),
        }
    });
    match outcome {
        Ok(Some(connector)) => {
            let relays = connector.run(&control);
            // Another connector follows. What a worker has of this one goes on until it ends.
            drop(control);
            for relay in relays {
                // One that has panicked has ended as well.
                let _ = relay.join();
            }
            Ok(())
        }
        Ok(None) => Ok(()),
        Err(error) => {
            // When even this cannot be said, the closed connection says it.
            let _ = protocol::send(&control, &LinkReport::Refused { why: error.to_string() }, &[]);
            Err(error)
        }
    }
}

/// Why a new device has no connection; the supervisor says which device.
fn unreachable(why: String) -> Error {
    Error::Failed { kind: ErrorKind::Server, message: why, hint: None }
}

fn begin(order: Connect, fds: Vec<OwnedFd>) -> Result<Connector, Error> {
    let mut fds = fds.into_iter();
    let channel = channel_of(&mut fds)?;
    let trust = fds.next().map(Trust::unsealed).transpose().map_err(|error| refused(&error.to_string()))?;
    let patience = if order.inherits { LEGACY } else { Duration::ZERO };
    let inherited = channel::begin(&channel[1], patience).map_err(|error| refused(&error.to_string()))?;
    let Inherited { requests, legacy, unused } = inherited;
    let (timeout, away) = (order.timeout.map(Duration::from_secs), order.away);
    let maker = Box::new(Dialing::new(order, trust, legacy, unused).map_err(unreachable)?);
    Ok(Connector::new(maker, timeout, channel, requests, away))
}

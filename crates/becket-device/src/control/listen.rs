//! The side of a program that listens to what happens: one call, and replies until one of the two hangs up.
//! It starts no server.

use std::io;
use std::time::Duration;

use super::connection::{broken, connect, limit, result};
use super::socket::Socket;
use crate::contract::Error;
use crate::contract::event::{Batch, Wanted};
use crate::contract::messages::INTERFACE;
use crate::contract::varlink::Call;
use crate::record::runtime::Runtime;

/// How often a listener is asked whether it goes on.
const GLANCE: Duration = Duration::from_millis(500);

/// Hands each batch of events to `each`, until that or `stays` says no, or the server ends. With `more` off
/// there is one. `false` if no server runs.
///
/// # Errors
/// The server refuses the call, or cannot be talked to.
pub(crate) fn listen(
    runtime: &Runtime,
    wanted: Wanted,
    more: bool,
    each: &mut dyn FnMut(Batch) -> bool,
    stays: &dyn Fn() -> bool,
) -> Result<bool, Error> {
    let Some(stream) = connect(runtime)? else { return Ok(false) };
    limit(&stream, GLANCE).map_err(Error::io("talk to the server at", &runtime.socket()))?;
    let mut socket = Socket::new(stream);
    let mut patience = || if stays() { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) };
    let method = format!("{INTERFACE}.Events");
    let call = Call { method, parameters: Some(wanted), oneway: false, more };
    let call = serde_json::to_vec(&call).map_err(broken)?;
    if socket.send(call, &[], &mut patience).is_err() {
        return Ok(false);
    }
    loop {
        match socket.receive(&mut patience) {
            Ok(Some((reply, _))) => {
                if !each(result(&reply)?) || !more {
                    return Ok(true);
                }
            }
            // It has ended, or the listener goes.
            Ok(None) | Err(_) => return Ok(true),
        }
    }
}

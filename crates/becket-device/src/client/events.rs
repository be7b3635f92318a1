//! What happens to devices, reported as it happens, across the ends of servers.
//! It changes nothing, and starts no server.

use std::thread;
use std::time::Duration;

use crate::contract::event::{Batch, Wanted};
use crate::contract::{Error, Happened};
use crate::control::listen::listen;
use crate::record::runtime::Runtime;

/// How often it is looked whether there is a server.
const AGAIN: Duration = Duration::from_millis(200);

/// What a listener hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// Something happened.
    Event(Happened),
    /// So many events were forgotten before they could be reported.
    Lost(u64),
}

/// Which events are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listening {
    /// Also those of the past that the server remembers.
    pub recent: bool,
    /// Also those to come.
    pub follow: bool,
}

/// Reports what happens to devices that becket's server has, until `each` or `stays` says no. When the server
/// ends, the next one is waited for, and its events are reported from its first one on.
///
/// # Errors
/// The server refuses to tell: it is of an earlier version.
pub fn events(
    listening: Listening,
    each: &mut dyn FnMut(Heard) -> bool,
    stays: &dyn Fn() -> bool,
) -> Result<(), Error> {
    let mut wanted = Wanted { after: listening.recent.then_some(0), server: None };
    let mut goes_on = true;
    loop {
        let heard = match Runtime::existing()? {
            None => false,
            Some(runtime) => {
                let first = wanted;
                let mut tell = |batch: Batch| {
                    wanted = Wanted { after: Some(batch.last), server: Some(batch.server) };
                    let lost = Some(batch.lost).filter(|lost| *lost > 0).map(Heard::Lost);
                    let mut all = lost.into_iter().chain(batch.events.into_iter().map(Heard::Event));
                    goes_on = all.all(&mut *each);
                    goes_on
                };
                listen(&runtime, first, listening.follow, &mut tell, stays)?
            }
        };
        if !listening.follow || !goes_on || !stays() {
            return Ok(());
        }
        // A server that comes now has begun after this: all of its events are new.
        if !heard {
            wanted.after.get_or_insert(0);
            thread::sleep(AGAIN);
        }
    }
}

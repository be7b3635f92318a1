//! The fetcher: the process that brings the bytes of one image on another host into its store file, for all
//! devices of that image.
//! It gets the file, the tables and its order as descriptors, and holds no image and no device.
//!
//! What it fetches with is the caller's (`becket-fetch`): this room only takes the precautions, and talks
//! with the supervisor.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use becket_image::filled::{Condition, Fetching, Presence};
use rustix::event::{PollFd, PollFlags, poll};

use crate::contract::Error;
use crate::contract::link::{Fill, LinkOrder, LinkReport};
use crate::contract::protocol;
use crate::system::role::{self, Begun, Role};
use crate::system::{confine, harden};

/// Longest text that is reported, in characters.
const TEXT: usize = 300;

/// Brings what readers ask for; returns only if that cannot begin.
pub type Fetch = fn(Fetching) -> io::Result<()>;

/// The fetcher's main. Standard input is its connection to the supervisor; the process ends with that.
///
/// # Errors
/// It was not started by a supervisor, or a precaution failed that could have worked.
pub fn fetcher_main(fetch: Fetch) -> Result<(), Error> {
    let Begun { control, _signals } = role::begin(Role::Fetcher)?;
    let prepared = harden::harden(Role::Fetcher).and_then(|mut notes| {
        notes.extend(confine::shut(Role::Fetcher)?);
        notes.extend(confine::filter(Role::Fetcher)?);
        Ok(notes)
    });
    let control = Arc::new(control);
    let outcome = prepared.and_then(|notes| {
        let failed = |error| Error::Worker { what: format!("cannot hear its server: {error}") };
        protocol::send(&*control, &LinkReport::Started { notes }, &[]).map_err(failed)?;
        match protocol::receive::<LinkOrder>(&control).map_err(failed)? {
            Some((LinkOrder::Fill(order), fds)) => begin(&order, fds, &control, fetch),
            _ => Ok(()),
        }
    });
    outcome.inspect_err(|error| {
        // When even this cannot be said, the closed connection says it.
        let _ = protocol::send(&*control, &LinkReport::Refused { why: error.to_string() }, &[]);
    })
}

fn begin(order: &Fill, fds: Vec<OwnedFd>, control: &Arc<OwnedFd>, fetch: Fetch) -> Result<(), Error> {
    let bad = |what: String| Error::Worker { what: format!("cannot fetch: {what}") };
    let mut fds = fds.into_iter();
    let mut next = || fds.next().ok_or_else(|| bad("a descriptor is missing".to_owned()));
    let (data, table, text, presence) = (next()?, next()?, next()?, next()?);
    let packed = fds.collect();
    let presence =
        Presence::open(presence, order.size, order.chunk).map_err(|error| bad(error.to_string()))?;
    let line = Arc::clone(control);
    std::thread::Builder::new()
        .name("becket-line".to_owned())
        .stack_size(128 << 10)
        .spawn(move || ends_with(&line))
        .map_err(|error| bad(error.to_string()))?;
    let line = Arc::clone(control);
    let tell = Box::new(move |condition| {
        let plain = |why: String| why.chars().filter(|c| !becket_image::is_hidden(*c)).take(TEXT).collect();
        let report = match condition {
            Condition::Fine => LinkReport::Connected,
            Condition::Away(why) => LinkReport::Away { why: plain(why) },
            Condition::Full => LinkReport::Full,
            Condition::Changed(why) => LinkReport::Changed { why: plain(why) },
            Condition::Damaged(why) => LinkReport::Damaged { why: plain(why) },
        };
        // A supervisor that is gone ends this process.
        let _ = protocol::send(&*line, &report, &[]);
    });
    let timeout = order.timeout.map(Duration::from_secs);
    let fetching = Fetching { data, table, order: text, presence, packed, timeout, tell };
    fetch(fetching).map_err(|error| bad(error.to_string()))
}

/// Ends the process when the supervisor ends the connection: another one starts a fetcher of its own.
fn ends_with(control: &OwnedFd) {
    let mut fds = [PollFd::new(control, PollFlags::IN)];
    while fds[0].revents().is_empty() {
        // A signal cannot end it: it looks again.
        let _ = poll(&mut fds, None);
    }
    std::process::exit(0);
}

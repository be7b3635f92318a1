//! The connector: the process that connects to one NBD server for one device, again whenever a worker asks.
//! It connects to the one export that the user named, holds no image and no device, and starts nothing.
//!
//! It keeps a copy of each connection that it has made. As long as the server has ended none of them, the
//! server that a new connection leads to is the one that has the bytes of earlier ones; that is how it can
//! say what became of a dead worker's writes (`Earlier`). And a dead worker's connection is ended in order,
//! before another worker gets one: its last writes have landed then, and no later ones of theirs are undone.

mod history;

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use becket_image::link::{Agreed, Endpoint, Wanted, channel, dial};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::history::History;
use crate::contract::Error;
use crate::contract::link::{Connect, LinkOrder, LinkReport};
use crate::contract::protocol;
use crate::system::role::{self, Begun, Role};
use crate::system::{confine, harden};

/// How long a server may take to accept and negotiate.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long is waited between two attempts, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// More requests than a worker has at once.
const ANSWERED: usize = 256;
/// Longest text that is reported, in characters.
const TEXT: usize = 300;

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
            Some((LinkOrder::Connect(order), fds)) => begin(*order, fds).map(Some),
            _ => Ok(None),
        }
    });
    match outcome {
        Ok(Some(connector)) => {
            connector.run(&control);
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

fn begin(order: Connect, fds: Vec<OwnedFd>) -> Result<Connector, Error> {
    let bad = |what: &str| Error::Worker { what: format!("cannot connect: {what}") };
    let endpoint = Endpoint::parse(&order.uri).map_err(|why| bad(&why))?;
    let [asks, channel] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| bad("its channel is missing"))?;
    let legacy = channel::begin(&channel).map_err(|error| bad(&error.to_string()))?;
    let history = History::new(order.shares, order.again, legacy);
    Ok(Connector {
        endpoint,
        agreed: order.agreed,
        timeout: order.timeout.map(Duration::from_secs),
        asks,
        channel,
        history,
        answered: VecDeque::new(),
    })
}

struct Connector {
    endpoint: Endpoint,
    agreed: Agreed,
    timeout: Option<Duration>,
    /// The other end of the channel, for what is left to a successor.
    asks: OwnedFd,
    channel: OwnedFd,
    history: History,
    /// Requests that were answered, of which another copy may come: the last [`ANSWERED`].
    answered: VecDeque<channel::Request>,
}

/// The supervisor is gone, or the channel: there is nothing left to do.
struct Gone;

impl Connector {
    fn run(mut self, control: &OwnedFd) {
        while let Ok(request) = self.next(control) {
            if self.answered.contains(&request) {
                continue;
            }
            // One that is not answered is asked again of the next connector.
            if self.connected(request, control).is_err() {
                break;
            }
            self.answered.truncate(ANSWERED - 1);
            self.answered.push_front(request);
        }
        self.ends();
    }

    /// The supervisor is gone: another one may follow, with a connector of its own.
    fn ends(self) {
        if let Some(legacy) = self.history.legacy()
            && let Err(error) = channel::bequeath(&self.asks, &legacy)
        {
            tracing::warn!("what is known of connections is lost: {error}");
        }
    }

    /// Waits for a request.
    fn next(&self, control: &OwnedFd) -> Result<channel::Request, Gone> {
        loop {
            let mut fds = [PollFd::new(control, PollFlags::IN), PollFd::new(&self.channel, PollFlags::IN)];
            rustix::io::retry_on_intr(|| poll(&mut fds, None)).map_err(|_| Gone)?;
            if !fds[0].revents().is_empty() {
                return Err(Gone);
            }
            match channel::next(&self.channel) {
                Ok(Some(request)) => return Ok(request),
                Ok(None) => {}
                Err(error) if error.kind() == std::io::ErrorKind::InvalidData => tracing::warn!("{error}"),
                Err(_) => return Err(Gone),
            }
        }
    }

    /// Gets a connection for a request, however long that takes, and answers it.
    fn connected(&mut self, request: channel::Request, control: &OwnedFd) -> Result<(), Gone> {
        let mut pause = FIRST_PAUSE;
        let began = Instant::now();
        let too_soon = self.history.prepares(request.session);
        let mut said = None;
        if too_soon {
            // A server that ends connections as soon as they are made is not called again and again.
            rest(control, FIRST_PAUSE * 5)?;
        }
        loop {
            match self.attempt() {
                Ok(socket) => {
                    let earlier = self.history.made(request.session, &socket);
                    channel::give(&self.channel, request, socket.as_fd(), earlier).map_err(|_| Gone)?;
                    return report(control, &LinkReport::Connected);
                }
                Err(why) => {
                    let why: String =
                        why.chars().filter(|c| !becket_image::is_hidden(*c)).take(TEXT).collect();
                    if said.as_ref() != Some(&why) {
                        report(control, &LinkReport::Away { why: why.clone() })?;
                        said = Some(why);
                    }
                }
            }
            if self.timeout.is_some_and(|timeout| began.elapsed() >= timeout) {
                return channel::give_up(&self.channel, request).map_err(|_| Gone);
            }
            rest(control, pause)?;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn attempt(&self) -> Result<OwnedFd, String> {
        // Workers understand simple replies.
        let wanted = Wanted { structured: false, tls: self.endpoint.tls };
        let (socket, agreed) = dial(&self.endpoint, wanted, PATIENCE).map_err(|error| error.to_string())?;
        if agreed.size != self.agreed.size {
            return Err(format!(
                "the export has {} bytes, and had {} when it was attached",
                agreed.size, self.agreed.size
            ));
        }
        if !agreed.is_like(&self.agreed) {
            return Err("the export is another kind of export than when it was attached".to_owned());
        }
        Ok(socket)
    }
}

fn report(control: &OwnedFd, report: &LinkReport) -> Result<(), Gone> {
    protocol::send(control, report, &[]).map_err(|_| Gone)
}

/// Waits, unless the supervisor goes.
fn rest(control: &OwnedFd, time: Duration) -> Result<(), Gone> {
    let mut fds = [PollFd::new(control, PollFlags::IN)];
    let time = Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() };
    match rustix::io::retry_on_intr(|| poll(&mut fds, Some(&time))) {
        Ok(0) => Ok(()),
        _ => Err(Gone),
    }
}

//! The connector: the process that connects to one NBD server for one device, again whenever a worker asks.
//! It connects to the one export that the user named, holds no image and no device, and starts nothing.
//!
//! It keeps a copy of each connection that it has made. As long as the server has ended none of them, the
//! server that a new connection leads to is the one that has the bytes of earlier ones; that is how it can
//! say what became of a dead worker's writes (`Earlier`). And a dead worker's connection is ended in order,
//! before another worker gets one: its last writes have landed then, and no later ones of theirs are undone.
//!
//! With TLS it stays between the server and the worker (`link::relay`): then it outlives its supervisor for
//! as long as a worker uses its connections, and its own death ends them.

mod history;

use std::os::fd::{AsFd as _, OwnedFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use becket_image::link::{Agreed, Dialed, Endpoint, Trust, channel, dial, probe};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::history::History;
use crate::contract::Error;
use crate::contract::link::{Connect, LinkOrder, LinkReport};
use crate::contract::protocol;
use crate::system::role::{self, Begun, Role};
use crate::system::{confine, harden};

/// How long a server may take to accept and negotiate, and then to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a predecessor may take to see that its supervisor is gone, and to leave what it knows.
const LEGACY: Duration = Duration::from_secs(3);
/// How long is waited between two attempts, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
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

fn begin(order: Connect, fds: Vec<OwnedFd>) -> Result<Connector, Error> {
    let bad = |what: &str| Error::Worker { what: format!("cannot connect: {what}") };
    let endpoint = Endpoint::parse(&order.uri).map_err(|why| bad(&why))?;
    let mut fds = fds.into_iter();
    let (Some(asks), Some(channel)) = (fds.next(), fds.next()) else {
        return Err(bad("its channel is missing"));
    };
    let trust = fds.next().map(Trust::unsealed).transpose().map_err(|error| bad(&error.to_string()))?;
    let (waiting, legacy) = channel::inherit(&channel, if order.inherits { LEGACY } else { Duration::ZERO })
        .map_err(|error| bad(&error.to_string()))?;
    let history = History::new(order.shares, order.again, legacy);
    Ok(Connector {
        endpoint,
        trust,
        relays: Vec::new(),
        agreed: order.agreed,
        timeout: order.timeout.map(Duration::from_secs),
        asks,
        channel,
        waiting,
        history,
        away: false,
    })
}

struct Connector {
    endpoint: Endpoint,
    /// What connections are secured by, where they are.
    trust: Option<Trust>,
    /// The threads that relay between TLS and workers.
    relays: Vec<JoinHandle<()>>,
    agreed: Agreed,
    timeout: Option<Duration>,
    /// The other end of the channel, for what is left to a successor.
    asks: OwnedFd,
    channel: OwnedFd,
    /// Requests that were there before.
    waiting: Vec<channel::Request>,
    history: History,
    /// It was reported that the server is away.
    away: bool,
}

/// The supervisor is gone, or the channel: there is nothing left to do.
struct Gone;

impl Connector {
    /// Works until the supervisor is gone; the relays that are left.
    fn run(mut self, control: &OwnedFd) -> Vec<JoinHandle<()>> {
        while let Some(request) = self.waiting.pop() {
            if self.connected(request, control).is_err() {
                return self.ends();
            }
        }
        while let Ok(request) = self.next(control) {
            let answered = self.connected(request, control).and_then(|()| {
                // It is answered; a connector that dies before this answers it twice.
                channel::done(&self.channel).map_err(|_| Gone)
            });
            if answered.is_err() {
                break;
            }
        }
        self.ends()
    }

    /// The supervisor is gone: another one may follow, with a connector of its own.
    fn ends(self) -> Vec<JoinHandle<()>> {
        let legacy = self.history.legacy();
        if let Err(error) = channel::bequeath(&self.asks, legacy.as_ref()) {
            tracing::warn!("what is known of connections is lost: {error}");
        }
        self.relays
    }

    /// Waits for a request. Where the server was away for too long for the last one, it is looked for all the
    /// same, so that it is seen when it is back.
    fn next(&mut self, control: &OwnedFd) -> Result<channel::Request, Gone> {
        loop {
            let mut fds = [PollFd::new(control, PollFlags::IN), PollFd::new(&self.channel, PollFlags::IN)];
            let pause = self.away.then_some(timespec(LONGEST_PAUSE));
            let found = rustix::io::retry_on_intr(|| poll(&mut fds, pause.as_ref())).map_err(|_| Gone)?;
            if !fds[0].revents().is_empty() {
                return Err(Gone);
            }
            if found == 0 {
                if self.attempt().is_ok() {
                    self.away = false;
                    report(control, &LinkReport::Connected)?;
                }
                continue;
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
                    channel::give(&self.channel, socket.as_fd(), earlier, self.timeout).map_err(|_| Gone)?;
                    self.away = false;
                    return report(control, &LinkReport::Connected);
                }
                Err(why) => {
                    let why: String =
                        why.chars().filter(|c| !becket_image::is_hidden(*c)).take(TEXT).collect();
                    if said.as_ref() != Some(&why) {
                        report(control, &LinkReport::Away { why: why.clone() })?;
                        self.away = true;
                        said = Some(why);
                    }
                }
            }
            if self.timeout.is_some_and(|timeout| began.elapsed() >= timeout) {
                return channel::give_up(&self.channel).map_err(|_| Gone);
            }
            rest(control, pause)?;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn attempt(&mut self) -> Result<OwnedFd, String> {
        // Workers understand simple replies.
        let patience = self.timeout.unwrap_or(PATIENCE).clamp(FIRST_PAUSE, PATIENCE);
        let dialed = dial(&self.endpoint, false, self.trust.as_ref(), patience);
        let Dialed { socket, agreed, relay } = dialed.map_err(|error| error.to_string())?;
        self.relays.retain(|relay| !relay.is_finished());
        self.relays.extend(relay);
        if agreed.size != self.agreed.size {
            return Err(format!(
                "the export has {} bytes, and had {} when it was attached",
                agreed.size, self.agreed.size
            ));
        }
        if !agreed.is_like(&self.agreed) {
            return Err("the export is another kind of export than when it was attached".to_owned());
        }
        probe(&socket, &agreed, patience).map_err(|error| error.to_string())?;
        Ok(socket)
    }
}

fn report(control: &OwnedFd, report: &LinkReport) -> Result<(), Gone> {
    protocol::send(control, report, &[]).map_err(|_| Gone)
}

/// Waits, unless the supervisor goes.
fn rest(control: &OwnedFd, time: Duration) -> Result<(), Gone> {
    let mut fds = [PollFd::new(control, PollFlags::IN)];
    let time = timespec(time);
    match rustix::io::retry_on_intr(|| poll(&mut fds, Some(&time))) {
        Ok(0) => Ok(()),
        _ => Err(Gone),
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() }
}

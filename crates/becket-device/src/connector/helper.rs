//! A connector that is a program of its own, because it needs libraries that becket is built without
//! (`becket-rbd`): what it shares with becket, and nothing of what it does.
//!
//! It takes its precautions in two steps. What only a process with all its rights can read (keys) is read
//! first, without a thread and without a byte of a stranger's; then the rights go, and then it connects.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use becket_image::link::{Agreed, channel};

use super::LEGACY;
pub use super::maker::{Describes, Failure, Left, Maker};
use super::rounds::{Connector, channel_of, plain, refused};
use crate::contract::Error;
use crate::contract::link::{LinkOrder, LinkReport};
use crate::contract::protocol;
use crate::system::role::{self, Begun, Role};
use crate::system::{confine, harden};

/// How often a program says that it is alive.
const BEAT: Duration = Duration::from_secs(1);

/// The image that a device needs.
#[derive(Debug, Clone)]
pub struct Task {
    /// Its name.
    pub uri: String,
    /// What its map was made by.
    pub agreed: Agreed,
    /// It is written.
    pub writes: bool,
    /// Another program was there before for this device.
    pub again: bool,
    /// As what programs before this one were known to the cluster.
    pub clients: Vec<String>,
}

/// What the supervisor hears.
#[derive(Debug)]
pub enum News {
    /// As what this program is known to the cluster; said before it takes the image's lock.
    Client(String),
    /// The cluster answers.
    Here,
    /// It does not, and is waited for.
    Away(String),
    /// The image is another's.
    Lost(String),
    /// The image is open, and has so many bytes.
    Size(u64),
}

/// Tells the supervisor.
#[derive(Debug, Clone)]
pub struct ToSupervisor {
    control: Arc<OwnedFd>,
    /// See [`News::Size`]; 0 until then.
    size: Arc<AtomicU64>,
}

impl ToSupervisor {
    /// Tells it. A supervisor that is gone hears nothing, and its successor starts another program.
    pub fn tell(&self, news: News) {
        let report = match news {
            News::Client(name) => LinkReport::Client { name: plain(&name) },
            News::Here => LinkReport::Connected,
            News::Away(why) => LinkReport::Away { why: plain(&why) },
            News::Lost(why) => LinkReport::Lost { why: plain(&why) },
            News::Size(size) => {
                self.size.store(size, Ordering::Relaxed);
                self.alive()
            }
        };
        let _ = protocol::send(&*self.control, &report, &[]);
    }

    fn alive(&self) -> LinkReport {
        let size = Some(self.size.load(Ordering::Relaxed)).filter(|size| *size > 0);
        LinkReport::Alive { size }
    }

    /// Says each second that this program is alive: one that says nothing is ended.
    fn beat(self) {
        while protocol::send(&*self.control, &self.alive(), &[]).is_ok() {
            std::thread::sleep(BEAT);
        }
    }
}

/// The first step, with all rights: reads what must be read.
pub type Prepare<P> = fn(&Task) -> Result<P, String>;
/// The second step, without them.
pub type Begin<P> = fn(Task, P, ToSupervisor) -> Box<dyn Maker>;

/// The main of such a program. Standard input is its connection to the supervisor; it returns when that is
/// gone.
///
/// # Errors
/// It was not started by a supervisor, or a precaution failed that could have worked.
pub fn helper_main<P>(prepare: Prepare<P>, begin: Begin<P>) -> Result<(), Error> {
    let Begun { control, _signals } = role::begin(Role::Helper)?;
    let outcome = ready(&control, prepare);
    let Ready { task, prepared, timeout, away, inherits, channel: [asks, channel] } = match outcome {
        Ok(Some(ready)) => ready,
        Ok(None) => return Ok(()),
        Err(error) => {
            // When even this cannot be said, the closed connection says it.
            let _ = protocol::send(&control, &LinkReport::Refused { why: error.to_string() }, &[]);
            return Err(error);
        }
    };
    let control = Arc::new(control);
    // It leaves no connections to another one: they end with it.
    let inherited = channel::begin(&channel, Duration::ZERO).map_err(|error| refused(&error.to_string()))?;
    let line = ToSupervisor { control: Arc::clone(&control), size: Arc::default() };
    let beating = line.clone();
    std::thread::spawn(move || beating.beat());
    let maker = begin(task, prepared, line);
    let connector = Connector::new(maker, timeout, [asks, channel], inherited.requests, away);
    // At once, because without it others could take an image that nobody uses. Where the one before may
    // still be there it has time to end, and is not fenced off from what is under way.
    let pause = if inherits { LEGACY } else { Duration::ZERO };
    connector.looks_after(pause).run(&control);
    Ok(())
}

/// What a program has before it connects.
struct Ready<P> {
    task: Task,
    prepared: P,
    timeout: Option<Duration>,
    /// For how long the server has been away already, in seconds.
    away: Option<u64>,
    /// The program before may still be there.
    inherits: bool,
    channel: [OwnedFd; 2],
}

fn ready<P>(control: &OwnedFd, prepare: Prepare<P>) -> Result<Option<Ready<P>>, Error> {
    let failed = |error| Error::Worker { what: format!("cannot hear its server: {error}") };
    protocol::send(control, &LinkReport::Started { notes: Vec::new() }, &[]).map_err(failed)?;
    let Some((LinkOrder::Connect(order), fds)) = protocol::receive::<LinkOrder>(control).map_err(failed)?
    else {
        return Ok(None);
    };
    let channel = channel_of(&mut fds.into_iter())?;
    let task = Task {
        uri: order.uri,
        agreed: order.agreed,
        writes: order.writes,
        again: order.again,
        clients: order.clients,
    };
    let prepared = prepare(&task).map_err(|why| refused(&why))?;
    let mut notes = harden::harden(Role::Helper)?;
    notes.extend(confine::shut(Role::Helper)?);
    notes.extend(confine::filter(Role::Helper)?);
    for note in notes {
        tracing::warn!("{note}");
    }
    let (timeout, away) = (order.timeout.map(Duration::from_secs), order.away);
    Ok(Some(Ready { task, prepared, timeout, away, inherits: order.inherits, channel }))
}

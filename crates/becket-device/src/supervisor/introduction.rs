//! What a worker of a predecessor says of itself, and in which version: the way of its devices to this
//! supervisor. It never hears a worker out that comes to no end, and believes nothing that is not
//! understood in full.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::contract::kept::Kept;
use crate::contract::protocol::{self, Report};
use crate::contract::versions::{self, Speech};
use crate::contract::{DeviceId, wrong};

/// The most devices that a worker can be believed to serve: descriptors end before that.
const MOST_DEVICES: usize = 1 << 16;
/// The longest text of a worker's that is kept, and the most of them.
pub(super) const LONGEST: usize = 500;
const MOST_NOTES: usize = 16;

/// What a worker says of itself.
#[derive(Debug)]
pub(super) struct About {
    pub(super) notes: Vec<String>,
    /// What it understands.
    pub(super) features: Vec<String>,
    /// It serves devices that it keeps to itself.
    pub(super) withholds: bool,
}

impl About {
    /// One that runs our own program.
    pub(super) fn ours(notes: Vec<String>) -> About {
        About { notes, features: Speech::ours().features, withholds: false }
    }
}

/// What a worker of a predecessor says of itself and of its devices, all of it in `patience`.
pub(super) fn introduction(socket: &OwnedFd, patience: Duration) -> io::Result<(About, Vec<Kept>)> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    let deadline = Instant::now() + patience;
    let mut notes = Vec::new();
    let mut held: HashMap<DeviceId, Kept> = HashMap::new();
    let mut closed = HashSet::new();
    let handed = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it comes to no end"));
        }
        set_socket_timeout(socket, Timeout::Recv, Some(left))?;
        match understood(protocol::receive::<Report>(socket))?.ok_or(io::ErrorKind::UnexpectedEof)? {
            (Report::Started { notes: said, .. }, _) => notes = notes_of(&said),
            (Report::Held(serve), fds) => {
                let id = serve.id;
                if held.insert(id, Kept::held(*serve, fds)?).is_some() {
                    return Err(wrong("it serves a device twice"));
                }
            }
            // It may have ended between the worker's look at its devices and our hearing of it.
            (Report::Closed { id }, _) => drop(closed.insert(id)),
            (Report::Handed(handed), _) if versions::protocol().contains(&handed.version) => break handed,
            (Report::Handed(handed), _) => {
                let (oldest, newest) = versions::protocol().into_inner();
                let spoken = handed.version;
                let why = format!("its worker speaks version {spoken}, this becket {oldest} to {newest}");
                return Err(io::Error::new(io::ErrorKind::Unsupported, why));
            }
            // What it still had to say to its last supervisor.
            _ => {}
        }
        if held.len().max(closed.len()) > MOST_DEVICES {
            return Err(wrong("it serves more devices than there can be"));
        }
    };
    set_socket_timeout(socket, Timeout::Recv, None)?;
    held.retain(|id, _| !closed.contains(id));
    let about = About { notes, features: handed.features, withholds: handed.withheld > 0 };
    Ok((about, held.into_values().collect()))
}

/// A message that means nothing here is most likely a later version's. A read that timed out is past the
/// deadline.
fn understood<T>(heard: io::Result<T>) -> io::Result<T> {
    heard.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        io::ErrorKind::InvalidData => {
            io::Error::new(io::ErrorKind::Unsupported, format!("its worker is not understood: {error}"))
        }
        _ => error,
    })
}

/// What a worker tells people, as far as they can be shown it.
pub(super) fn quoted(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).take(LONGEST).collect()
}

pub(super) fn notes_of(notes: &[String]) -> Vec<String> {
    notes.iter().take(MOST_NOTES).map(|note| quoted(note)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::contract::protocol::Handed;

    /// What the introduction of a worker tells its next supervisor.
    fn introduced(says: impl Fn(&OwnedFd) -> io::Result<()> + Send + 'static) -> io::Result<usize> {
        let (ours, theirs) = protocol::pair().unwrap();
        let speaker = std::thread::spawn(move || while says(&theirs).is_ok() {});
        let heard = introduction(&ours, Duration::from_millis(500)).map(|(_, held)| held.len());
        drop(ours);
        speaker.join().unwrap();
        heard
    }

    #[test]
    fn a_worker_that_tells_a_successor_without_end_is_not_heard_out() {
        use crate::contract::protocol::tests::serve;
        let notes = || Report::Started { threads: 1, notes: Vec::new() };
        let error = introduced(move |to| protocol::send(to, &notes(), &[])).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let silent = introduced(|_| {
            std::thread::sleep(Duration::from_secs(1));
            Err(io::ErrorKind::Other.into())
        });
        assert_eq!(silent.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let twice = introduced(|to| protocol::send(to, &Report::Held(Box::new(serve(Vec::new()))), &[]));
        assert!(twice.unwrap_err().to_string().contains("twice"));
        let id = AtomicU32::new(0);
        let closed = introduced(move |to| {
            protocol::send(to, &Report::Closed { id: id.fetch_add(1, Ordering::Relaxed).into() }, &[])
        });
        assert!(closed.is_err(), "bounded by number or by time");
    }

    /// A worker of a version that this becket does not speak is not a mistake of the worker's: it is left
    /// alone, and what to say of its devices is known.
    #[test]
    fn a_worker_of_another_version_is_not_a_broken_one() {
        let version = *versions::protocol().end() + 1;
        let handed = move || Report::Handed(Handed { version, features: Vec::new(), withheld: 0 });
        let error = introduced(move |to| protocol::send(to, &handed(), &[])).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        assert!(error.to_string().contains(&format!("speaks version {version}")), "{error}");
        let words = introduced(|to| protocol::send(to, &"something new", &[])).unwrap_err();
        assert_eq!(words.kind(), io::ErrorKind::Unsupported);
        // The last words of a version that is understood may say more than is known here.
        let more = introduced(|to| {
            let words = serde_json::json!({"handed": {"version": 3, "features": ["x"], "mood": "fine"}});
            protocol::send(to, &words, &[])
        });
        assert_eq!(more.unwrap(), 0);
    }
}

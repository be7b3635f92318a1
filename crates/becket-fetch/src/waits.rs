//! How often and for how long a server is asked again that does not answer.
//! It never gives up before its time is over.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Error;
use crate::place::shown;

/// The first wait between attempts, and the longest.
pub(crate) const PAUSE: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(5);
/// After so long without an answer, people hear why.
const SPEAK_AFTER: Duration = Duration::from_secs(1);

/// Hears for which URL it is tried again, and why.
#[derive(Clone)]
pub struct Waiting(Arc<Hear>);

type Hear = dyn Fn(&str, &str) + Send + Sync;

impl Waiting {
    /// One that is called with the URL, safe to show, and why there was no answer.
    pub fn new(hear: impl Fn(&str, &str) + Send + Sync + 'static) -> Waiting {
        Waiting(Arc::new(hear))
    }
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waiting")
    }
}

/// Why one attempt brought no more.
pub(crate) enum Trouble {
    Fatal(Error),
    /// Trying again can help, after a pause that the server may have named.
    Again(String, Option<Duration>),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Fatal(error)
    }
}

/// How long it is tried again.
pub(crate) struct Waits<'a> {
    url: &'a str,
    /// How long a request may go on that brings nothing, and how long the server may be away.
    limit: Duration,
    patience: Duration,
    waiting: Option<&'a Waiting>,
    since: Instant,
    pause: Duration,
    /// Whether it was said that it takes long.
    said: bool,
}

impl<'a> Waits<'a> {
    /// For requests to this URL that may each go on for `limit` without bringing anything, if the server may
    /// be away for `patience`; `waiting` hears of long waits.
    pub(crate) fn new(
        url: &'a str,
        limit: Duration,
        patience: Duration,
        waiting: Option<&'a Waiting>,
    ) -> Waits<'a> {
        Waits { url, limit, patience, waiting, since: Instant::now(), pause: PAUSE, said: false }
    }

    /// How long a request may go on that brings nothing.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.since.checked_add(self.limit)
    }

    /// Waits until it is worth trying again; an error if that is never, or too late.
    pub(crate) fn bear(&mut self, trouble: Trouble) -> Result<(), Error> {
        let (why, asked) = match trouble {
            Trouble::Fatal(error) => return Err(error),
            Trouble::Again(why, asked) => (why, asked),
        };
        let left = self.patience.saturating_sub(self.since.elapsed());
        if left.is_zero() {
            let seconds = self.since.elapsed().as_secs();
            return Err(Error::Away { url: shown(self.url), seconds, why });
        }
        // The last try is made when the time is over, and not before.
        let wait = asked.unwrap_or(self.pause).min(left);
        if self.since.elapsed() >= SPEAK_AFTER && !std::mem::replace(&mut self.said, true) {
            self.waiting.iter().for_each(|waiting| waiting.0(&shown(self.url), &why));
        }
        std::thread::sleep(wait);
        self.pause = (self.pause * 2).min(LONGEST);
        Ok(())
    }
}

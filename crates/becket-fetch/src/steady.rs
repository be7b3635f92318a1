//! Whether the body of an answer comes at some pace: a server that drips is as good as one that is silent.

use std::io::{self, Read};
use std::time::{Duration, Instant};

/// What brings less than this, in bytes, counts as nothing: a server may not drip.
pub(crate) const PROGRESS: u64 = 16 << 10;
/// What is said of a server that drips.
pub(crate) const DRIPS: &str = "the server sends a few bytes at a time";

/// Reads as long as each such time brings [`PROGRESS`].
pub(crate) struct Steady<R> {
    body: R,
    within: Duration,
    since: Instant,
    /// How much has come since then.
    came: u64,
}

impl<R> Steady<R> {
    pub(crate) fn new(body: R, within: Duration) -> Steady<R> {
        Steady { body, within, since: Instant::now(), came: 0 }
    }
}

impl<R: Read> Read for Steady<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.since.elapsed() > self.within {
            return Err(io::Error::new(io::ErrorKind::TimedOut, DRIPS));
        }
        let count = match self.body.read(buf) {
            // The time of its request is over.
            Err(error) if self.came > 0 && is_late(&error) => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, DRIPS));
            }
            read => read?,
        };
        self.came += count as u64;
        if self.came >= PROGRESS {
            (self.since, self.came) = (Instant::now(), 0);
        }
        Ok(count)
    }
}

fn is_late(error: &io::Error) -> bool {
    let of_ureq = error.get_ref().and_then(|inner| inner.downcast_ref());
    matches!(of_ureq, Some(ureq::Error::Timeout(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_that_drips_ends_and_one_that_flows_does_not() {
        struct Body(usize);
        impl Read for Body {
            fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                std::thread::sleep(Duration::from_millis(10));
                Ok(self.0.min(buf.len()))
            }
        }
        let within = Duration::from_millis(50);
        let mut buf = vec![0; 64 << 10];
        let mut last = |len: usize| {
            let mut body = Steady::new(Body(len), within);
            (0..30).map(|_| body.read(&mut buf)).find_map(Result::err)
        };
        assert_eq!(last(1).unwrap().to_string(), DRIPS);
        assert!(last(32 << 10).is_none());
    }
}

//! The connections that a connector has made, and what they say of the server behind a new one.
//! It sends nothing over them and looks at no byte that comes.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use becket_image::link::channel::{Earlier, Legacy};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

/// How long a server may take to end connections that end in order, at most.
const ENDING: Duration = Duration::from_secs(10);
/// A connection that breaks sooner is one of a server that does not serve.
const SOON: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct History {
    /// A flush over one connection covers the writes of all.
    shares: bool,
    /// Another connector was there before.
    again: bool,
    /// There are no writes, so none is lost.
    only_read: bool,
    ending: Duration,
    session: Option<u64>,
    /// What was reported to the worker that asks now.
    verdict: Earlier,
    /// Connections of that session, and of the one before until the first of the new one is made.
    made: Vec<(OwnedFd, Instant)>,
    earlier: Vec<OwnedFd>,
    /// A connection that the session does not use any more, where it has none that it uses.
    unused: Option<OwnedFd>,
    /// Bytes may be lost, and it was not said that the user has heard of them.
    broke: bool,
}

impl History {
    /// `legacy` is what another connector has left, where one was there before.
    pub(super) fn new(shares: bool, again: bool, legacy: Option<Legacy>) -> History {
        let session = legacy.as_ref().map(|legacy| legacy.session);
        let made = legacy.into_iter().flat_map(|legacy| legacy.sockets);
        let made = made.map(|socket| (socket, Instant::now())).collect();
        let earlier = Vec::new();
        History {
            shares,
            again,
            only_read: false,
            ending: ENDING,
            session,
            verdict: Earlier::Unknown,
            made,
            earlier,
            unused: None,
            broke: false,
        }
    }

    /// The same of an image that is only read.
    pub(super) fn of_readers(self) -> History {
        History { only_read: true, ..self }
    }

    /// The same for a user who does not wait longer than that for a server.
    pub(super) fn within(self, patience: Duration) -> History {
        History { ending: patience.min(ENDING), ..self }
    }

    /// What another connector has to know; nothing where it would know no more by it.
    pub(super) fn legacy(self) -> Option<Legacy> {
        let sockets: Vec<OwnedFd> =
            self.made.into_iter().map(|(socket, _)| socket).chain(self.unused).collect();
        let goes_on = |socket: &OwnedFd| !has_ended(socket) && !is_given_up(socket);
        let whole = !self.broke && sockets.len() <= Legacy::MOST && sockets.iter().all(goes_on);
        self.session.filter(|_| whole).map(|session| Legacy { session, sockets })
    }

    /// A connection is about to be made for a session. Connections that have ended are let go. Those that a
    /// worker has given up end first, for what was sent over them may still land, and is sent again; and so
    /// do those of a server that takes one client. Says whether one has ended soon after it was made.
    pub(super) fn prepares(&mut self, session: u64) -> bool {
        let ended = |(socket, _): &(OwnedFd, Instant)| has_ended(socket);
        let soon = self.made.iter().any(|made| ended(made) && made.1.elapsed() < SOON);
        let (gone, made): (Vec<_>, Vec<_>) =
            self.made.drain(..).partition(|made| ended(made) || is_given_up(&made.0));
        self.made = made;
        let unused = self.unused.take_if(|socket| has_ended(socket));
        self.broke |= !gone.is_empty() || unused.is_some();
        let until = Instant::now() + self.ending;
        if !self.only_read {
            let unended = gone.into_iter().filter(|made| !ended(made));
            unended.for_each(|(socket, _)| end(socket, until));
        }
        if self.session.is_some_and(|known| known != session) {
            self.earlier = self.made.drain(..).map(|(socket, _)| socket).chain(self.unused.take()).collect();
        }
        if !self.shares {
            self.made.drain(..).for_each(|(socket, _)| end(socket, until));
            self.earlier.drain(..).for_each(|socket| end(socket, until));
        }
        soon
    }

    /// The user of a session has heard of all that it may have lost.
    pub(super) fn reported(&mut self, session: u64) {
        // What comes late from a dead worker says nothing about its successor.
        if self.session == Some(session) {
            self.broke = false;
        }
    }

    /// A session does not use that connection any more. It ends in order, unless it is the last one: as long
    /// as that does not end, the next one leads to the same server.
    pub(super) fn left(&mut self, session: u64, inode: u64) {
        let is_it = |(socket, _): &(OwnedFd, Instant)| {
            rustix::fs::fstat(socket).is_ok_and(|stat| stat.st_ino == inode)
        };
        if self.session == Some(session)
            && let Some(at) = self.made.iter().position(is_it)
            // What has ended otherwise is for `prepares` to see.
            && self.made.get(at).is_some_and(|(socket, _)| !has_ended(socket) && !is_given_up(socket))
        {
            let (socket, _) = self.made.remove(at);
            self.ends_unused();
            if self.made.is_empty() {
                self.unused = Some(socket);
            } else {
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
            }
        }
    }

    /// Ends the connection that nobody uses: another one is there to show that the server stays.
    fn ends_unused(&mut self) {
        if let Some(socket) = self.unused.take() {
            self.broke |= has_ended(&socket);
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
        }
    }

    /// A connection was made for a session: what became of the bytes of earlier ones.
    pub(super) fn made(&mut self, session: u64, socket: &OwnedFd) -> Earlier {
        let known = self.session == Some(session);
        if !known {
            self.verdict = match (self.session, self.again) {
                _ if self.only_read => Earlier::None,
                (None, false) => Earlier::None,
                (None, true) => Earlier::Unknown,
                // The new connection was made while the old ones were there: it leads to the same server.
                _ if self.shares && !self.broke && !self.earlier.iter().any(has_ended) => Earlier::Kept,
                _ => Earlier::Unknown,
            };
            if self.verdict == Earlier::Unknown {
                let why = match (self.session, self.shares) {
                    (None, _) => "the process that connected before is gone",
                    (_, false) => "it does not promise that a flush covers all connections",
                    _ => "it has ended a connection",
                };
                tracing::info!("the server may lack what an earlier worker wrote: {why}");
            }
            // The worker has to report it.
            self.broke = self.verdict == Earlier::Unknown;
            self.session = Some(session);
            let until = Instant::now() + self.ending;
            self.earlier.drain(..).for_each(|socket| end(socket, until));
        }
        self.ends_unused();
        match socket.try_clone() {
            Ok(copy) => self.made.push((copy, Instant::now())),
            // What cannot be watched cannot be vouched for.
            Err(_) => self.shares = false,
        }
        // What a worker sees break it accounts for by itself, but for what it has left.
        match self.verdict {
            _ if self.broke && !self.only_read => Earlier::Unknown,
            Earlier::Unknown if known => Earlier::Kept,
            verdict => verdict,
        }
    }
}

/// Whether the far side has ended a connection.
fn has_ended(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    let found = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    found.is_err() || !fds[0].revents().is_empty()
}

/// Whether a worker has said over a connection that nothing follows.
fn is_given_up(socket: &OwnedFd) -> bool {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[], &mut SendAncillaryBuffer::default(), flags) == Err(Errno::PIPE)
}

/// Ends a connection that no worker uses: the server carries out what was sent whole, and its answers are
/// thrown away. When the server ends it, too, nothing will land later.
fn end(socket: OwnedFd, until: Instant) {
    let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Write);
    let mut bytes = vec![0; 64 << 10];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let time = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let mut fds = [PollFd::new(&socket, PollFlags::IN)];
        match rustix::io::retry_on_intr(|| poll(&mut fds, Some(&time))) {
            Ok(0) | Err(_) => {
                break tracing::warn!(
                    "a server does not end a connection: what it was sent last may land late"
                );
            }
            Ok(_) => match rustix::net::recv(socket.as_fd(), &mut bytes, rustix::net::RecvFlags::DONTWAIT) {
                Ok((0, _)) => break,
                Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(_) => break,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A connection, and the server's end of it. The server ends it when the client does.
    fn connection() -> (OwnedFd, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (ours.into(), theirs)
    }

    fn next(history: &mut History, session: u64) -> (Earlier, UnixStream) {
        history.prepares(session);
        let (ours, theirs) = connection();
        (history.made(session, &ours), theirs)
    }

    #[test]
    fn a_server_that_stayed_has_what_a_dead_worker_wrote() {
        let mut history = History::new(true, false, None);
        let (first, server) = next(&mut history, 1);
        assert_eq!(first, Earlier::None);
        let ends = std::thread::spawn(move || {
            std::io::Read::read(&mut &server, &mut [0]).unwrap();
            drop(server);
        });
        let (second, _server) = next(&mut history, 2);
        assert_eq!(second, Earlier::Kept);
        ends.join().unwrap();
        assert_eq!(next(&mut history, 2).0, Earlier::Kept, "a session hears one answer");
    }

    #[test]
    fn another_connector_vouches_for_what_it_was_left() {
        let mut history = History::new(true, false, None);
        let (_, _server) = next(&mut history, 1);
        let mut successor = History::new(true, true, history.legacy());
        drop(_server);
        assert_eq!(next(&mut successor, 2).0, Earlier::Unknown, "it has ended since");
        let mut history = History::new(true, false, None);
        let (_, server) = next(&mut history, 1);
        let mut successor = History::new(true, true, history.legacy());
        let ends = std::thread::spawn(move || {
            std::io::Read::read(&mut &server, &mut [0]).unwrap();
            drop(server);
        });
        assert_eq!(next(&mut successor, 2).0, Earlier::Kept);
        ends.join().unwrap();
    }

    #[test]
    fn a_server_that_went_or_takes_one_client_may_have_lost_it() {
        let mut history = History::new(true, false, None);
        drop(next(&mut history, 1).1);
        assert_eq!(next(&mut history, 2).0, Earlier::Unknown);
        let mut history = History::new(false, false, None);
        drop(next(&mut history, 1).1);
        assert_eq!(next(&mut history, 2).0, Earlier::Unknown);
        let mut history = History::new(false, false, None).of_readers();
        drop(next(&mut history, 1).1);
        assert_eq!(next(&mut history, 2).0, Earlier::None, "nothing was written");
        assert_eq!(
            next(&mut History::new(true, true, None), 1).0,
            Earlier::Unknown,
            "another connector knew it"
        );
    }

    #[test]
    fn what_a_worker_had_to_report_when_it_died_its_successor_reports() {
        let mut history = History::new(true, false, None);
        drop(next(&mut history, 1).1);
        let (_, _second) = next(&mut history, 1);
        let (third, _server) = next(&mut history, 2);
        assert_eq!(third, Earlier::Unknown, "the first session has not said that its user has heard");
        history.reported(1);
        drop(_second);
        let (fourth, _fourth) = next(&mut history, 3);
        assert_eq!(fourth, Earlier::Unknown, "and neither has the second");
        history.reported(3);
        drop(_server);
        let ends = std::thread::spawn(move || drop(std::io::Read::read(&mut &_fourth, &mut [0])));
        assert_eq!(next(&mut history, 4).0, Earlier::Kept);
        ends.join().unwrap();
    }

    #[test]
    fn what_a_session_has_left_shows_whether_the_server_stayed() {
        let inode = |socket: &OwnedFd| rustix::fs::fstat(socket).unwrap().st_ino;
        let new = |history: &mut History| {
            history.prepares(1);
            let (ours, theirs) = connection();
            (history.made(1, &ours), inode(&ours), theirs)
        };
        let mut history = History::new(true, false, None);
        let (_, first, server) = new(&mut history);
        history.left(1, first);
        assert!(!has_ended(&server.try_clone().unwrap().into()), "it is all that shows it");
        let (answer, second, other) = new(&mut history);
        assert_eq!(answer, Earlier::None);
        assert!(has_ended(&server.into()), "another one shows it");
        history.left(1, second);
        drop(other);
        let (answer, third, _third) = new(&mut history);
        assert_eq!(answer, Earlier::Unknown, "its server has ended since");
        history.reported(1);
        let (_, fourth, kept) = new(&mut history);
        history.left(1, fourth);
        assert!(has_ended(&kept.into()), "the third is used");
        history.left(1, third);
        assert_eq!(new(&mut history).0, Earlier::None);
    }

    #[test]
    fn what_was_given_up_ends_before_there_is_another_one() {
        let mut history = History::new(true, false, None);
        history.prepares(1);
        let (ours, theirs) = connection();
        history.made(1, &ours);
        // A worker says that nothing follows. The server carries out what it has, and ends it then.
        rustix::net::shutdown(&ours, rustix::net::Shutdown::Write).unwrap();
        drop(ours);
        let began = Instant::now();
        let pause = Duration::from_millis(200);
        let ends = std::thread::spawn(move || {
            std::thread::sleep(pause);
            drop(theirs);
        });
        history.prepares(1);
        assert!((pause..ENDING).contains(&began.elapsed()), "{:?}", began.elapsed());
        ends.join().unwrap();
    }

    #[test]
    fn a_server_that_ends_connections_at_once_is_noticed() {
        let mut history = History::new(true, false, None);
        drop(next(&mut history, 1).1);
        assert!(history.prepares(1));
        assert!(!history.prepares(1), "it is forgotten then");
    }
}

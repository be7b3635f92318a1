//! How a connector answers workers: one request after another, each until there is a connection or it was
//! tried for too long. It ends with its supervisor.

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, OwnedFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use becket_image::link::channel::{self, Request, Said};
use becket_image::link::states;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::maker::{Failure, Left, Maker};
use crate::contract::Error;
use crate::contract::link::{LinkOrder, LinkReport};
use crate::contract::protocol;

/// How long is waited between two attempts, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// More requests than a worker has at once.
const ANSWERED: usize = 256;
/// The most queues whose questions are answered at once.
const ASKING: usize = 256;
/// Longest text that is reported, in characters.
const TEXT: usize = 300;

pub(super) fn refused(what: &str) -> Error {
    Error::Worker { what: format!("cannot connect: {what}") }
}

/// The asking and the answering end of the channel.
pub(super) fn channel_of(fds: &mut impl Iterator<Item = OwnedFd>) -> Result<[OwnedFd; 2], Error> {
    fds.next().zip(fds.next()).map(<[OwnedFd; 2]>::from).ok_or_else(|| refused("its channel is missing"))
}

pub(super) struct Connector {
    maker: Box<dyn Maker>,
    timeout: Option<Duration>,
    /// The other end of the channel, for what is left to a successor.
    asks: OwnedFd,
    channel: OwnedFd,
    /// What was said and not dealt with, in that order: requests that were there before, and since then no
    /// more than [`ANSWERED`].
    heard: VecDeque<Said>,
    /// Requests that were answered, of which another copy may come: the last [`ANSWERED`].
    answered: VecDeque<Request>,
    /// It was reported that the server is away.
    away: bool,
    /// How long it was away before this process began, until the first request is dealt with.
    waited: Duration,
    /// After what time it is looked for the server that nobody has asked for yet.
    first_look: Option<Duration>,
    /// The supervisor has said that the device is detached.
    over: bool,
    /// The threads that answer questions.
    answering: Vec<JoinHandle<()>>,
}

/// What follows an attempt.
enum Then {
    /// Another one, for this reason; by another process where this one is `spent`.
    Again { why: String, spent: bool },
    /// Nothing: that is said.
    Over(LinkReport),
}

impl From<Failure> for Then {
    fn from(failure: Failure) -> Then {
        match failure {
            Failure::Away(why) => Then::Again { why: plain(&why), spent: false },
            Failure::Spent(why) => Then::Again { why: plain(&why), spent: true },
            Failure::Over(why) => Then::Over(LinkReport::Lost { why: plain(&why) }),
            Failure::Replaced(why) => Then::Over(LinkReport::Changed { why: plain(&why) }),
        }
    }
}

/// The supervisor is gone, or the channel: there is nothing left to do.
struct Gone;

impl Connector {
    pub(super) fn new(
        maker: Box<dyn Maker>,
        timeout: Option<Duration>,
        [asks, channel]: [OwnedFd; 2],
        waiting: Vec<Request>,
        away: Option<u64>,
    ) -> Connector {
        let heard = waiting.into_iter().map(Said::Asks).collect();
        let waited = Duration::from_secs(away.unwrap_or(0));
        Connector {
            maker,
            timeout,
            asks,
            channel,
            heard,
            answered: VecDeque::new(),
            away: away.is_some(),
            waited,
            first_look: None,
            over: false,
            answering: Vec::new(),
        }
    }

    /// Looks for the server after that time, whether or not anybody has asked for it.
    pub(super) fn looks_after(self, time: Duration) -> Connector {
        Connector { first_look: Some(time), ..self }
    }

    /// Works until the supervisor is gone; the threads that go on for as long as workers need them.
    pub(super) fn run(mut self, control: &OwnedFd) -> Vec<JoinHandle<()>> {
        while let Ok(request) = self.next(control) {
            if request.number.is_some() && self.answered.contains(&request) {
                continue;
            }
            // One that is not answered is asked again of the next connector.
            if self.connected(request, control).is_err() {
                break;
            }
            self.answered.truncate(ANSWERED - 1);
            self.answered.push_front(request);
        }
        self.ends(control)
    }

    /// The supervisor is gone: another one may follow, with a connector of its own. None follows if the
    /// device is detached: then nothing is left in the channel, whose end the supervisor has, and the
    /// connections end.
    fn ends(self, control: &OwnedFd) -> Vec<JoinHandle<()>> {
        let over = self.over || is_over(control);
        let Left { legacy, relays } = self.maker.ends(over);
        if !over && let Err(error) = channel::bequeath(&self.asks, legacy.as_ref()) {
            tracing::warn!("what is known of connections is lost: {error}");
        }
        relays
    }

    /// Waits for a request. Where the server was away for too long for the last one, it is looked for all the
    /// same, so that it is seen when it is back.
    fn next(&mut self, control: &OwnedFd) -> Result<Request, Gone> {
        loop {
            match self.heard.pop_front() {
                Some(Said::Asks(request)) => return Ok(request),
                Some(Said::Reported(session)) => self.maker.reported(session),
                Some(Said::Left(session, inode)) => self.maker.left(session, inode),
                Some(Said::AsksStatus) | None => {}
            }
            if !self.heard.is_empty() {
                continue;
            }
            let mut fds = [PollFd::new(control, PollFlags::IN), PollFd::new(&self.channel, PollFlags::IN)];
            let pause = self.first_look.or_else(|| self.away.then_some(LONGEST_PAUSE)).map(timespec);
            let found = rustix::io::retry_on_intr(|| poll(&mut fds, pause.as_ref())).map_err(|_| Gone)?;
            if !fds[0].revents().is_empty() {
                self.heed(control)?;
                let size = self.look().map_err(|why| plain(&why));
                report(control, &LinkReport::Looked { size })?;
                continue;
            }
            if found == 0 {
                self.look_unasked(control)?;
                continue;
            }
            self.listen()?;
        }
    }

    /// Takes in what a worker has said next. Its questions wait for no connection that is being made.
    fn listen(&mut self) -> Result<(), Gone> {
        match channel::next(&self.channel) {
            Ok(Some((Said::AsksStatus, socket))) => {
                socket.into_iter().for_each(|socket| self.answer_status(socket))
            }
            // A request that is asked once more. One without a number is asked once only.
            Ok(Some((said @ Said::Asks(Request { number: Some(_), .. }), _)))
                if self.heard.contains(&said) => {}
            Ok(Some((said, _))) => self.heard.push_back(said),
            Ok(None) => {}
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => tracing::warn!("{error}"),
            Err(_) => return Err(Gone),
        }
        Ok(())
    }

    /// Has a thread answer what a queue asks over that socket. Where none does, the socket is closed.
    fn answer_status(&mut self, socket: OwnedFd) {
        self.answering.retain(|thread| !thread.is_finished());
        if self.answering.len() >= ASKING {
            return;
        }
        if let Some(describes) = self.maker.describes() {
            let thread = std::thread::Builder::new().name("becket-states".to_owned());
            self.answering.extend(thread.spawn(move || states::answer(&socket, describes)));
        }
    }

    /// Looks whether the server can be reached, for which nobody has asked.
    fn look_unasked(&mut self, control: &OwnedFd) -> Result<(), Gone> {
        let first = self.first_look.take().is_some();
        let then = match self.maker.look() {
            Ok(()) => Then::Over(LinkReport::Connected),
            Err(failure) => failure.into(),
        };
        let (why, spent) = match then {
            Then::Again { why, spent } => (why, spent),
            Then::Over(said) => {
                self.away = false;
                return report(control, &said);
            }
        };
        if first {
            self.away = true;
            report(control, &LinkReport::Away { why: why.clone() })?;
        }
        if !spent {
            return Ok(());
        }
        if first {
            self.rest(control, LONGEST_PAUSE, &why)?;
        }
        Err(Gone)
    }

    /// Gets a connection for a request, however long that takes, and answers it.
    fn connected(&mut self, request: Request, control: &OwnedFd) -> Result<(), Gone> {
        let mut pause = FIRST_PAUSE;
        let (began, waited) = (Instant::now(), std::mem::take(&mut self.waited));
        let too_soon = self.maker.prepares(request.session);
        let mut said = None;
        if too_soon {
            // A server that ends connections as soon as they are made is not called again and again.
            self.rest(control, FIRST_PAUSE * 5, "the server has ended its connections")?;
        }
        loop {
            let (why, spent) = match self.maker.attempt(request.session).map_err(Then::from) {
                Ok((socket, earlier)) => {
                    let patience = self.timeout;
                    channel::give(&self.channel, request, socket.as_fd(), earlier, patience)
                        .map_err(|_| Gone)?;
                    self.away = false;
                    report(control, &LinkReport::Connected)?;
                    let size = self.maker.size();
                    return size
                        .map_or(Ok(()), |size| report(control, &LinkReport::Alive { size: Some(size) }));
                }
                Err(Then::Again { why, spent }) => (why, spent),
                Err(Then::Over(said)) => {
                    report(control, &said)?;
                    return channel::give_up(&self.channel, request).map_err(|_| Gone);
                }
            };
            if said.as_ref() != Some(&why) {
                report(control, &LinkReport::Away { why: why.clone() })?;
                self.away = true;
                said = Some(why.clone());
            }
            let late = self.timeout.is_some_and(|timeout| waited + began.elapsed() >= timeout);
            if late {
                channel::give_up(&self.channel, request).map_err(|_| Gone)?;
            }
            if spent {
                self.rest(control, LONGEST_PAUSE, &why)?;
                return Err(Gone);
            }
            if late {
                return Ok(());
            }
            self.rest(control, pause, &why)?;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Receives what the supervisor has said, which is to look how long the image is, or that it is gone.
    fn heed(&mut self, control: &OwnedFd) -> Result<(), Gone> {
        match protocol::receive::<LinkOrder>(control) {
            Ok(Some((LinkOrder::Look, _))) => Ok(()),
            said => {
                self.over = matches!(said, Ok(Some((LinkOrder::End, _))));
                Err(Gone)
            }
        }
    }

    /// How long the image is now.
    fn look(&mut self) -> Result<u64, String> {
        match self.maker.look() {
            Ok(()) => self.maker.size().ok_or_else(|| "it says no length".to_owned()),
            Err(Failure::Away(why) | Failure::Spent(why) | Failure::Over(why) | Failure::Replaced(why)) => {
                Err(why)
            }
        }
    }

    /// Waits, unless the supervisor goes. `why` nothing is known of the server meanwhile.
    fn rest(&mut self, control: &OwnedFd, time: Duration, why: &str) -> Result<(), Gone> {
        let end = Instant::now() + time;
        loop {
            let mut fds = [PollFd::new(control, PollFlags::IN), PollFd::new(&self.channel, PollFlags::IN)];
            let fds = if self.heard.len() < ANSWERED { &mut fds[..] } else { &mut fds[..1] };
            let left = timespec(end.saturating_duration_since(Instant::now()));
            if rustix::io::retry_on_intr(|| poll(fds, Some(&left))).map_err(|_| Gone)? == 0 {
                return Ok(());
            }
            if fds[0].revents().is_empty() {
                self.listen()?;
                continue;
            }
            self.heed(control)?;
            report(control, &LinkReport::Looked { size: Err(plain(why)) })?;
        }
    }
}

/// Whether the supervisor has said that the device is detached, before it went.
fn is_over(control: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(control, PollFlags::IN)];
    let nothing = timespec(Duration::ZERO);
    let found = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&nothing)));
    let said = found == Ok(1) && fds[0].revents().contains(PollFlags::IN);
    said && matches!(protocol::receive::<LinkOrder>(control), Ok(Some((LinkOrder::End, _))))
}

/// A text that is safe to show.
pub(super) fn plain(text: &str) -> String {
    text.chars().filter(|c| !becket_image::is_hidden(*c)).take(TEXT).collect()
}

fn report(control: &OwnedFd, report: &LinkReport) -> Result<(), Gone> {
    protocol::send(control, report, &[]).map_err(|_| Gone)
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() }
}

//! The command's side: finds the supervisor, starts one when none runs, and calls it.
//! It never waits for a server that does not come, and never sends descriptors to another user's.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::connection::{broken, connect, exchange, hung_up, limit, result};
use super::socket::Socket;
use crate::contract::Error;
use crate::control::health::{self, Concerns, Unresponsive};
use crate::record::runtime::Runtime;
use crate::system::{log, origin};

/// How long a server may take from its start until it answers.
const PATIENCE: Duration = Duration::from_secs(15);
/// A server may end while we connect, since its last device is gone; then another one is started.
const ATTEMPTS: u32 = 5;

/// Calls the supervisor, which is started when none runs. `concerns` says whom the call waits for.
pub(crate) fn call<P, R>(
    runtime: &Runtime,
    method: &str,
    parameters: &P,
    fds: &[OwnedFd],
    concerns: Concerns,
) -> Result<R, Error>
where
    P: Serialize,
    R: DeserializeOwned,
{
    for _ in 0..ATTEMPTS {
        let mut connected = match Connected::again(runtime) {
            Some(connected) => connected,
            None => match connect(runtime)? {
                Some(stream) => Connected::new(runtime, stream)?,
                None => Connected::new(runtime, start(runtime)?)?,
            },
        };
        if let Some(reply) = connected.call(method, parameters, fds, concerns)? {
            connected.keep();
            return Ok(reply);
        }
    }
    Err(Error::Server { what: "ends before it answers".to_owned(), log: last_words(runtime) })
}

/// Calls the supervisor when one runs.
pub(crate) fn call_running<P, R>(
    runtime: &Runtime,
    method: &str,
    parameters: &P,
    concerns: Concerns,
) -> Result<Option<R>, Error>
where
    P: Serialize,
    R: DeserializeOwned,
{
    // The connection of the last call may be to a server that has ended; then the call was not taken.
    for again in [true, false] {
        let connected = match again {
            true => Connected::again(runtime),
            false => connect(runtime)?.map(|stream| Connected::new(runtime, stream)).transpose()?,
        };
        if let Some(mut connected) = connected
            && let Some(reply) = connected.call(method, parameters, &[], concerns)?
        {
            connected.keep();
            return Ok(Some(reply));
        }
    }
    Ok(None)
}

/// A connection to a supervisor.
struct Connected {
    runtime: Runtime,
    socket: Socket,
}

thread_local! {
    /// The connection of this thread's last call. A thread that attaches several images then needs a new
    /// thread of the supervisor for the first of them only, and none of them waits for another thread's.
    static KEPT: RefCell<Option<Connected>> = const { RefCell::new(None) };
}

impl Connected {
    fn new(runtime: &Runtime, stream: UnixStream) -> Result<Connected, Error> {
        limit(&stream, health::DOUBT).map_err(Error::io("talk to the server at", &runtime.socket()))?;
        Ok(Connected { runtime: runtime.clone(), socket: Socket::new(stream) })
    }

    /// That of this thread's last call to the same supervisor.
    fn again(runtime: &Runtime) -> Option<Connected> {
        KEPT.take().filter(|connected| connected.runtime.socket() == runtime.socket())
    }

    /// For this thread's next call. Only a connection on which a call has succeeded is kept: an answer to
    /// another call cannot arrive on it.
    fn keep(self) {
        KEPT.set(Some(self));
    }

    /// `None` when the server ended without having taken the call.
    fn call<P, R>(
        &mut self,
        method: &str,
        parameters: &P,
        fds: &[OwnedFd],
        concerns: Concerns,
    ) -> Result<Option<R>, Error>
    where
        P: Serialize,
        R: DeserializeOwned,
    {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let server = health::peer(self.socket.stream());
        let mut silent = None;
        let runtime = &self.runtime;
        let mut patience = || health::given_up(health::check(runtime, server, concerns), &mut silent);
        match exchange(&mut self.socket, method, parameters, &fds, &mut patience) {
            Ok(Some(reply)) => result(&reply).map(Some),
            Ok(None) => Ok(None),
            Err(error) if hung_up(&error) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                let found = error.get_ref().and_then(|found| found.downcast_ref::<Unresponsive>());
                Err(found.cloned().map_or_else(|| broken(error), Error::from))
            }
            Err(error) => Err(broken(error)),
        }
    }
}

/// Starts a supervisor and waits until it answers.
fn start(runtime: &Runtime) -> Result<UnixStream, Error> {
    let (ready, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(Error::io("make a pipe to", "the server".as_ref()))?;
    let path = runtime.log();
    let log_file = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&path)
        .map_err(Error::io("open", &path))?;
    let program = "/proc/self/exe";
    let child = origin::environment(&mut Command::new(program))
        .arg0("becket")
        .args(["serve", "--ready-fd", "1"])
        .env(crate::contract::DIR_VARIABLE, runtime.dir())
        .env(crate::contract::LINKS_VARIABLE, runtime.links())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::from(theirs))
        .stderr(Stdio::from(log_file))
        .spawn()
        .map_err(Error::io("start the server", program.as_ref()))?;
    let ready = await_byte(File::from(ready));
    reap(child);
    match ready {
        // Another server may have won the race and ended already; the caller then tries again.
        Ok(true) => {}
        Ok(false) => {
            return Err(Error::Server { what: "did not start".to_owned(), log: last_words(runtime) });
        }
        Err(error) => return Err(Error::io("wait for", "the server".as_ref())(error)),
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(stream) = connect(runtime)? {
            return Ok(stream);
        }
        if Instant::now() >= deadline {
            return Err(Error::Server { what: "does not answer".to_owned(), log: last_words(runtime) });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The server outlives most commands; one that lives longer must not leave it as a zombie.
fn reap(mut child: Child) {
    std::thread::spawn(move || {
        // Its exit says nothing that its log does not.
        let _ = child.wait();
    });
}

/// Whether the one byte came before the writer went away.
fn await_byte(mut pipe: File) -> io::Result<bool> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        let mut fds = [PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(pipe.read(&mut [0])? == 1),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The last lines of the server's log.
fn last_words(runtime: &Runtime) -> Option<String> {
    let mut file = File::open(runtime.log()).ok()?;
    let len = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(2048))).ok()?;
    let mut text = Vec::new();
    file.take(4096).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().rev().take(3).collect();
    let words = lines.into_iter().rev().map(|line| log::words(line.trim())).collect::<Vec<_>>().join("; ");
    (!words.is_empty()).then_some(words)
}

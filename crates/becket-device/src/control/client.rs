//! The command's side: finds the supervisor, starts one when none runs, and calls it.
//! It never waits for a server that does not come, and never sends descriptors to another user's.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::socket::{Patience, Socket, no_longer};
use crate::contract::messages::{Failure, INTERFACE, Nothing, Pulse};
use crate::contract::varlink::{Call, SERVICE};
use crate::contract::{Error, ErrorKind};
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
        let mut line = match Line::again(runtime) {
            Some(line) => line,
            None => match connect(runtime)? {
                Some(stream) => Line::new(runtime, stream)?,
                None => Line::new(runtime, start(runtime)?)?,
            },
        };
        if let Some(reply) = line.call(method, parameters, fds, concerns)? {
            line.keep();
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
    match connect(runtime)? {
        Some(stream) => Line::new(runtime, stream)?.call(method, parameters, &[], concerns),
        None => Ok(None),
    }
}

/// Asks the supervisor which of its workers do not respond; `None` when no supervisor runs, an error when it
/// does not itself answer in time.
pub(crate) fn ping(runtime: &Runtime, patience: Duration) -> Result<Option<Pulse>, ()> {
    let stream = match connect(runtime) {
        Ok(Some(stream)) => stream,
        Ok(None) => return Ok(None),
        Err(error) => return if error.kind() == ErrorKind::Timeout { Err(()) } else { Ok(None) },
    };
    if limit(&stream, patience).is_err() {
        return Ok(None);
    }
    match exchange(&mut Socket::new(stream), "Ping", &Nothing {}, &[], &mut no_longer) {
        Ok(Some(reply)) => Ok(Some(result(&reply).unwrap_or_default())),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(()),
        // It answers, though an older one does not know the question; or it is ending.
        _ => Ok(Some(Pulse::default())),
    }
}

/// Limits how long a stream waits at once.
fn limit(stream: &UnixStream, time: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(time))?;
    stream.set_write_timeout(Some(time))
}

/// `None` when no server listens.
pub(crate) fn connect(runtime: &Runtime) -> Result<Option<UnixStream>, Error> {
    let path = runtime.socket();
    match reach(&path) {
        Ok(stream) => {
            check_peer(&stream).map_err(Error::io("talk to the server at", &path))?;
            Ok(Some(stream))
        }
        Err(error) if gone(&error) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(Error::Failed {
            kind: ErrorKind::Timeout,
            message: "becket's server takes no more connections: it does not respond".to_owned(),
            hint: Some("becket list shows its process and whether it is stopped".to_owned()),
        }),
        Err(error) => Err(Error::io("connect to", &path)(error)),
    }
}

/// Connects in a limited time: a server that is stopped has no room for more callers some day.
fn reach(path: &Path) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(health::SUPERVISOR))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_write_timeout(None)?;
    Ok(stream)
}

/// Descriptors of images are for our own server only.
fn check_peer(stream: &UnixStream) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?.uid;
    if peer == rustix::process::geteuid() || peer.is_root() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is another user's"))
}

fn gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// A connection to a supervisor.
struct Line {
    runtime: Runtime,
    socket: Socket,
}

thread_local! {
    /// The connection of this thread's last call. A thread that attaches several images then needs a new
    /// thread of the supervisor for the first of them only, and none of them waits for another thread's.
    static KEPT: RefCell<Option<Line>> = const { RefCell::new(None) };
}

impl Line {
    fn new(runtime: &Runtime, stream: UnixStream) -> Result<Line, Error> {
        limit(&stream, health::DOUBT).map_err(Error::io("talk to the server at", &runtime.socket()))?;
        Ok(Line { runtime: runtime.clone(), socket: Socket::new(stream) })
    }

    /// That of this thread's last call to the same supervisor.
    fn again(runtime: &Runtime) -> Option<Line> {
        KEPT.take().filter(|line| line.runtime.socket() == runtime.socket())
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

/// Sends a call and returns the reply; `None` when the server hung up before that.
fn exchange(
    socket: &mut Socket,
    method: &str,
    parameters: &impl Serialize,
    fds: &[BorrowedFd<'_>],
    patience: Patience<'_>,
) -> io::Result<Option<Vec<u8>>> {
    let method = format!("{INTERFACE}.{method}");
    let call = serde_json::to_vec(&Call { method, parameters: Some(parameters), oneway: false })?;
    socket.send(call, fds, patience)?;
    // None of becket's replies comes with descriptors.
    Ok(socket.receive(patience)?.map(|(reply, _)| reply))
}

/// What a reply says.
fn result<R: DeserializeOwned>(reply: &[u8]) -> Result<R, Error> {
    #[derive(Deserialize)]
    struct Reply<'a> {
        error: Option<String>,
        #[serde(borrow)]
        parameters: Option<&'a RawValue>,
    }
    let Reply { error, parameters } = serde_json::from_slice(reply).map_err(broken)?;
    let parameters = parameters.map_or("{}", RawValue::get);
    let Some(error) = error else { return serde_json::from_str(parameters).map_err(broken) };
    match serde_json::from_slice::<Failure>(reply) {
        Ok(failure) => Err(failure.into()),
        Err(_) if error.starts_with(SERVICE) => Err(Error::Failed {
            kind: ErrorKind::Server,
            message: format!("becket's server refuses the call: {error} {parameters}"),
            hint: Some(
                "it may be of another version: end it with SIGTERM once its devices are detached".to_owned(),
            ),
        }),
        Err(_) => Err(broken(format_args!("it answers {error} {parameters}"))),
    }
}

fn broken(error: impl std::fmt::Display) -> Error {
    Error::Server { what: format!("cannot be talked to: {error}"), log: None }
}

fn hung_up(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
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

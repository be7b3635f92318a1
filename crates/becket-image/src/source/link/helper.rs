//! A server that is a program beside becket, started for one connection: `becket-rbd`, which has the
//! libraries of Ceph. It is no part of becket's own program, which needs no library.
//! It never searches `PATH`, nor any directory that another user could write to.
//!
//! The program speaks first: the length of its [`Greeting`] in four bytes, most significant first, and the
//! greeting as JSON, with the sockets of further connections. The transmission phase of NBD follows, over
//! each.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use super::error::DialError;
use super::handshake::{Agreed, CONNECTIONS, Wanted};
use super::rbd::Rbd;

/// The program's file.
pub const PROGRAM: &str = "becket-rbd";
/// The version of what becket and the program say to each other. The program refuses any other.
pub const PROTOCOL: &str = "5";
/// Its first word where it is started for one user.
pub const CLIENT: &str = "client";
/// A request beside those of NBD: the image that was made ([`Way::Write`]) gets its name. The answer is a
/// simple reply.
pub const CMD_NAME: u16 = 0x4000;
/// Where packages put it, if not beside becket.
const PLACES: [&str; 2] = ["/usr/libexec/becket", "/usr/local/libexec/becket"];
/// The longest greeting in bytes.
const LONGEST: u32 = 16 << 10;

/// What the program says first.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Greeting {
    /// The image is open.
    Agreed(Agreed),
    /// The same, and it was made.
    Made(Agreed),
    /// It cannot be.
    Refused {
        /// Why, in one sentence.
        why: String,
        /// What may help.
        hint: Option<String>,
        /// The errno that fits best; 0 where none does.
        errno: i32,
    },
}

impl Greeting {
    /// Says it, with up to [`CONNECTIONS`] less one further connections.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn send(&self, mut to: &UnixStream, further: &[BorrowedFd<'_>]) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        let len = u32::try_from(text.len()).map_err(io::Error::other)?;
        let bytes = [&len.to_be_bytes()[..], &text].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(CONNECTIONS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !further.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(further)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let sent = sendmsg(to, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
        to.write_all(bytes.get(sent..).unwrap_or_default())
    }
}

/// Where the program is.
///
/// # Errors
/// It is not installed; the text says what to install.
pub fn program() -> io::Result<PathBuf> {
    let own = std::fs::read_link("/proc/self/exe").ok();
    let beside = own.as_deref().and_then(|own| own.parent()).map(|dir| dir.join(PROGRAM));
    let places = PLACES.iter().map(|dir| PathBuf::from(dir).join(PROGRAM));
    beside.into_iter().chain(places).find(|path| path.is_file()).ok_or_else(|| {
        let why = format!("{PROGRAM} is not installed, by which becket reaches Ceph (package becket-rbd)");
        io::Error::new(io::ErrorKind::NotFound, why)
    })
}

/// How the program opens an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// To be read.
    Read,
    /// To be read, if it could be written.
    Try,
    /// To be written, with its lock. Where it is missing, one of that length in bytes is made, which has
    /// another name until [`CMD_NAME`] and is removed without.
    Write(u64),
}

impl Way {
    /// What is wanted of an image.
    pub(super) fn of(wanted: Wanted) -> Way {
        match wanted {
            Wanted { writes: false, .. } => Way::Read,
            Wanted { copies: None, .. } => Way::Try,
            Wanted { copies: Some(len), .. } => Way::Write(len),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::Read => f.write_str("read"),
            Way::Try => f.write_str("try"),
            Way::Write(len) => write!(f, "write:{len}"),
        }
    }
}

impl FromStr for Way {
    type Err = String;

    fn from_str(text: &str) -> Result<Way, String> {
        let writes = || text.strip_prefix("write:")?.parse().ok().map(Way::Write);
        let known = match text {
            "read" => Some(Way::Read),
            "try" => Some(Way::Try),
            _ => writes(),
        };
        known.ok_or_else(|| format!("{text:?} is not known"))
    }
}

/// What the program has reached.
pub(super) struct Reached {
    pub(super) sockets: Vec<OwnedFd>,
    pub(super) agreed: Agreed,
    /// It has made the image.
    pub(super) new: bool,
}

/// Starts the program for connections to an image. It ends with them. Replies to reads come in chunks if that
/// is wanted.
pub(super) fn connect(
    rbd: &Rbd,
    way: Way,
    structured: bool,
    patience: Duration,
) -> Result<Reached, DialError> {
    let until = Instant::now() + patience;
    let (ours, theirs) = UnixStream::pair()?;
    let missing =
        |error: io::Error| DialError::Helper { why: error.to_string(), hint: None, errno: libc::ENOENT };
    let mut child = Command::new(program().map_err(missing)?)
        .args([CLIENT, PROTOCOL, &way.to_string(), &rbd.to_string()])
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        // It ends in order where a terminal interrupts this process.
        .process_group(0)
        .spawn()?;
    // It ends when the connection does, and nobody else waits for it.
    std::thread::spawn(move || child.wait());
    let (agreed, new, further) = match heard(&ours, until) {
        Ok((Greeting::Agreed(agreed), further)) => (agreed, false, further),
        Ok((Greeting::Made(agreed), further)) => (agreed, true, further),
        Ok((Greeting::Refused { why, hint, errno }, _)) => {
            return Err(DialError::Helper { why, hint, errno });
        }
        Err(error) => {
            let why = match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    "the cluster does not answer".to_owned()
                }
                io::ErrorKind::UnexpectedEof => format!("{PROGRAM} ended before it was ready"),
                _ => format!("{PROGRAM} cannot be understood: {error}"),
            };
            return Err(DialError::Helper { why, hint: None, errno: 0 });
        }
    };
    ours.set_read_timeout(None)?;
    let allocation = agreed.allocation.filter(|_| structured);
    let sockets = [ours.into()].into_iter().chain(further).collect();
    Ok(Reached { sockets, agreed: Agreed { structured, allocation, ..agreed }, new })
}

fn heard(from: &UnixStream, until: Instant) -> io::Result<(Greeting, Vec<OwnedFd>)> {
    let mut further = Vec::new();
    let mut take = |bytes: &mut [u8]| {
        let mut rest = bytes;
        while !rest.is_empty() {
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            from.set_read_timeout(Some(left))?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(CONNECTIONS))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC;
            let got = match recvmsg(from, &mut [IoSliceMut::new(rest)], &mut ancillary, flags) {
                Ok(got) if got.bytes == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => got.bytes,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            rest = rest.get_mut(got..).unwrap_or_default();
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    further.extend(fds);
                }
            }
        }
        Ok::<_, io::Error>(())
    };
    let mut len = [0; 4];
    take(&mut len)?;
    let len = u32::from_be_bytes(len);
    if len > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "its greeting is too long"));
    }
    let mut text = vec![0; len as usize];
    take(&mut text)?;
    Ok((serde_json::from_slice(&text)?, further))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn a_way_comes_back_as_it_went() {
        for way in [Way::Read, Way::Try, Way::Write(0), Way::Write(u64::MAX)] {
            assert_eq!(way.to_string().parse(), Ok(way));
        }
        for text in ["", "write", "write:", "write:-1", "reads"] {
            assert!(text.parse::<Way>().is_err(), "{text}");
        }
    }

    /// No hint of a socket is to be given, for the text says which package is missing.
    #[test]
    fn a_program_that_is_not_installed_is_named() {
        let name = "rbd:p/i";
        let reached = connect(&Rbd::parse(name).unwrap(), Way::Read, true, Duration::from_secs(1));
        let error = reached.err().unwrap();
        assert!(error.to_string().contains("package becket-rbd"), "{error}");
        assert_eq!(error.hint(name.as_ref()), None);
    }

    #[test]
    fn further_connections_come_with_the_greeting() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let pairs: Vec<_> = (1..CONNECTIONS).map(|_| UnixStream::pair().unwrap()).collect();
        let far: Vec<_> = pairs.iter().map(|(far, _)| far.as_fd()).collect();
        let agreed = Agreed { size: 7, ..Agreed::default() };
        Greeting::Agreed(agreed).send(&theirs, &far).unwrap();
        let (greeting, further) = heard(&ours, Instant::now() + Duration::from_secs(1)).unwrap();
        assert!(matches!(greeting, Greeting::Agreed(Agreed { size: 7, .. })), "{greeting:?}");
        assert_eq!(further.len(), pairs.len());
        for ((_, near), socket) in pairs.iter().zip(further) {
            UnixStream::from(socket).write_all(b"x").unwrap();
            (&mut &*near).read_exact(&mut [0]).unwrap();
        }
    }
}

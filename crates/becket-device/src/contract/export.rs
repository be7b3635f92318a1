//! How an export is reached: what people are shown of it, what its doorman must know, and what both say to
//! each other. Nothing here touches a socket.
//!
//! The *doorman* talks with clients until they have agreed on an export. It holds the socket that listens,
//! no image and no device. What it and a client have agreed on is opaque here: it crosses to the export's
//! worker as it is.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::contract::{Error, ErrorKind};

/// The longest name of an export, in bytes (NBD project, doc/proto.md).
const LONGEST_NAME: usize = 4096;

/// How an export is reached, as records and `list` have it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    /// What clients call it.
    pub name: String,
    /// Where its socket listens: `unix:PATH`, `tcp:HOST:PORT`.
    pub address: String,
    /// Most connections at once to this address; more clients wait.
    pub max_connections: u32,
    /// Clients must use TLS.
    pub tls: bool,
    /// Clients must have a certificate of the authority in `--tls`.
    pub verify: bool,
    /// The names of which a client's certificate must have one; all are allowed when there is none.
    pub allow: Vec<String>,
    /// The file of the unix socket, which is removed with the last export at it.
    pub socket: Option<SocketFile>,
    /// What requests of clients must be multiples of, in bytes, where the user has said so.
    #[serde(default)]
    pub smallest: Option<u32>,
}

/// A unix socket's file, and how it is known again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketFile {
    /// Its name in its directory, whose descriptor the server has.
    #[serde(with = "crate::contract::path_text::one")]
    pub name: PathBuf,
    /// Its inode.
    pub ino: u64,
    /// The device of that.
    pub dev: u64,
}

impl Export {
    /// Whether clients of NBD can be given an export by that name. A device's name is one of few letters:
    /// [`crate::check_name`].
    ///
    /// # Errors
    /// It is too long, or has control characters.
    pub fn check_name(name: &str) -> Result<(), Error> {
        let why = if name.len() > LONGEST_NAME {
            format!("it has {} bytes, and NBD allows {LONGEST_NAME}", name.len())
        } else if name.chars().any(char::is_control) {
            "it has a control character".to_owned()
        } else {
            return Ok(());
        };
        let message = format!("no export can be called so: {why}");
        Err(Error::Failed { kind: ErrorKind::InvalidOption, message, hint: None })
    }

    /// The NBD URI of this export (NBD project, doc/uri.md).
    pub fn uri(&self) -> String {
        let scheme = if self.tls { "nbds" } else { "nbd" };
        let name = escaped(&self.name, false);
        match self.address.split_once(':') {
            Some(("unix", path)) => format!("{scheme}+unix:///{name}?socket={}", escaped(path, true)),
            Some(("tcp", place)) => format!("{scheme}://{place}/{name}"),
            _ => format!("{scheme}:///{name}"),
        }
    }

    /// Whether clients of other hosts reach it.
    pub(crate) fn is_open(&self) -> bool {
        let place = self.address.strip_prefix("tcp:").and_then(|place| place.parse::<SocketAddr>().ok());
        place.is_some_and(|place| !place.ip().is_loopback())
    }

    /// Where it listens, when that is a path.
    pub fn path(&self) -> Option<&Path> {
        self.address.strip_prefix("unix:").map(Path::new)
    }
}

/// Percent-encodes what may not be in that part of a URI (RFC 3986).
fn escaped(text: &str, slashes: bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => escaped.push(byte.into()),
            b'/' if slashes => escaped.push('/'),
            // Writing to a string never fails.
            _ => drop(write!(escaped, "%{byte:02X}")),
        }
    }
    escaped
}

/// What a door needs that no record may have: its key. It crosses in a sealed memfd.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DoorWords {
    pub(crate) tls: Option<TlsFiles>,
}

/// The contents of the files in a directory of `--tls`, in PEM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TlsFiles {
    pub(crate) certificates: String,
    pub(crate) key: String,
    pub(crate) authorities: Option<String>,
    pub(crate) revoked: Option<String>,
}

/// An export as its doorman shows it to clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Shown {
    /// The export's number, which comes back with what was agreed on.
    pub(crate) number: u32,
    pub(crate) name: String,
    /// Bytes.
    pub(crate) size: u64,
    pub(crate) read_only: bool,
    /// What requests must be multiples of, in bytes, and the smallest write that costs no read.
    pub(crate) block_size: u32,
    pub(crate) preferred: u32,
    pub(crate) rotational: bool,
    /// TRIM can be asked for.
    pub(crate) discards: bool,
}

/// What the supervisor tells a doorman.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum DoorOrder {
    /// Attend to a door. The descriptors: the socket that listens, and the sealed [`DoorWords`].
    Attend {
        shown: Vec<Shown>,
        max_connections: u32,
        verify: bool,
        allow: Vec<String>,
        /// As in [`DoorOrder::Open`].
        open: u32,
    },
    /// These are the exports from now on.
    Show { shown: Vec<Shown> },
    /// So many connections are open, as of that many [`DoorReport::Agreed`].
    Open { open: u32, seen: u64 },
}

/// What a doorman tells the supervisor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum DoorReport {
    /// It waits for clients. The notes are precautions that the environment forbids.
    Started { notes: Vec<String> },
    /// It has taken the order to attend, and lets clients in.
    Attends,
    /// It will not attend to the door at all.
    Refused { why: String },
    /// A client wants that export. The descriptor: its socket.
    Agreed {
        number: u32,
        terms: serde_json::Value,
        /// What it has sent since.
        unread: Vec<u8>,
    },
}

/// A client that the worker of an export is given, with its socket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Visitor {
    /// A client that has agreed with a doorman, or that another worker has had.
    Nbd {
        terms: serde_json::Value,
        /// What it has sent that was not yet understood.
        unread: Vec<u8>,
    },
    /// The front-end of a virtual machine.
    VhostUser,
    /// One that another worker has had. The descriptors: its socket, and those of what was agreed on.
    VhostUserAgain { agreed: Vec<u8> },
}

/// How many visitors a worker has had, and how many of them have gone, since it serves the export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Visits {
    pub(crate) begun: u64,
    pub(crate) ended: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_leads_to_the_export_whatever_it_is_called() {
        let uri = |address: &str, name: &str, tls| {
            Export { name: name.into(), address: address.into(), tls, ..Export::default() }.uri()
        };
        assert_eq!(
            uri("unix:/run/a b.sock", "disk.img", false),
            "nbd+unix:///disk.img?socket=/run/a%20b.sock"
        );
        assert_eq!(uri("unix:/x?y&z", "", true), "nbds+unix:///?socket=/x%3Fy%26z");
        assert_eq!(uri("tcp:127.0.0.1:10809", "ä/b", false), "nbd://127.0.0.1:10809/%C3%A4%2Fb");
        assert_eq!(uri("tcp:[::1]:7", "x", true), "nbds://[::1]:7/x");
    }

    #[test]
    fn an_export_has_any_name_that_a_client_can_ask_for() {
        for name in ["", "disk.img", "my disk/äö", "-", &"a".repeat(4096)] {
            Export::check_name(name).unwrap();
        }
        for (name, why) in [("a\nb", "control"), ("\u{9b}", "control"), (&*"ä".repeat(2049), "4098 bytes")] {
            let error = Export::check_name(name).unwrap_err();
            assert!(error.kind() == ErrorKind::InvalidOption && error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn what_is_said_at_a_door_is_read_again() {
        let terms = serde_json::json!({"export": "a", "structured": true});
        let report = DoorReport::Agreed { number: 3, terms: terms.clone(), unread: vec![1, 2] };
        let text = serde_json::to_string(&report).unwrap();
        let again: DoorReport = serde_json::from_str(&text).unwrap();
        assert!(matches!(again, DoorReport::Agreed { number: 3, terms: same, .. } if same == terms));
        assert!(serde_json::from_str::<DoorOrder>("{\"open\":{\"open\":1,\"seen\":2,\"x\":3}}").is_err());
    }
}

//! Why there is no connection to a server.
//! Every message is safe to show.

use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::handshake::Refused;
use crate::text::quoted;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// There is no such host or socket, nobody listens, or the connection broke.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The server refused.
    #[error("{0}")]
    Refused(#[from] Refused),
    /// The program that reaches the image cannot.
    #[error("{why}")]
    Helper {
        /// Why, in one sentence.
        why: String,
        /// What may help.
        hint: Option<String>,
        /// The errno that fits best; 0 where none does.
        errno: i32,
    },
    /// A file with certificates, or with a key, cannot be used.
    #[error("{0}")]
    Certificates(io::Error),
    /// The connection could not be made secure.
    #[error("{why}")]
    Tls {
        /// What was wrong.
        why: String,
        /// What helps, where something does.
        hint: Option<&'static str>,
    },
}

impl DialError {
    /// What to do next, where there is something to say; `uri` is what was connected to.
    pub(crate) fn hint(&self, uri: &Path) -> Option<String> {
        let begins = |start: &str| uri.as_os_str().as_bytes().starts_with(start.as_bytes());
        let is_socket = begins("nbd+unix:") || begins("nbds+unix:");
        let hint = match self {
            DialError::Refused(Refused::Unknown { .. }) => {
                return Some(format!("see what the server exports: nbdinfo --list {}", quoted(uri)));
            }
            DialError::Refused(Refused::TlsRequired) => "use nbds:// instead of nbd://",
            DialError::Refused(Refused::NoTls) => {
                "becket does not go on without TLS by itself; if the way to the server is secure: nbd://"
            }
            DialError::Refused(_) => return None,
            DialError::Helper { hint, .. } => return hint.clone(),
            DialError::Certificates(_) => {
                "tls-certificates=DIR in the URI names a directory with ca-cert.pem, and for a client's own \
                 with client-cert.pem and client-key.pem; without it, $SSL_CERT_FILE or the system's file is read"
            }
            DialError::Tls { hint, .. } => return hint.map(str::to_owned),
            DialError::Io(error) => match error.kind() {
                io::ErrorKind::InvalidInput if begins("rbd:") => {
                    "names are rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][?conf=FILE&id=USER]; \
                     a path inside the image follows #"
                }
                io::ErrorKind::InvalidInput => {
                    "URIs are nbd://HOST[:PORT]/EXPORT and nbd+unix:///EXPORT?socket=PATH; \
                     a path inside the image follows #"
                }
                io::ErrorKind::ConnectionRefused => {
                    "nothing listens there: is the server running, and is it that port?"
                }
                io::ErrorKind::NotFound => "no server has made that socket: is it running?",
                io::ErrorKind::ReadOnlyFilesystem => return None,
                io::ErrorKind::TimedOut if is_socket => {
                    "is the server at that socket stopped, or busy? --origin-timeout waits longer"
                }
                _ if is_socket => "check the server at that socket",
                _ => "check the name of the host and the network",
            },
        };
        Some(hint.to_owned())
    }
}

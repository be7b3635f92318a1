//! Why there is no connection to a server.
//! Every message is safe to show.

use std::io;

use super::handshake::Refused;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// There is no such host or socket, nobody listens, or the connection broke.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The server refused.
    #[error("{0}")]
    Refused(#[from] Refused),
    /// The connection could not be made secure.
    #[error("{why}")]
    Tls {
        /// What was wrong.
        why: String,
        /// What helps, where something does.
        hint: Option<&'static str>,
    },
}

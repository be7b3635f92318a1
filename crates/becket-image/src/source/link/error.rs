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
    /// The connection could not be made secure.
    #[error("{why}")]
    Tls {
        /// What was wrong.
        why: String,
        /// What helps, where something does.
        hint: Option<&'static str>,
    },
}

//! Why there is no connection to an export.
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
    },
}

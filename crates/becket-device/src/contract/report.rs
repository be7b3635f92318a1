//! What the command that collects metrics and its reporter say to each other.
//! Nothing here reads a counter or a client's request.

use serde::{Deserialize, Serialize};

/// What a reporter gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ReportOrder {
    /// Answer the clients of this socket, which listens. The descriptor: the socket.
    Listen,
    /// What clients that have asked get. The descriptor: a sealed file with the text.
    Text,
}

/// What a reporter says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Reported {
    /// It waits for its socket. The notes are precautions that the environment forbids.
    Started { notes: Vec<String> },
    /// It cannot work.
    Refused { why: String },
    /// Clients have asked for the text of this moment.
    Wanted,
}

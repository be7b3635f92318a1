//! Events: what happens to devices that becket's server has, and how they are asked for.
//! Nothing here waits or remembers.

use serde::{Deserialize, Serialize};

/// Something that happened to a device or to a process that serves devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Happened {
    /// Its number: one more than that of the event before it, of the same server.
    pub number: u64,
    /// When, in UTC: `2026-11-23T19:05:07.123Z`.
    pub at: String,
    /// What, in one word. Words may be added.
    pub event: String,
    /// How bad it is: `info`, `warn` or `error`.
    pub level: String,
    /// The device's name; none for what concerns several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The same for people.
    pub message: String,
}

/// Which events are wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Wanted {
    /// Those with a higher number; new ones only, if it is not given.
    pub(crate) after: Option<u64>,
    /// The server whose numbers these are: all events of another one are wanted.
    pub(crate) server: Option<u32>,
}

/// Some events.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Batch {
    /// They, in their order.
    pub(crate) events: Vec<Happened>,
    /// The number of the last event that there was, whether it is among these or not.
    pub(crate) last: u64,
    /// How many before these the server does not remember any more.
    pub(crate) lost: u64,
    /// The server's process.
    pub(crate) server: u32,
}

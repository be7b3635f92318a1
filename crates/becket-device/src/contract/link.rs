//! What a supervisor and a connector or a fetcher say to each other.
//! Nothing here connects to anything.

use becket_image::link::Agreed;
use serde::{Deserialize, Serialize};

/// What a connector or a fetcher gets once, when it begins.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum LinkOrder {
    /// Make connections to this export for whichever worker asks. The descriptors: the asking and the
    /// answering end of the image's channel, and where TLS is used its opened envelope.
    Connect(Box<Connect>),
    /// Fill a store file. The descriptors: the file, the store's table, the order of the one who opened the
    /// image, the table in memory that readers share, and what it is decoded from, if it is.
    Fill(Fill),
    /// Say how long the image is now: connect once more, and answer with [`LinkReport::Looked`].
    Look,
    /// The device is detached: give back what others wait for.
    End,
}

/// Which store file is filled.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fill {
    /// Its length and that of a chunk, in bytes.
    pub(crate) size: u64,
    pub(crate) chunk: u64,
    /// How long a server may be away until requests fail, in seconds; for ever, when not given.
    pub(crate) timeout: Option<u64>,
}

/// To what connections are made, and what every one of them must be.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Connect {
    /// The URI that the user gave.
    pub(crate) uri: String,
    /// What the image's map was made by.
    pub(crate) agreed: Agreed,
    /// The server takes several connections, and a flush over one covers the writes of all.
    pub(crate) shares: bool,
    /// Another connector was there before, and what it knew of its connections is lost.
    pub(crate) again: bool,
    /// That one may still be about to leave what it knows.
    pub(crate) inherits: bool,
    /// How long a server may be away until requests fail, in seconds; for ever, when not given.
    pub(crate) timeout: Option<u64>,
    /// For how long it has been away already, in seconds, as connectors before this one have said.
    pub(crate) away: Option<u64>,
    /// The image is written.
    pub(crate) writes: bool,
    /// [`LinkReport::Client`] of connectors before this one.
    pub(crate) clients: Vec<String>,
}

/// What a connector or a fetcher says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum LinkReport {
    /// It waits for its order. The notes are precautions that the environment forbids.
    Started { notes: Vec<String> },
    /// It cannot work.
    Refused { why: String },
    /// A connection was made, or the server answers again.
    Connected,
    /// The server cannot be reached; it is tried again.
    Away { why: String },
    /// As what it is known to the cluster, where it is about to take the image's lock.
    Client { name: String },
    /// The image is another's now: requests fail from now on.
    Lost { why: String },
    /// It works; a program beside becket says that each second. With the image's length in bytes, where it is
    /// open.
    Alive { size: Option<u64> },
    /// So many bytes has the image now, or why that is not known: the answer to [`LinkOrder::Look`].
    Looked { size: Result<u64, String> },
    /// The store has no room for what nobody waits for yet.
    Full,
    /// The server has another version of the object: what is missing cannot be had.
    Changed { why: String },
    /// The compressed file cannot be decoded, or the image is not that of its digest: what is missing cannot
    /// be had.
    Damaged { why: String },
}

//! How a device is offered to the kernel's users: one folder per transport behind one trait.
//! Knows nothing of formats: an image arrives here as a map and descriptors.
#![forbid(unsafe_code)]

pub mod loop_;
pub mod node;
pub mod sysfs;
pub mod ublk;

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The ways a device can be offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A user-space block device (`/dev/ublkbN`), served by becket.
    Ublk,
    /// The kernel's loop driver (`/dev/loopN`), no server.
    Loop,
    /// A device-mapper linear table, no server.
    Dm,
    /// A file in a FUSE mount.
    Fuse,
}

impl Kind {
    /// The word used on the command line and in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::Ublk => "ublk",
            Kind::Loop => "loop",
            Kind::Dm => "dm",
            Kind::Fuse => "fuse",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A word that names no transport.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no transport called '{0}'; there are ublk, loop, dm and fuse")]
pub struct UnknownKind(pub String);

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        [Kind::Ublk, Kind::Loop, Kind::Dm, Kind::Fuse]
            .into_iter()
            .find(|kind| kind.as_str() == word)
            .ok_or_else(|| UnknownKind(word.to_owned()))
    }
}

/// Whether a transport works on this machine, and if not what would mend it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// A device could be attached with it now.
    pub works: bool,
    /// Why, in one sentence.
    pub reason: String,
    /// The command that would make it work, where there is one.
    pub mend: Option<String>,
    /// Facts worth showing, as name and value.
    pub details: Vec<(String, String)>,
}

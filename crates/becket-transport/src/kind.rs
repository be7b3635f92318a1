//! The transports by name, for the command line, records and messages.
//! Never decides anything: what a transport can do is said in its folder.

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
    /// An export over NBD: a socket that clients connect to, and no disk.
    Nbd,
    /// A vhost-user-blk backend: a socket that a virtual machine connects to, and no disk.
    #[serde(rename = "vhost_user")]
    VhostUser,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 6] = [Kind::Ublk, Kind::Loop, Kind::Dm, Kind::Fuse, Kind::Nbd, Kind::VhostUser];

    /// The word used on the command line and in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::Ublk => "ublk",
            Kind::Loop => "loop",
            Kind::Dm => "dm",
            Kind::Fuse => "fuse",
            Kind::Nbd => "nbd",
            Kind::VhostUser => "vhost-user",
        }
    }

    /// Whether becket serves its devices: a supervisor owns them, and a worker moves their bytes.
    pub const fn is_served(self) -> bool {
        match self {
            Kind::Ublk | Kind::Fuse | Kind::Nbd | Kind::VhostUser => true,
            Kind::Loop | Kind::Dm => false,
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
#[error("there is no transport called '{0}'; there are ublk, loop, dm, fuse, nbd and vhost-user")]
pub struct UnknownKind(pub String);

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        Kind::ALL.into_iter().find(|kind| kind.as_str() == word).ok_or_else(|| UnknownKind(word.to_owned()))
    }
}

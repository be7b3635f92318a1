//! Reads partition tables.
//! It never trusts a number that it read, and never reads more than a bounded amount.

use serde::{Deserialize, Serialize};

/// A partition that a table names; it lies within its image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// As the kernel counts: a GPT entry's place in the array, MBR 1 to 4, logical ones from 5 on.
    pub number: u32,
    /// First byte, counted from the start of the image.
    pub start: u64,
    /// Length in bytes, never 0.
    pub len: u64,
    /// The name in a GPT entry.
    pub label: Option<String>,
    /// GPT: the entry's own UUID; MBR: disk signature and number, as in `/dev/disk/by-partuuid`.
    pub uuid: Option<String>,
    /// GPT: the type's UUID; MBR: the type byte as `0x83`.
    pub type_: String,
}

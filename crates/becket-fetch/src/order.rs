//! What is said to a fetcher.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::access::Access;
use crate::store::Meta;

/// What a fetcher is to bring, and with which rights.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) meta: Meta,
    pub(crate) access: Access,
    /// The tag of this boot in the object's table.
    pub(crate) boot: [u8; 16],
    /// Note what is waited for.
    #[serde(default)]
    pub(crate) record: bool,
    /// Keep what comes in memory only.
    #[serde(default)]
    pub(crate) memory_only: bool,
    /// What will be waited for, in chunks and in this order.
    #[serde(default)]
    pub(crate) foreseen: Vec<Range<u64>>,
}

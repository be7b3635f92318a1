//! What is said to a fetcher.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::access::Access;
use crate::store::Meta;
use crate::unpack::Packing;

/// What a fetcher is to bring, and with which rights.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) meta: Meta,
    /// For what is fetched.
    #[serde(default)]
    pub(crate) access: Option<Access>,
    /// Stands for the rights that the user had and for all that was asked. Devices with the same have one
    /// fetcher; the supervisor reads nothing else of an order.
    #[serde(default)]
    pub(crate) sharing: String,
    /// For what is decoded.
    #[serde(default)]
    pub(crate) unpack: Option<Unpack>,
    /// The tag of this boot in the object's table.
    pub(crate) boot: [u8; 16],
    /// Note what is waited for.
    #[serde(default)]
    pub(crate) record: bool,
    /// Keep what comes in memory only.
    #[serde(default)]
    pub(crate) memory_only: bool,
    /// How many bytes of it the store may have.
    #[serde(default)]
    pub(crate) limit: Option<u64>,
    /// What will be waited for, in chunks and in this order.
    #[serde(default)]
    pub(crate) foreseen: Vec<Range<u64>>,
}

/// What is decoded.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Unpack {
    pub(crate) packing: Packing,
    /// What people know it by.
    pub(crate) called: String,
    /// The length of the compressed file in bytes.
    pub(crate) len: u64,
    /// How many bytes the store may keep of what it yields.
    pub(crate) limit: Option<u64>,
    pub(crate) from: PackedAt,
}

/// Where a compressed file is.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PackedAt {
    /// On this host, complete and in this state.
    File { state: String },
    /// In the store, where it is fetched.
    Object(Box<Order>),
}

//! A layer by its digest.

use serde::{Deserialize, Serialize};

/// A part of an image in a registry.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Blob {
    pub(super) digest: String,
    pub(super) size: u64,
}

/// Whether a text is a digest that becket can compare.
pub(super) fn is_digest(text: &str) -> bool {
    let digits = text.strip_prefix("sha256:").unwrap_or_default();
    digits.len() == 64 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

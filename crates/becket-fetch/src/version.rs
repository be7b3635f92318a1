//! Which version of an object bytes are of.

use serde::{Deserialize, Serialize};
use ureq::http::Response;

use crate::answer::{self, header};

/// What says which version of an object bytes are of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Version {
    /// A strong entity tag, with its quotes.
    Etag(String),
    /// `Last-Modified`, as the server writes it. Changes within one second are not seen.
    Modified(String),
    /// The digest of all bytes: `sha256:` and hexadecimal digits.
    Digest(String),
    /// What a compressed file yields: how it is packed, and its own version.
    Unpacked(String),
}

impl Version {
    /// The strongest that an answer has.
    pub(crate) fn of<T>(answer: &Response<T>) -> Option<Version> {
        let etag = header(answer, "etag").filter(|etag| answer::is_strong(etag));
        etag.map(|etag| Version::Etag(etag.to_owned()))
            .or_else(|| header(answer, "last-modified").map(|date| Version::Modified(date.to_owned())))
    }

    /// The condition that a request for this version has. What a digest names never changes.
    pub(crate) fn condition(&self) -> Option<(&'static str, &str)> {
        match self {
            Version::Etag(etag) => Some(("If-Match", etag)),
            Version::Modified(date) => Some(("If-Unmodified-Since", date)),
            Version::Digest(_) | Version::Unpacked(_) => None,
        }
    }

    /// Whether an answer is of this version.
    pub(crate) fn is_of<T>(&self, answer: &Response<T>) -> bool {
        match self {
            Version::Etag(etag) => header(answer, "etag") == Some(etag),
            Version::Modified(date) => header(answer, "last-modified") == Some(date),
            // The bytes are compared with it when all are there.
            Version::Digest(_) => true,
            // It is no server's.
            Version::Unpacked(_) => false,
        }
    }

    /// The line of the compressed file's version that this is decoded from, if it is.
    pub(crate) fn packed(&self) -> Option<String> {
        if let Version::Unpacked(of) = self { Some(of.split_once(' ')?.1.to_owned()) } else { None }
    }

    /// In one line that no other version has.
    pub(crate) fn line(&self) -> String {
        match self {
            Version::Etag(etag) => format!("etag {etag}"),
            Version::Modified(date) => format!("date {date}"),
            Version::Digest(digest) => format!("digest {digest}"),
            Version::Unpacked(of) => format!("unpacked {of}"),
        }
    }
}

/// What is known of an object after the first answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) version: Version,
    /// Length in bytes.
    pub(crate) size: u64,
}

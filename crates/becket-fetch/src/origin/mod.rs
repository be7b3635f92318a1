//! Kinds of origins: how a URL becomes a web address, and what requests for it carry.
//! No kind shows a secret, or has one sent to another server than that of its address.
//!
//! A new kind is a file and a line in each match of [`Rights`].

mod contract;
mod oci;
mod query;
mod s3;
mod web;

use std::ffi::OsStr;

use serde::{Deserialize, Serialize};

pub(crate) use self::contract::{Ask, Failed, Header, Origin, Short};
use crate::Error;
use crate::place::shown;

/// The start of a URL, and how its rights are looked up.
const KINDS: [(&str, OfUser); 4] = [
    ("http://", |url| Ok(Rights::Web(web::Web::of_user(url)))),
    ("https://", |url| Ok(Rights::Web(web::Web::of_user(url)))),
    ("s3://", |url| Ok(Rights::S3(s3::S3::of_user(url)?))),
    ("oci://", |url| Ok(Rights::Oci(oci::Oci::of_user(url)?))),
];

/// Looks up what a user may do at a URL; an error is a sentence.
type OfUser = fn(&str) -> Result<Rights, String>;

/// The kind of an origin with what its user may do there. It has secrets: nothing prints it.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Rights {
    Web(web::Web),
    S3(s3::S3),
    Oci(oci::Oci),
}

impl Rights {
    /// What this process's user has for a URL.
    pub(crate) fn of_user(url: &str) -> Result<Rights, Error> {
        let bad = |why: String| Error::Url { url: shown(url), why };
        let kind = KINDS.iter().find(|(start, _)| begins(url.as_bytes(), start));
        let (_, of_user) = kind.ok_or_else(|| bad("this kind of URL is not known".to_owned()))?;
        of_user(url).map_err(bad)
    }

    pub(crate) fn origin(&self) -> &dyn Origin {
        match self {
            Rights::Web(web) => web,
            Rights::S3(s3) => s3,
            Rights::Oci(oci) => oci,
        }
    }

    pub(crate) fn origin_mut(&mut self) -> &mut dyn Origin {
        match self {
            Rights::Web(web) => web,
            Rights::S3(s3) => s3,
            Rights::Oci(oci) => oci,
        }
    }
}

fn begins(word: &[u8], start: &str) -> bool {
    word.get(..start.len()).is_some_and(|word| word.eq_ignore_ascii_case(start.as_bytes()))
}

/// Whether a word of the command line names an object on another host.
pub fn is_remote(word: &OsStr) -> bool {
    KINDS.iter().any(|(start, _)| begins(word.as_encoded_bytes(), start))
}

/// What the user named, for people: a URL without its query, if that may be a signature.
pub fn named(word: &OsStr) -> String {
    if !is_remote(word) {
        return becket_image::shown(word.as_encoded_bytes());
    }
    let text = word.to_string_lossy();
    match text.split_once('#') {
        Some((url, inside)) => format!("{}#{}", shown(url), becket_image::shown(inside.as_bytes())),
        None => shown(&text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_urls_by_their_start_only() {
        for url in ["http://h/x", "HTTPS://h", "s3://bucket/key", "oci://h/name"] {
            assert!(is_remote(OsStr::new(url)), "{url}");
        }
        for other in ["disk.img", "https:", "/http://x", "ftp://x/y", "nbd://x", "s3:/x"] {
            assert!(!is_remote(OsStr::new(other)), "{other}");
        }
        assert_eq!(named(OsStr::new("http://h/x?sig=secret#p1")), "http://h/x?...#p1");
        assert_eq!(named(OsStr::new("oci://h/x?layer=a#p1")), "oci://h/x?layer=a#p1");
    }
}

//! Kinds of origins: how a URL becomes a web address, and what requests for it carry.
//! No kind shows a secret, or has one sent to another server than that of its address.
//!
//! A new kind is a file and a line in each match of [`Rights`].

mod oci;
mod query;
mod s3;
mod web;

use std::ffi::OsStr;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use ureq::http::HeaderMap;

use crate::Error;
use crate::place::{Parts, shown};
use crate::version::Known;

/// The start of a URL, and how its rights are looked up.
const KINDS: [(&str, OfUser); 4] = [
    ("http://", |url| Ok(Rights::Web(web::Web::of_user(url)))),
    ("https://", |url| Ok(Rights::Web(web::Web::of_user(url)))),
    ("s3://", |url| Ok(Rights::S3(s3::S3::of_user(url)?))),
    ("oci://", |url| Ok(Rights::Oci(oci::Oci::of_user(url)?))),
];

/// Looks up what a user may do at a URL; an error is a sentence.
type OfUser = fn(&str) -> Result<Rights, String>;

/// A header of a request.
pub(crate) type Header = (&'static str, String);

/// A short answer, whole.
#[derive(Debug)]
pub(crate) struct Short {
    pub(crate) status: u16,
    pub(crate) head: HeaderMap,
    pub(crate) body: Vec<u8>,
}

/// Asks a server, which need not be that of the object, for something short, with these headers and no
/// others. Redirects are not followed.
pub(crate) type Ask<'a> = &'a dyn Fn(&str, &[Header]) -> Result<Short, Error>;

/// What an origin does.
pub(crate) trait Origin {
    /// The web address of the object.
    fn address(&self) -> String;

    /// What a request for these bytes carries for the server of [`Origin::address`], which `address` is on.
    fn headers(&self, address: &str, range: &Range<u64>) -> Vec<Header>;

    /// Finds out where the object is, before it is asked for; what is known of it then.
    ///
    /// # Errors
    /// It cannot be found: a sentence, or what the server's answer means.
    fn find(&mut self, _ask: Ask<'_>) -> Result<Option<Known>, Failed> {
        Ok(None)
    }

    /// Learns from an answer that refuses how to ask better; false if there is nothing to learn.
    ///
    /// # Errors
    /// As for [`Origin::find`].
    fn learn(&mut self, _status: u16, _head: &HeaderMap, _ask: Ask<'_>) -> Result<bool, Failed> {
        Ok(false)
    }

    /// What the user can do if the server does not allow it.
    fn hint(&self) -> &'static str;
}

/// Why an origin cannot go on.
pub(crate) enum Failed {
    /// A sentence, and what the user can do.
    Because(String, Option<&'static str>),
    Error(Error),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed::Error(error)
    }
}

impl From<String> for Failed {
    fn from(why: String) -> Failed {
        Failed::Because(why, None)
    }
}

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

/// Whether a host is this one by its name or number, so that what is sent to it stays here.
fn is_loopback(parts: Parts<'_>) -> bool {
    let host = parts.host();
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
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

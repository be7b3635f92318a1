//! What every kind of origin is: it says where an object is, and what requests for it carry.

use std::ops::Range;

use ureq::http::HeaderMap;

use crate::Error;
use crate::place::Parts;
use crate::version::Known;

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
    fn hint(&self) -> String;

    /// What the user can do if the server has no such object.
    fn missing(&self) -> String;
}

/// Why an origin cannot go on.
pub(crate) enum Failed {
    /// A sentence, and what the user can do.
    Because(String, Option<String>),
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

/// Whether a host is this one by its name or number, so that what is sent to it stays here.
pub(super) fn is_loopback(parts: Parts<'_>) -> bool {
    let host = parts.host();
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

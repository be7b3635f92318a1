//! Asks a web server for a range of one version of an object, by as many requests as that takes.
//! It never takes a byte from an answer that may be of another version, and follows no redirect that leads
//! from https to http, or into this host's own network from outside.
//!
//! Followed: RFC 9110 (ranges, conditions, redirects, Retry-After). Each request names its version, and each
//! answer must repeat it. What a failed request has brought stays: the next one asks for the rest.

use std::io::{self, Read as _};
use std::net::{IpAddr, ToSocketAddrs as _};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use ureq::http::Response;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy};

use crate::answer::{self, ContentRange};
use crate::place::{Parts, redirected, shown};
use crate::{Error, access::Access};

/// How many redirects are followed.
const REDIRECTS: u32 = 10;
/// The longest head of an answer, in bytes.
const HEAD_MAX: usize = 32 << 10;
/// How long a connection, the head of an answer, and a read of its body may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long one body may take. A slower one is asked for again from where it ended.
const BODY_WITHIN: Duration = Duration::from_secs(60);
/// An attempt that brings less than this, in bytes, counts as none: a server may not drip.
const PROGRESS: u64 = 16 << 10;
/// The first and the longest wait between attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// How much is read at once.
const BUFFER: usize = 128 << 10;

/// What says which version of an object bytes are of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Version {
    /// A strong entity tag, with its quotes.
    Etag(String),
    /// `Last-Modified`, as the server writes it. Changes within one second are not seen.
    Modified(String),
}

impl Version {
    /// The strongest that an answer has.
    fn of(answer: &Response<Body>) -> Option<Version> {
        let etag = header(answer, "etag").filter(|etag| answer::is_strong(etag));
        etag.map(|etag| Version::Etag(etag.to_owned()))
            .or_else(|| header(answer, "last-modified").map(|date| Version::Modified(date.to_owned())))
    }

    /// The condition that a request for this version has.
    fn condition(&self) -> (&'static str, &str) {
        match self {
            Version::Etag(etag) => ("If-Match", etag),
            Version::Modified(date) => ("If-Unmodified-Since", date),
        }
    }

    /// Whether an answer is of this version.
    fn is_of(&self, answer: &Response<Body>) -> bool {
        match self {
            Version::Etag(etag) => header(answer, "etag") == Some(etag),
            Version::Modified(date) => header(answer, "last-modified") == Some(date),
        }
    }
}

fn header<'a>(answer: &'a Response<Body>, name: &str) -> Option<&'a str> {
    answer.headers().get(name)?.to_str().ok()
}

/// What is known of an object after the first answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) version: Version,
    /// Length in bytes.
    pub(crate) size: u64,
}

/// Takes the bytes of an answer in order.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(&[u8]) -> Result<(), Error>;

/// One object on one server.
#[derive(Debug)]
pub(crate) struct Client {
    agent: Agent,
    url: String,
    /// The `Authorization` for the host that the user named.
    authorization: Option<String>,
    /// Where the last redirect led.
    at: Mutex<Option<String>>,
    /// How long it is tried without any progress.
    patience: Duration,
}

/// Why one attempt brought no more.
enum Trouble {
    Fatal(Error),
    /// Trying again can help, after a pause that the server may have named.
    Again(String, Option<Duration>),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Fatal(error)
    }
}

impl Client {
    pub(crate) fn new(url: &str, access: &Access, patience: Duration) -> Result<Client, Error> {
        let mut tls = TlsConfig::builder()
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()));
        if let Some(authorities) = &access.authorities {
            let certificates = parse_pem(authorities.as_bytes()).filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            });
            tls = tls.root_certs(RootCerts::Specific(Arc::new(certificates.collect())));
        }
        let agent = Agent::config_builder()
            .tls_config(tls.build())
            .proxy(access.proxy.as_deref().and_then(|proxy| Proxy::new(proxy).ok()))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("becket/", env!("CARGO_PKG_VERSION")))
            // Bytes of the object are wanted, and not of a compressed form of it.
            .accept_encoding("identity")
            .max_response_header_size(HEAD_MAX)
            .timeout_resolve(Some(PATIENCE))
            .timeout_connect(Some(PATIENCE))
            .timeout_recv_response(Some(PATIENCE))
            .timeout_per_read(Some(PATIENCE))
            .timeout_recv_body(Some(BODY_WITHIN))
            .max_idle_connections_per_host(16)
            .build()
            .new_agent();
        let (authorization, at) = (access.authorization.clone(), Mutex::default());
        Ok(Client { agent, url: url.to_owned(), authorization, at, patience })
    }

    /// Learns what the object is and takes its first bytes, up to `len`, by one request.
    pub(crate) fn first(&self, len: u64, sink: Sink<'_>) -> Result<Known, Error> {
        let mut known = None;
        self.bring(0..len, &mut known, sink)?;
        known.ok_or_else(|| self.refused("it says nothing about the object".to_owned(), None))
    }

    /// Takes the bytes of a range, which must be within the object, in order.
    pub(crate) fn get(&self, range: Range<u64>, known: &Known, sink: Sink<'_>) -> Result<(), Error> {
        self.bring(range, &mut Some(known.clone()), sink)
    }

    /// The whole range, by as many attempts as that takes.
    fn bring(&self, range: Range<u64>, known: &mut Option<Known>, sink: Sink<'_>) -> Result<(), Error> {
        let (mut at, mut end) = (range.start, range.end);
        let (mut since, mut pause) = (Instant::now(), PAUSES.0);
        while at < end {
            let before = at;
            let tried = self.attempt(at..end, known, &mut |bytes| {
                sink(bytes)?;
                at += bytes.len() as u64;
                Ok(())
            });
            if let Some(known) = known {
                end = end.min(known.size);
            }
            if at - before >= PROGRESS || at == end {
                (since, pause) = (Instant::now(), PAUSES.0);
            }
            match tried {
                Ok(()) => {}
                Err(Trouble::Fatal(error)) => return Err(error),
                Err(Trouble::Again(why, asked)) => {
                    let wait = asked.unwrap_or(pause);
                    if since.elapsed() + wait > self.patience {
                        let seconds = since.elapsed().as_secs();
                        return Err(Error::Away { url: shown(&self.url), seconds, why });
                    }
                    std::thread::sleep(wait);
                    pause = (pause * 2).min(PAUSES.1);
                }
            }
        }
        Ok(())
    }

    /// One request and, where it is redirected, those that follow it.
    fn attempt(&self, range: Range<u64>, known: &mut Option<Known>, sink: Sink<'_>) -> Result<(), Trouble> {
        let remembered = || self.at.lock().unwrap_or_else(PoisonError::into_inner);
        let start = remembered().clone();
        let again = start.is_some();
        let mut url = start.unwrap_or_else(|| self.url.clone());
        for _ in 0..=REDIRECTS {
            let answer = self.ask(&url, &range, known.as_ref())?;
            let status = answer.status().as_u16();
            match status {
                301 | 302 | 303 | 307 | 308 => {
                    let Some(location) = header(&answer, "location") else {
                        return Err(self
                            .refused(format!("it answers {status} without a place"), None)
                            .into());
                    };
                    url = redirected(&url, location).map_err(|why| self.refused(why, None))?;
                    self.check_inward(&url)?;
                }
                206 => {
                    if url != self.url {
                        *remembered() = Some(url);
                    }
                    return self.take(answer, &range, known, sink);
                }
                // The place that it was redirected to may be one for a short time.
                400..=499 if again && !matches!(status, 412 | 416 | 429) => {
                    *remembered() = None;
                    return Err(Trouble::Again(format!("status {status}"), Some(PAUSES.0)));
                }
                _ => return Err(self.status(status, &answer, known.as_ref())),
            }
        }
        Err(self.refused(format!("it redirects more than {REDIRECTS} times"), None).into())
    }

    fn ask(&self, url: &str, range: &Range<u64>, known: Option<&Known>) -> Result<Response<Body>, Trouble> {
        let mut request = self.agent.get(url);
        let last = range.end.saturating_sub(1);
        request = request.header("Range", format!("bytes={}-{last}", range.start));
        if let Some(known) = known {
            let (name, value) = known.version.condition();
            request = request.header(name, value);
        }
        if let Some(authorization) = &self.authorization
            && Parts::of(url).is_same_server(Parts::of(&self.url))
        {
            request = request.header("Authorization", authorization);
        }
        request.call().map_err(|error| self.failed(error))
    }

    /// What a request that got no answer means.
    fn failed(&self, error: ureq::Error) -> Trouble {
        let certificate = |error: &(dyn std::error::Error + 'static)| {
            error.downcast_ref::<rustls::Error>().map(ToString::to_string)
        };
        let refused = |why| Trouble::Fatal(self.refused(why, None));
        match &error {
            ureq::Error::Io(io) => match io.get_ref().and_then(|inner| certificate(inner)) {
                Some(why) => refused(format!("TLS: {why}")),
                None => Trouble::Again(io.to_string(), None),
            },
            ureq::Error::Timeout(_)
            | ureq::Error::HostNotFound
            | ureq::Error::ConnectionFailed
            | ureq::Error::ConnectProxyFailed(_)
            | ureq::Error::BodyStalled => Trouble::Again(error.to_string(), None),
            ureq::Error::Rustls(why) => refused(format!("TLS: {why}")),
            ureq::Error::LargeResponseHeader(..) => {
                refused(format!("the head of its answer has more than {HEAD_MAX} bytes"))
            }
            _ => refused(format!("its answer is no HTTP: {error}")),
        }
    }

    /// What an answer without bytes of the object means.
    fn status(&self, status: u16, answer: &Response<Body>, known: Option<&Known>) -> Trouble {
        let refused = |why: String, fix| Trouble::Fatal(self.refused(why, fix));
        let changed =
            |why: &str| Trouble::Fatal(Error::Changed { url: shown(&self.url), why: why.to_owned() });
        match status {
            200 => refused(
                "the server sends the whole object when it is asked for a part".to_owned(),
                Some("download it, or use a server that serves ranges"),
            ),
            404 | 410 if known.is_some() => changed("it is not there any more"),
            404 | 410 => refused(format!("there is no such object (status {status})"), None),
            401 | 403 => refused(
                format!("the server does not allow it (status {status})"),
                Some("put name and password for the host into ~/.netrc"),
            ),
            407 => refused("the proxy asks for a password".to_owned(), None),
            412 => changed("the server has another version"),
            416 if known.is_some() => changed("it is shorter"),
            416 => match header(answer, "content-range").and_then(answer::content_range) {
                Some(ContentRange::Unsatisfied(0)) => refused("it is empty".to_owned(), None),
                _ => refused("the server serves no range of it (status 416)".to_owned(), None),
            },
            408 | 425 | 429 | 500 | 502 | 503 | 504 => {
                let asked = header(answer, "retry-after").and_then(answer::retry_after);
                Trouble::Again(format!("the server answers with status {status}"), asked)
            }
            _ => refused(format!("the server answers with status {status}"), None),
        }
    }

    /// Takes the body of an answer, once its head has said all that it must.
    fn take(
        &self,
        mut answer: Response<Body>,
        range: &Range<u64>,
        known: &mut Option<Known>,
        sink: Sink<'_>,
    ) -> Result<(), Trouble> {
        let refused = |why: &str| Trouble::Fatal(self.refused(why.to_owned(), None));
        let encoding = header(&answer, "content-encoding").unwrap_or("identity");
        if !encoding.eq_ignore_ascii_case("identity") {
            return Err(refused("the server compresses the object on the way, so its bytes have no places"));
        }
        let Some(ContentRange::Part(part, size)) =
            header(&answer, "content-range").and_then(answer::content_range)
        else {
            return Err(refused("the server does not say which bytes it sends"));
        };
        let object = match known {
            Some(object) => object.clone(),
            None => {
                let Some(version) = Version::of(&answer) else {
                    let why = "the server names neither an ETag nor a date, so a change would not be noticed";
                    return Err(self.refused(why.to_owned(), Some("download the image first")).into());
                };
                Known { version, size }
            }
        };
        if !object.version.is_of(&answer) || object.size != size {
            let why = "the server sends bytes of another version".to_owned();
            return Err(Error::Changed { url: shown(&self.url), why }.into());
        }
        if part.start != range.start || part.end > range.end {
            return Err(refused("the server sends other bytes than it was asked for"));
        }
        let wanted = part.end - part.start;
        if answer.body().content_length().is_some_and(|len| len != wanted) {
            return Err(refused("the server contradicts itself about the length of its answer"));
        }
        *known = Some(object);
        let mut body = answer.body_mut().as_reader();
        let mut buffer = vec![0; BUFFER.min(usize::try_from(wanted).unwrap_or(BUFFER))];
        let mut left = wanted;
        while left > 0 {
            let room = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            let room = buffer.get_mut(..room).unwrap_or_default();
            match body.read(room) {
                Ok(0) => return Err(Trouble::Again("the answer ends too early".to_owned(), None)),
                Ok(count) => {
                    sink(room.get(..count).unwrap_or_default())?;
                    left = left.saturating_sub(count as u64);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Trouble::Again(error.to_string(), None)),
            }
        }
        // The end must be seen before the connection is used again.
        match body.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(refused("the server sends more bytes than it was asked for")),
            Err(_) => Ok(()),
        }
    }

    /// Refuses to follow a redirect to this host or its links, unless the user named such a host.
    fn check_inward(&self, url: &str) -> Result<(), Error> {
        let (named, to) = (Parts::of(&self.url), Parts::of(url));
        if named.host().eq_ignore_ascii_case(to.host()) || addresses(named).iter().any(is_inward) {
            return Ok(());
        }
        match addresses(to).iter().any(is_inward) {
            true => Err(self.refused(format!("it redirects to {}, which is this host", shown(url)), None)),
            false => Ok(()),
        }
    }

    pub(crate) fn refused(&self, why: String, fix: Option<&'static str>) -> Error {
        Error::Refused { url: shown(&self.url), why, fix }
    }
}

/// The addresses of a host; none where it cannot be looked up, for then it cannot be reached either.
fn addresses(parts: Parts<'_>) -> Vec<IpAddr> {
    let found = (parts.host(), parts.port()).to_socket_addrs();
    found.map(|all| all.map(|address| address.ip().to_canonical()).collect()).unwrap_or_default()
}

/// Whether an address is one of this host, or of a link that it is on.
fn is_inward(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local() || v4.is_unspecified(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unicast_link_local() || v6.is_unspecified(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_host_are_known_in_all_their_forms() {
        for inward in
            ["127.0.0.1", "127.8.8.8", "0.0.0.0", "169.254.169.254", "::1", "fe80::1", "::ffff:127.0.0.1"]
        {
            let address: IpAddr = inward.parse().unwrap();
            assert!(is_inward(&address.to_canonical()), "{inward}");
        }
        for outward in ["192.0.2.1", "10.0.0.1", "2001:db8::1"] {
            assert!(!is_inward(&outward.parse().unwrap()), "{outward}");
        }
    }
}

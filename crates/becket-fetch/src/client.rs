//! Asks a web server for a range of one version of an object, by as many requests as that takes.
//! It never takes a byte from an answer that may be of another version, and follows no redirect that leads
//! from https to http, or into this host's own network from outside.
//!
//! Followed: RFC 9110 (ranges, conditions, redirects, Retry-After). Each request names its version, and each
//! answer must repeat it. What a failed request has brought stays: the next one asks for the rest.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustls::{CertificateError::UnknownIssuer, Error::InvalidCertificate};
use ureq::http::Response;
use ureq::{Body, BodyReader, ResponseExt as _};

use crate::Error;
use crate::access::Access;
use crate::agents::{Agents, HEAD_MAX};
use crate::answer::{self, ContentRange, header, is_busy};
use crate::inward::{Inward, led};
use crate::origin::{Failed, Header, Rights, Short};
use crate::pace::Pace;
use crate::place::{Parts, redirected, shown};
use crate::proxies::Named;
use crate::steady::{DRIPS, PROGRESS, Steady};
use crate::version::{Known, Version};
use crate::waits::{PAUSE, Trouble, Waiting, Waits};

/// How many redirects are followed.
const REDIRECTS: u32 = 10;
/// How long a connection, the head of an answer, and a read of its body may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long one body may take. A slower one is asked for again from where it ended.
const BODY_WITHIN: Duration = Duration::from_secs(60);
/// How often one request learns from an answer how to ask better.
const TRIES: u32 = 2;
/// The longest answer to a question about an object, in bytes.
const SHORT_MAX: u64 = 4 << 20;
/// How much is read at once.
const BUFFER: usize = 128 << 10;

/// The least that an answer is waited for.
const LEAST: Duration = Duration::from_millis(100);

/// What helps where nobody knows who has signed a certificate.
const AUTHORITY: &str =
    "if you trust its authority, name the file of that one's certificate by $SSL_CERT_FILE";

/// Takes the bytes of an answer in order.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(&[u8]) -> Result<(), Error>;

/// One object on one server.
#[derive(Debug)]
pub(crate) struct Client {
    agents: Agents,
    url: String,
    /// A digest of the rights and ways as they were at first.
    rights: String,
    access: Box<Mutex<Access>>,
    /// How often something was learned about how to ask.
    lessons: AtomicU64,
    /// Where the last redirect led.
    at: Mutex<Option<String>>,
    /// How long it is tried without any progress.
    patience: Duration,
    /// How long one request may go without any.
    limit: Duration,
    pace: Pace,
    /// Hears of long waits.
    pub(crate) waiting: Option<Waiting>,
}

impl Client {
    /// `patience` is how long it is tried without any progress, and `limit` how long one request goes on
    /// without.
    pub(crate) fn new(
        url: &str,
        access: &Access,
        patience: Duration,
        limit: Duration,
    ) -> Result<Client, Error> {
        let agents = Agents::new(access, PATIENCE.min(limit), BODY_WITHIN);
        let rights = access.digest();
        let (access, at) = (Box::new(Mutex::new(access.clone())), Mutex::default());
        Ok(Client {
            agents,
            url: url.to_owned(),
            rights,
            access,
            lessons: AtomicU64::new(0),
            at,
            patience,
            limit,
            pace: Pace::default(),
            waiting: None,
        })
    }

    /// The rights, with what was learned, for another process that goes on with it.
    pub(crate) fn access(&self) -> Access {
        lock(&self.access).clone()
    }

    /// What stands for the user's rights and ways, before anything was learned.
    pub(crate) fn rights(&self) -> &str {
        &self.rights
    }

    /// The object's web address.
    fn address(&self) -> String {
        lock(&self.access).rights.origin().address()
    }

    /// Learns what the object is and takes its first bytes, up to `len`, by one request.
    pub(crate) fn first(&self, len: u64, sink: Sink<'_>) -> Result<Known, Error> {
        let found = self.with_rights(|rights, ask| rights.origin_mut().find(ask));
        let mut known = found.map_err(|failed| self.explain(failed))?;
        let len = known.as_ref().map_or(len, |known| known.size.min(len));
        if len == 0 {
            return Err(self.refused("it is empty".to_owned(), None));
        }
        self.bring(0..len, &mut known, sink)?;
        known.ok_or_else(|| self.refused("it says nothing about the object".to_owned(), None))
    }

    /// Takes the bytes of a range, which must be within the object, in order.
    pub(crate) fn get(&self, range: Range<u64>, known: &Known, sink: Sink<'_>) -> Result<(), Error> {
        self.bring(range, &mut Some(known.clone()), sink)
    }

    fn waits(&self) -> Waits<'_> {
        Waits::new(&self.url, self.limit, self.patience, self.waiting.as_ref())
    }

    /// The whole range, by as many attempts as that takes.
    fn bring(&self, range: Range<u64>, known: &mut Option<Known>, sink: Sink<'_>) -> Result<(), Error> {
        let (mut at, mut end) = (range.start, range.end);
        let mut waits = self.waits();
        while at < end {
            let before = at;
            let mut mark = at;
            let until = waits.until();
            let tried = self.attempt(at..end, known, until, &mut |bytes| {
                sink(bytes)?;
                at += bytes.len() as u64;
                if at - mark >= PROGRESS {
                    (mark, waits) = (at, self.waits());
                }
                Ok(())
            });
            if let Some(known) = known {
                end = end.min(known.size);
            }
            // Nor may a server drip by short answers.
            let little = at < end && at - before < PROGRESS;
            let drips = || Trouble::Again(DRIPS.to_owned(), None);
            if let Err(trouble) = tried.and_then(|()| if little { Err(drips()) } else { Ok(()) }) {
                waits.bear(trouble)?;
            }
        }
        Ok(())
    }

    /// Something short of any server, for what an origin must know.
    fn short(&self, url: &str, headers: &[Header], inward: &str) -> Result<Short, Error> {
        self.check_inward(inward, url)?;
        let once = |until| {
            let mut answer = self.call(url, headers, until).map_err(|error| self.failed(url, error))?;
            let status = answer.status().as_u16();
            if is_busy(status) {
                return Err(self.status(status, &answer, None));
            }
            let mut body = Vec::new();
            let read = self.steady(&mut answer).take(SHORT_MAX + 1).read_to_end(&mut body);
            read.map_err(|error| Trouble::Again(broken(&error), None))?;
            if body.len() as u64 > SHORT_MAX {
                return Err(self.refused("the server answers with too much".to_owned(), None).into());
            }
            Ok(Short { status, head: answer.headers().clone(), body })
        };
        let mut waits = self.waits();
        loop {
            match once(waits.until()) {
                Ok(short) => return Ok(short),
                Err(trouble) => waits.bear(trouble)?,
            }
        }
    }

    fn with_rights<T>(
        &self,
        work: impl FnOnce(&mut Rights, crate::origin::Ask<'_>) -> Result<T, Failed>,
    ) -> Result<T, Failed> {
        let mut access = lock(&self.access);
        let address = access.rights.origin().address();
        work(&mut access.rights, &|url, headers| self.short(url, headers, &address))
    }

    fn explain(&self, failed: Failed) -> Error {
        match failed {
            Failed::Because(why, fix) => self.refused(why, fix),
            Failed::Error(error) => error,
        }
    }

    /// Whether an answer says how to ask better than when `lessons` had been learned.
    fn learn(&self, status: u16, answer: &Response<Body>, lessons: u64) -> Result<bool, Trouble> {
        let learned = self.with_rights(|rights, ask| {
            // Another thread was faster.
            if self.lessons.load(Ordering::Relaxed) != lessons {
                return Ok(true);
            }
            let learned = rights.origin_mut().learn(status, answer.headers(), ask)?;
            self.lessons.fetch_add(u64::from(learned), Ordering::Relaxed);
            Ok(learned)
        });
        learned.map_err(|failed| self.explain(failed).into())
    }

    /// One request and, where it is redirected, those that follow it.
    fn attempt(
        &self,
        range: Range<u64>,
        known: &mut Option<Known>,
        until: Option<Instant>,
        sink: Sink<'_>,
    ) -> Result<(), Trouble> {
        let remembered = || lock(&self.at);
        let start = remembered().clone();
        let again = start.is_some();
        let mut address = self.address();
        let mut url = start.unwrap_or_else(|| address.clone());
        let mut tries = 0;
        for _ in 0..=REDIRECTS {
            let lessons = self.lessons.load(Ordering::Relaxed);
            let answer = self.ask(&url, &address, &range, known.as_ref(), until)?;
            let status = answer.status().as_u16();
            let ours = Parts::of(&url).is_same_server(Parts::of(&address));
            if status >= 300 && ours && tries < TRIES && self.learn(status, &answer, lessons)? {
                tries += 1;
                address = self.address();
                url.clone_from(&address);
                continue;
            }
            match status {
                301 | 302 | 303 | 307 | 308 => {
                    let Some(location) = header(&answer, "location") else {
                        return Err(self
                            .refused(format!("it answers {status} without a place"), None)
                            .into());
                    };
                    url = redirected(&url, location).map_err(|why| self.refused(why, None))?;
                    self.check_inward(&address, &url)?;
                }
                206 => {
                    if url != address {
                        *remembered() = Some(url);
                    }
                    return self.take(answer, &range, known, sink);
                }
                // The place that it was redirected to may be one for a short time.
                400..=499 if again && !matches!(status, 412 | 416 | 429) => {
                    *remembered() = None;
                    return Err(Trouble::Again(format!("status {status}"), Some(PAUSE)));
                }
                _ => return Err(self.status(status, &answer, known.as_ref())),
            }
        }
        Err(self.refused(format!("it redirects more than {REDIRECTS} times"), None).into())
    }

    fn ask(
        &self,
        url: &str,
        address: &str,
        range: &Range<u64>,
        known: Option<&Known>,
        until: Option<Instant>,
    ) -> Result<Response<Body>, Trouble> {
        let last = range.end.saturating_sub(1);
        let mut headers = vec![("Range", format!("bytes={}-{last}", range.start))];
        if let Some((name, value)) = known.and_then(|known| known.version.condition()) {
            headers.push((name, value.to_owned()));
        }
        // Secrets are for the server of the address.
        if Parts::of(url).is_same_server(Parts::of(address)) {
            headers.extend(lock(&self.access).rights.origin().headers(url, range));
        }
        self.call(url, &headers, until).map_err(|error| self.failed(url, error))
    }

    /// Sends a request, and sends it again over another connection if the answer is late. It is not waited
    /// for any longer than `until`, nor for its body where that is soon.
    fn call(
        &self,
        url: &str,
        headers: &[Header],
        until: Option<Instant>,
    ) -> Result<Response<Body>, ureq::Error> {
        let began = Instant::now();
        let mut tries = 0;
        loop {
            let left = until.map_or(PATIENCE * 3, |until| until.saturating_duration_since(Instant::now()));
            let left = left.max(LEAST);
            // The last try has to get some of the time.
            let late = self.pace.late(tries).filter(|late| began.elapsed() + *late < PATIENCE);
            let late = late.filter(|late| *late < left * 3 / 4);
            let within = late.or((left < PATIENCE).then_some(left));
            let request = self.agents.of(url)?.get(url);
            let request = headers.iter().fold(request, |all, (name, value)| all.header(*name, value));
            let asked = Instant::now();
            let answer = match within {
                // ureq prepares TLS anew for a request with a limit of its own. All of it has to end when the
                // time is over: what has come by then stays, and the rest is asked for again.
                Some(within) => {
                    let all = (left < PATIENCE).then_some(left + LEAST);
                    let config = request.config().timeout_recv_response(Some(within)).timeout_global(all);
                    config.build().call()
                }
                None => request.call(),
            };
            let is_late = matches!(answer, Err(ureq::Error::Timeout(ureq::Timeout::RecvResponse)));
            if answer.is_ok() || is_late {
                self.pace.took(asked.elapsed());
            }
            if !is_late || late.is_none() {
                return answer;
            }
            tries += 1;
        }
    }

    /// What a request for this address that got no answer means.
    fn failed(&self, url: &str, error: ureq::Error) -> Trouble {
        let refused = |why| Trouble::Fatal(self.refused(why, None));
        let tls = |why: &rustls::Error| {
            let unknown = matches!(why, InvalidCertificate(UnknownIssuer));
            Trouble::Fatal(self.refused(format!("TLS: {why}"), unknown.then(|| AUTHORITY.to_owned())))
        };
        let proxy = self.agents.proxy(url);
        let again = |why: String| match &proxy {
            Some(Named { place, variable }) => {
                Trouble::Again(format!("{why} (by the proxy {place} that ${variable} names)"), None)
            }
            None => Trouble::Again(why, None),
        };
        match &error {
            ureq::Error::ConnectProxyFailed(why) if why.contains("responded 407") => {
                refused(self.no_password(url))
            }
            ureq::Error::ConnectProxyFailed(why) if why.contains("responded 4") => {
                refused(format!("no way to it: the {why}"))
            }
            ureq::Error::Io(io) => match io.get_ref().and_then(|inner| inner.downcast_ref()) {
                Some(why) => tls(why),
                None => again(plainly(&error)),
            },
            ureq::Error::Timeout(_)
            | ureq::Error::HostNotFound
            | ureq::Error::ConnectionFailed
            | ureq::Error::ConnectProxyFailed(_)
            | ureq::Error::BodyStalled => again(plainly(&error)),
            ureq::Error::Rustls(why) => tls(why),
            ureq::Error::InvalidProxyUrl => {
                let variable = proxy.as_ref().map_or("", |proxy| proxy.variable.as_str());
                refused(format!(
                    "its proxy is none that becket can use: write http://HOST:PORT into ${variable}"
                ))
            }
            ureq::Error::LargeResponseHeader(..) => {
                refused(format!("the head of its answer has more than {HEAD_MAX} bytes"))
            }
            _ => refused(format!("its answer is not HTTP: {error}")),
        }
    }

    /// What an answer without bytes of the object means.
    fn status(&self, status: u16, answer: &Response<Body>, known: Option<&Known>) -> Trouble {
        let refused = |why: String, fix| Trouble::Fatal(self.refused(why, fix));
        let changed =
            |why: &str| Trouble::Fatal(Error::Changed { url: shown(&self.url), why: why.to_owned() });
        let answered = answer.get_uri().to_string();
        let forwarded = self.agents.is_forwarded(&answered);
        let who = if forwarded { "the server, or the proxy on the way to it," } else { "the server" };
        match status {
            // An empty object has no ranges, and some servers send all of it.
            200 if header(answer, "content-length") == Some("0") => refused("it is empty".to_owned(), None),
            200 => refused(
                "the server sends the whole object when it is asked for a part".to_owned(),
                Some("download it, or use a server that serves ranges".to_owned()),
            ),
            404 | 410 if known.is_some() => changed("it is not there any more"),
            404 | 410 => refused(
                format!("there is no such object (status {status})"),
                Some(lock(&self.access).rights.origin().missing()),
            ),
            401 | 403 => refused(
                format!("{who} does not allow it (status {status})"),
                // A proxy that wants a password says so by another status.
                (status == 401 || !forwarded).then(|| self.not_allowed(&answered)),
            ),
            407 => refused(self.no_password(&answered), None),
            412 => changed("the server has another version"),
            416 if known.is_some() => changed("it is shorter"),
            416 => match header(answer, "content-range").and_then(answer::content_range) {
                Some(ContentRange::Unsatisfied(0)) => refused("it is empty".to_owned(), None),
                _ => refused("the server serves no range of it (status 416)".to_owned(), None),
            },
            busy if is_busy(busy) => {
                let asked = header(answer, "retry-after");
                let asked = asked.and_then(|asked| answer::retry_after(asked, SystemTime::now()));
                Trouble::Again(format!("{who} answers with status {status}"), asked)
            }
            _ => refused(format!("{who} answers with status {status}"), None),
        }
    }

    /// What a proxy wants that got no password, or a wrong one.
    fn no_password(&self, url: &str) -> String {
        match self.agents.proxy(url) {
            Some(Named { place, variable }) => {
                format!("the proxy asks for a password: write http://NAME:PASSWORD@{place} into ${variable}")
            }
            None => "the server asks for the password of a proxy, and none is on the way".to_owned(),
        }
    }

    /// What the user can do if what answers for this URL does not allow it.
    fn not_allowed(&self, answered: &str) -> String {
        let access = lock(&self.access);
        let origin = access.rights.origin();
        let (address, other) = (origin.address(), Parts::of(answered));
        if other.is_same_server(Parts::of(&address)) {
            return origin.hint();
        }
        let place = shown(&format!("{}://{}", other.scheme, other.authority));
        format!(
            "it redirects to {place}, and passwords, tokens and keys are sent to the server of the URL \
             alone: if that other one wants any, name its own URL"
        )
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
                    let names = match header(&answer, "etag") {
                        Some(_) => {
                            "no date, and its ETag is none that says which bytes it is of (a weak one)"
                        }
                        None => "neither an ETag nor a date",
                    };
                    let why = format!("the server names {names}, so a change would not be noticed");
                    return Err(self.refused(why, Some("download the image first".to_owned())).into());
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
        let len = answer.body().content_length();
        if len.is_some_and(|len| len != wanted) {
            return Err(refused("the server contradicts itself about the length of its answer"));
        }
        *known = Some(object);
        let mut body = self.steady(&mut answer);
        if len.is_some() {
            return self.take_body(&mut body, wanted, sink);
        }
        // Only its end shows whether it has the bytes that its head says, and no others.
        let mut held = Vec::new();
        let taken = self.take_body(&mut body, wanted, &mut |bytes| {
            held.extend_from_slice(bytes);
            Ok(())
        });
        if !matches!(taken, Err(Trouble::Fatal(_))) {
            sink(&held)?;
        }
        taken
    }

    /// Takes a body that should have so many bytes.
    fn take_body(&self, body: &mut impl Read, wanted: u64, sink: Sink<'_>) -> Result<(), Trouble> {
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
                Err(error) => return Err(Trouble::Again(broken(&error), None)),
            }
        }
        // The end must be seen before the connection is used again.
        match body.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => {
                let why = "the server sends more bytes than it was asked for".to_owned();
                Err(self.refused(why, None).into())
            }
            Err(_) => Ok(()),
        }
    }

    fn steady<'a>(&self, answer: &'a mut Response<Body>) -> Steady<BodyReader<'a>> {
        Steady::new(answer.body_mut().as_reader(), BODY_WITHIN.min(self.limit))
    }

    /// Refuses to follow a redirect to this host or its links from a host that is not there.
    fn check_inward(&self, address: &str, url: &str) -> Result<(), Error> {
        let what = match led(Parts::of(address), Parts::of(url)) {
            Some(Inward::Host) => "this host",
            Some(Inward::Link) => "a link of this host",
            None => return Ok(()),
        };
        Err(self.refused(format!("it redirects to {}, which is {what}", shown(url)), None))
    }

    pub(crate) fn refused(&self, why: String, fix: Option<String>) -> Error {
        Error::Refused { url: shown(&self.url), why, fix }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why there was no answer, in words.
fn plainly(error: &ureq::Error) -> String {
    let why = match error {
        ureq::Error::Timeout(ureq::Timeout::Resolve | ureq::Timeout::Connect) => "it is not reached in time",
        ureq::Error::Timeout(_) => "it does not answer in time",
        ureq::Error::HostNotFound => "nobody knows its name",
        ureq::Error::ConnectionFailed => "it takes no connection",
        ureq::Error::BodyStalled => "its answer stands still",
        ureq::Error::Io(error) => return broken(error),
        error => return error.to_string(),
    };
    why.to_owned()
}

/// Why a connection broke.
fn broken(error: &io::Error) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<ureq::Error>()) {
        Some(error @ (ureq::Error::Timeout(_) | ureq::Error::BodyStalled)) => plainly(error),
        _ if error.kind() == io::ErrorKind::UnexpectedEof => "it ended the connection".to_owned(),
        _ => error.to_string(),
    }
}

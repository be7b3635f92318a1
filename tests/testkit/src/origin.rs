//! A web server on the loopback address that serves one object by ranges, and misbehaves as a test says.
//! It never answers a connection from another host.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// A request, as it came.
#[derive(Clone, Debug)]
pub struct Request {
    /// The path with its query.
    pub path: String,
    /// Lower-case names, and values.
    pub headers: Vec<(String, String)>,
    /// How many came before it.
    pub number: u64,
}

impl Request {
    /// The value of a header.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The first and last byte that it asks for.
    #[must_use]
    pub fn range(&self) -> Option<(u64, u64)> {
        let (first, last) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    }
}

/// An answer that is to be sent.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// The status.
    pub status: u16,
    /// All headers but `Content-Length`, which is the body's unless it is among them.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
    /// Close the connection after so many bytes of the body.
    pub cut: Option<usize>,
    /// Begin after this time.
    pub late: Option<Duration>,
    /// Send single bytes, with this pause between them.
    pub drip: Option<Duration>,
}

impl Reply {
    /// An answer without a body.
    #[must_use]
    pub fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    /// The same with a header, which takes the place of one of that name.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self = self.without(name);
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The same without a header.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
        self
    }
}

type Trick = Box<dyn Fn(&Request, Reply) -> Reply + Send>;

struct State {
    body: Arc<Vec<u8>>,
    etag: String,
    trick: Option<Trick>,
    latency: Duration,
    log: Vec<Request>,
}

/// The server; it ends with this value.
pub struct Origin {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    ends: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
}

impl Origin {
    /// Serves `body` under every path.
    #[must_use]
    pub fn start(body: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port on the loopback address");
        let address = listener.local_addr().expect("a bound socket has an address");
        let (body, etag) = (Arc::new(body), "\"one\"".to_owned());
        let state = State { body, etag, trick: None, latency: Duration::ZERO, log: Vec::new() };
        let (state, ends) = (Arc::new(Mutex::new(state)), Arc::new(AtomicBool::new(false)));
        let sent = Arc::new(AtomicU64::new(0));
        let (served, stop, count) = (Arc::clone(&state), Arc::clone(&ends), Arc::clone(&sent));
        thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Acquire) {
                    break;
                }
                let (Ok(stream), state, count) = (stream, Arc::clone(&served), Arc::clone(&count)) else {
                    continue;
                };
                // A client that goes away is not a failure of the server.
                thread::spawn(move || drop(serve(&stream, &state, &count)));
            }
        });
        Self { address, state, ends, sent }
    }

    /// The URL of a path, which begins with a slash.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves another object from now on.
    pub fn replace(&self, body: Vec<u8>, etag: &str) {
        let mut state = self.state();
        (state.body, state.etag) = (Arc::new(body), etag.to_owned());
    }

    /// Changes every answer from now on.
    pub fn trick(&self, trick: impl Fn(&Request, Reply) -> Reply + Send + 'static) {
        self.state().trick = Some(Box::new(trick));
    }

    /// Answers as it should from now on.
    pub fn honest(&self) {
        self.state().trick = None;
    }

    /// Waits before each answer.
    pub fn latency(&self, latency: Duration) {
        self.state().latency = latency;
    }

    /// The requests so far.
    #[must_use]
    pub fn log(&self) -> Vec<Request> {
        self.state().log.clone()
    }

    /// How many bytes of bodies were sent so far. An answer that its client has given up before it begins is
    /// not sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        // It waits for a connection.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(stream: &TcpStream, state: &Mutex<State>, sent: &AtomicU64) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut input = BufReader::new(stream);
    while let Some(request) = read(&mut input, state)? {
        let (reply, latency) = {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            state.log.push(request.clone());
            let good = honest(&state, &request);
            let reply =
                state.trick.as_ref().map_or_else(|| good.clone(), |trick| trick(&request, good.clone()));
            (reply, state.latency)
        };
        thread::sleep(latency + reply.late.unwrap_or_default());
        if has_left(stream)? || !send(stream, &reply, sent)? {
            break;
        }
    }
    Ok(())
}

fn read(input: &mut BufReader<&TcpStream>, state: &Mutex<State>) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if input.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let path = line.split_whitespace().nth(1).unwrap_or_default().to_owned();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        input.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let number = state.lock().unwrap_or_else(PoisonError::into_inner).log.len() as u64;
    Ok(Some(Request { path, headers, number }))
}

/// What a good server answers.
fn honest(state: &State, request: &Request) -> Reply {
    let size = state.body.len() as u64;
    let reply = |status| Reply::status(status).with("ETag", &state.etag);
    if request.header("if-match").is_some_and(|wanted| wanted != state.etag) {
        return Reply::status(412);
    }
    let Some((first, last)) = request.range() else {
        return Reply { body: state.body.to_vec(), ..reply(200) };
    };
    if first >= size {
        return reply(416).with("Content-Range", &format!("bytes */{size}"));
    }
    let last = last.min(size - 1);
    let body = usize::try_from(first).ok().zip(usize::try_from(last).ok());
    let body = body.map(|(first, last)| state.body[first..=last].to_vec()).unwrap_or_default();
    Reply { body, ..reply(206).with("Content-Range", &format!("bytes {first}-{last}/{size}")) }
}

/// Whether the client has closed the connection.
fn has_left(stream: &TcpStream) -> io::Result<bool> {
    stream.set_nonblocking(true)?;
    let left = matches!(stream.peek(&mut [0]), Ok(0));
    stream.set_nonblocking(false)?;
    Ok(left)
}

/// Sends an answer; whether the connection goes on.
fn send(mut stream: &TcpStream, reply: &Reply, sent: &AtomicU64) -> io::Result<bool> {
    let mut head = format!("HTTP/1.1 {} x\r\n", reply.status);
    let chunked = reply.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("transfer-encoding"));
    if !chunked && !reply.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-length")) {
        head += &format!("Content-Length: {}\r\n", reply.body.len());
    }
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    let body = &reply.body[..reply.cut.unwrap_or(reply.body.len()).min(reply.body.len())];
    sent.fetch_add(body.len() as u64, Ordering::Relaxed);
    match reply.drip {
        Some(pause) => {
            for byte in body {
                stream.write_all(&[*byte])?;
                thread::sleep(pause);
            }
        }
        None if chunked => {
            stream.write_all(format!("{:x}\r\n", body.len()).as_bytes())?;
            stream.write_all(body)?;
            stream.write_all(b"\r\n0\r\n\r\n")?;
        }
        None => stream.write_all(body)?,
    }
    Ok(reply.cut.is_none())
}

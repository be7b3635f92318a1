//! A proxy on the loopback address, as those at the border of a company's network: it forwards requests for
//! http, tunnels to the port of https only, and may want a password.
//! It connects to the loopback address only, whatever name it is asked for.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

/// The longest head of a request, in bytes.
const HEAD: u64 = 64 << 10;

/// See the module.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Where requests and tunnels lead.
    http: u16,
    https: u16,
    /// The value of `Proxy-Authorization` that it wants.
    wanted: Option<String>,
    log: Mutex<Vec<String>>,
    ends: AtomicBool,
}

impl Proxy {
    /// One by which http leads to one port of this host, and tunnels to another. With `wanted`, that is what
    /// `Proxy-Authorization` must say.
    ///
    /// # Panics
    /// There is no port.
    #[must_use]
    #[allow(clippy::unwrap_used, reason = "a failed step fails the test")]
    pub fn start(http: u16, https: u16, wanted: Option<&str>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let wanted = wanted.map(str::to_owned);
        let (log, ends) = (Mutex::default(), AtomicBool::new(false));
        let shared = Arc::new(Shared { http, https, wanted, log, ends });
        let ours = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming() {
                if ours.ends.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(client), shared) = (client, Arc::clone(&ours)) else { continue };
                // One that breaks off is the client's business.
                thread::spawn(move || shared.serve(client));
            }
        });
        Self { address, shared }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The first line of each request that it has let through.
    #[must_use]
    pub fn log(&self) -> Vec<String> {
        self.shared.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn serve(&self, client: TcpStream) -> io::Result<()> {
        let mut reader = BufReader::new(client.try_clone()?);
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let before = head.len();
            reader.by_ref().take(HEAD).read_until(b'\n', &mut head)?;
            if head.len() == before || head.len() as u64 > HEAD {
                return Ok(());
            }
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let (first, rest) = head.split_once("\r\n").unwrap_or((&head, ""));
        let refuse = |status: &str| {
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            (&client).write_all(answer.as_bytes())
        };
        let said = rest.lines().filter_map(|line| line.split_once(": "));
        let said = said.filter(|(name, _)| name.eq_ignore_ascii_case("proxy-authorization"));
        if let Some(wanted) = &self.wanted
            && !said.map(|(_, value)| value).any(|value| value == wanted)
        {
            return refuse("407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=\"test\"");
        }
        let mut words = first.split(' ');
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (port, passed) = match method {
            // As proxies are set up: no tunnels to anything but https.
            "CONNECT" if target.ends_with(":443") => (self.https, String::new()),
            "CONNECT" => return refuse("403 Forbidden"),
            _ => {
                let Some((_, path)) = target.strip_prefix("http://").and_then(|rest| rest.split_once('/'))
                else {
                    return refuse("400 Bad Request");
                };
                let lines = rest.lines().filter(|line| !line.to_ascii_lowercase().starts_with("proxy-"));
                let kept: String = lines.map(|line| format!("{line}\r\n")).collect();
                // One request for each connection.
                (self.http, format!("{method} /{path} HTTP/1.1\r\nConnection: close\r\n{kept}"))
            }
        };
        self.log.lock().unwrap_or_else(PoisonError::into_inner).push(first.to_owned());
        let server = TcpStream::connect(("127.0.0.1", port))?;
        match method {
            "CONNECT" => (&client).write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")?,
            _ => (&server).write_all(passed.as_bytes())?,
        }
        let (mut up, mut back) = (server.try_clone()?, client.try_clone()?);
        thread::spawn(move || {
            let _ = io::copy(&mut reader, &mut up);
            let _ = up.shutdown(Shutdown::Write);
        });
        io::copy(&mut &server, &mut back)?;
        client.shutdown(Shutdown::Both)
    }
}

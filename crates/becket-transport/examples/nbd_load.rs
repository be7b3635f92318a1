//! A client for benchmarks of NBD servers: reads by simple replies, with many requests in one system call, so
//! that the server is what is measured.
//! Usage: `nbd_load SOCKET EXPORT [--seconds N] [--depth N] [--len BYTES] [--sequential]`. It prints one line
//! of JSON, and never writes to the export.
#![allow(clippy::print_stdout, reason = "that is its result")]

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use becket_uapi::nbd as uapi;

fn wrong(what: &str) -> io::Error {
    io::Error::other(what.to_owned())
}

/// What is asked of the server.
struct Load {
    len: usize,
    depth: u64,
    sequential: bool,
    /// Requests that the export has room for.
    places: u64,
    /// State of a generator of places (xorshift).
    random: u64,
    asked: u64,
}

impl Load {
    fn next(&mut self, requests: &mut Vec<u8>) -> io::Result<()> {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let place = if self.sequential { self.asked } else { self.random } % self.places;
        let request = uapi::Request {
            command: uapi::CMD_READ,
            cookie: self.asked,
            offset: place * self.len as u64,
            len: self.len as u64,
            flags: 0,
        };
        let mut head = [0; uapi::Request::SIZE];
        request.write(&mut head, false).ok_or_else(|| wrong("the request is too long"))?;
        requests.extend_from_slice(&head);
        self.asked += 1;
        Ok(())
    }
}

/// Chooses the export; returns its size.
fn connect(socket: &mut UnixStream, export: &str) -> io::Result<u64> {
    let mut greeting = [0; 18];
    socket.read_exact(&mut greeting)?;
    let mut words = 3u32.to_be_bytes().to_vec();
    words.extend(uapi::OPTION_MAGIC.to_be_bytes());
    words.extend(uapi::OPT_EXPORT_NAME.to_be_bytes());
    words.extend((export.len() as u32).to_be_bytes());
    words.extend(export.as_bytes());
    socket.write_all(&words)?;
    let mut answer = [0; 10];
    socket.read_exact(&mut answer)?;
    uapi::u64_at(&answer, 0).ok_or_else(|| wrong("no size"))
}

fn main() -> io::Result<()> {
    let mut words = std::env::args().skip(1);
    let (Some(path), Some(export)) = (words.next(), words.next()) else {
        return Err(wrong("usage: nbd_load SOCKET EXPORT [OPTION...]"));
    };
    let mut seconds = 2;
    let (mut len, mut depth, mut sequential) = (4096usize, 64u64, false);
    while let Some(word) = words.next() {
        let mut number =
            || words.next().and_then(|number| number.parse().ok()).ok_or_else(|| wrong("no number"));
        match word.as_str() {
            "--seconds" => seconds = number()?,
            "--depth" => depth = number()?,
            "--len" => len = number()? as usize,
            "--sequential" => sequential = true,
            _ => return Err(wrong("an unknown option")),
        }
    }
    let mut socket = UnixStream::connect(path)?;
    let places = (connect(&mut socket, &export)? / len as u64).max(1);
    let mut load = Load { len, depth, sequential, places, random: 0x9e37_79b9_7f4a_7c15, asked: 0 };
    let mut requests = Vec::with_capacity(64 << 10);
    for _ in 0..load.depth {
        load.next(&mut requests)?;
    }
    socket.write_all(&requests)?;
    let each = uapi::Reply::SIMPLE_SIZE + len;
    let mut buffer = vec![0; (1 << 20).max(each * 2)];
    let (mut from, mut to, mut ended) = (0, 0, 0u64);
    let begun = Instant::now();
    let mut stopping = false;
    while ended < load.asked {
        let some = socket.read(buffer.get_mut(to..).unwrap_or_default())?;
        if some == 0 {
            return Err(wrong("the server has ended the connection"));
        }
        to += some;
        stopping = stopping || begun.elapsed() >= Duration::from_secs(seconds);
        requests.clear();
        while to - from >= each {
            match buffer.get(from..to).and_then(uapi::Reply::read) {
                Some(uapi::Reply::Simple { error: 0, .. }) => {}
                _ => return Err(wrong("a read has failed")),
            }
            (from, ended) = (from + each, ended + 1);
            if !stopping {
                load.next(&mut requests)?;
            }
        }
        buffer.copy_within(from..to, 0);
        (from, to) = (0, to - from);
        socket.write_all(&requests)?;
    }
    let rate = ended as f64 / begun.elapsed().as_secs_f64();
    println!("{{\"ios\":{ended},\"per_second\":{rate:.0}}}");
    Ok(())
}

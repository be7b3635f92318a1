//! A door for fuzzers: what a server says, from its greeting to its answers.
//! Nothing is judged here but that reading ends, without a panic and within bounds.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::conn::Connection;
use super::handshake::{Handshake, Next, Wanted};
use super::states::{Cursor, Question, state_at};

/// The most that is read of a server's words at once, and that is said to it, in bytes.
const MOST_HELD: usize = 16 << 10;
/// What fits into a socket without a reader, in bytes.
const FITS: usize = 64 << 10;

/// A server's words, of which the first byte says what is asked of it. Whether it has given an answer.
pub fn server(bytes: &[u8]) -> bool {
    let Some((&first, mut rest)) = bytes.split_first() else { return false };
    let wanted = Wanted { tls: first & 1 == 1, structured: first & 2 == 2, ..Wanted::default() };
    let mut shake = Handshake::new("an export", wanted);
    let agreed = loop {
        assert!(shake.outgoing().len() <= MOST_HELD, "what is said has a bound");
        let wants = shake.wants();
        assert!(wants <= MOST_HELD, "what is read has a bound");
        let Some((heard, behind)) = rest.split_at_checked(wants) else { return false };
        rest = behind;
        match shake.feed(heard) {
            Ok(Next::Done(agreed)) => break agreed,
            // As if TLS had come and gone: what follows are the server's words in it.
            Ok(Next::StartTls) => shake.tls_started(),
            Ok(Next::More) => {}
            Err(_) => return false,
        }
    };
    assert!(agreed.smallest.is_power_of_two() && agreed.largest.is_multiple_of(agreed.smallest));
    let Ok((ours, mut theirs)) = UnixStream::pair() else { return false };
    if theirs.write_all(rest.get(..FITS.min(rest.len())).unwrap_or_default()).is_err() {
        return false;
    }
    // It has said all: a client that waits for more sees the end.
    let _ = theirs.shutdown(std::net::Shutdown::Write);
    let Ok(mut connection) = Connection::new(ours.into(), agreed, Some(Duration::from_secs(1))) else {
        return false;
    };
    let unit = u64::from(agreed.smallest);
    let len = (4096 / unit).max(1) * unit;
    let mut buffer = vec![0; usize::try_from(len).unwrap_or(0)];
    let mut answered = false;
    for _ in 0..4 {
        // An error of the server's is not an end; a broken connection answers nothing more.
        answered |= match first >> 3 & 3 {
            // No more than fits into the socket, whose other end reads nothing.
            1 if unit <= 4096 => connection.write(&buffer, 0).is_ok(),
            2 => connection.zero(0, len).is_ok(),
            3 => connection.flush().is_ok(),
            _ if agreed.allocation.is_some() && first & 4 == 4 => {
                connection.status(0, len).is_ok_and(|found| !found.is_empty())
            }
            _ => connection.read(&mut buffer, 0).is_ok(),
        };
    }
    answered
}

/// An answer about what ranges hold: its first eight bytes are the number of the question. Whether it says
/// anything.
pub fn states(bytes: &[u8]) -> bool {
    let Some(number) = bytes.first_chunk() else { return false };
    let question = Question { number: u64::from_le_bytes(*number), offset: 0, len: u64::MAX };
    let Some(ranges) = question.ranges(bytes) else { return false };
    let (mut at, mut cursor) = (0, Cursor::default());
    // Each step is over one range at least.
    for _ in 0..ranges.len() / 8 {
        let Some((len, ..)) = state_at(ranges, at, &mut cursor) else { break };
        assert!(len > 0, "each range has bytes");
        at += len;
    }
    assert!(state_at(ranges, at, &mut cursor).is_none(), "behind the last there is none");
    at > 0
}

//! What a client of the reporter asks for: the head of one HTTP request, and the heads of answers.
//! It reads no body, keeps no connection open for another request, and does no input or output.
//!
//! Specification: RFC 9112, "HTTP/1.1", as much of it as a client of `GET /metrics` uses.

/// The longest head of a request. Scrapers send less than 1 KiB.
const LONGEST: usize = 8 << 10;

/// What is asked for, or wrong with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    Metrics,
    /// Where the metrics are.
    Root,
    NotFound,
    /// Neither GET nor HEAD.
    Method,
    Malformed,
    TooLong,
}

/// A request as far as it has come.
pub(super) struct Request {
    bytes: Vec<u8>,
    heard: usize,
}

impl Request {
    pub(super) fn new() -> Request {
        Request { bytes: Vec::new(), heard: 0 }
    }

    /// Where more of it goes; never empty before [`Request::heard`] has had its end.
    pub(super) fn room(&mut self) -> &mut [u8] {
        self.bytes.resize(LONGEST, 0);
        self.bytes.get_mut(self.heard..).unwrap_or_default()
    }

    /// So many bytes have come: what is asked for, and whether only the head of the answer is wanted. `None`
    /// if the request goes on.
    pub(super) fn heard(&mut self, more: usize) -> Option<(Asked, bool)> {
        let seen = self.heard.saturating_sub(3);
        self.heard = (self.heard + more).min(LONGEST);
        let all = self.bytes.get(..self.heard).unwrap_or_default();
        let ended = all.get(seen..).unwrap_or_default().windows(4).any(|end| end == b"\r\n\r\n");
        match ended {
            true => Some(judge(all)),
            false if self.heard == LONGEST => Some((Asked::TooLong, false)),
            false => None,
        }
    }
}

fn judge(head: &[u8]) -> (Asked, bool) {
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return (Asked::Malformed, false);
    };
    if !version.starts_with(b"HTTP/1.") {
        return (Asked::Malformed, false);
    }
    if method != b"GET" && method != b"HEAD" {
        return (Asked::Method, false);
    }
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    let asked = match path {
        b"/metrics" => Asked::Metrics,
        b"/" => Asked::Root,
        _ => Asked::NotFound,
    };
    (asked, method == b"HEAD")
}

/// The head of an answer whose body has so many bytes.
pub(super) fn head(asked: Asked, length: usize) -> Vec<u8> {
    let status = match asked {
        Asked::Metrics | Asked::Root => "200 OK",
        Asked::NotFound => "404 Not Found",
        Asked::Method => "405 Method Not Allowed\r\nAllow: GET, HEAD",
        Asked::Malformed => "400 Bad Request",
        Asked::TooLong => "431 Request Header Fields Too Large",
    };
    let kind = if asked == Asked::Metrics { "; version=0.0.4" } else { "" };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain{kind}; charset=utf-8\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n"
    )
    .into_bytes()
}

/// The body of an answer that is not the metrics.
pub(super) fn body(asked: Asked) -> &'static str {
    match asked {
        Asked::Metrics => "",
        Asked::Root => "becket's metrics are at /metrics\n",
        Asked::NotFound => "there is only /metrics\n",
        Asked::Method => "use GET\n",
        Asked::Malformed => "this is not an HTTP request\n",
        Asked::TooLong => "the request is too long\n",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds a request in pieces of a length; after the last one it must not be waited for more.
    fn fed(text: &[u8], piece: usize) -> Option<(Asked, bool)> {
        let mut request = Request::new();
        for bytes in text.chunks(piece) {
            let room = request.room();
            let fits = bytes.len().min(room.len());
            room[..fits].copy_from_slice(&bytes[..fits]);
            if let Some(asked) = request.heard(fits) {
                return Some(asked);
            }
        }
        None
    }

    #[test]
    fn requests_are_understood_however_they_are_cut() {
        for piece in [1, 3, 4, 7, 10_000] {
            let asked = |text: &str| fed(text.as_bytes(), piece);
            assert_eq!(asked("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), Some((Asked::Metrics, false)));
            assert_eq!(asked("HEAD /metrics?a=b HTTP/1.0\r\n\r\n"), Some((Asked::Metrics, true)));
            assert_eq!(asked("GET / HTTP/1.1\r\n\r\n"), Some((Asked::Root, false)));
            assert_eq!(asked("GET /../etc HTTP/1.1\r\n\r\n"), Some((Asked::NotFound, false)));
            assert_eq!(asked("POST /metrics HTTP/1.1\r\n\r\n"), Some((Asked::Method, false)));
            assert_eq!(asked("GET /metrics\r\n\r\n"), Some((Asked::Malformed, false)));
            assert_eq!(asked("GET /metrics HTTP/2\r\n\r\n"), Some((Asked::Malformed, false)));
            assert_eq!(asked("\r\n\r\n"), Some((Asked::Malformed, false)));
            assert_eq!(asked("GET /metrics HTTP/1.1\r\nHost: x\r\n"), None);
        }
    }

    #[test]
    fn a_request_without_an_end_is_refused_when_it_is_too_long() {
        assert_eq!(fed(&vec![b'a'; LONGEST - 1], 100), None);
        assert_eq!(fed(&vec![b'a'; LONGEST], 100), Some((Asked::TooLong, false)));
        assert_eq!(fed(&vec![0xff; 3 * LONGEST], 5000), Some((Asked::TooLong, false)));
    }

    #[test]
    fn an_answer_says_how_long_it_is() {
        let text = String::from_utf8(head(Asked::Metrics, 12)).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\n"), "{text:?}");
        assert!(text.contains("Content-Length: 12\r\n") && text.contains("version=0.0.4"), "{text:?}");
    }
}

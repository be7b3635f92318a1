//! What the head of an answer must say before a byte of it is believed (RFC 9110, sections 13 to 15).
//! It reads values of headers and nothing else; each is a stranger's.

use std::ops::Range;
use std::time::Duration;

use ureq::http::Response;

/// The longest wait that a server may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The value of a header.
pub(crate) fn header<'a, T>(answer: &'a Response<T>, name: &str) -> Option<&'a str> {
    answer.headers().get(name)?.to_str().ok()
}

/// Whether a status means that a later request may succeed.
pub(crate) fn is_busy(status: u16) -> bool {
    matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504)
}

/// What `Content-Range` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ContentRange {
    /// These bytes of an object of this length.
    Part(Range<u64>, u64),
    /// None of an object of this length.
    Unsatisfied(u64),
}

/// Reads `bytes 0-99/1234` and `bytes */1234`. An unknown length is refused, as is a range that is none.
pub(crate) fn content_range(value: &str) -> Option<ContentRange> {
    let (unit, rest) = value.trim().split_once(' ')?;
    let (range, total) = rest.trim().split_once('/')?;
    if !unit.eq_ignore_ascii_case("bytes") {
        return None;
    }
    let total = number(total)?;
    if range == "*" {
        return Some(ContentRange::Unsatisfied(total));
    }
    let (first, last) = range.split_once('-')?;
    let (first, end) = (number(first)?, number(last)?.checked_add(1)?);
    (first < end && end <= total).then_some(ContentRange::Part(first..end, total))
}

/// A number as headers have them: digits only.
pub(crate) fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

/// How long `Retry-After` asks to wait, within reason; dates are not read.
pub(crate) fn retry_after(value: &str) -> Option<Duration> {
    Some(Duration::from_secs(number(value.trim())?).min(PAUSE_MAX))
}

/// Whether an entity tag is a strong one, which names bytes and not meanings.
pub(crate) fn is_strong(etag: &str) -> bool {
    let inner = etag.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    inner.is_some_and(|inner| !inner.contains('"') && inner.len() <= 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_believed_only_if_they_can_be() {
        let part = |start, end, total| Some(ContentRange::Part(start..end, total));
        assert_eq!(content_range("bytes 0-99/1234"), part(0, 100, 1234));
        assert_eq!(content_range("BYTES 5-5/6 "), part(5, 6, 6));
        assert_eq!(content_range("bytes */0"), Some(ContentRange::Unsatisfied(0)));
        for bad in [
            "",
            "bytes",
            "bytes 0-99",
            "bytes 0-99/*",
            "bytes 9-3/10",
            "bytes 0-10/10",
            "bytes -5/10",
            "lines 0-1/2",
            "bytes +0-1/2",
            "bytes 0-18446744073709551615/18446744073709551615",
            "bytes 0-1/99999999999999999999",
        ] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }

    #[test]
    fn waits_have_a_bound() {
        assert_eq!(retry_after("2"), Some(Duration::from_secs(2)));
        assert_eq!(retry_after("86400"), Some(PAUSE_MAX));
        assert_eq!(retry_after("-1"), None);
        assert_eq!(retry_after("Wed, 21 Oct 2015 07:28:00 GMT"), None);
    }

    #[test]
    fn only_strong_tags_name_bytes() {
        assert!(is_strong("\"abc\"") && is_strong("\"\""));
        for weak in ["W/\"abc\"", "abc", "\"", "", "\"a\"b\""] {
            assert!(!is_strong(weak), "{weak}");
        }
    }
}

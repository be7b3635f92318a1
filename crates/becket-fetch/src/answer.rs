//! What the head of an answer must say before a byte of it is believed (RFC 9110, sections 13 to 15).
//! It reads values of headers and nothing else; each is a stranger's.

use std::ops::Range;
use std::time::{Duration, SystemTime};

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

/// How long `Retry-After` asks to wait, within reason.
pub(crate) fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    let wait = match number(value) {
        Some(seconds) => Duration::from_secs(seconds),
        None => date(value)?.duration_since(now).unwrap_or_default(),
    };
    Some(wait.min(PAUSE_MAX))
}

/// Reads `Wed, 21 Oct 2015 07:28:00 GMT`, the form in which dates are sent.
fn date(value: &str) -> Option<SystemTime> {
    const MONTHS: &str = "JanFebMarAprMayJunJulAugSepOctNovDec";
    let (_, rest) = value.split_once(", ")?;
    let mut words = rest.split(' ');
    let mut next = || words.next();
    let (day, month, year, time, zone) = (number(next()?)?, next()?, number(next()?)?, next()?, next()?);
    let month = (MONTHS.find(month).filter(|at| at.is_multiple_of(3) && month.len() == 3)? / 3) as u64;
    let parts: Option<Vec<u64>> = time.split(':').map(number).collect();
    let &[hours, minutes, seconds] = parts?.as_slice() else { return None };
    let possible = (1..=31).contains(&day) && (1970..=9999).contains(&year) && zone == "GMT";
    if !possible || hours > 23 || minutes > 59 || seconds > 60 {
        return None;
    }
    // Years begin in March here, so that the day of a leap year is the last of one.
    let (year, month) = if month < 2 { (year - 1, month + 10) } else { (year, month - 2) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    let seconds = ((days.checked_sub(719_468)? * 24 + hours) * 60 + minutes) * 60 + seconds;
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
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
        let seconds = Duration::from_secs;
        let at = |time| SystemTime::UNIX_EPOCH + seconds(time);
        let retry_after = |value, now| retry_after(value, at(now));
        assert_eq!(retry_after("2", 0), Some(seconds(2)));
        assert_eq!(retry_after("86400", 0), Some(PAUSE_MAX));
        assert_eq!(retry_after("-1", 0), None);
        let date = "Wed, 21 Oct 2015 07:28:00 GMT";
        assert_eq!(retry_after(date, 1_445_412_480 - 7), Some(seconds(7)));
        assert_eq!(retry_after(date, 1_445_412_480 + 7), Some(seconds(0)), "it is over");
        assert_eq!(retry_after(date, 0), Some(PAUSE_MAX));
        assert_eq!(super::date("Thu, 29 Feb 2024 00:00:00 GMT"), Some(at(1_709_164_800)));
        assert_eq!(super::date("Thu, 01 Jan 1970 00:00:00 GMT"), Some(at(0)));
        for bad in [
            "Wed, 21 Oct 2015 07:28:00 CET",
            "Wed, 21 ctN 2015 07:28:00 GMT",
            "Wed, 21 Oct 2015 25:28:00 GMT",
            "Wed, 21 Oct 99999999999999999999 07:28:00 GMT",
            "Wednesday, 21-Oct-15 07:28:00 GMT",
            "Wed, 21 Oct 2015",
        ] {
            assert_eq!(retry_after(bad, 0), None, "{bad}");
        }
    }

    #[test]
    fn only_strong_tags_name_bytes() {
        assert!(is_strong("\"abc\"") && is_strong("\"\""));
        for weak in ["W/\"abc\"", "abc", "\"", "", "\"a\"b\""] {
            assert!(!is_strong(weak), "{weak}");
        }
    }
}

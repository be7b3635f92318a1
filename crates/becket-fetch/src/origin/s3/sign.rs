//! Signatures of requests (AWS Signature Version 4), for GET without a body.

use std::time::{SystemTime, UNIX_EPOCH};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ring::{digest, hmac};

use super::super::contract::Header;
use super::profile::Keys;
use crate::place::Parts;

/// What is written as it is in the path of an object.
const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~').remove(b'/');
/// The digest of no bytes.
const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// A key as it is in a URL.
pub(super) fn encoded(key: &str) -> String {
    utf8_percent_encode(key, PATH).to_string()
}

/// The headers that show who asks for `address`.
pub(super) fn headers(keys: &Keys, region: &str, address: &str, now: SystemTime) -> Vec<Header> {
    let time = stamp(now);
    let mut headers = vec![("x-amz-content-sha256", EMPTY.to_owned()), ("x-amz-date", time.clone())];
    headers.extend(keys.token.iter().map(|token| ("x-amz-security-token", token.clone())));
    let parts = Parts::of(address);
    let mut signed = vec![("host", parts.authority.to_owned())];
    signed.extend(headers.iter().cloned());
    let authorization = authorization(keys, region, parts.path, &signed, &time);
    headers.push(("Authorization", authorization));
    headers
}

/// `headers` are sorted by their names.
fn authorization(keys: &Keys, region: &str, path: &str, headers: &[Header], time: &str) -> String {
    let names: Vec<&str> = headers.iter().map(|(name, _)| *name).collect();
    let (names, day) = (names.join(";"), time.get(..8).unwrap_or_default());
    let lines: String = headers.iter().map(|(name, value)| format!("{name}:{}\n", value.trim())).collect();
    let request = format!("GET\n{path}\n\n{lines}\n{names}\n{EMPTY}");
    let scope = format!("{day}/{region}/s3/aws4_request");
    let request = hex(digest::digest(&digest::SHA256, request.as_bytes()).as_ref());
    let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{request}");
    let step = |key: &[u8], text: &str| hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes());
    let key = step(format!("AWS4{}", keys.secret).as_bytes(), day);
    let key =
        ["s3", "aws4_request"].iter().fold(step(key.as_ref(), region), |key, text| step(key.as_ref(), text));
    let signature = hex(step(key.as_ref(), &text).as_ref());
    format!("AWS4-HMAC-SHA256 Credential={}/{scope},SignedHeaders={names},Signature={signature}", keys.id)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A time as `20130524T000000Z`.
fn stamp(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (mut days, rest) = (seconds / 86_400, seconds % 86_400);
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}{month:02}{:02}T{hour:02}{minute:02}{second:02}Z", days + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The example "GET Object" of the S3 API reference, with its range.
    #[test]
    fn a_signature_is_that_of_the_reference() {
        let keys = Keys {
            id: "AKIAIOSFODNN7EXAMPLE".to_owned(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".to_owned(),
            token: None,
        };
        let headers = [
            ("host", "examplebucket.s3.amazonaws.com".to_owned()),
            ("range", "bytes=0-9".to_owned()),
            ("x-amz-content-sha256", EMPTY.to_owned()),
            ("x-amz-date", "20130524T000000Z".to_owned()),
        ];
        let made = authorization(&keys, "us-east-1", "/test.txt", &headers, "20130524T000000Z");
        assert!(made.starts_with(
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,\
             SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,Signature="
        ));
        let signature = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41";
        assert!(made.ends_with(signature), "{made}");
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "19700101T000000Z"),
            (951_827_696, "20000229T123456Z"),
            (1_369_353_600, "20130524T000000Z"),
            (4_107_542_399, "21000228T235959Z"),
            (4_107_542_400, "21000301T000000Z"),
        ] {
            assert_eq!(stamp(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }
}

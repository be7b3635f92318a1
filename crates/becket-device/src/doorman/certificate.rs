//! The names in a client's certificate, for `--tls-allow`: its DNS names and its common name (RFC 5280).
//! It never trusts a certificate: the chain has been verified before, and what is malformed has no name.

use std::ops::ControlFlow;

/// Tags of DER (X.690).
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OID: u8 = 0x06;
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;
const OCTETS: u8 = 0x04;
const BOOLEAN: u8 = 0x01;
/// `dNSName` of a general name.
const DNS_NAME: u8 = 0x82;
/// 2.5.4.3 and 2.5.29.17.
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];
/// The most elements of one list that are looked at.
const MOST: usize = 256;

/// Whether one of these names is one of the certificate's. Case does not count.
pub(super) fn has_name(certificate: &[u8], allowed: &[String]) -> bool {
    let wanted = |name: &[u8]| allowed.iter().any(|one| one.as_bytes().eq_ignore_ascii_case(name));
    names(certificate, &mut |name| match wanted(name) {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    })
    .is_break()
}

/// The first of its names, for people, who may get at most 64 characters of it.
pub(super) fn first_name(certificate: &[u8]) -> Option<String> {
    let mut first = None;
    let _ = names(certificate, &mut |name| {
        first = Some(String::from_utf8_lossy(name).chars().take(64).collect());
        ControlFlow::Break(())
    });
    first
}

/// Calls `each` with every name until it breaks. A certificate that cannot be read has those before that.
fn names(certificate: &[u8], each: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> ControlFlow<()> {
    let Some(fields) = element(certificate, SEQUENCE).and_then(|(body, _)| element(body, SEQUENCE)) else {
        return ControlFlow::Continue(());
    };
    let mut fields = list(fields.0).peekable();
    fields.next_if(|(tag, _)| *tag == VERSION);
    // The serial number, the algorithm, the issuer and the validity come before the subject.
    if let Some((SEQUENCE, subject)) = fields.nth(4) {
        for attribute in list(subject).filter(|(tag, _)| *tag == SET).flat_map(|(_, set)| list(set)) {
            let mut parts = list(attribute.1);
            if parts.next() == Some((OID, COMMON_NAME))
                && let Some((_, name)) = parts.next()
            {
                each(name)?;
            }
        }
    }
    let extensions = fields.find(|(tag, _)| *tag == EXTENSIONS).and_then(|(_, body)| element(body, SEQUENCE));
    for (_, extension) in extensions.into_iter().flat_map(|(body, _)| list(body)) {
        let mut parts = list(extension).peekable();
        if parts.next() != Some((OID, SUBJECT_ALT_NAME)) {
            continue;
        }
        parts.next_if(|(tag, _)| *tag == BOOLEAN);
        let Some((OCTETS, value)) = parts.next() else { continue };
        let Some((all, _)) = element(value, SEQUENCE) else { continue };
        for (_, name) in list(all).filter(|(tag, _)| *tag == DNS_NAME) {
            each(name)?;
        }
    }
    ControlFlow::Continue(())
}

/// The elements of a body, as tag and body.
fn list(mut body: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let next = move || {
        let (tag, inside, rest) = split(body)?;
        body = rest;
        Some((tag, inside))
    };
    std::iter::from_fn(next).take(MOST)
}

/// The first element's body and what follows, if it has that tag.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    split(bytes).filter(|(found, ..)| *found == tag).map(|(_, body, rest)| (body, rest))
}

/// The first element: tag, body and what follows.
fn split(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, first], rest) = bytes.split_first_chunk()?;
    let (len, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        // Lengths of at most four bytes: a certificate is not longer.
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (digits.iter().fold(0usize, |len, digit| len << 8 | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    let (body, rest) = rest.split_at_checked(len)?;
    Some((tag, body, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn der(tag: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![tag];
        match u8::try_from(body.len()) {
            Ok(len @ 0..=0x7f) => bytes.push(len),
            _ => bytes.extend([0x82, (body.len() >> 8) as u8, body.len() as u8]),
        }
        bytes.extend(body);
        bytes
    }

    fn certificate(common: &str, dns: &[&str]) -> Vec<u8> {
        let attribute = [der(OID, COMMON_NAME), der(0x0c, common.as_bytes())].concat();
        let subject = der(SEQUENCE, &der(SET, &der(SEQUENCE, &attribute)));
        let names: Vec<u8> = dns.iter().flat_map(|name| der(DNS_NAME, name.as_bytes())).collect();
        let alternative = [der(OID, SUBJECT_ALT_NAME), der(OCTETS, &der(SEQUENCE, &names))].concat();
        let extensions = der(EXTENSIONS, &der(SEQUENCE, &der(SEQUENCE, &alternative)));
        let before =
            [der(VERSION, &[2, 1, 2]), der(2, &[1]), der(SEQUENCE, &[]), der(SEQUENCE, &[])].concat();
        let body = [before, der(SEQUENCE, &[]), subject, der(SEQUENCE, &[]), extensions].concat();
        der(SEQUENCE, &der(SEQUENCE, &body))
    }

    #[test]
    fn a_certificate_has_its_common_name_and_its_dns_names() {
        let one = certificate("Backup", &["a.example", "b.example"]);
        let has = |name: &str| has_name(&one, &["x".to_owned(), name.to_owned()]);
        assert!(has("backup") && has("a.example") && has("B.Example"));
        assert!(!has("example") && !has("") && !has("backup.a.example"));
        assert!(!has_name(&one, &[]));
    }

    proptest! {
        #[test]
        fn any_bytes_have_an_end(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            has_name(&bytes, &["x".to_owned()]);
        }

        #[test]
        fn a_damaged_certificate_has_an_end(at in 0usize..100, to in any::<u8>()) {
            let mut bytes = certificate("a", &["b"]);
            let len = bytes.len();
            bytes[at % len] = to;
            has_name(&bytes, &["x".to_owned()]);
        }
    }
}

//! Web addresses that have the right to read an object in their query ("presigned"). The store knows the
//! object without it: the next signature is for the same object, and no signature is written down.
//!
//! A parameter is left out only where all of a known scheme are there that make a signature: servers may give
//! another meaning to a name like `sig` alone. All others stay: they can choose the object or its version.

use crate::place::Parts;

/// The parameters of a scheme.
struct Scheme {
    /// Those that each signature has.
    always: &'static [&'static str],
    sometimes: &'static [&'static str],
}

const SCHEMES: [Scheme; 6] = [
    // Amazon, and what speaks its protocol: signatures of version 4, and of version 2.
    Scheme {
        always: &["X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-Signature"],
        sometimes: &["X-Amz-SignedHeaders", "X-Amz-Security-Token"],
    },
    Scheme { always: &["AWSAccessKeyId", "Expires", "Signature"], sometimes: &["X-Amz-Security-Token"] },
    // Google Cloud Storage, likewise.
    Scheme {
        always: &[
            "X-Goog-Algorithm",
            "X-Goog-Credential",
            "X-Goog-Date",
            "X-Goog-Expires",
            "X-Goog-Signature",
        ],
        sometimes: &["X-Goog-SignedHeaders"],
    },
    Scheme { always: &["GoogleAccessId", "Expires", "Signature"], sometimes: &[] },
    // CloudFront.
    Scheme { always: &["Key-Pair-Id", "Signature"], sometimes: &["Expires", "Policy", "Hash-Algorithm"] },
    // Azure: service, account and user delegation signatures.
    Scheme {
        always: &["sv", "sig"],
        sometimes: &[
            "se", "si", "sp", "sr", "srt", "ss", "st", "sip", "spr", "sdd", "ses", "skoid", "sktid", "skt",
            "ske", "sks", "skv", "saoid", "suoid", "scid",
        ],
    },
];

impl Scheme {
    fn has(&self, name: &str) -> bool {
        is_among(name, self.always) || is_among(name, self.sometimes)
    }
}

fn is_among(name: &str, names: &[&str]) -> bool {
    names.iter().any(|known| known.eq_ignore_ascii_case(name))
}

/// A URL without the signature in it.
pub(crate) fn unsigned(url: &str) -> String {
    let Some((start, query)) = url.split_once('?').filter(|_| Parts::of(url).is_web()) else {
        return url.to_owned();
    };
    let name = |parameter: &str| parameter.split('=').next().unwrap_or_default().to_owned();
    let all: Vec<&str> = query.split('&').collect();
    let signs = |scheme: &&Scheme| {
        let is_there = |wanted: &&str| all.iter().any(|it| is_among(&name(it), &[*wanted]));
        scheme.always.iter().all(is_there)
    };
    let schemes: Vec<&Scheme> = SCHEMES.iter().filter(signs).collect();
    if schemes.is_empty() {
        return url.to_owned();
    }
    let stays = |it: &&str| !schemes.iter().any(|scheme| scheme.has(&name(it)));
    let rest: Vec<&str> = all.iter().copied().filter(stays).collect();
    if rest.is_empty() { start.to_owned() } else { format!("{start}?{}", rest.join("&")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_no_part_of_an_object_s_name() {
        let amazon = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=K%2F2026&X-Amz-Date=2026&\
                      X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=secret";
        let google = amazon.replace("X-Amz", "X-Goog");
        for query in [
            amazon,
            &amazon.to_ascii_lowercase(),
            &format!("X-Amz-Security-Token=secret&{amazon}"),
            &google,
            "AWSAccessKeyId=K&Signature=secret&Expires=1",
            "GoogleAccessId=me%40x&Expires=1&Signature=secret",
            "Expires=1&Signature=secret&Key-Pair-Id=K",
            "Policy=secret&Signature=secret&Key-Pair-Id=K",
            "sp=r&st=2026&se=2027&spr=https&sv=2022-11-02&sr=b&sig=secret",
        ] {
            assert_eq!(unsigned(&format!("https://h/a/x.img?{query}")), "https://h/a/x.img", "{query}");
            let kept = unsigned(&format!("https://h/x.img?versionId=7&{query}&part=2"));
            assert_eq!(kept, "https://h/x.img?versionId=7&part=2", "{query}");
        }
    }

    #[test]
    fn what_is_no_known_signature_stays() {
        for url in [
            "https://h/x.img",
            "https://h/x.img?",
            "https://h/x.img?sig=a",
            "https://h/x.img?sv=2&Expires=3",
            "https://h/x.img?X-Amz-Signature=a&X-Amz-Date=b",
            "https://h/x.img?Signature=a&Expires=1",
            "https://h/x.img?snapshot=1&token=a",
            "oci://h/x?sv=1&sig=2",
            "file:/a/b?sv=1&sig=2",
        ] {
            assert_eq!(unsigned(url), url);
        }
        assert_ne!(
            unsigned("https://h/x?snapshot=1&sv=1&sig=2"),
            unsigned("https://h/x?snapshot=2&sv=1&sig=2")
        );
    }
}

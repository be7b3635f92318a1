//! Backing names that are URLs, and which of them the user allows.
//! It opens nothing. A URL in an image is only compared with what the user has named.

use std::path::{Path, PathBuf};

use crate::Fillers;
use crate::source::link;

/// A URL that an image may name below itself, because the user allows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingUrl {
    /// As the image names it, without a path inside the image.
    pub url: PathBuf,
    /// Where its bytes are: a file of this host, with what fills it among the fillers, or a URI of
    /// [`crate::is_remote`].
    pub place: PathBuf,
    /// Which contents it has, where that is known; see [`crate::Below`].
    pub version: Option<String>,
}

/// A URL that an image names below itself, and that is not open yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedUrl {
    /// Without a path inside the image.
    pub url: PathBuf,
    /// Its contents are those of the image that becket finds in it, not its bytes as they are stored.
    pub contents: bool,
}

/// What an image may refer to beside what lies in its own directory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allowed<'a> {
    /// Directories.
    pub(crate) dirs: &'a [PathBuf],
    pub(crate) urls: &'a [BackingUrl],
    /// What fills files of a store.
    pub(crate) fillers: &'a Fillers,
    /// See [`crate::open_to_serve`] and [`crate::OpenOptions::patience`].
    pub(crate) to_serve: bool,
    pub(crate) patience: Option<std::time::Duration>,
}

/// Whether a name is a URL, of whatever scheme.
pub(crate) fn is_url(name: &str) -> bool {
    let plain = |scheme: &str| {
        !scheme.is_empty()
            && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
    };
    link::rbd::is_name(Path::new(name)) || name.split_once("://").is_some_and(|(scheme, _)| plain(scheme))
}

/// The parts of a URL that say what it leads to.
#[derive(Debug, PartialEq, Eq)]
struct Parts<'a> {
    scheme: &'a str,
    /// The host with its port; the pool of an image of Ceph.
    host: &'a str,
    path: &'a str,
    /// With its question mark. It can name a socket, a certificate, a configuration or a signature.
    query: &'a str,
}

impl<'a> Parts<'a> {
    fn of(url: &'a str) -> Option<Parts<'a>> {
        if !is_url(url) || url.contains('#') {
            return None;
        }
        let (rest, query) = url.split_at(url.find('?').unwrap_or(url.len()));
        let (scheme, rest) = rest.split_once("://").or_else(|| rest.split_once(':'))?;
        let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        Some(Parts { scheme, host, path, query })
    }

    /// Whether a server or a library could read the path as another one.
    fn is_crooked(&self) -> bool {
        let dots = |name: &str| matches!(name.to_ascii_lowercase().replace("%2e", ".").as_str(), "." | "..");
        let strange = |byte: u8| !(0x21..0x7f).contains(&byte) || byte == b'\\';
        let slash = |at: usize| {
            let hex = self.path.get(at + 1..at + 3).unwrap_or_default();
            hex.eq_ignore_ascii_case("2f") || hex.eq_ignore_ascii_case("5c")
        };
        let [host, path, query] = [self.host, self.path, self.query];
        [host, path, query].iter().any(|part| part.bytes().any(strange))
            || path.split('/').any(dots)
            || path.match_indices('%').any(|(at, _)| slash(at))
    }
}

/// Whether a URL begins with one that the user allows: the same scheme and host, and the path continues
/// behind a slash or ends. What follows `?` must be the same, because that can name another server or a file
/// of this host.
pub fn is_within(url: &str, prefix: &str) -> bool {
    let (Some(url), Some(allowed)) = (Parts::of(url), Parts::of(prefix)) else { return false };
    let rest = url.path.strip_prefix(allowed.path);
    let ends = |rest: &str| rest.is_empty() || rest.starts_with('/');
    !url.is_crooked()
        && (url.scheme, url.host, url.query) == (allowed.scheme, allowed.host, allowed.query)
        && rest.is_some_and(|rest| allowed.path.ends_with('/') || ends(rest))
}

/// Checks what a user allows.
///
/// # Errors
/// It is no URL that backing names can begin with, for people.
pub fn check_prefix(prefix: &str) -> Result<(), String> {
    let Some(parts) = Parts::of(prefix) else {
        return Err("it is no URL: nbd://HOST/, https://HOST/DIR/ and the like, without a #".to_owned());
    };
    if parts.is_crooked() {
        return Err("its path has ., .. or an encoded slash, or it has spaces or other signs".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_begins_with_what_is_allowed_at_a_boundary() {
        for (url, prefix) in [
            ("https://h/a/b.img", "https://h"),
            ("https://h/a/b.img", "https://h/"),
            ("https://h/a/b.img", "https://h/a"),
            ("https://h/a/b.img", "https://h/a/"),
            ("https://h/a/b.img", "https://h/a/b.img"),
            ("https://h/b?key=1", "https://h/b?key=1"),
            ("https://h/b?key=1", "https://h/?key=1"),
            ("nbd://h:10809/disk", "nbd://h:10809/"),
            ("nbd://h", "nbd://h"),
            ("nbd+unix:///e?socket=/run/a", "nbd+unix:///?socket=/run/a"),
            ("rbd:pool/image@snap", "rbd:pool/"),
            ("rbd:pool/image?conf=/c&id=me", "rbd:pool/image?conf=/c&id=me"),
            ("oci://registry/name:tag", "oci://registry/name:tag"),
            ("s3://bucket/key", "s3://bucket"),
        ] {
            assert!(is_within(url, prefix), "{url} {prefix}");
            check_prefix(prefix).unwrap();
        }
    }

    #[test]
    fn another_url_is_not_within() {
        for (url, prefix) in [
            ("https://h/ab", "https://h/a"),
            ("https://hh/a", "https://h"),
            ("https://h@evil/a", "https://h"),
            ("https://h:80/a", "https://h"),
            ("https://h.evil/a", "https://h"),
            ("http://h/a", "https://h"),
            ("https://h/a/../b", "https://h/a"),
            ("https://h/a/%2E%2e/b", "https://h/a"),
            ("https://h/a/.%2e/b", "https://h/a"),
            ("https://h/a/..%2fb", "https://h/a"),
            ("https://h/a/%5c..%5cb", "https://h/a"),
            ("https://h/a\\..\\b", "https://h/a"),
            ("https://h\\@evil/a", "https://h"),
            ("https://h/a b", "https://h/"),
            ("https://h/a\r\nHost: evil", "https://h/"),
            ("https://h/a?to=evil", "https://h/a"),
            ("https://h/a#p1", "https://h/a"),
            ("nbd+unix:///e?socket=/run/b", "nbd+unix:///"),
            ("nbd+unix:///e?socket=/run/b", "nbd+unix:///?socket=/run/a"),
            ("nbds://h/e?tls-certificates=/theirs", "nbds://h/e"),
            ("rbd:pool/image?conf=/theirs", "rbd:pool/"),
            ("rbd:pool2/image", "rbd:pool"),
            ("rbd:pool:conf=x/image", "rbd:pool"),
            ("/etc/passwd", "/etc"),
            ("/etc/passwd", ""),
            ("https://h/a", ""),
        ] {
            assert!(!is_within(url, prefix), "{url} {prefix}");
        }
    }

    #[test]
    fn only_urls_can_be_allowed() {
        for prefix in
            ["", "/srv", "https:", "://h", "nbd:h:10809", "json:{}", "https://h/a/../", "nbd://h/#p1"]
        {
            assert!(check_prefix(prefix).is_err(), "{prefix}");
        }
        for name in ["json:{\"url\":\"https://h/a\"}", "becket:=a7:https://h/a", "a:b", "nbd:unix:/s"] {
            assert!(!is_url(name), "{name}");
        }
    }
}

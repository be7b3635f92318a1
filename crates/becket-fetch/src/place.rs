//! URLs of images: which words are one, their parts, and where a redirect leads.
//! It never looks a name up and opens nothing.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use becket_image::codec::sha256;
use becket_image::one_case;

use crate::Error;
use crate::answer::number;

/// The longest URL.
const LONGEST: usize = 8192;

/// An object on another host, and how the path goes on inside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The URL without its fragment; of a web address scheme and host are in lower case.
    pub url: String,
    /// What follows `#`: names inside the image, empty for the image itself.
    pub inside: OsString,
}

impl Place {
    /// Reads a URL.
    ///
    /// # Errors
    /// It is none that becket can open, or has a password in it.
    pub fn parse(word: &OsStr) -> Result<Place, Error> {
        let bytes = word.as_bytes();
        let hash = bytes.iter().position(|byte| *byte == b'#');
        let (url, inside) = match hash {
            Some(at) => (bytes.get(..at), bytes.get(at + 1..)),
            None => (Some(bytes), None),
        };
        let url = String::from_utf8_lossy(url.unwrap_or_default()).into_owned();
        let bad = |why: &str| Err(Error::Url { url: shown(&url), why: why.to_owned() });
        if url.len() > LONGEST {
            return bad("the URL is too long");
        }
        if url.bytes().any(|byte| !(0x21..0x7f).contains(&byte)) {
            return bad(
                "a URL has no spaces, control characters or letters beyond ASCII; use %20 and the like",
            );
        }
        let parts = Parts::of(&url);
        if parts.authority.contains('@') {
            return bad("a password on the command line is visible to others; put it into ~/.netrc");
        }
        if parts.authority.starts_with('[') && !parts.authority.contains(']') {
            return bad("the URL's address has no closing bracket: write http://[::1]/x");
        }
        if parts.host().is_empty() {
            return bad(match parts.scheme.to_ascii_lowercase().as_str() {
                "s3" => "the URL names no bucket: write s3://BUCKET/KEY",
                "oci" => "the URL names no registry: write oci://REGISTRY/NAME:TAG",
                _ => "the URL has no host",
            });
        }
        if !parts.has_port() {
            return bad("the URL's port is not a number from 1 to 65535");
        }
        let inside = inside.unwrap_or_default();
        let inside = inside.strip_prefix(b"/").unwrap_or(inside);
        Ok(Place { url: one_case(&url), inside: OsStr::from_bytes(inside).to_owned() })
    }

    /// A name for the file in the store, after the last name of the URL's path. Its suffix stays, because
    /// that can say what the file is.
    pub(crate) fn file_name(&self) -> String {
        let path = Parts::of(&self.url).path;
        let path = path.split('?').next().unwrap_or_default();
        let last = path.rsplit('/').next().unwrap_or_default();
        plain_name(last)
    }
}

/// A name for a text: hexadecimal digits of its digest.
pub(crate) fn short_digest(text: &str) -> String {
    sha256(text.as_bytes()).iter().take(20).map(|byte| format!("{byte:02x}")).collect()
}

/// A name for a file in the store after another name, of harmless letters.
pub(crate) fn plain_name(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte);
    let name: String = name.bytes().map(|byte| if plain(byte) { char::from(byte) } else { '_' }).collect();
    let name = name.get(name.len().saturating_sub(100)..).unwrap_or_default();
    match name.trim_start_matches('.') {
        "" => "image".to_owned(),
        name => name.to_owned(),
    }
}

/// A URL for people: without the query of a web address, which may be a signature, and without what a
/// terminal would act on.
pub(crate) fn shown(url: &str) -> String {
    let url = one_case(url);
    let (start, query) = url.split_at(url.find('?').unwrap_or(url.len()));
    let parts = Parts::of(start);
    let query = if parts.is_web() && !query.is_empty() { "?..." } else { query };
    let authority = parts.authority.rsplit('@').next().unwrap_or_default();
    let text = match parts.scheme {
        "" => start.to_owned(),
        scheme => format!("{scheme}://{authority}{}", parts.path),
    };
    becket_image::shown(format!("{text}{query}").as_bytes())
}

/// The same of where an object comes from, which may be a file of this host.
pub(crate) fn shown_source(url: &str) -> String {
    url.strip_prefix("file:").map_or_else(|| shown(url), |path| becket_image::shown(path.as_bytes()))
}

/// What stands for a URL where the store knows a compressed file of this host, by its path without links.
pub(crate) fn url_of_file(path: &Path) -> String {
    format!("file:{}", path.display())
}

/// The same by any path of a file, which may be gone.
pub(crate) fn url_of_path(path: &Path) -> String {
    let gone = || {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(fs::canonicalize(dir).ok()?.join(path.file_name()?))
    };
    url_of_file(&fs::canonicalize(path).ok().or_else(gone).unwrap_or_else(|| path.to_owned()))
}

/// The parts of a URL; all borrowed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) scheme: &'a str,
    pub(crate) authority: &'a str,
    /// From the first slash on, with the query; may be empty.
    pub(crate) path: &'a str,
}

impl<'a> Parts<'a> {
    pub(crate) fn of(url: &'a str) -> Parts<'a> {
        let Some((scheme, rest)) = url.split_once("://") else {
            return Parts { scheme: "", authority: "", path: url };
        };
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        Parts { scheme, authority, path }
    }

    pub(crate) fn is_secure(self) -> bool {
        self.scheme.eq_ignore_ascii_case("https")
    }

    pub(crate) fn is_web(self) -> bool {
        self.is_secure() || self.scheme.eq_ignore_ascii_case("http")
    }

    /// The host without brackets and port.
    pub(crate) fn host(self) -> &'a str {
        let authority = self.authority.rsplit('@').next().unwrap_or_default();
        if let Some((host, _)) = authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            return host;
        }
        authority.split(':').next().unwrap_or_default()
    }

    /// The port as it is written, which may be anything; none where there is none.
    fn written_port(self) -> Option<&'a str> {
        let after = self.authority.rsplit(']').next().unwrap_or_default();
        after.split_once(':').map(|(_, port)| port).filter(|port| !port.is_empty())
    }

    /// Whether there is such a port.
    pub(crate) fn has_port(self) -> bool {
        let is_one = |port| number(port).is_some_and(|port| (1..=u16::MAX.into()).contains(&port));
        self.written_port().is_none_or(is_one)
    }

    pub(crate) fn port(self) -> u16 {
        let default = if self.is_secure() { 443 } else { 80 };
        self.written_port().and_then(|port| port.parse().ok()).unwrap_or(default)
    }

    /// Whether both are one server: the same scheme, host and port.
    pub(crate) fn is_same_server(self, other: Parts<'_>) -> bool {
        self.is_secure() == other.is_secure()
            && self.host().eq_ignore_ascii_case(other.host())
            && self.port() == other.port()
    }
}

/// Where the `Location` of an answer leads.
///
/// # Errors
/// To where no redirect may lead; a sentence.
pub(crate) fn redirected(from: &str, location: &str) -> Result<String, String> {
    let base = Parts::of(from);
    let location = location.split('#').next().unwrap_or_default();
    if location.len() > LONGEST || location.bytes().any(|byte| !(0x21..0x7f).contains(&byte)) {
        return Err("the server redirects to something that is not a URL".to_owned());
    }
    let to = if let Some(rest) = location.strip_prefix("//") {
        format!("{}://{rest}", base.scheme)
    } else if location.starts_with('/') {
        format!("{}://{}{location}", base.scheme, base.authority)
    } else if location.split(['/', '?']).next().is_some_and(|start| start.contains(':')) {
        location.to_owned()
    } else {
        let path = base.path.split('?').next().unwrap_or_default();
        let dir = Path::new(path).parent().map_or("", |dir| dir.to_str().unwrap_or_default());
        format!("{}://{}{}/{location}", base.scheme, base.authority, dir.trim_end_matches('/'))
    };
    let parts = Parts::of(&to);
    if !parts.is_web() {
        return Err(format!("the server redirects to {}, which is not a web address", shown(&to)));
    }
    if base.is_secure() && !parts.is_secure() {
        return Err(format!("the server redirects from https to {}, which is not encrypted", shown(&to)));
    }
    if parts.authority.contains('@') || parts.host().is_empty() {
        return Err("the server redirects to a URL without a host, or with a password".to_owned());
    }
    if !parts.has_port() {
        return Err("the server redirects to a port that does not exist".to_owned());
    }
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(word: &str) -> Result<Place, Error> {
        Place::parse(OsStr::new(word))
    }

    #[test]
    fn a_url_ends_where_the_path_inside_the_image_begins() {
        let whole = place("https://host/a/live.iso#LiveOS/squashfs.img").unwrap();
        assert_eq!(
            (whole.url.as_str(), whole.inside.to_str()),
            ("https://host/a/live.iso", Some("LiveOS/squashfs.img"))
        );
        assert_eq!(place("http://host:80/x#/p2").unwrap().inside, "p2");
        assert_eq!(place("HTTPS://Host:8/X?Y#Z").unwrap(), place("https://host:8/X?Y#Z").unwrap());
        assert_ne!(place("https://host/X").unwrap(), place("https://host/x").unwrap());
        assert_ne!(place("s3://Bucket/x").unwrap(), place("s3://bucket/x").unwrap());
        for bad in ["http://", "http:///x", "http://u:p@host/x", "http://host/a b", "http://host/\u{1b}[2J"] {
            assert!(place(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_a_url_lacks_is_called_by_its_name() {
        for (url, said) in [
            ("http:///x", "has no host"),
            ("s3:///x", "names no bucket: write s3://BUCKET/KEY"),
            ("S3://", "names no bucket"),
            ("oci:///x", "names no registry"),
            ("http://[::1", "has no closing bracket"),
            ("http://[::1:80/x", "has no closing bracket"),
        ] {
            let error = place(url).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn a_port_is_one_or_the_url_is_refused() {
        for good in
            ["http://host:/x", "http://host:1/x", "http://[::1]:65535/x", "http://[::1]", "s3://b/a:b"]
        {
            assert!(place(good).is_ok(), "{good}");
        }
        for bad in ["host:99999", "host:abc", "host:0", "host:+80", "host:80:80", "[::1]:x", "fe80::1"] {
            let error = place(&format!("http://{bad}/x")).unwrap_err().to_string();
            assert!(error.contains("port"), "{bad}: {error}");
            assert!(redirected("http://h/a", &format!("http://{bad}/x")).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_file_in_the_store_keeps_its_suffix_and_nothing_that_leads_away() {
        for (url, name) in [
            ("http://h/a/disk.qcow2?sig=x/../y", "disk.qcow2"),
            ("http://h", "image"),
            ("http://h/..", "image"),
            ("http://h/%2e%2e%2fx.img", "_2e_2e_2fx.img"),
            ("http://h/.hidden", "hidden"),
        ] {
            assert_eq!(place(url).unwrap().file_name(), name);
        }
        let long = place(&format!("http://h/{}.qcow2", "x".repeat(300))).unwrap().file_name();
        assert!(long.len() == 100 && long.ends_with(".qcow2"));
    }

    #[test]
    fn a_file_of_this_host_is_known_by_its_path_without_links_also_when_it_is_gone() {
        let temp = tempfile::tempdir().unwrap();
        let dir = fs::canonicalize(temp.path()).unwrap();
        fs::write(dir.join("d.gz"), "").unwrap();
        std::os::unix::fs::symlink(&dir, dir.join("link")).unwrap();
        for name in ["d.gz", "gone.gz"] {
            let url = format!("file:{}/{name}", dir.display());
            assert_eq!(url_of_path(&dir.join("link").join(name)), url);
        }
        assert_eq!(url_of_path(Path::new("gone.gz")), url_of_path(Path::new("./gone.gz")));
    }

    #[test]
    fn nobody_sees_a_query_or_a_password() {
        assert_eq!(shown("https://h/x.img?X-Amz-Signature=secret"), "https://h/x.img?...");
        assert_eq!(shown("https://me:secret@h/x"), "https://h/x");
        assert_eq!(shown("oci://h/x?layer=disk.img"), "oci://h/x?layer=disk.img");
    }

    #[test]
    fn redirects_lead_to_web_servers_only() {
        let from = "https://host:8443/a/b.img?q=1/2";
        for (location, to) in [
            ("c.img", "https://host:8443/a/c.img"),
            ("/c.img?x", "https://host:8443/c.img?x"),
            ("//other/c", "https://other/c"),
            ("https://other/c#frag", "https://other/c"),
        ] {
            assert_eq!(redirected(from, location).as_deref(), Ok(to));
        }
        for bad in
            ["http://host/x", "file:///etc/passwd", "ftp://h/x", "https://u:p@h/x", "https:///x", "a\nb"]
        {
            assert!(redirected(from, bad).is_err(), "{bad}");
        }
        assert_eq!(redirected("http://h/a", "https://h/b").as_deref(), Ok("https://h/b"));
    }

    #[test]
    fn a_server_is_scheme_host_and_port() {
        let same = |one, other| Parts::of(one).is_same_server(Parts::of(other));
        assert!(same("https://Host/x", "https://host:443/y"));
        assert!(!same("https://host/x", "http://host:443/x"));
        assert!(!same("https://host/x", "https://host.evil/x"));
        assert_eq!(Parts::of("http://[::1]:8080/x").host(), "::1");
        assert_eq!(Parts::of("http://[::1]:8080/x").port(), 8080);
        assert_eq!(Parts::of("http://[::1]/x").port(), 80);
    }
}

//! Which server and which of its exports a URI names, by the NBD project's document "NBD URI".
//! It connects to nothing.

use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use becket_uapi::nbd::{LONGEST_NAME, PORT};

use super::names::{decoded, encode};
use super::rbd::{self, Rbd};

/// Beginnings of the URIs that name an export, with whether TLS is wanted and whether it is a unix socket's.
const SCHEMES: [(&str, bool, bool); 4] = [
    ("nbd://", false, false),
    ("nbds://", true, false),
    ("nbd+unix://", false, true),
    ("nbds+unix://", true, true),
];
/// Bytes that stand for themselves in the name of an export and in the path of a socket.
const PLAIN: &[u8] = b"-._~/:@!$'()*,;=";

/// An export of an NBD server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// TLS must be used, and how.
    pub tls: Option<Tls>,
    /// Where the server listens.
    pub server: Server,
    /// The name of the export; empty for the server's default.
    pub export: String,
}

/// What a URI says of TLS.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// The directory with `ca-cert.pem`, and where the server wants them `client-cert.pem` and
    /// `client-key.pem`; an absolute path. Without one, the authorities are those of the system.
    pub certificates: Option<PathBuf>,
    /// The name that the server's certificate must have, where that is not the host's.
    pub hostname: Option<String>,
}

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Server {
    /// At a TCP port.
    Tcp {
        /// A name or an address; an IPv6 address without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// At a unix socket, by its absolute path.
    Unix(PathBuf),
    /// Nowhere: a program is started that reaches an image of a Ceph cluster.
    Rbd(Box<Rbd>),
}

/// Whether a path names an export, well-formed or not.
pub fn is_link(path: &Path) -> bool {
    let schemes = SCHEMES.iter().map(|(scheme, ..)| *scheme).chain([rbd::SCHEME]);
    let bytes = path.as_os_str().as_bytes();
    schemes.into_iter().any(|scheme| bytes.starts_with(scheme.as_bytes()))
}

impl Endpoint {
    /// Reads a URI. The path of a socket that is relative is one below the working directory.
    ///
    /// # Errors
    /// What is wrong with it, in one sentence.
    pub fn parse(uri: &str) -> Result<Endpoint, String> {
        if uri.starts_with(rbd::SCHEME) {
            let server = Server::Rbd(Box::new(Rbd::parse(uri)?));
            return Ok(Endpoint { tls: None, server, export: String::new() });
        }
        let known =
            SCHEMES.iter().find_map(|(scheme, tls, unix)| Some((uri.strip_prefix(scheme)?, *tls, *unix)));
        let Some((rest, tls, unix)) = known else {
            return Err("it begins with none of nbd://, nbds://, nbd+unix:// and nbds+unix://".to_owned());
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decoded(export)?;
        if export.len() > LONGEST_NAME {
            return Err(format!("the name of its export is longer than {LONGEST_NAME} bytes"));
        }
        let export =
            String::from_utf8(export).map_err(|_| "the name of its export is not UTF-8".to_owned())?;
        let mut socket = None;
        let mut secured = Tls::default();
        for (name, value) in query.split('&').filter_map(|part| part.split_once('=')) {
            match name {
                "socket" => socket = Some(PathBuf::from(OsString::from_vec(decoded(value)?))),
                other if other.starts_with("tls-") && !tls => {
                    return Err(format!("it has {other} and asks for no TLS: use nbds:// or nbds+unix://"));
                }
                "tls-certificates" => {
                    let dir = std::path::absolute(OsString::from_vec(decoded(value)?));
                    let dir =
                        dir.map_err(|error| format!("its tls-certificates cannot be named: {error}"))?;
                    secured.certificates = Some(dir);
                }
                "tls-hostname" => {
                    let name = String::from_utf8(decoded(value)?);
                    secured.hostname = Some(name.map_err(|_| "its tls-hostname is not UTF-8".to_owned())?);
                }
                "tls-psk-file" => return Err("becket has no pre-shared keys".to_owned()),
                other if other.starts_with("tls-") => {
                    return Err(format!("the parameter {other} is not known"));
                }
                // The document has clients ignore what they do not know.
                _ => {}
            }
        }
        let server = match (unix, socket) {
            (true, Some(path)) if !path.as_os_str().is_empty() => {
                let whole = std::path::absolute(&path);
                Server::Unix(whole.map_err(|error| format!("its socket cannot be named: {error}"))?)
            }
            (true, _) => return Err("it names no socket: nbd+unix:///EXPORT?socket=PATH".to_owned()),
            (false, Some(_)) => return Err("it names a host and a socket".to_owned()),
            (false, None) => tcp(authority)?,
        };
        if unix && !authority.is_empty() {
            return Err(
                "it names a host and a socket: nbd+unix:///EXPORT?socket=PATH has three slashes".to_owned()
            );
        }
        Ok(Endpoint { tls: tls.then_some(secured), server, export })
    }

    /// Whether this export goes by a name that may say less of how it is reached.
    pub(crate) fn goes_by(&self, typed: &Endpoint) -> bool {
        match (&self.server, &typed.server) {
            (Server::Rbd(rbd), Server::Rbd(typed)) => rbd.goes_by(typed),
            _ => self.plainly() == typed.plainly(),
        }
    }

    /// The same export by a URI without the ways to reach it securely: two URIs of one export are equal.
    pub fn plainly(&self) -> String {
        Endpoint { tls: self.tls.as_ref().map(|_| Tls::default()), ..self.clone() }.to_string()
    }
}

/// The host and port that a URI names.
fn tcp(authority: &str) -> Result<Server, String> {
    if authority.contains('@') {
        return Err("it names a user, which only TLS with pre-shared keys has".to_owned());
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or("its address lacks a closing bracket")?;
            (host, rest.strip_prefix(':'))
        }
        None => authority.rsplit_once(':').map_or((authority, None), |(host, port)| (host, Some(port))),
    };
    let port = match port.filter(|port| !port.is_empty()) {
        None => PORT,
        Some(text) => {
            text.parse().ok().filter(|port| *port != 0).ok_or_else(|| format!("{text:?} is not a port"))?
        }
    };
    let host = String::from_utf8(decoded(host)?).map_err(|_| "its host is not UTF-8".to_owned())?;
    if host.is_empty() || host.bytes().any(|byte| byte.is_ascii_control() || byte == b' ') {
        return Err("it names no host".to_owned());
    }
    Ok(Server::Tcp { host, port })
}

/// As a URI; two of the same export are equal.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tls = if self.tls.is_some() { "s" } else { "" };
        let mut before = "?";
        match &self.server {
            Server::Rbd(rbd) => write!(f, "{rbd}")?,
            Server::Tcp { host, port } => {
                let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
                write!(f, "nbd{tls}://{open}{host}{close}")?;
                if *port != PORT {
                    write!(f, ":{port}")?;
                }
                f.write_char('/')?;
                encode(f, self.export.as_bytes(), PLAIN)?;
            }
            Server::Unix(path) => {
                write!(f, "nbd{tls}+unix:///")?;
                encode(f, self.export.as_bytes(), PLAIN)?;
                f.write_str("?socket=")?;
                encode(f, path.as_os_str().as_bytes(), PLAIN)?;
                before = "&";
            }
        }
        let Tls { certificates, hostname } = self.tls.clone().unwrap_or_default();
        if let Some(dir) = certificates {
            write!(f, "{before}tls-certificates=")?;
            encode(f, dir.as_os_str().as_bytes(), PLAIN)?;
            before = "&";
        }
        if let Some(name) = hostname {
            write!(f, "{before}tls-hostname=")?;
            encode(f, name.as_bytes(), PLAIN)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tcp(host: &str, port: u16, export: &str) -> Endpoint {
        Endpoint { tls: None, server: Server::Tcp { host: host.to_owned(), port }, export: export.to_owned() }
    }

    #[test]
    fn uris_name_exports() {
        let parse = |uri| Endpoint::parse(uri).unwrap();
        assert_eq!(parse("nbd://host"), tcp("host", PORT, ""));
        assert_eq!(parse("nbd://host/"), tcp("host", PORT, ""));
        assert_eq!(parse("nbd://host:7/a%20b/c"), tcp("host", 7, "a b/c"));
        assert_eq!(parse("nbd://[::1]:8/x"), tcp("::1", 8, "x"));
        assert_eq!(parse("nbds://host/x"), Endpoint { tls: Some(Tls::default()), ..tcp("host", PORT, "x") });
        let secured = parse("nbds://host/x?tls-certificates=/pki%20a&tls-hostname=other");
        let tls = secured.tls.clone().unwrap();
        assert_eq!((tls.certificates, tls.hostname.as_deref()), (Some("/pki a".into()), Some("other")));
        assert_eq!(secured.plainly(), "nbds://host/x", "the same export");
        let unix = parse("nbd+unix:///disk?socket=/run/a%20b.sock");
        assert_eq!(unix.server, Server::Unix("/run/a b.sock".into()));
        assert_eq!((unix.export.as_str(), unix.tls), ("disk", None));
        assert!(matches!(parse("nbd+unix:///?socket=here").server, Server::Unix(path) if path.is_absolute()));
        assert_eq!(parse("nbd://host/x?unheard=1"), tcp("host", PORT, "x"));
    }

    #[test]
    fn what_names_none_is_refused() {
        for uri in [
            "http://host/",
            "nbd://",
            "nbd:///export",
            "nbd://host:0/",
            "nbd://host:70000/",
            "nbd://[::1/x",
            "nbd://user@host/",
            "nbd://host/%4",
            "nbd://host/%00",
            "nbd://host/%ff",
            "nbd://host/x?socket=/s",
            "nbd+unix:///x",
            "nbd+unix://host/x?socket=/s",
            "nbds://host/x?tls-psk-file=/f",
            "nbds://host/x?tls-verify-peer=false",
            "nbd://host/x?tls-certificates=/pki",
        ] {
            assert!(Endpoint::parse(uri).is_err(), "{uri}");
        }
        assert!(Endpoint::parse(&format!("nbd://host/{}", "x".repeat(5000))).is_err());
    }

    proptest! {
        #[test]
        fn a_uri_comes_back_as_it_went(tls: bool, host in "[a-z][a-z0-9.-]{0,20}", port in 1u16.., export in "\\PC{0,20}", unix: bool, path in "/[^\0]{0,20}", dir in "(/[^\0]{0,20})?", name in "\\PC{0,9}") {
            let server = if unix { Server::Unix(path.into()) } else { Server::Tcp { host, port } };
            let certificates = (!dir.is_empty()).then(|| dir.into());
            let hostname = (!name.is_empty()).then_some(name);
            let endpoint =
                Endpoint { tls: tls.then_some(Tls { certificates, hostname }), server, export };
            // A path that is not in its shortest form names the same socket.
            let again = Endpoint::parse(&endpoint.to_string()).unwrap();
            prop_assert_eq!(again.to_string(), Endpoint::parse(&again.to_string()).unwrap().to_string());
            prop_assert_eq!((again.tls.is_some(), again.export), (tls, endpoint.export));
            prop_assert_eq!(again.tls.and_then(|tls| tls.hostname), endpoint.tls.and_then(|tls| tls.hostname));
        }

        #[test]
        fn any_text_is_read_without_a_panic(text in "nbds?(\\+unix)?://\\PC{0,60}") {
            let _ = Endpoint::parse(&text);
        }
    }
}

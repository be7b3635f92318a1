//! Exports: the socket that clients connect to is made here, with the rights of the user who asks for it, and
//! goes to the server with the image. It never takes a socket away from a program that listens there.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::linux::fs::MetadataExt as _;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use becket_transport::Kind;
use becket_uapi::handover::inherited_fd;
use rustix::fs::{Mode, OFlags};
use rustix::net::sockopt;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, getsockname, listen, socket_with,
};

use crate::contract::export::{DoorWords, TlsFiles};
use crate::contract::sealed;
use crate::contract::{Error, ErrorKind, Export, SocketFile};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;
/// The longest file of a directory of `--tls`, in bytes.
const LONGEST_PEM: u64 = 1 << 20;
/// The port of NBD (IANA).
const PORT: u16 = 10809;

/// Who may connect, and how many.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DoorOptions {
    /// Most connections at once.
    pub max_connections: u32,
    /// The directory of the server's certificate and key. Clients must use TLS then.
    pub tls: Option<PathBuf>,
    /// Clients must have a certificate.
    pub verify: bool,
    /// The names of which a client's certificate must have one.
    pub allow: Vec<String>,
    /// A TCP address other than loopback without TLS is allowed.
    pub insecure: bool,
}

/// A socket that listens for clients of exports. Unless an export was made with it, its file goes with it.
#[derive(Debug)]
pub struct Doorway {
    pub(crate) kind: Kind,
    pub(crate) export: Export,
    listener: OwnedFd,
    words: OwnedFd,
    dir: OwnedFd,
    used: AtomicBool,
}

impl Doorway {
    /// Listens for NBD clients at `unix:PATH`, `tcp:HOST[:PORT]`, `fd:N` (a socket that listens already) or
    /// `systemd` (the one that a service manager has handed to this process).
    ///
    /// # Errors
    /// The address cannot be understood or is in use, a file of `tls` cannot be used, or the address could be
    /// reached by others without TLS.
    pub fn nbd(address: &str, options: &DoorOptions) -> Result<Doorway, Error> {
        let tls = options.tls.as_deref().map(|dir| read_tls(dir, options)).transpose()?;
        if tls.is_none() && (options.verify || !options.allow.is_empty()) {
            return Err(wrong("clients have certificates only with TLS", Some("add --tls DIR")));
        }
        let secured = tls.is_some() || options.insecure;
        let mut doorway = Doorway::at(Kind::Nbd, address, secured, DoorWords { tls })?;
        doorway.export = Export {
            max_connections: options.max_connections,
            tls: options.tls.is_some(),
            verify: options.verify || !options.allow.is_empty(),
            allow: options.allow.clone(),
            ..std::mem::take(&mut doorway.export)
        };
        Ok(doorway)
    }

    /// Listens for the front-end of a virtual machine at `unix:PATH`, `fd:N` or `systemd`.
    ///
    /// # Errors
    /// As [`Doorway::nbd`]. It is not a Unix socket.
    pub fn vhost_user(address: &str) -> Result<Doorway, Error> {
        if address.starts_with("tcp:") {
            return Err(wrong("vhost-user shares memory, so it needs a unix socket", Some("use unix:PATH")));
        }
        let mut doorway = Doorway::at(Kind::VhostUser, address, true, DoorWords::default())?;
        if sockopt::socket_domain(&doorway.listener) != Ok(AddressFamily::UNIX) {
            return Err(wrong("vhost-user shares memory, so it needs a unix socket", Some("use unix:PATH")));
        }
        doorway.export.max_connections = 1;
        Ok(doorway)
    }

    fn at(kind: Kind, address: &str, secured: bool, words: DoorWords) -> Result<Doorway, Error> {
        let failed =
            |what: &'static str| move |error: io::Error| Error::io(what, "the server".as_ref())(error);
        let words = sealed::write_json("becket-door", &words).map_err(failed("write the key for"))?;
        let Listening { listener, address, place } = Listening::at(address, secured)?;
        let (dir, socket) = match place {
            Some((dir, file)) => (dir, Some(file)),
            None => (directory(Path::new("/")).map_err(failed("open a directory for"))?, None),
        };
        let export = Export { address, socket, ..Export::default() };
        Ok(Doorway { kind, export, listener, words, dir, used: false.into() })
    }

    /// Its descriptors, in the order in which the server takes them.
    pub(crate) fn descriptors(&self) -> io::Result<[OwnedFd; 3]> {
        Ok([self.listener.try_clone()?, self.words.try_clone()?, self.dir.try_clone()?])
    }

    /// How many queues an export here has: each connection of NBD is one.
    pub(crate) fn queues(&self) -> Option<u16> {
        match self.kind {
            Kind::Nbd => u16::try_from(self.export.max_connections).ok(),
            _ => None,
        }
    }

    /// An export was made with it, and its server removes the file of the socket.
    pub(crate) fn keep(&self) {
        self.used.store(true, Ordering::Relaxed);
    }
}

impl Drop for Doorway {
    fn drop(&mut self) {
        let unused = !self.used.load(Ordering::Relaxed);
        if let Some(file) = self.export.socket.as_ref().filter(|_| unused) {
            // It is in nobody's way when it stays: the next one replaces a socket without a listener.
            let _ = rustix::fs::unlinkat(&self.dir, &file.name, rustix::fs::AtFlags::empty());
        }
    }
}

pub(super) struct Listening {
    pub(super) listener: OwnedFd,
    pub(super) address: String,
    /// The directory of a socket's file, and the file.
    place: Option<(OwnedFd, SocketFile)>,
}

impl Listening {
    /// Listens at an address; at one that others reach only if `secured`.
    pub(super) fn at(address: &str, secured: bool) -> Result<Listening, Error> {
        let listening = match address.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => return unix(Path::new(path)),
            Some(("tcp", place)) => tcp(place)?,
            Some(("fd", number)) => inherited(number.parse().ok(), address)?,
            None if address == "systemd" => inherited(Some(activated()?), address)?,
            _ => {
                let what =
                    format!("{address:?} is not an address: unix:PATH, tcp:HOST:PORT, fd:N or systemd");
                return Err(wrong(&what, None));
            }
        };
        let place = SocketAddr::try_from(getsockname(&listening.listener).map_err(listens(address))?);
        if let Ok(place) = place
            && !place.ip().is_loopback()
            && !secured
        {
            let what =
                format!("there is no TLS, so anybody who reaches {place} could read and write the images");
            return Err(wrong(&what, Some("add --tls DIR, or --insecure if the network is trusted")));
        }
        Ok(listening)
    }
}

fn wrong(message: &str, hint: Option<&str>) -> Error {
    Error::Failed {
        kind: ErrorKind::InvalidOption,
        message: message.to_owned(),
        hint: hint.map(str::to_owned),
    }
}

fn listens(address: &str) -> impl FnOnce(rustix::io::Errno) -> Error + use<> {
    let address = PathBuf::from(address);
    move |error| Error::Io { what: "listen at", path: address, source: error.into() }
}

fn directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Listens at a path, which only the user may connect to. A socket without a listener is replaced.
fn unix(path: &Path) -> Result<Listening, Error> {
    let failed = |error: io::Error| Error::io("listen at", path)(error);
    let path = &std::path::absolute(path).map_err(failed)?;
    let text = path.to_str().ok_or_else(|| wrong("the path of a socket must be UTF-8", None))?;
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(wrong(&format!("{text} is not a path of a socket"), None));
    };
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(failed(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "it exists and is not a socket",
            )));
        }
        Ok(_) => match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(failed)?;
            }
            _ => {
                return Err(Error::Failed {
                    kind: ErrorKind::InUse,
                    message: format!("a program listens at {text} already"),
                    hint: Some(
                        "if `becket list` shows an export there, detach it first, and name all images of one \
                         address in one command; or choose another path"
                            .to_owned(),
                    ),
                });
            }
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let dir = directory(parent).map_err(failed)?;
    let made = || -> rustix::io::Result<OwnedFd> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // The file that `bind` makes has the mode of the socket.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    };
    let listener = made().map_err(|error| failed(error.into()))?;
    let found = fs::symlink_metadata(path).map_err(failed)?;
    let file = SocketFile { name: name.into(), ino: found.st_ino(), dev: found.st_dev() };
    listen(&listener, BACKLOG).map_err(|error| failed(error.into())).inspect_err(|_| {
        let _ = fs::remove_file(path);
    })?;
    Ok(Listening { listener, address: format!("unix:{text}"), place: Some((dir, file)) })
}

/// An address in one spelling: of two that are equal, only one can be listened at. Nothing is known of a free
/// port, nor of a socket that is handed over.
pub fn spelled(address: &str) -> Option<String> {
    match address.split_once(':')? {
        // Without repeated slashes and dots.
        ("unix", path) => {
            Some(format!("unix:{}", Path::new(path).components().collect::<PathBuf>().display()))
        }
        ("tcp", place) => {
            with_port(place).ok().filter(|(_, port)| *port > 0).map(|(place, _)| format!("tcp:{place}"))
        }
        _ => None,
    }
}

/// `HOST[:PORT]` with its port, and the port; an error says why it is none.
fn with_port(place: &str) -> Result<(String, u16), &'static str> {
    let (host, port) = written_port(place).unwrap_or((place, ""));
    match port.parse() {
        _ if host.is_empty() => Err("it names no host"),
        Ok(port) => Ok((place.to_owned(), port)),
        Err(_) if port.is_empty() => Ok((format!("{place}:{PORT}"), PORT)),
        Err(_) => Err("a port is 65535 at most"),
    }
}

/// `HOST:PORT` in two, if there is a number. An IPv6 address is in brackets.
pub(super) fn written_port(place: &str) -> Option<(&str, &str)> {
    let is_number = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    place.rsplit_once(':').filter(|(_, port)| is_number(port))
}

/// Listens at `HOST[:PORT]`; port 0 is one that is free.
fn tcp(place: &str) -> Result<Listening, Error> {
    let address = format!("tcp:{place}");
    let (named, _) = with_port(place).map_err(|why| {
        let hint = "for example tcp:127.0.0.1:10809";
        wrong(&format!("cannot listen at {address}: {why}"), Some(hint))
    })?;
    let failed = |error: io::Error| Error::io("listen at", address.as_ref())(error);
    let found: Vec<SocketAddr> = named.to_socket_addrs().map_err(failed)?.collect();
    let listener = TcpListener::bind(found.as_slice()).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok(Listening { listener: listener.into(), address: format!("tcp:{bound}"), place: None })
}

/// A socket that was handed to this process and listens already.
fn inherited(number: Option<i32>, address: &str) -> Result<Listening, Error> {
    let failed = |error: io::Error| Error::io("listen at", address.as_ref())(error);
    let number = number.ok_or_else(|| wrong(&format!("{address:?} names no descriptor"), None))?;
    let listener = inherited_fd(number).map_err(failed)?;
    let stream = sockopt::socket_type(&listener) == Ok(SocketType::STREAM);
    if !stream || !sockopt::socket_acceptconn(listener.as_fd()).unwrap_or(false) {
        return Err(wrong(&format!("{address} is not a stream socket that listens"), None));
    }
    let bound = getsockname(&listener).map_err(listens(address))?;
    let unix = || SocketAddrUnix::try_from(bound.clone()).ok()?.path_bytes().map(<[u8]>::to_vec);
    let address = match SocketAddr::try_from(bound.clone()) {
        Ok(bound) => format!("tcp:{bound}"),
        Err(_) => match unix().and_then(|path| String::from_utf8(path).ok()) {
            Some(path) => format!("unix:{}", from_here(path)),
            None => address.to_owned(),
        },
    };
    // Its file is whose who made it.
    Ok(Listening { listener, address, place: None })
}

/// The path of a socket that was made by a relative one, for people who are elsewhere: most likely it was
/// made in the working directory.
fn from_here(path: String) -> String {
    let whole = std::path::absolute(&path).ok().filter(|whole| whole.exists());
    whole.and_then(|whole| whole.to_str().map(str::to_owned)).unwrap_or(path)
}

/// The number of the descriptor that a service manager has handed to this process: sd_listen_fds(3).
fn activated() -> Result<i32, Error> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    match (number("LISTEN_PID"), number("LISTEN_FDS")) {
        (Some(pid), Some(1)) if pid == std::process::id() => Ok(3),
        (Some(pid), Some(count)) if pid == std::process::id() => {
            Err(wrong(&format!("the service manager has handed over {count} sockets, not one"), None))
        }
        _ => Err(wrong(
            "no service manager has handed a socket to this command",
            Some("name an address, like unix:PATH; or see systemd.socket(5) and systemd-socket-activate(1)"),
        )),
    }
}

/// Reads the files of a directory of `--tls`, which are called as libnbd calls them.
fn read_tls(dir: &Path, options: &DoorOptions) -> Result<TlsFiles, Error> {
    let read = |name: &str| -> Result<Option<String>, Error> {
        let path = dir.join(name);
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io("read", &path)(error)),
            Ok(found) if found.len() > LONGEST_PEM => {
                return Err(wrong(&format!("{} is too long for a certificate", path.display()), None));
            }
            Ok(_) => {}
        }
        fs::read_to_string(&path).map(Some).map_err(|error| Error::io("read", &path)(error))
    };
    let needed = |name: &str, why: &str| {
        read(name)?.ok_or_else(|| {
            let what = format!("{} is missing: {why}", dir.join(name).display());
            wrong(&what, Some("certtool(1) makes such files; docs/guide has the commands"))
        })
    };
    let verify = options.verify || !options.allow.is_empty();
    Ok(TlsFiles {
        certificates: needed("server-cert.pem", "the server has no certificate")?,
        key: needed("server-key.pem", "the server has no key")?,
        authorities: match verify {
            true => Some(needed("ca-cert.pem", "no certificate of a client can be checked")?),
            false => None,
        },
        revoked: if verify { read("ca-crl.pem")? } else { None },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(address: &str, options: &DoorOptions) -> (ErrorKind, String) {
        let error = Doorway::nbd(address, options).unwrap_err();
        (error.kind(), error.to_string())
    }

    #[test]
    fn a_socket_is_for_its_user_alone_and_goes_when_nothing_was_made_with_it() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("a b.sock");
        let address = format!("unix:{}", path.display());
        let doorway = Doorway::nbd(&address, &DoorOptions::default()).unwrap();
        assert_eq!(doorway.export.address, address);
        let found = fs::metadata(&path).unwrap();
        assert_eq!(found.st_mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        let (kind, text) = refused(&address, &DoorOptions::default());
        assert_eq!(kind, ErrorKind::InUse, "{text}");
        drop(doorway);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_without_a_listener_is_replaced_and_a_file_is_not() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("s");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let address = format!("unix:{}", path.display());
        drop(Doorway::nbd(&address, &DoorOptions::default()).unwrap());
        fs::write(&path, "mine").unwrap();
        let (_, text) = refused(&address, &DoorOptions::default());
        assert!(text.contains("not a socket"), "{text}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    }

    #[test]
    fn an_address_that_is_none_is_not_looked_up() {
        for (address, why) in [
            ("tcp:", "names no host"),
            ("tcp::0", "names no host"),
            ("tcp:127.0.0.1:99999", "65535 at most"),
            ("tcp:[::1]:65536", "65535 at most"),
        ] {
            let (kind, text) = refused(address, &DoorOptions::default());
            assert!(kind == ErrorKind::InvalidOption && text.contains(why), "{address}: {text}");
        }
        for place in ["127.0.0.1", "[::1]", "h:0", "h:65535"] {
            assert!(with_port(place).is_ok(), "{place}");
        }
    }

    #[test]
    fn what_others_can_reach_needs_tls_or_the_user_s_word() {
        let (kind, text) = refused("tcp:0.0.0.0:0", &DoorOptions::default());
        assert_eq!(kind, ErrorKind::InvalidOption);
        assert!(text.contains("no TLS"), "{text}");
        let insecure = DoorOptions { insecure: true, ..DoorOptions::default() };
        Doorway::nbd("tcp:0.0.0.0:0", &insecure).unwrap();
        let local = Doorway::nbd("tcp:127.0.0.1:0", &DoorOptions::default()).unwrap();
        let port = local.export.address.rsplit_once(':').unwrap().1.parse::<u16>().unwrap();
        assert_ne!(port, 0, "the port is the one that it has");
    }

    #[test]
    fn addresses_and_files_that_make_no_sense_are_refused() {
        for address in ["", "unix:", "disk.img", "fd:x", "systemd", "http://x"] {
            let (kind, text) = refused(address, &DoorOptions::default());
            assert_eq!(kind, ErrorKind::InvalidOption, "{address}: {text}");
        }
        // Exports are not the only ones that listen.
        let hint = activated().unwrap_err().hint().unwrap();
        assert!(hint.contains("unix:PATH") && !hint.contains("export"), "{hint}");
        let temp = tempfile::tempdir().unwrap();
        let tls = DoorOptions { tls: Some(temp.path().into()), ..DoorOptions::default() };
        assert!(refused("tcp:127.0.0.1:0", &tls).1.contains("server-cert.pem is missing"));
        let alone = DoorOptions { verify: true, ..DoorOptions::default() };
        assert!(refused("tcp:127.0.0.1:0", &alone).1.contains("only with TLS"));
        assert_eq!(Doorway::vhost_user("tcp:127.0.0.1:0").unwrap_err().kind(), ErrorKind::InvalidOption);
    }
}

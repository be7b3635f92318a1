//! The client's side of TLS: whom a server must prove to be, and what this side proves.
//! It never goes on with a server that has proved nothing: there is no option for that.
//!
//! Files are read once, by the process that the user started. Another process that makes connections gets
//! their contents in an *envelope*, which whoever serves the image can hold and not read.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{AlertDescription, CertificateError, ClientConfig, ClientConnection, RootCertStore};
use serde::{Deserialize, Serialize};

use super::error::DialError;
use super::uri::{Endpoint, Server, Tls};

/// Where systems keep the certificates that they trust.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// The longest file that is read, and the longest envelope, in bytes.
const LONGEST: u64 = 4 << 20;

/// The certificates that this system trusts, in PEM: of `$SSL_CERT_FILE`, or of the system's own file.
///
/// # Errors
/// Which file cannot be read, and why.
pub fn trusted() -> Result<String, (PathBuf, io::Error)> {
    let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let path = named.or_else(|| BUNDLES.iter().map(PathBuf::from).find(|path| path.exists()));
    let path = path.unwrap_or_else(|| BUNDLES.first().map(PathBuf::from).unwrap_or_default());
    fs::read_to_string(&path).map_err(|error| (path, error))
}

/// The contents of the files, in PEM.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Files {
    authorities: String,
    /// The client's certificate and its key.
    client: Option<(String, String)>,
}

/// What connections to a server are secured by. It has secrets: nothing prints it.
#[derive(Clone)]
pub struct Trust {
    files: Files,
    config: Arc<ClientConfig>,
}

impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trust").finish_non_exhaustive()
    }
}

impl Trust {
    /// Reads what a URI asks for. The files of a directory have the names that libnbd gives them.
    pub(super) fn of(tls: &Tls) -> Result<Trust, DialError> {
        let files = match &tls.certificates {
            Some(dir) => {
                let needed = |name: &str| {
                    read(dir, name)?.ok_or_else(|| unusable(&dir.join(name), &io::ErrorKind::NotFound.into()))
                };
                let authorities = needed("ca-cert.pem")?;
                let client = match read(dir, "client-cert.pem")? {
                    Some(certificate) => Some((certificate, needed("client-key.pem")?)),
                    None => None,
                };
                Files { authorities, client }
            }
            None => {
                let authorities = trusted().map_err(|(path, error)| unusable(&path, &error))?;
                Files { authorities, client: None }
            }
        };
        Trust::new(files)
            .map_err(|why| DialError::Certificates(io::Error::new(io::ErrorKind::InvalidInput, why)))
    }

    fn new(files: Files) -> Result<Trust, String> {
        let config = Arc::new(config(&files)?);
        Ok(Trust { files, config })
    }

    /// The files' contents for another process, in a descriptor that has no right to read.
    ///
    /// # Errors
    /// There is no memory, or no `/proc`.
    pub(super) fn sealed(&self) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = fs::File::from(rustix::fs::memfd_create("becket-tls", flags)?);
        rustix::fs::fchmod(&file, Mode::RUSR)?;
        file.write_all(&serde_json::to_vec(&self.files)?)?;
        rustix::fs::fcntl_add_seals(
            &file,
            SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
        )?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// The reverse, of an envelope that was opened for reading.
    ///
    /// # Errors
    /// It cannot be read, or holds something else.
    pub fn unsealed(envelope: OwnedFd) -> io::Result<Trust> {
        // At a place of its own: several processes share the descriptor, one after another.
        let file = fs::File::from(envelope);
        let len = usize::try_from(file.metadata()?.len().min(LONGEST)).unwrap_or(0);
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, 0)?;
        Trust::new(serde_json::from_slice(&bytes)?).map_err(io::Error::other)
    }

    /// A connection that is to be made to that server.
    pub(super) fn begin(&self, endpoint: &Endpoint) -> Result<ClientConnection, DialError> {
        let name = wanted_name(endpoint);
        let invalid = |_| {
            let why = format!("{name:?} is not a name that a certificate can have");
            DialError::Io(io::Error::new(io::ErrorKind::InvalidInput, why))
        };
        let server = ServerName::try_from(name.clone()).map_err(invalid)?;
        ClientConnection::new(Arc::clone(&self.config), server).map_err(|error| explained(&error, endpoint))
    }
}

/// The name that the server's certificate must have.
fn wanted_name(endpoint: &Endpoint) -> String {
    match (endpoint.tls.as_ref().and_then(|tls| tls.hostname.clone()), &endpoint.server) {
        (Some(name), _) => name,
        (None, Server::Tcp { host, .. }) => host.clone(),
        // No name of Ceph's wants TLS.
        (None, Server::Unix(_) | Server::Rbd(_)) => "localhost".to_owned(),
    }
}

fn unusable(path: &Path, error: &io::Error) -> DialError {
    let why = format!("{} cannot be used: {error}", path.display());
    DialError::Certificates(io::Error::new(error.kind(), why))
}

/// A file of the directory, if it is there.
fn read(dir: &Path, name: &str) -> Result<Option<String>, DialError> {
    let path = dir.join(name);
    let file = match fs::File::open(&path) {
        Ok(file) => file,
        // A directory that is not there is a mistake.
        Err(error) if error.kind() == io::ErrorKind::NotFound && dir.is_dir() => return Ok(None),
        Err(error) => return Err(unusable(&path, &error)),
    };
    let mut text = String::new();
    match file.take(LONGEST / 4).read_to_string(&mut text) {
        Ok(_) => Ok(Some(text)),
        Err(error) => Err(unusable(&path, &error)),
    }
}

fn config(files: &Files) -> Result<ClientConfig, String> {
    let certificates = |what: &str, text: &str| -> Result<Vec<CertificateDer<'static>>, String> {
        let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
        let read = read.map_err(|error| format!("{what}: {error}"))?;
        if read.is_empty() { Err(format!("{what} has no certificate")) } else { Ok(read) }
    };
    let mut roots = RootCertStore::empty();
    let (taken, _) = roots.add_parsable_certificates(certificates("ca-cert.pem", &files.authorities)?);
    if taken == 0 {
        return Err("ca-cert.pem has no certificate of an authority".to_owned());
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    match &files.client {
        None => Ok(builder.with_no_client_auth()),
        Some((certificate, key)) => {
            let chain = certificates("client-cert.pem", certificate)?;
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes())
                .map_err(|error| format!("client-key.pem: {error}"))?;
            let config = builder.with_client_auth_cert(chain, key);
            config.map_err(|error| format!("client-cert.pem and client-key.pem: {error}"))
        }
    }
}

/// Says what is wrong, and what helps.
pub(super) fn explained(error: &rustls::Error, endpoint: &Endpoint) -> DialError {
    use rustls::Error as E;
    let name = wanted_name(endpoint);
    let certificate = |what: &str| format!("the server's certificate {what}");
    let (why, hint) = match error {
        E::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => (
            certificate("is of no authority that is trusted"),
            Some("add tls-certificates=DIR to the URI, with the authority's ca-cert.pem in DIR"),
        ),
        E::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => (
            certificate(&format!("is not for {name:?}")),
            Some("if another name of its is right, add tls-hostname=NAME to the URI"),
        ),
        E::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            (certificate("has expired"), None)
        }
        E::InvalidCertificate(other) => (certificate(&format!("cannot be trusted: {other}")), None),
        E::AlertReceived(
            alert @ (AlertDescription::CertificateRequired
            | AlertDescription::BadCertificate
            | AlertDescription::UnknownCA
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateUnknown
            | AlertDescription::AccessDenied
            | AlertDescription::HandshakeFailure),
        ) => (format!("the server refuses this client ({alert:?})"), Some(CLIENT)),
        E::AlertReceived(alert) => (format!("the server ends TLS ({alert:?})"), None),
        E::InvalidMessage(_) | E::InappropriateMessage { .. } | E::InappropriateHandshakeMessage { .. } => {
            (format!("the server does not speak TLS: {error}"), None)
        }
        other => (format!("the server's TLS cannot be used: {other}"), None),
    };
    DialError::Tls { why, hint }
}

/// What helps where a server may want to know its client.
pub(super) const CLIENT: &str = "if the server wants a client certificate: put client-cert.pem and \
    client-key.pem, with ca-cert.pem, in a directory, and add tls-certificates=DIR to the URI";

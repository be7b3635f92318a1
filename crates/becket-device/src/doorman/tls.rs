//! The server's side of TLS: its certificate and key, and which clients may come in.
//! It reads no file: the contents came with the order to attend.

use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use crate::contract::export::{DoorWords, TlsFiles};

/// How connections are secured, if they are.
///
/// # Errors
/// Which of the files cannot be used, and why.
pub(super) fn server(words: &DoorWords, verify: bool) -> Result<Option<Arc<ServerConfig>>, String> {
    let Some(files) = &words.tls else { return Ok(None) };
    config(files, verify).map(|config| Some(Arc::new(config)))
}

fn config(files: &TlsFiles, verify: bool) -> Result<ServerConfig, String> {
    let certificates = |name: &str, text: &str| -> Result<Vec<CertificateDer<'static>>, String> {
        let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
        let read = read.map_err(|error| format!("{name}: {error}"))?;
        if read.is_empty() { Err(format!("{name} has no certificate")) } else { Ok(read) }
    };
    let chain = certificates("server-cert.pem", &files.certificates)?;
    let key = PrivateKeyDer::from_pem_slice(files.key.as_bytes())
        .map_err(|error| format!("server-key.pem: {error}"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let builder = match (&files.authorities, verify) {
        (Some(text), true) => {
            let mut roots = RootCertStore::empty();
            for authority in certificates("ca-cert.pem", text)? {
                roots.add(authority).map_err(|error| format!("ca-cert.pem: {error}"))?;
            }
            let revoked = files.revoked.as_deref().unwrap_or_default().as_bytes();
            let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(revoked).collect();
            let lists = lists.map_err(|error| format!("ca-crl.pem: {error}"))?;
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .with_crls(lists)
                .build()
                .map_err(|error| format!("ca-cert.pem: {error}"))?;
            builder.with_client_cert_verifier(verifier)
        }
        (None, true) => return Err("ca-cert.pem is missing: no client could be checked".to_owned()),
        (_, false) => builder.with_no_client_auth(),
    };
    let config = builder.with_single_cert(chain, key);
    config.map_err(|error| format!("server-cert.pem and server-key.pem: {error}"))
}

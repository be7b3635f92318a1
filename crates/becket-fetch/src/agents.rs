//! What sends requests: to a server, or by the proxy for its scheme.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Proxy, ProxyProtocol};

use crate::access::Access;
use crate::forward;
use crate::place::Parts;
use crate::proxies::{Named, Proxies};

/// The longest head of an answer, in bytes.
pub(crate) const HEAD_MAX: usize = 32 << 10;

/// See the module.
pub(crate) struct Agents {
    direct: Agent,
    /// By the proxy for `http://`, and by that for `https://`; none where there is none that works.
    plain: Option<Agent>,
    secure: Option<Agent>,
    proxies: Proxies,
}

impl Agents {
    /// `step` is how long a connection, the head of an answer, and a read of its body may take; `body` is for
    /// one body.
    pub(crate) fn new(access: &Access, step: Duration, body: Duration) -> Agents {
        let mut tls = TlsConfig::builder()
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()));
        if let Some(authorities) = &access.authorities {
            let certificates = parse_pem(authorities.as_bytes()).filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            });
            tls = tls.root_certs(RootCerts::Specific(Arc::new(certificates.collect())));
        }
        let tls = tls.build();
        let config = |proxy| {
            Agent::config_builder()
                .tls_config(tls.clone())
                .proxy(proxy)
                .http_status_as_error(false)
                .max_redirects(0)
                .max_redirects_will_error(false)
                .user_agent(concat!("becket/", env!("CARGO_PKG_VERSION")))
                // Bytes of the object are wanted, and not of a compressed form of it.
                .accept_encoding("identity")
                .max_response_header_size(HEAD_MAX)
                .timeout_resolve(Some(step))
                .timeout_connect(Some(step))
                .timeout_recv_response(Some(step))
                .timeout_per_read(Some(step))
                .timeout_recv_body(Some(body))
                .max_idle_connections_per_host(16)
                .build()
        };
        let proxies = access.proxies.clone();
        let usable = |proxy: &Option<String>| {
            let proxy = Proxy::new(proxy.as_deref()?).ok()?;
            matches!(proxy.protocol(), ProxyProtocol::Http | ProxyProtocol::Https).then_some(proxy)
        };
        let tunnel = |proxy: Proxy| config(Some(proxy)).new_agent();
        let plain = usable(&proxies.plain)
            .map(|proxy| forward::agent(&proxy, config(None)).unwrap_or_else(|| tunnel(proxy)));
        let secure = usable(&proxies.secure).map(tunnel);
        Agents { direct: config(None).new_agent(), plain, secure, proxies }
    }

    /// What asks for a URL.
    ///
    /// # Errors
    /// Its proxy is none that becket can use.
    pub(crate) fn of(&self, url: &str) -> Result<&Agent, ureq::Error> {
        let server = Parts::of(url);
        let by_proxy = if server.is_secure() { &self.secure } else { &self.plain };
        match self.proxies.way(server) {
            Some(_) => by_proxy.as_ref().ok_or(ureq::Error::InvalidProxyUrl),
            None => Ok(&self.direct),
        }
    }

    /// Whether what answers for a URL may be a proxy: it sees each request for plain http.
    pub(crate) fn is_forwarded(&self, url: &str) -> bool {
        !Parts::of(url).is_secure() && self.proxy(url).is_some()
    }

    /// The proxy that is the way to the server of a URL.
    pub(crate) fn proxy(&self, url: &str) -> Option<Named> {
        self.proxies.named(Parts::of(url))
    }
}

impl fmt::Debug for Agents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agents").finish_non_exhaustive()
    }
}

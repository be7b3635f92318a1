//! Requests for plain http by a proxy: it is asked for the whole URL (RFC 9112, 3.2.2) and connects itself,
//! as proxies expect it; many tunnel to the port of https only. ureq has tunnels only, so this stands between
//! it and the connection, and changes the head of each request on its way.

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, DefaultConnector, NextTimeout, Transport,
};
use ureq::{Agent, Error, Proxy, ProxyProtocol};

use crate::netrc::basic;

/// How each request for plain http begins here.
const METHOD: &[u8] = b"GET ";

/// An agent for plain http, if that proxy forwards requests. `config` names no proxy.
pub(crate) fn agent(proxy: &Proxy, config: Config) -> Option<Agent> {
    if proxy.protocol() != ProxyProtocol::Http {
        return None;
    }
    let password = proxy.username().or(proxy.password()).is_some();
    let password =
        password.then(|| basic(proxy.username().unwrap_or_default(), proxy.password().unwrap_or_default()));
    let line = password.map(|value| format!("Proxy-Authorization: {value}\r\n")).unwrap_or_default();
    let resolver = ToProxy { proxy: proxy.uri().clone(), names: DefaultResolver::default() };
    Some(Agent::with_parts(config, Forward { connector: DefaultConnector::new(), line }, resolver))
}

/// Whatever a server is called, the connection goes to the proxy.
#[derive(Debug)]
struct ToProxy {
    proxy: Uri,
    names: DefaultResolver,
}

impl Resolver for ToProxy {
    fn resolve(&self, _: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        self.names.resolve(&self.proxy, config, timeout)
    }
}

struct Forward {
    connector: DefaultConnector,
    /// What each head has for the proxy.
    line: String,
}

impl std::fmt::Debug for Forward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Forward")
    }
}

impl Connector<()> for Forward {
    type Out = Forwarded;

    fn connect(&self, details: &ConnectionDetails<'_>, _: Option<()>) -> Result<Option<Forwarded>, Error> {
        let Some(transport) = self.connector.connect(details, None)? else { return Ok(None) };
        let server = details.uri.authority().map(|server| format!("http://{server}")).unwrap_or_default();
        Ok(Some(Forwarded { transport, server, line: self.line.clone(), begins: true }))
    }
}

/// A connection to a proxy, for requests to one server.
struct Forwarded {
    transport: Box<dyn Transport>,
    /// The server's URL, without a path.
    server: String,
    line: String,
    /// A head begins next.
    begins: bool,
}

impl std::fmt::Debug for Forwarded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Forwarded").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Transport for Forwarded {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.transport.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        let output = self.transport.buffers().output();
        let head = output.get(..amount).unwrap_or_default();
        let begins = std::mem::replace(&mut self.begins, head.ends_with(b"\r\n\r\n"));
        if !begins {
            return self.transport.transmit_output(amount, timeout);
        }
        let changed = changed(head, &self.server, &self.line);
        let changed =
            changed.ok_or_else(|| Error::BadUri("it is not a request that a proxy forwards".to_owned()))?;
        let room = output.get_mut(..changed.len()).ok_or(Error::BodyExceedsLimit(0))?;
        room.copy_from_slice(&changed);
        self.transport.transmit_output(changed.len(), timeout)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.transport.await_input(timeout)
    }

    fn is_open(&mut self) -> bool {
        self.transport.is_open()
    }
}

/// The start of a head as a proxy wants it: with the whole URL, and a line for itself.
fn changed(head: &[u8], server: &str, line: &str) -> Option<Vec<u8>> {
    let rest = head.strip_prefix(METHOD).filter(|rest| rest.starts_with(b"/"))?;
    let end = rest.windows(2).position(|pair| pair == b"\r\n")? + 2;
    let (first, rest) = rest.split_at_checked(end)?;
    Some([METHOD, server.as_bytes(), first, line.as_bytes(), rest].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_names_the_whole_url_and_nothing_else_is_changed() {
        let head = b"GET /a?b HTTP/1.1\r\nhost: x\r\nrange: bytes=0-1\r\n\r\n";
        let found = changed(head, "http://x:81", "Proxy-Authorization: y\r\n").unwrap();
        let expected =
            "GET http://x:81/a?b HTTP/1.1\r\nProxy-Authorization: y\r\nhost: x\r\nrange: bytes=0-1\r\n\r\n";
        assert_eq!(String::from_utf8(found).unwrap(), expected);
        assert_eq!(changed(b"GET /a HTTP", "http://x", ""), None, "its first line is not whole");
        assert_eq!(changed(b"POST / HTTP/1.1\r\n", "http://x", ""), None);
        assert_eq!(changed(b"GET http://y/ HTTP/1.1\r\n", "http://x", ""), None);
    }
}

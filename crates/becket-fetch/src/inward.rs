//! Which addresses are inside: those of this host and of its links, where no server of another network may
//! send anybody.

use std::net::{IpAddr, ToSocketAddrs as _};

use crate::place::Parts;

/// What is inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Inward {
    /// This host.
    Host,
    /// Its links, where the services are that give a machine of a cloud its keys.
    Link,
}

/// Where inside a redirect would lead from the host that the user named; none if it may be followed: to the
/// same host, out, or to what that host is itself.
pub(crate) fn led(named: Parts<'_>, to: Parts<'_>) -> Option<Inward> {
    let same = named.host().eq_ignore_ascii_case(to.host());
    if same { None } else { led_from(|| addresses(named), &addresses(to)) }
}

fn led_from(named: impl FnOnce() -> Vec<IpAddr>, to: &[IpAddr]) -> Option<Inward> {
    let inside: Vec<Inward> = to.iter().filter_map(inward).collect();
    if inside.is_empty() {
        return None;
    }
    let named: Vec<Option<Inward>> = named().iter().map(inward).collect();
    let is_there = |place: Inward| !named.is_empty() && named.iter().all(|one| *one == Some(place));
    inside.into_iter().find(|place| !is_there(*place))
}

/// The addresses of a host; none where it cannot be looked up, for then it cannot be reached either.
fn addresses(parts: Parts<'_>) -> Vec<IpAddr> {
    let found = (parts.host(), parts.port()).to_socket_addrs();
    found.map(|all| all.map(|address| address.ip().to_canonical()).collect()).unwrap_or_default()
}

/// Whether an address is one of this host, or of a link that it is on.
fn inward(address: &IpAddr) -> Option<Inward> {
    let (host, link) = match address {
        IpAddr::V4(v4) => (v4.is_loopback() || v4.is_unspecified(), v4.is_link_local()),
        IpAddr::V6(v6) => (v6.is_loopback() || v6.is_unspecified(), v6.is_unicast_link_local()),
    };
    if host { Some(Inward::Host) } else { link.then_some(Inward::Link) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(address: &str) -> IpAddr {
        address.parse::<IpAddr>().unwrap().to_canonical()
    }

    #[test]
    fn addresses_of_this_host_are_known_in_all_their_forms() {
        for ours in ["127.0.0.1", "127.8.8.8", "0.0.0.0", "::1", "::ffff:127.0.0.1"] {
            assert_eq!(inward(&of(ours)), Some(Inward::Host), "{ours}");
        }
        for near in ["169.254.169.254", "fe80::1", "::ffff:169.254.169.254"] {
            assert_eq!(inward(&of(near)), Some(Inward::Link), "{near}");
        }
        for outward in ["192.0.2.1", "10.0.0.1", "2001:db8::1"] {
            assert_eq!(inward(&of(outward)), None, "{outward}");
        }
    }

    #[test]
    fn a_redirect_leads_inside_only_from_there() {
        let led = |named: &[&str], to: &str| {
            led_from(|| named.iter().map(|address| of(address)).collect(), &[of(to)])
        };
        assert_eq!(led(&["127.0.0.1"], "169.254.169.254"), Some(Inward::Link));
        assert_eq!(led(&["10.0.0.1"], "fe80::1"), Some(Inward::Link));
        assert_eq!(led(&["192.0.2.1", "127.0.0.1"], "127.0.0.1"), Some(Inward::Host));
        assert_eq!(led(&["169.254.7.7"], "127.0.0.1"), Some(Inward::Host));
        assert_eq!(led(&[], "127.0.0.1"), Some(Inward::Host), "behind a proxy");
        assert_eq!(led(&["127.0.0.1", "::1"], "127.8.8.8"), None);
        assert_eq!(led(&["169.254.7.7"], "169.254.169.254"), None);
        assert_eq!(led(&["127.0.0.1"], "192.0.2.1"), None);
    }
}

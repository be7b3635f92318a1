//! Which addresses are inside: those of this host and of its links, where no server of another network may
//! send anybody.

use std::net::{IpAddr, ToSocketAddrs as _};

use crate::place::Parts;

/// The addresses of a host; none where it cannot be looked up, for then it cannot be reached either.
pub(crate) fn addresses(parts: Parts<'_>) -> Vec<IpAddr> {
    let found = (parts.host(), parts.port()).to_socket_addrs();
    found.map(|all| all.map(|address| address.ip().to_canonical()).collect()).unwrap_or_default()
}

/// Whether an address is one of this host, or of a link that it is on.
pub(crate) fn is_inward(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local() || v4.is_unspecified(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unicast_link_local() || v6.is_unspecified(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_host_are_known_in_all_their_forms() {
        for inward in
            ["127.0.0.1", "127.8.8.8", "0.0.0.0", "169.254.169.254", "::1", "fe80::1", "::ffff:127.0.0.1"]
        {
            let address: IpAddr = inward.parse().unwrap();
            assert!(is_inward(&address.to_canonical()), "{inward}");
        }
        for outward in ["192.0.2.1", "10.0.0.1", "2001:db8::1"] {
            assert!(!is_inward(&outward.parse().unwrap()), "{outward}");
        }
    }
}

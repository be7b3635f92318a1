//! Objects on web servers: the URL is the address, and a password or a token may be in the user's netrc.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::contract::{Header, Origin};
use crate::home;
use crate::netrc::{self, Login};
use crate::place::Parts;

/// The name of a login whose password is a token (RFC 6750).
const BEARER: &str = "Bearer";

/// See the module.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Web {
    url: String,
    authorization: Option<String>,
}

impl Web {
    pub(super) fn of_user(url: &str) -> Web {
        let login = netrc::login(Parts::of(url).host());
        let authorization = login.and_then(|login| authorization(&login, Parts::of(url)));
        Web { url: url.to_owned(), authorization }
    }
}

/// What a request carries. A token is good for anybody who reads it, so it goes over TLS only.
fn authorization(login: &Login, server: Parts<'_>) -> Option<String> {
    if login.name != BEARER {
        return Some(login.basic());
    }
    let sound = login.password.bytes().all(|byte| (0x21..0x7f).contains(&byte));
    (server.is_secure() && sound).then(|| format!("Bearer {}", login.password))
}

impl Origin for Web {
    fn address(&self) -> String {
        self.url.clone()
    }

    fn headers(&self, _address: &str, _range: &Range<u64>) -> Vec<Header> {
        self.authorization.iter().map(|value| ("Authorization", value.clone())).collect()
    }

    fn hint(&self) -> &'static str {
        if !home::is_any_set(&["HOME", "NETRC"]) {
            return "neither $HOME nor $NETRC is set, so no password was looked for: set $NETRC to the path of \
                    a file with name and password for the host";
        }
        "put name and password for the host into ~/.netrc; with 'login Bearer' the password is a token"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_the_password_of_bearer_and_goes_over_tls_only() {
        let of = |name: &str, password: &str, url: &str| {
            let login = Login { name: name.to_owned(), password: password.to_owned() };
            authorization(&login, Parts::of(url))
        };
        assert_eq!(of("Bearer", "t0ken", "https://h/x").as_deref(), Some("Bearer t0ken"));
        assert_eq!(of("Bearer", "t0ken", "http://h/x"), None);
        assert_eq!(of("Bearer", "t0ken\r\nHost: x", "https://h/x"), None);
        assert!(of("bearer", "t0ken", "http://h/x").is_some_and(|value| value.starts_with("Basic ")));
    }
}

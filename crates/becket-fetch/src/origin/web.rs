//! Objects on web servers: the URL is the address, and a password or a token may be in the user's netrc.

use std::ops::Range;

use becket_image::shown;
use serde::{Deserialize, Serialize};

use super::contract::{Header, Origin};
use crate::netrc::{Login, Netrc};
use crate::place::Parts;

/// The name of a login whose password is a token (RFC 6750).
const BEARER: &str = "Bearer";

const NOWHERE: &str = "neither $HOME nor $NETRC is set, so no password was looked for: set $NETRC to the path \
                       of a file with name and password for the host";

/// See the module.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Web {
    url: String,
    authorization: Option<String>,
    /// What the user can do if the server does not allow it. A fetcher gives no advice.
    #[serde(skip)]
    hint: String,
}

impl Web {
    pub(super) fn of_user(url: &str) -> Web {
        Web::by(url, &Netrc::of_user(Parts::of(url).host()))
    }

    fn by(url: &str, netrc: &Netrc) -> Web {
        let (server, mut authorization) = (Parts::of(url), None);
        let host = shown(server.host().as_bytes());
        let token = "with 'login Bearer' the password is a token";
        let hint = match netrc {
            Netrc::Nowhere => NOWHERE.to_owned(),
            Netrc::Missing(file) => format!("put name and password for {host} into {file}; {token}"),
            Netrc::Unread(file, why) => {
                format!("{file} cannot be read, so no password was looked for in it: {why}")
            }
            Netrc::Silent(file) => {
                format!("{file} has no login for {host}: put name and password into it; {token}")
            }
            Netrc::Login(file, login) => {
                let what = if login.name == BEARER { "token (login Bearer)" } else { "password" };
                match carried(login, server) {
                    Ok(value) => {
                        authorization = Some(value);
                        format!("the {what} for {host} in {file} was sent: check it, and what it may read")
                    }
                    Err(why) => format!("the {what} for {host} in {file} was not sent: {why}"),
                }
            }
        };
        Web { url: url.to_owned(), authorization, hint }
    }
}

/// What a request carries. A token is good for anybody who reads it, so it goes over TLS only.
///
/// # Errors
/// Why it carries nothing.
fn carried(login: &Login, server: Parts<'_>) -> Result<String, &'static str> {
    if login.name != BEARER {
        return Ok(login.basic());
    }
    if !server.is_secure() {
        return Err("a token goes over https only, and the URL is of http");
    }
    match login.password.bytes().all(|byte| (0x21..0x7f).contains(&byte)) {
        true => Ok(format!("Bearer {}", login.password)),
        false => Err("it has characters that no token has"),
    }
}

impl Origin for Web {
    fn address(&self) -> String {
        self.url.clone()
    }

    fn headers(&self, _address: &str, _range: &Range<u64>) -> Vec<Header> {
        self.authorization.iter().map(|value| ("Authorization", value.clone())).collect()
    }

    fn hint(&self) -> String {
        self.hint.clone()
    }

    fn missing(&self) -> String {
        "in a URL a path inside the image follows #: https://HOST/disk.img#p1".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_the_password_of_bearer_and_goes_over_tls_only() {
        let of = |name: &str, password: &str, url: &str| {
            let login = Login { name: name.to_owned(), password: password.to_owned() };
            Web::by(url, &Netrc::Login("/n".to_owned(), login))
        };
        let sent = |name: &str, password: &str, url: &str| of(name, password, url).authorization;
        assert_eq!(sent("Bearer", "t0ken", "https://h/x").as_deref(), Some("Bearer t0ken"));
        assert_eq!(sent("Bearer", "t0ken", "http://h/x"), None);
        assert_eq!(sent("Bearer", "t0ken\r\nHost: x", "https://h/x"), None);
        assert!(sent("bearer", "t0ken", "http://h/x").is_some_and(|value| value.starts_with("Basic ")));
        for (name, password, url, said) in [
            ("Bearer", "t0ken", "https://h/x", "the token (login Bearer) for h in /n was sent"),
            ("Bearer", "t0ken", "http://h/x", "was not sent: a token goes over https only"),
            ("Bearer", "t0\rken", "https://h/x", "was not sent: it has characters that no token has"),
            ("me", "t0ken", "http://h/x", "the password for h in /n was sent"),
        ] {
            let hint = of(name, password, url).hint();
            assert!(hint.contains(said) && !hint.contains("t0"), "{hint}");
        }
    }
}

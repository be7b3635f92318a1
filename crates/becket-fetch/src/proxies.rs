//! Which proxy is the way to a server: the variables and the rules of curl(1).
//! It never looks a name up and opens nothing.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::place::Parts;

/// The user's proxies. They may have passwords in them: nothing prints them.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct Proxies {
    /// For `http://`.
    pub(crate) plain: Option<String>,
    /// For `https://`.
    pub(crate) secure: Option<String>,
    /// The variables that name these two; an order of an earlier version does not say.
    #[serde(default)]
    named_by: (String, String),
    /// Hosts that are reached without one.
    direct: String,
}

/// A proxy, for people.
pub(crate) struct Named {
    /// `HOST:PORT`, as it is written.
    pub(crate) place: String,
    pub(crate) variable: String,
}

impl Proxies {
    /// Those of this process's user.
    pub(crate) fn of_user() -> Proxies {
        Proxies::of(&|name| std::env::var(name).ok())
    }

    /// `HTTP_PROXY` is not read: a web server sets it from what a client of it says.
    fn of(env: &dyn Fn(&str) -> Option<String>) -> Proxies {
        let set = |name: &&str| Some((env(name).filter(|text| !text.is_empty())?, (*name).to_owned()));
        let first = |names: &[&str]| names.iter().find_map(set).unzip();
        let (plain, plain_by) = first(&["http_proxy", "all_proxy", "ALL_PROXY"]);
        let (secure, secure_by) = first(&["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"]);
        let named_by = (plain_by.unwrap_or_default(), secure_by.unwrap_or_default());
        let direct = first(&["no_proxy", "NO_PROXY"]).0.unwrap_or_default();
        Proxies { plain, secure, named_by, direct }
    }

    /// The proxy by which a server is reached.
    pub(crate) fn way(&self, server: Parts<'_>) -> Option<&str> {
        let proxy = if server.is_secure() { &self.secure } else { &self.plain };
        proxy.as_deref().filter(|_| !self.is_direct(server.host()))
    }

    /// Where the proxy is by which a server is reached, without its password, and the variable that names it.
    pub(crate) fn named(&self, server: Parts<'_>) -> Option<Named> {
        let proxy = self.way(server)?;
        let (by, usual) = match server.is_secure() {
            true => (&self.named_by.1, "https_proxy"),
            false => (&self.named_by.0, "http_proxy"),
        };
        let variable = if by.is_empty() { usual.to_owned() } else { by.clone() };
        // A password may have any sign in it.
        let place = proxy.split_once("://").map_or(proxy, |(_, rest)| rest);
        let place = place.rsplit('@').next().unwrap_or_default().split('/').next().unwrap_or_default();
        Some(Named { place: becket_image::shown(place.as_bytes()), variable })
    }

    fn is_direct(&self, host: &str) -> bool {
        let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        let number: Option<IpAddr> = host.parse().ok();
        let mut words = self.direct.split([',', ' ', '\t']).filter(|word| !word.is_empty());
        words.any(|word| match number {
            _ if word == "*" => true,
            Some(number) => has_number(word, number),
            None => {
                let word = word.strip_prefix('*').unwrap_or(word).trim_matches('.').to_ascii_lowercase();
                let before = host.strip_suffix(&word).filter(|_| !word.is_empty());
                before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
            }
        })
    }
}

/// Whether a word is this address, or a network (`10.0.0.0/8`) that it is in.
fn has_number(word: &str, number: IpAddr) -> bool {
    let (network, bits) = word.split_once('/').map_or((word, None), |(start, bits)| (start, Some(bits)));
    let network = network.trim_start_matches('[').trim_end_matches(']').parse();
    let (ours, theirs, width) = match (number, network) {
        (IpAddr::V4(ours), Ok(IpAddr::V4(theirs))) => (ours.to_bits().into(), theirs.to_bits().into(), 32),
        (IpAddr::V6(ours), Ok(IpAddr::V6(theirs))) => (ours.to_bits(), theirs.to_bits(), 128),
        _ => return false,
    };
    let bits = bits.map_or(Ok(width), str::parse::<u32>);
    bits.is_ok_and(|bits| bits <= width && (ours ^ theirs).checked_shr(width - bits).unwrap_or(0) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(env: &[(&str, &str)]) -> Proxies {
        Proxies::of(&|name| env.iter().find(|(known, _)| *known == name).map(|(_, text)| (*text).to_owned()))
    }

    #[test]
    fn each_scheme_has_a_proxy_of_its_own() {
        let ways = |env: &[(&str, &str)]| {
            let proxies = of(env);
            let way = |url| proxies.way(Parts::of(url)).unwrap_or("").to_owned();
            (way("http://h/x"), way("https://h/x"))
        };
        let pair = |plain: &str, secure: &str| (plain.to_owned(), secure.to_owned());
        assert_eq!(ways(&[("https_proxy", "a"), ("http_proxy", "b")]), pair("b", "a"));
        assert_eq!(ways(&[("https_proxy", "a")]), pair("", "a"));
        assert_eq!(ways(&[("http_proxy", "b")]), pair("b", ""));
        assert_eq!(ways(&[("ALL_PROXY", "c"), ("http_proxy", "b")]), pair("b", "c"));
        assert_eq!(ways(&[("HTTPS_PROXY", "a"), ("HTTP_PROXY", "b")]), pair("", "a"));
        assert_eq!(ways(&[("HTTPS_PROXY", "A"), ("https_proxy", "a")]), pair("", "a"));
        assert_eq!(ways(&[("ALL_PROXY", "C"), ("all_proxy", "c"), ("http_proxy", "")]), pair("c", "c"));
    }

    #[test]
    fn a_proxy_is_named_by_its_variable_and_without_its_password() {
        let named = |env: &[(&str, &str)], url: &str| {
            of(env).named(Parts::of(url)).map(|Named { place, variable }| format!("{variable} {place}"))
        };
        for (env, said) in [
            (("http_proxy", "http://me:s3cret@proxy.test:3128/"), "http_proxy proxy.test:3128"),
            (("ALL_PROXY", "me:s3/c@ret@[::1]:8"), "ALL_PROXY [::1]:8"),
            (("all_proxy", "socks5://\x1b@10.0.0.1"), "all_proxy 10.0.0.1"),
        ] {
            assert_eq!(named(&[env], "http://h/x").as_deref(), Some(said));
        }
        let all = [("http_proxy", "a:1"), ("ALL_PROXY", "b:2"), ("HTTPS_PROXY", "c:3")];
        assert_eq!(named(&all, "https://h/x").as_deref(), Some("HTTPS_PROXY c:3"));
        assert_eq!(named(&all[2..], "http://h/x"), None);
        let old: Proxies = serde_json::from_str(r#"{"plain":"a:1","secure":null,"direct":""}"#).unwrap();
        assert_eq!(old.named(Parts::of("http://h/x")).unwrap().variable, "http_proxy");
    }

    #[test]
    fn some_hosts_are_reached_without_a_proxy() {
        let direct = |words: &str, host: &str| {
            let url = format!("http://{host}:81/x");
            of(&[("http_proxy", "b"), ("NO_PROXY", words)]).way(Parts::of(&url)).is_none()
        };
        for (words, host) in [
            ("*", "a.example"),
            ("x, Example.com", "www.example.COM"),
            (".example.com", "example.com"),
            ("*.example.com", "a.example.com."),
            ("localhost,127.0.0.1", "127.0.0.1"),
            ("10.0.0.0/8", "10.200.3.4"),
            ("0.0.0.0/0", "10.200.3.4"),
            ("fd00::/8", "[fd12::1]"),
        ] {
            assert!(direct(words, host), "{words} {host}");
        }
        for (words, host) in [
            ("", "example.com"),
            ("example.com", "notexample.com"),
            ("example.com", "example.com.evil"),
            (".", "example.com"),
            ("10.0.0.0/8", "11.0.0.1"),
            ("10.0.0.0/33", "10.0.0.1"),
            ("0.0.1", "127.0.0.1"),
            ("::/0", "10.0.0.1"),
        ] {
            assert!(!direct(words, host), "{words} {host}");
        }
    }
}

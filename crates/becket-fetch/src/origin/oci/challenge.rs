//! What a registry wants from those who ask: a password, or a token of a server that it names.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;

/// The longest challenge that is read, in bytes.
const LONGEST: usize = 4096;

/// The value of a `WWW-Authenticate` header.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    Bearer(Token),
}

/// Where there are tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) realm: String,
    service: Option<String>,
}

impl Challenge {
    /// Reads the first challenge of a header; the scope is not believed.
    pub(super) fn read(value: &str) -> Option<Challenge> {
        let (kind, mut rest) = value.trim().split_once(' ').unwrap_or((value.trim(), ""));
        if value.len() > LONGEST {
            return None;
        }
        if kind.eq_ignore_ascii_case("basic") {
            return Some(Challenge::Basic);
        }
        if !kind.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service) = (None, None);
        while let Some((name, after)) = rest.split_once('=') {
            let (value, after) = match after.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"')?,
                None => after.split_at(after.find(',').unwrap_or(after.len())),
            };
            match name.trim().to_ascii_lowercase().as_str() {
                "realm" => realm = Some(value.to_owned()),
                "service" => service = Some(value.to_owned()),
                _ => {}
            }
            rest = after.trim_start().strip_prefix(',').unwrap_or_default();
        }
        let plain = |text: &String| text.bytes().all(|byte| (0x21..0x7f).contains(&byte));
        Some(Challenge::Bearer(Token { realm: realm.filter(plain)?, service }))
    }
}

impl Token {
    /// The URL that has a token for a scope.
    pub(super) fn url(&self, scope: &str) -> String {
        let encoded = |text| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let join = if self.realm.contains('?') { '&' } else { '?' };
        let service = self.service.as_deref().map(|service| format!("service={}&", encoded(service)));
        format!("{}{join}{}scope={}", self.realm, service.unwrap_or_default(), encoded(scope))
    }
}

/// Whether a server of tokens may see the registry's password: it is the registry, or in its domain.
pub(super) fn is_near(registry: &str, realm: &str) -> bool {
    let (registry, realm) = (registry.to_ascii_lowercase(), realm.to_ascii_lowercase());
    let is_number = registry.parse::<std::net::IpAddr>().is_ok();
    let domain = registry.split_once('.').map(|(_, domain)| domain).filter(|domain| domain.contains('.'));
    registry == realm
        || !is_number
            && domain.is_some_and(|domain| {
                realm.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            })
}

/// The value of an `Authorization` header with the token of an answer.
///
/// # Errors
/// The answer has none: a sentence.
pub(super) fn bearer(body: &[u8]) -> Result<String, String> {
    #[derive(Deserialize)]
    struct Answer {
        token: Option<String>,
        access_token: Option<String>,
    }
    let answer = serde_json::from_slice::<Answer>(body).ok();
    let token = answer.and_then(|answer| answer.token.or(answer.access_token));
    let plain = |token: &String| !token.is_empty() && token.bytes().all(|byte| (0x21..0x7f).contains(&byte));
    let token = token.filter(plain).ok_or("the registry's server of tokens answers without a token")?;
    Ok(format!("Bearer {token}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_those_of_registries() {
        let token = |realm: &str, service: Option<&str>| {
            Some(Challenge::Bearer(Token { realm: realm.to_owned(), service: service.map(str::to_owned) }))
        };
        let docker =
            "Bearer realm=\"https://auth.docker.io/token\",service=\"registry.docker.io\",scope=\"a,b\"";
        assert_eq!(
            Challenge::read(docker),
            token("https://auth.docker.io/token", Some("registry.docker.io"))
        );
        assert_eq!(Challenge::read("bearer scope=x, realm=https://h/t"), token("https://h/t", None));
        assert_eq!(Challenge::read("Basic realm=\"x\""), Some(Challenge::Basic));
        for bad in
            ["", "Bearer", "Bearer realm", "Bearer realm=\"x", "Digest realm=\"x\"", "Bearer realm=\"a b\""]
        {
            assert_eq!(Challenge::read(bad), None, "{bad}");
        }
        let Some(Challenge::Bearer(token)) = Challenge::read(docker) else { panic!() };
        let url = "https://auth.docker.io/token?service=registry%2Edocker%2Eio&scope=repository%3Aa%3Apull";
        assert_eq!(token.url("repository:a:pull"), url);
    }

    #[test]
    fn a_domain_is_that_of_the_registry() {
        assert!(is_near("registry-1.docker.io", "auth.docker.io") && is_near("ghcr.io", "GHCR.io"));
        assert!(is_near("registry.gitlab.com", "gitlab.com"));
        for (registry, realm) in [
            ("ghcr.io", "evil.io"),
            ("registry.gitlab.com", "evilgitlab.com"),
            ("10.0.0.1", "9.0.0.1"),
            ("registry.gitlab.com", "gitlab.com.evil"),
        ] {
            assert!(!is_near(registry, realm), "{registry} {realm}");
        }
    }

    #[test]
    fn a_token_is_one_word() {
        assert_eq!(bearer(br#"{"access_token": "abc"}"#).as_deref(), Ok("Bearer abc"));
        for bad in [&b"{}"[..], b"", br#"{"token": ""}"#, br#"{"token": "a\r\nX: y"}"#, b"[1]"] {
            assert!(bearer(bad).is_err());
        }
    }
}

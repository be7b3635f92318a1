//! Passwords for registries, from the files that `docker login` and `podman login` write.
//! It runs no helper that a file names.

use std::collections::HashMap;
use std::path::PathBuf;

use serde::Deserialize;

/// The largest file that is read, in bytes.
const LARGEST: u64 = 1 << 20;
/// The machine of Docker's own registry.
pub(super) const REGISTRY: &str = "registry-1.docker.io";
/// The name of Docker's own registry in these files.
const DOCKER: [&str; 3] = ["https://index.docker.io/v1/", "index.docker.io", "docker.io"];

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    auths: HashMap<String, Auth>,
}

#[derive(Deserialize)]
struct Auth {
    auth: Option<String>,
}

/// What these files say of a registry.
#[derive(Default)]
pub(super) struct Login {
    /// The value of an `Authorization` header.
    pub(super) login: Option<String>,
    /// A file that cannot be read, and so may have it.
    pub(super) unread: Option<PathBuf>,
}

/// Looks a registry up, `HOST` or `HOST:PORT`.
pub(super) fn of_user(registry: &str) -> Login {
    let env = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let files = [
        env("REGISTRY_AUTH_FILE"),
        env("DOCKER_CONFIG")
            .or_else(|| Some(env("HOME")?.join(".docker")))
            .map(|dir| dir.join("config.json")),
        env("XDG_RUNTIME_DIR").map(|dir| dir.join("containers/auth.json")),
    ];
    let read = |path: &PathBuf| {
        let small = std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() <= LARGEST);
        small.then(|| std::fs::read(path).ok())?
    };
    let mut found = Login::default();
    for path in files.into_iter().flatten().filter(|path| path.exists()) {
        match read(&path).and_then(|text| serde_json::from_slice(&text).ok()) {
            Some(config) => found.login = found.login.or_else(|| find(&config, registry)),
            None => found.unread = found.unread.or(Some(path)),
        }
    }
    found
}

fn find(config: &Config, registry: &str) -> Option<String> {
    let plain = |name: &str| {
        let name = name.trim_start_matches("https://").trim_start_matches("http://");
        name.trim_end_matches('/').to_ascii_lowercase()
    };
    let is_docker = registry == REGISTRY;
    let ours = |name: &str| plain(name) == plain(registry) || is_docker && DOCKER.contains(&name);
    let (_, auth) = config.auths.iter().find(|(name, _)| ours(name))?;
    let auth = auth.auth.as_ref().filter(|auth| !auth.is_empty())?;
    let digit = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte);
    // It is name and password in the form that the header has.
    auth.bytes().all(digit).then(|| format!("Basic {auth}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registry_has_its_own_login() {
        let text =
            br#"{"auths": {"127.0.0.1:5000": {"auth": "bWU6c2VjcmV0"}, "https://Quay.io/": {"auth": "eA=="},
            "https://index.docker.io/v1/": {"auth": "ZA=="}, "bad": {"auth": "a b"}, "helper": {}},
            "credsStore": "x"}"#;
        let config = serde_json::from_slice(text).unwrap();
        let of = |registry| find(&config, registry);
        assert_eq!(of("127.0.0.1:5000").as_deref(), Some("Basic bWU6c2VjcmV0"));
        assert_eq!(of("quay.io").as_deref(), Some("Basic eA=="));
        assert_eq!(of("registry-1.docker.io").as_deref(), Some("Basic ZA=="));
        for other in ["127.0.0.1:5001", "127.0.0.1", "bad", "helper", "quay.io.evil", "docker.io.evil"] {
            assert_eq!(of(other), None, "{other}");
        }
        assert_eq!(find(&serde_json::from_slice(b"{}").unwrap(), "x"), None);
    }
}

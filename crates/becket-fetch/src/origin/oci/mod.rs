//! Images in registries of containers: `oci://REGISTRY/NAME:TAG` or `NAME@DIGEST`, with a disk as a layer.
//! A layer is what its digest says, or none of it counts once all its bytes are there.
//!
//! Followed: the OCI distribution and image specifications, and Docker's token protocol. The option `layer`
//! of the query chooses one of several layers, by its title, its media type or its digest. Registries on
//! this host are spoken to without TLS, and no other.

mod blob;
mod challenge;
mod login;
mod manifest;

use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;

use serde::{Deserialize, Serialize};
use ureq::http::HeaderMap;

use self::blob::{Blob, is_digest};
use self::challenge::{Challenge, Token};
use super::contract::{Ask, Failed, Header, Origin, Short, is_loopback};
use super::query::{decoded, options};
use crate::home;
use crate::place::Parts;
use crate::version::{Known, Version};

/// Docker's registry has a name for people and one for machines.
const DOCKER: (&str, &str) = ("docker.io", login::REGISTRY);
/// How often a manifest may refer to another one.
const DEPTH: usize = 2;

/// See the module.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Oci {
    /// The registry's web address, without a path.
    registry: String,
    name: String,
    /// A tag or a digest.
    reference: String,
    layer: Option<String>,
    /// The layer, once it is known.
    blob: Option<Blob>,
    /// The value of an `Authorization` header for the registry, with the user's password.
    login: Option<String>,
    /// A file that may have one and cannot be read, for people.
    #[serde(default)]
    unread: Option<String>,
    authorization: Option<String>,
}

impl Oci {
    pub(super) fn of_user(url: &str) -> Result<Oci, String> {
        let mut oci = Oci::of(url)?;
        let found = login::of_user(Parts::of(&oci.registry).authority);
        oci.login = found.login;
        oci.unread = found.unread.map(|path| becket_image::shown(path.as_os_str().as_bytes()));
        Ok(oci)
    }

    fn of(url: &str) -> Result<Oci, String> {
        let (start, [layer]) = options(url, ["layer"])?;
        let parts = Parts::of(start);
        let host = if parts.authority == DOCKER.0 { DOCKER.1 } else { parts.authority };
        let scheme = if is_loopback(parts) { "http" } else { "https" };
        let path = decoded(parts.path.strip_prefix('/').unwrap_or_default())?;
        let (name, digest) =
            path.split_once('@').map_or((path.as_str(), None), |(name, digest)| (name, Some(digest)));
        // A tag before a digest is for people.
        let (name, tag) = name.rsplit_once(':').unwrap_or((name, "latest"));
        let word = |text: &str, more: &[u8]| {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || more.contains(&byte);
            !text.is_empty() && text.len() <= 255 && text.bytes().all(plain)
        };
        if !name.split('/').all(|part| word(part, b"._-") && !part.starts_with('.')) || !word(tag, b"._-") {
            return Err("write oci://REGISTRY/NAME:TAG or oci://REGISTRY/NAME@sha256:DIGEST".to_owned());
        }
        if digest.is_some_and(|digest| !is_digest(digest)) {
            return Err("its digest is none: write NAME@sha256: and 64 hexadecimal digits".to_owned());
        }
        Ok(Oci {
            registry: format!("{scheme}://{host}"),
            name: name.to_owned(),
            reference: digest.unwrap_or(tag).to_owned(),
            layer,
            blob: None,
            login: None,
            unread: None,
            authorization: None,
        })
    }

    /// Asks the registry, with what it has shown to want.
    fn get(&mut self, path: &str, accept: &str, ask: Ask<'_>) -> Result<Short, Failed> {
        let url = format!("{}/v2/{}/{path}", self.registry, self.name);
        let headers = |oci: &Oci| {
            let all = [("Accept", Some(accept.to_owned())), ("Authorization", oci.authorization.clone())];
            all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect::<Vec<_>>()
        };
        let first = ask(&url, &headers(self))?;
        if first.status == 401 && self.learn(first.status, &first.head, ask)? {
            return Ok(ask(&url, &headers(self))?);
        }
        Ok(first)
    }

    /// The bytes of a manifest, which are those of its digest.
    fn manifest(&mut self, reference: &str, ask: Ask<'_>) -> Result<manifest::Manifest, Failed> {
        let short = self.get(&format!("manifests/{reference}"), manifest::ACCEPT, ask)?;
        match short.status {
            200 => {}
            401 | 403 => {
                return Err(
                    self.not_allowed(format!("the registry does not allow it (status {})", short.status))
                );
            }
            404 => return Err(format!("the registry has no {}:{reference}", self.name).into()),
            status => return Err(format!("the registry answers with status {status}").into()),
        }
        if is_digest(reference) && !is_of(reference, &short.body) {
            return Err("the registry's manifest is not that of the digest".to_owned().into());
        }
        Ok(manifest::read(&short.body)?)
    }
}

fn is_of(digest: &str, bytes: &[u8]) -> bool {
    let found = ring::digest::digest(&ring::digest::SHA256, bytes);
    let hex: String = found.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    digest.strip_prefix("sha256:") == Some(hex.as_str())
}

impl Origin for Oci {
    fn address(&self) -> String {
        let what = match &self.blob {
            Some(blob) => format!("blobs/{}", blob.digest),
            None => format!("manifests/{}", self.reference),
        };
        format!("{}/v2/{}/{what}", self.registry, self.name)
    }

    fn headers(&self, _address: &str, _range: &Range<u64>) -> Vec<Header> {
        self.authorization.iter().map(|value| ("Authorization", value.clone())).collect()
    }

    fn find(&mut self, ask: Ask<'_>) -> Result<Option<Known>, Failed> {
        let mut reference = self.reference.clone();
        for _ in 0..DEPTH {
            match self.manifest(&reference, ask)? {
                manifest::Manifest::Index(digest) => reference = digest,
                manifest::Manifest::Layers(layers) => {
                    let blob = manifest::choose(&layers, self.layer.as_deref())?;
                    let version = Version::Digest(blob.digest.clone());
                    let size = blob.size;
                    self.blob = Some(blob);
                    return Ok(Some(Known { version, size }));
                }
            }
        }
        Err("its manifest is a list of lists".to_owned().into())
    }

    /// Takes a password or a token, as the answer asks. A token that is too old is replaced in this way, too.
    fn learn(&mut self, status: u16, head: &HeaderMap, ask: Ask<'_>) -> Result<bool, Failed> {
        let asked = head.get_all("www-authenticate").iter().filter_map(|value| value.to_str().ok());
        let Some(challenge) = asked.filter_map(Challenge::read).next().filter(|_| status == 401) else {
            return Ok(false);
        };
        let before = self.authorization.take();
        self.authorization = match challenge {
            Challenge::Basic => self.login.clone(),
            Challenge::Bearer(token) => Some(self.token(&token, ask)?),
        };
        Ok(self.authorization.is_some() && self.authorization != before)
    }

    fn hint(&self) -> String {
        let files = ["HOME", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"];
        let hint = match home::is_any_set(&files) {
            true => "run 'docker login REGISTRY', or check what its account may read",
            false => {
                "$HOME is not set, so no file of 'docker login' was looked for: set it, or \
                 $REGISTRY_AUTH_FILE to the path of such a file"
            }
        };
        hint.to_owned()
    }

    fn missing(&self) -> String {
        "the registry has the image's manifest and not this layer of it: push the image again".to_owned()
    }
}

impl Oci {
    fn not_allowed(&self, why: String) -> Failed {
        let unread = self.unread.iter().filter(|_| self.login.is_none());
        let unread: String =
            unread.map(|path| format!("; {path} is not read: it is not valid JSON")).collect();
        Failed::Because(why + &unread, Some(self.hint()))
    }

    /// Asks for a token where the registry says. The password goes only to servers of its domain.
    fn token(&self, token: &Token, ask: Ask<'_>) -> Result<String, Failed> {
        let (registry, realm) = (Parts::of(&self.registry), Parts::of(&token.realm));
        if !realm.is_web() || realm.host().is_empty() || realm.authority.contains('@') {
            return Err("the registry wants a token of a place that is not a web server".to_owned().into());
        }
        if !is_loopback(registry) && (!realm.is_secure() || is_loopback(realm)) {
            return Err("the registry wants a token of this host, or without encryption".to_owned().into());
        }
        let scope = format!("repository:{}:pull", self.name);
        let url = token.url(&scope);
        let ours = challenge::is_near(registry.host(), realm.host());
        let login = self.login.iter().filter(|_| ours).map(|login| ("Authorization", login.clone()));
        let short = ask(&url, &login.collect::<Vec<_>>())?;
        if short.status != 200 {
            let why = format!("the registry's server of tokens answers with status {}", short.status);
            return Err(self.not_allowed(why));
        }
        Ok(challenge::bearer(&short.body)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_a_tag_or_a_digest() {
        let of = |url: &str| Oci::of(url).map(|oci| oci.address());
        let ok = |address: &str| Ok(address.to_owned());
        assert_eq!(of("oci://ghcr.io/a/b:1.0"), ok("https://ghcr.io/v2/a/b/manifests/1.0"));
        assert_eq!(of("oci://127.0.0.1:5000/a?layer=x"), ok("http://127.0.0.1:5000/v2/a/manifests/latest"));
        assert_eq!(of("oci://docker.io/a/b"), ok("https://registry-1.docker.io/v2/a/b/manifests/latest"));
        let digest = format!("sha256:{}", "0".repeat(64));
        let url = format!("oci://h/a:tag@{digest}");
        assert_eq!(of(&url), Ok(format!("https://h/v2/a/manifests/{digest}")));
        for bad in
            ["oci://h", "oci://h/", "oci://h/a/../b", "oci://h/a:b/c", "oci://h/a@sha256:12", "oci://h/a?x"]
        {
            assert!(of(bad).is_err(), "{bad}");
        }
        assert!(is_of("sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", b"abc"));
    }

    fn short(status: u16, body: &str) -> Short {
        Short { status, head: HeaderMap::new(), body: body.as_bytes().to_vec() }
    }

    #[test]
    fn a_password_is_sent_to_servers_of_the_registrys_domain_only() {
        let mut oci = Oci::of("oci://registry.example.com/a").unwrap_or_else(|why| panic!("{why}"));
        oci.login = Some("Basic secret".to_owned());
        let mut learn = |asked: String| {
            let mut head = HeaderMap::new();
            head.insert("www-authenticate", asked.parse().unwrap());
            let sent = std::cell::RefCell::new(None);
            let ask = |_: &str, headers: &[Header]| {
                *sent.borrow_mut() = Some(headers.iter().any(|(_, value)| value.contains("secret")));
                Ok(short(200, r#"{"token": "t"}"#))
            };
            let learned = oci.learn(401, &head, &ask).ok();
            oci.authorization = None;
            (learned, sent.into_inner())
        };
        let realm = |realm: &str| format!("Bearer realm=\"{realm}\",service=\"s\"");
        assert_eq!(learn(realm("https://auth.example.com/token")), (Some(true), Some(true)));
        assert_eq!(learn(realm("https://auth.evil.com/token")), (Some(true), Some(false)));
        for bad in
            ["http://auth.example.com/t", "https://127.0.0.1/t", "file:///etc/passwd", "https://u:p@h/"]
        {
            assert_eq!(learn(realm(bad)), (None, None), "{bad}");
        }
        assert_eq!(learn("Negotiate".to_owned()), (Some(false), None));
    }
}

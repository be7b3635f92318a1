//! Objects in S3 and in stores that speak its protocol: `s3://BUCKET/KEY`.
//! Secrets come from the environment and from the files of the AWS tools, and never from the URL.
//!
//! Followed: the S3 API reference (GetObject, virtual hosting of buckets, redirects between regions). Options
//! in the query: `endpoint`, `region`, `profile`, `anonymous`. Roles, SSO and metadata services are not used.

mod profile;
mod sign;

use std::ops::Range;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use ureq::http::HeaderMap;

use self::profile::{Keys, Profile};
use super::contract::{Ask, Failed, Header, Origin};
use super::query::{decoded, options};
use crate::home;
use crate::place::{Parts, shown};

/// Where buckets are if nothing says otherwise.
const REGION: &str = "us-east-1";

/// See the module.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct S3 {
    bucket: String,
    /// As it is in a URL.
    key: String,
    /// The server, where it is not Amazon's.
    endpoint: Option<String>,
    region: String,
    keys: Option<Keys>,
}

impl S3 {
    pub(super) fn of_user(url: &str) -> Result<S3, String> {
        let env = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        S3::of(url, &env, &|path| std::fs::read_to_string(path).ok())
    }

    fn of(
        url: &str,
        env: &dyn Fn(&str) -> Option<String>,
        read: &dyn Fn(&str) -> Option<String>,
    ) -> Result<S3, String> {
        let (start, [endpoint, region, profile, anonymous]) =
            options(url, ["endpoint", "region", "profile", "anonymous"])?;
        let parts = Parts::of(start);
        let bucket = parts.authority.to_owned();
        if !is_bucket(&bucket) {
            return Err("there is no bucket of that name".to_owned());
        }
        let key = decoded(parts.path.strip_prefix('/').unwrap_or_default())?;
        if key.is_empty() {
            return Err("the URL names no object: write s3://BUCKET/KEY".to_owned());
        }
        let Profile { keys, region: usual, endpoint: near } = profile::look(profile.as_deref(), env, read)?;
        let keys = if anonymous.is_some() { None } else { keys };
        let endpoint = endpoint.or_else(|| env("AWS_ENDPOINT_URL_S3")).or_else(|| env("AWS_ENDPOINT_URL"));
        let endpoint = endpoint.or(near).map(|endpoint| endpoint.trim_end_matches('/').to_owned());
        if let Some(endpoint) = &endpoint {
            let parts = Parts::of(endpoint);
            let plain = endpoint.bytes().all(|byte| (0x21..0x7f).contains(&byte)) && !endpoint.contains('?');
            let host = !parts.host().is_empty() && parts.has_port() && !parts.authority.contains('@');
            if !parts.is_web() || !host || !plain {
                return Err("its endpoint is not a web address".to_owned());
            }
        }
        let region = region.or_else(|| env("AWS_REGION")).or_else(|| env("AWS_DEFAULT_REGION"));
        let region = region.or(usual).unwrap_or_else(|| REGION.to_owned());
        if !is_region(&region) {
            return Err("its region is not the name of a region".to_owned());
        }
        Ok(S3 { bucket, key: sign::encoded(&key), endpoint, region, keys })
    }
}

fn is_bucket(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    (1..=255).contains(&name.len()) && name.bytes().all(plain) && name != "." && name != ".."
}

/// It becomes part of a host's name, so nothing else may be in it.
fn is_region(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=32).contains(&name.len()) && name.bytes().all(plain)
}

/// Whether a bucket's name can be the first of a host's name that Amazon's certificates are for.
fn is_label(bucket: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    bucket.bytes().all(plain) && bucket.len() <= 63 && !bucket.starts_with('-') && !bucket.ends_with('-')
}

impl Origin for S3 {
    fn address(&self) -> String {
        let S3 { bucket, key, endpoint, region, .. } = self;
        match endpoint {
            Some(endpoint) => format!("{endpoint}/{bucket}/{key}"),
            None if is_label(bucket) => format!("https://{bucket}.s3.{region}.amazonaws.com/{key}"),
            None => format!("https://s3.{region}.amazonaws.com/{bucket}/{key}"),
        }
    }

    fn headers(&self, address: &str, _range: &Range<u64>) -> Vec<Header> {
        let Some(keys) = &self.keys else { return Vec::new() };
        sign::headers(keys, &self.region, address, SystemTime::now())
    }

    /// The answer names the bucket's region if that is another one.
    fn learn(&mut self, _status: u16, head: &HeaderMap, _ask: Ask<'_>) -> Result<bool, Failed> {
        let region = head.get("x-amz-bucket-region").and_then(|value| value.to_str().ok());
        let other = region.filter(|region| is_region(region) && *region != self.region);
        if let Some(region) = other {
            region.clone_into(&mut self.region);
        }
        Ok(other.is_some())
    }

    fn hint(&self) -> String {
        let hint = match self.keys {
            Some(_) => "check that the keys in use may read the object, or choose others with ?profile=NAME",
            None if !home::is_any_set(&["HOME", "AWS_SHARED_CREDENTIALS_FILE"]) => {
                "$HOME is not set, so the files of the AWS tools were not looked for: set it, or \
                 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            }
            None => "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run 'aws configure'",
        };
        hint.to_owned()
    }

    fn missing(&self) -> String {
        let S3 { bucket, key, endpoint, region, .. } = self;
        let place = match endpoint {
            Some(endpoint) => format!("{} (?endpoint=URL)", shown(endpoint)),
            None => "Amazon (?endpoint=URL for another store)".to_owned(),
        };
        format!(
            "check the bucket {bucket} and the key {}: they were looked for at {place} in the region \
             {region} (?region=NAME); a path inside the image follows #",
            becket_image::shown(key.as_bytes())
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(url: &str, env: &[(&str, &str)]) -> Result<S3, String> {
        let env =
            |name: &str| env.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        S3::of(url, &env, &|_| None)
    }

    #[test]
    fn an_address_is_that_of_the_bucket_or_of_the_endpoint() {
        let address = |url: &str, env: &[_]| of(url, env).map(|s3| s3.address());
        let ok = |address: &str| Ok(address.to_owned());
        assert_eq!(
            address("s3://images/a%20b/c+d.img", &[]),
            ok("https://images.s3.us-east-1.amazonaws.com/a%20b/c%2Bd.img")
        );
        assert_eq!(
            address("s3://a.b/x?region=eu-west-1", &[]),
            ok("https://s3.eu-west-1.amazonaws.com/a.b/x")
        );
        let near = [("AWS_ENDPOINT_URL", "http://127.0.0.1:9000/"), ("AWS_REGION", "r1")];
        assert_eq!(address("s3://images/x", &near), ok("http://127.0.0.1:9000/images/x"));
        for bad in [
            "s3://",
            "s3://b",
            "s3://b/",
            "s3://b:80/x",
            "s3://b/x?secret=1",
            "s3://b/x?region=a.evil/",
            "s3://b/x?endpoint=file:///etc",
            "s3://b/x?endpoint=http://u:p@h",
            "s3://b/x?endpoint=http://h:99999",
        ] {
            assert!(of(bad, &[]).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_was_looked_for_and_where_is_said() {
        let missing = |url: &str, env: &[_]| of(url, env).unwrap_or_else(|why| panic!("{why}")).missing();
        let amazon = missing("s3://images/a%20b/d.img", &[("AWS_REGION", "eu-west-1")]);
        for said in ["bucket images", "key a%20b/d.img", "Amazon (?endpoint=URL", "region eu-west-1"] {
            assert!(amazon.contains(said), "{amazon}");
        }
        let other = missing("s3://images/x?endpoint=http://127.0.0.1:9000", &[]);
        assert!(other.contains("at http://127.0.0.1:9000 (") && other.contains("us-east-1"), "{other}");
    }

    #[test]
    fn a_region_is_learned_once_and_only_if_it_is_a_name() {
        let mut s3 = of("s3://images/x", &[]).unwrap_or_else(|why| panic!("{why}"));
        let mut learn = |region: &'static str| {
            let mut head = HeaderMap::new();
            head.insert("x-amz-bucket-region", ureq::http::HeaderValue::from_static(region));
            let ask: Ask<'_> = &|_, _| panic!("nothing is asked");
            (s3.learn(301, &head, ask).ok(), s3.address())
        };
        let there = "https://images.s3.eu-north-1.amazonaws.com/x".to_owned();
        assert_eq!(learn("eu-north-1"), (Some(true), there.clone()));
        assert_eq!(learn("eu-north-1"), (Some(false), there.clone()));
        assert_eq!(learn("evil.example/"), (Some(false), there));
    }
}

//! Which image of a Ceph cluster a name means: `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][?conf=FILE&id=USER]`.
//! It connects to nothing.
//!
//! Bytes that mean something here are written with a percent sign in names: `/`, `@`, `:`, `?`, `#`, `&` and
//! the percent sign itself.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use super::names::{decoded, encode, split_inside, with_inside};

/// The beginning of such a name.
pub const SCHEME: &str = "rbd:";
/// The longest name of a pool, an image or a snapshot, in bytes.
const LONGEST: usize = 1024;
/// Bytes that stand for themselves in a name, and in the path of a file.
const PLAIN: &[u8] = b"-._~+ ,=";
const IN_PATHS: &[u8] = b"-._~+,=/";

/// An image of a Ceph cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rbd {
    /// The pool.
    pub pool: String,
    /// A namespace of the pool, where it is not the default one.
    pub namespace: Option<String>,
    /// The image.
    pub image: String,
    /// A snapshot of it, which is only read.
    pub snapshot: Option<String>,
    /// The configuration of the cluster, by its absolute path; the library's default where it is not given.
    pub conf: Option<PathBuf>,
    /// The user, without `client.`; the library's default (`admin`) where it is not given.
    pub id: Option<String>,
}

impl Rbd {
    /// Reads a name.
    ///
    /// # Errors
    /// What is wrong with it, in one sentence.
    pub fn parse(text: &str) -> Result<Rbd, String> {
        let rest = text.strip_prefix(SCHEME).ok_or("it does not begin with rbd:")?;
        let (names, query) = rest.split_once('?').unwrap_or((rest, ""));
        if names.contains(':') {
            return Err("it has a second colon: options are written ?conf=FILE&id=USER, and a colon of a \
                        name %3A"
                .to_owned());
        }
        let parts: Vec<&str> = names.split('/').collect();
        let (pool, namespace, image) = match parts.as_slice() {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(*namespace), image),
            [_] => return Err("it names no pool: rbd:POOL/IMAGE".to_owned()),
            _ => return Err("it has too many slashes; a path inside the image follows #".to_owned()),
        };
        let (image, snapshot) =
            image.split_once('@').map_or((*image, None), |(image, snapshot)| (image, Some(snapshot)));
        let (mut conf, mut id) = (None, None);
        for (key, value) in query.split('&').filter(|part| !part.is_empty()).map(pair) {
            match key {
                "conf" => {
                    let path = PathBuf::from(OsString::from_vec(decoded(value)?));
                    let whole = std::path::absolute(path);
                    conf =
                        Some(whole.map_err(|error| format!("its configuration cannot be named: {error}"))?);
                }
                "id" => id = Some(name("user", value)?),
                other => return Err(format!("the parameter {other} is not known")),
            }
        }
        Ok(Rbd {
            pool: name("pool", pool)?,
            namespace: namespace.map(|text| name("namespace", text)).transpose()?,
            image: name("image", image)?,
            snapshot: snapshot.map(|text| name("snapshot", text)).transpose()?,
            conf,
            id,
        })
    }

    /// The same image by another configuration and another user, where these are given.
    #[must_use]
    pub fn by(self, conf: Option<&Path>, id: Option<&str>) -> Rbd {
        let conf = conf.and_then(|path| std::path::absolute(path).ok());
        Rbd { conf: conf.or(self.conf), id: id.map(str::to_owned).or(self.id), ..self }
    }

    /// Whether this image goes by a name that may not say which configuration or user.
    pub(super) fn goes_by(&self, typed: &Rbd) -> bool {
        self.clone().by(typed.conf.as_deref(), typed.id.as_deref()) == *self
            && Rbd { conf: self.conf.clone(), id: self.id.clone(), ..typed.clone() } == *self
    }
}

/// Whether a path is such a name, well-formed or not.
pub fn is_name(path: &Path) -> bool {
    path.as_os_str().as_bytes().starts_with(SCHEME.as_bytes())
}

/// The same name with this configuration and user, where these are given; with `usual` where neither it nor
/// `conf` says which configuration. One that cannot be read stays as it is.
pub fn by(path: &Path, conf: Option<&Path>, usual: Option<&Path>, id: Option<&str>) -> PathBuf {
    let (uri, inside) = split_inside(path.as_os_str());
    let Some(rbd) = uri.to_str().and_then(|uri| Rbd::parse(uri).ok()) else { return path.to_owned() };
    let usual = usual.filter(|_| rbd.conf.is_none());
    with_inside(Path::new(&rbd.by(conf.or(usual), id).to_string()), &inside)
}

fn pair(part: &str) -> (&str, &str) {
    part.split_once('=').unwrap_or((part, ""))
}

fn name(what: &str, text: &str) -> Result<String, String> {
    let bytes = decoded(text)?;
    if bytes.is_empty() {
        return Err(format!("its {what} has no name"));
    }
    if bytes.len() > LONGEST {
        return Err(format!("the name of its {what} is longer than {LONGEST} bytes"));
    }
    String::from_utf8(bytes).map_err(|_| format!("the name of its {what} is not UTF-8"))
}

/// As a name; two of the same image, configuration and user are equal.
impl fmt::Display for Rbd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(SCHEME)?;
        encode(f, self.pool.as_bytes(), PLAIN)?;
        for (before, name) in
            [("/", self.namespace.as_ref()), ("/", Some(&self.image)), ("@", self.snapshot.as_ref())]
        {
            if let Some(name) = name {
                f.write_str(before)?;
                encode(f, name.as_bytes(), PLAIN)?;
            }
        }
        let mut before = "?";
        if let Some(conf) = &self.conf {
            f.write_str("?conf=")?;
            encode(f, conf.as_os_str().as_bytes(), IN_PATHS)?;
            before = "&";
        }
        if let Some(id) = &self.id {
            write!(f, "{before}id=")?;
            encode(f, id.as_bytes(), PLAIN)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_mean_images() {
        let parse = |text| Rbd::parse(text).unwrap();
        let plain = parse("rbd:pool/image");
        assert_eq!((plain.pool.as_str(), plain.image.as_str()), ("pool", "image"));
        assert_eq!((&plain.namespace, &plain.snapshot, &plain.conf, &plain.id), (&None, &None, &None, &None));
        let all = parse("rbd:p/n/i@s?conf=/etc/x.conf&id=me");
        assert_eq!(all.namespace.as_deref(), Some("n"));
        assert_eq!(all.snapshot.as_deref(), Some("s"));
        assert_eq!(all.conf.as_deref(), Some(Path::new("/etc/x.conf")));
        assert_eq!(all.id.as_deref(), Some("me"));
        assert_eq!(all.to_string(), "rbd:p/n/i@s?conf=/etc/x.conf&id=me");
        assert_eq!(parse("rbd:a%2Fb/c%40d").image, "c@d");
        let other = plain.by(Some(Path::new("/y.conf")), Some("you"));
        assert_eq!(other.to_string(), "rbd:pool/image?conf=/y.conf&id=you");
    }

    #[test]
    fn options_become_part_of_the_name() {
        let (conf, usual) = (Some(Path::new("/c.conf")), Some(Path::new("/u.conf")));
        let path = Path::new("rbd:p/i#p1/etc");
        assert_eq!(by(path, None, None, None), path);
        assert_eq!(by(path, None, usual, None), Path::new("rbd:p/i?conf=/u.conf#p1/etc"));
        assert_eq!(by(path, conf, usual, Some("me")), Path::new("rbd:p/i?conf=/c.conf&id=me#p1/etc"));
        let named = Path::new("rbd:p/i?conf=/n.conf");
        assert_eq!(by(named, None, usual, None), named);
        assert_eq!(by(Path::new("rbd:nonsense"), conf, usual, None), Path::new("rbd:nonsense"));
    }

    #[test]
    fn what_names_none_is_refused() {
        for (text, why) in [
            ("rbd:image", "names no pool"),
            ("rbd:/image", "its pool has no name"),
            ("rbd:pool/", "its image has no name"),
            ("rbd:pool/image@", "its snapshot has no name"),
            ("rbd:a/b/c/d", "too many slashes"),
            ("rbd:pool/image:id=me", "a second colon"),
            ("rbd:pool/image?user=me", "the parameter user is not known"),
            ("rbd:pool/%", "percent sign"),
        ] {
            let error = Rbd::parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(Rbd::parse(&format!("rbd:p/{}", "x".repeat(2000))).is_err());
    }

    proptest! {
        #[test]
        fn a_name_comes_back_as_it_went(pool in "[^\0]{1,20}", image in "[^\0]{1,20}", snapshot in proptest::option::of("[^\0]{1,9}"), id in proptest::option::of("[^\0]{1,9}")) {
            let rbd = Rbd { pool, namespace: None, image, snapshot, conf: None, id };
            prop_assert_eq!(Rbd::parse(&rbd.to_string()), Ok(rbd));
        }

        #[test]
        fn any_text_is_read_without_a_panic(text in "rbd:\\PC{0,60}") {
            let _ = Rbd::parse(&text);
        }
    }
}

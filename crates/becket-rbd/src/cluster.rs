//! From a name to an open image: configuration, key, connection, pool, image, each with a message of its own
//! where it fails.
//! It waits for no cluster longer than it is given.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

#[cfg(doc)]
use becket_image::link::Agreed;
use becket_image::link::number_of;
use becket_image::link::rbd::Rbd;

use crate::library::{Cluster, Errno, Image, Library, Pool};

/// How long monitors may take until a connection to the cluster counts as impossible, in seconds.
pub(crate) const PATIENCE: u32 = 10;

/// Why there is no image.
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    pub(crate) why: String,
    pub(crate) hint: Option<String>,
    /// The errno that fits best; 0 where none does.
    pub(crate) errno: Errno,
}

impl Refusal {
    pub(crate) fn new(why: impl Into<String>) -> Refusal {
        Refusal { why: why.into(), hint: None, errno: 0 }
    }

    pub(crate) fn hint(self, hint: impl Into<String>) -> Refusal {
        Refusal { hint: Some(hint.into()), ..self }
    }

    pub(crate) fn errno(self, errno: Errno) -> Refusal {
        Refusal { errno, ..self }
    }
}

/// The text of an error number.
pub(crate) fn said(errno: Errno) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

/// A cluster whose configuration and key were read, and to which nothing was sent.
pub(crate) struct Prepared {
    rbd: Rbd,
    cluster: Cluster,
}

/// Loads the libraries, and reads what only a process with all its rights may be able to read.
pub(crate) fn prepare(rbd: Rbd) -> Result<Prepared, Refusal> {
    let library = Library::load().map_err(Refusal::new)?;
    let user = format!("client.{}", rbd.id.as_deref().unwrap_or("admin"));
    let failed = |errno| Refusal::new(format!("librados cannot begin: {}", said(errno))).errno(errno);
    let cluster = library.cluster(&user).map_err(failed)?;
    let conf = rbd
        .conf
        .as_deref()
        .map(|path| path.to_str().ok_or_else(|| Refusal::new("the path of its configuration is not UTF-8")));
    let conf = conf.transpose()?;
    cluster.read_conf(conf).map_err(|errno| {
        let which = conf.unwrap_or("/etc/ceph/ceph.conf");
        Refusal::new(format!("{which}: the configuration of the cluster cannot be read: {}", said(errno)))
            .hint("name it: --ceph-conf FILE")
            .errno(errno)
    })?;
    let set = |option: &str, value: &str| cluster.set(option, value).map_err(failed);
    set("client_mount_timeout", &PATIENCE.to_string())?;
    set("rados_mon_op_timeout", &PATIENCE.to_string())?;
    // Finished writes are then on the disks of all replicas, and no flush is owed when this process dies.
    set("rbd_cache", "false")?;
    // A discard of less is accepted and does nothing otherwise.
    set("rbd_discard_granularity_bytes", "4096")?;
    // Who loses the lock must be unable to write.
    let _ = cluster.set("rbd_blocklist_on_break_lock", "true");
    for silent in ["log_to_stderr", "err_to_stderr", "log_to_file"] {
        let _ = cluster.set(silent, "false");
    }
    let _ = cluster.set("log_file", "/dev/null");
    let _ = cluster.set("admin_socket", "");
    if let Some(key) = key_of(&cluster, &user) {
        set("key", &key)?;
    }
    Ok(Prepared { rbd, cluster })
}

/// Which pool of the cluster is full, so that its writes wait: this one, or another one that has its data.
pub(crate) fn full_pool(cluster: &Cluster, pool: &str) -> Option<String> {
    let said = cluster.ask(r#"{"prefix":"osd pool ls","detail":"detail","format":"json"}"#).ok()?;
    full_of(&said, pool)
}

fn full_of(said: &[u8], pool: &str) -> Option<String> {
    let pools: Vec<PoolFlags> = serde_json::from_slice(said).ok()?;
    let is_full = |one: &&PoolFlags| one.flags_names.split(',').any(|flag| flag == "full");
    let full: Vec<_> = pools.iter().filter(is_full).map(|one| &one.pool_name).collect();
    full.iter().find(|name| **name == pool).or(full.first()).map(|name| (*name).clone())
}

/// What a monitor says of a pool.
#[derive(serde::Deserialize)]
struct PoolFlags {
    pool_name: String,
    flags_names: String,
}

/// The user's key in the first of the key rings that the configuration names.
fn key_of(cluster: &Cluster, user: &str) -> Option<String> {
    let rings = cluster.get("keyring").ok()?;
    let rings = rings.split([',', ' ', ';']).filter(|ring| !ring.is_empty());
    let text = rings.into_iter().find_map(|ring| fs::read_to_string(Path::new(ring)).ok())?;
    let head = format!("[{user}]");
    let lines = text.lines().map(str::trim).skip_while(|line| *line != head).skip(1);
    let mut lines = lines.take_while(|line| !line.starts_with('['));
    lines.find_map(|line| {
        let (name, value) = line.split_once('=')?;
        (name.trim() == "key").then(|| value.trim().to_owned())
    })
}

/// What `why` says of an error, with that error.
fn explained<T>(outcome: Result<T, Errno>, why: impl Fn(Errno) -> Refusal) -> Result<T, Refusal> {
    outcome.map_err(|errno| why(errno).errno(errno))
}

/// A cluster that has answered.
pub(crate) struct Connected {
    rbd: Rbd,
    cluster: Arc<Cluster>,
}

impl Prepared {
    /// Connects.
    pub(crate) fn connect(self) -> Result<Connected, Refusal> {
        let Prepared { rbd, cluster } = self;
        let user = rbd.id.as_deref().unwrap_or("admin");
        explained(cluster.connect(), |errno| match errno {
            libc::ETIMEDOUT => {
                Refusal::new(format!("no monitor of the cluster has answered in {PATIENCE} s"))
                    .hint("see that they run, and that `mon host` of the configuration names them")
            }
            libc::EACCES | libc::EPERM => {
                Refusal::new(format!("the cluster does not accept the key of client.{user}"))
                    .hint("name another user: --ceph-id USER; see `ceph auth get client.USER`")
            }
            libc::ENOENT => Refusal::new(format!("there is no key of client.{user}"))
                .hint("put it in /etc/ceph/ceph.client.USER.keyring, or name another user: --ceph-id USER"),
            other => Refusal::new(format!("the cluster cannot be connected to: {}", said(other))),
        })?;
        Ok(Connected { rbd, cluster: Arc::new(cluster) })
    }
}

impl Connected {
    /// Whether there is room for what is written. Opening an image to write it waits until there is.
    pub(crate) fn has_room(&self) -> Result<(), Refusal> {
        full_pool(&self.cluster, &self.rbd.pool).map_or(Ok(()), |pool| {
            Err(Refusal::new(format!("the pool {pool:?} is full"))
                .hint("attach with --read-only, or make room: see `ceph health detail`")
                .errno(libc::ENOSPC))
        })
    }

    fn pool(&self) -> Result<Pool, Refusal> {
        let Connected { rbd, cluster } = self;
        let pool = cluster.pool(&rbd.pool, rbd.namespace.as_deref());
        explained(pool, |errno| match errno {
            libc::ENOENT => Refusal::new(format!("the cluster has no pool named {:?}", rbd.pool))
                .hint("see which there are: ceph osd lspools"),
            other => Refusal::new(format!("the pool {:?} cannot be used: {}", rbd.pool, said(other))),
        })
    }

    /// Makes an image of so many bytes, under another name; that is what is opened from now on.
    pub(crate) fn make(&mut self, size: u64) -> Result<Made, Refusal> {
        let pool = self.pool()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.subsec_nanos());
        let meanwhile = format!(".becket-{}-{now:x}", std::process::id());
        explained(pool.make(&meanwhile, size), |errno| match errno {
            libc::EPERM | libc::EACCES => {
                Refusal::new(format!("the user may make no image in the pool {:?}", self.rbd.pool))
            }
            other => Refusal::new(format!("the image cannot be made: {}", said(other))),
        })?;
        let name = std::mem::replace(&mut self.rbd.image, meanwhile.clone());
        Ok(Made { pool, meanwhile, name })
    }

    /// What tells an image that was opened from another one under the same name; see [`Agreed::image`].
    pub(crate) fn number(&self, image: &Image) -> Result<Option<u64>, Errno> {
        let Some(id) = image.id()? else { return Ok(None) };
        let snapshot = self.rbd.snapshot.as_deref().map(|name| image.snapshot_id(name)).transpose()?;
        let whole = snapshot.map_or(id.clone(), |snapshot| format!("{id}@{snapshot}"));
        Ok(Some(number_of(whole.as_bytes())))
    }

    /// Opens the image.
    pub(crate) fn open(&self, read_only: bool) -> Result<Image, Refusal> {
        let pool = self.pool()?;
        let Connected { rbd, .. } = self;
        let user = rbd.id.as_deref().unwrap_or("admin");
        let image = pool.image(&rbd.image, rbd.snapshot.as_deref(), read_only);
        explained(image, |errno| {
            let namespace = rbd.namespace.as_deref();
            let place = namespace.map_or(rbd.pool.clone(), |name| format!("{}/{name}", rbd.pool));
            let name = match &rbd.snapshot {
                Some(snapshot) => format!("{}@{snapshot}", rbd.image),
                None => rbd.image.clone(),
            };
            match errno {
                libc::ENOENT => Refusal::new(format!("{place} has no image {name:?}"))
                    .hint(format!("see which there are: rbd ls --long {place}")),
                libc::EPERM | libc::EACCES => {
                    let (what, else_) =
                        if read_only { ("open", "") } else { ("write", "attach with --read-only; or ") };
                    Refusal::new(format!("client.{user} may not {what} {place}/{name}")).hint(format!(
                        "{else_}allow it: ceph auth caps client.{user} mon 'profile rbd' osd 'profile rbd \
                         pool={}'",
                        rbd.pool
                    ))
                }
                libc::ENOSYS | libc::ENOTSUP => {
                    Refusal::new(format!("{place}/{name} has features that this librbd does not know"))
                        .hint(format!("see them: rbd info {place}/{}; and install a newer librbd", rbd.image))
                }
                libc::ETIMEDOUT => Refusal::new("the cluster does not answer"),
                other => Refusal::new(format!("{place}/{name} cannot be opened: {}", said(other))),
            }
        })
    }
}

/// An image that was made for a copy.
pub(crate) struct Made {
    pool: Pool,
    /// The name that it has until it is complete.
    meanwhile: String,
    name: String,
}

impl Made {
    /// Gives it its name.
    pub(crate) fn name(&self) -> Result<(), Errno> {
        self.pool.rename(&self.meanwhile, &self.name)
    }

    /// Removes it, if it has no name yet. It must be closed.
    pub(crate) fn ends(&self) {
        // Nothing is there where it has one. What cannot be removed has a name that says whose it was.
        let _ = self.pool.remove(&self.meanwhile);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_pool_is_found_among_others() {
        let pool = |name: &str, flags: &str| {
            format!(r#"{{"pool_id":1,"pool_name":"{name}","flags":8193,"flags_names":"{flags}","size":1}}"#)
        };
        let of = |pools: &[String]| full_of(format!("\n[{}]", pools.join(",")).as_bytes(), "b");
        let free = pool("a", "hashpspool,nearfull,backfillfull");
        let (other, ours) = (pool("c", "full,hashpspool"), pool("b", "hashpspool,full"));
        assert_eq!(of(std::slice::from_ref(&free)), None);
        assert_eq!(of(&[free.clone(), other.clone()]).as_deref(), Some("c"));
        assert_eq!(of(&[other, free, ours]).as_deref(), Some("b"));
        assert_eq!(full_of(b"no JSON", "b"), None);
    }
}

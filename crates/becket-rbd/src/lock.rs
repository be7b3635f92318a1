//! Who may write: the image's exclusive lock, taken explicitly, because the lock that librbd takes by itself
//! is handed over to whichever client writes next.
//! It never takes the lock from a client that lives and is not this device's own.
//!
//! A device knows as what its earlier programs were known to the cluster. If one of them has the lock, it is
//! dead, or as good as dead: the lock is taken from it, and the cluster accepts nothing of it any more. Only
//! then are requests issued again that it has not answered.

use crate::cluster::{Refusal, said};
use crate::library::{Errno, Image};

/// Marks the name of a program that may not have had the lock.
const MAYBE: &str = "?";

/// The name of a program that is about to take the lock.
pub(crate) fn about_to(address: &str) -> String {
    format!("{MAYBE}{address}")
}

/// Why a device has no lock.
#[derive(Debug)]
pub(crate) enum NoLock {
    /// It can be tried again.
    Not(Refusal),
    /// Others have had it since the device was attached.
    Lost(String),
}

/// Takes the lock. `again`: another program has served the device before, and was known by one of `clients`.
/// `begins` is called when it can be had: a program that only tries must not count as one that may have it.
pub(crate) fn take(
    image: &Image,
    again: bool,
    clients: &[String],
    begins: impl FnOnce(),
) -> Result<(), NoLock> {
    let failed = |errno| NoLock::Not(refused(errno).errno(errno));
    let ours = |owner: &str| clients.iter().any(|known| known.trim_start_matches(MAYBE) == owner);
    match image.owner().map_err(failed)? {
        Some(owner) if ours(&owner) => image.take_from(&owner).map_err(|errno| {
            let why = format!("the program that died cannot be fenced off ({owner}): {}", said(errno));
            NoLock::Not(Refusal::new(why))
        })?,
        Some(owner) if again => return Err(NoLock::Lost(format!("the client {owner} has its lock"))),
        // One that is dead has no watch, and librbd takes the lock from it.
        Some(owner) if image.watchers().map_err(failed)?.contains(&owner) => {
            return Err(NoLock::Not(busy(&owner)));
        }
        None if again && clients.iter().any(|known| !known.starts_with(MAYBE)) => {
            return Err(NoLock::Lost("its lock was taken away".to_owned()));
        }
        _ => {}
    }
    begins();
    image.lock().map_err(failed)?;
    match image.has_lock() {
        Ok(true) => Ok(()),
        Ok(false) => Err(NoLock::Not(Refusal::new("the image's lock is another's"))),
        Err(errno) => Err(failed(errno)),
    }
}

fn busy(owner: &str) -> Refusal {
    Refusal::new(format!("the image is in use: the client {owner} has its lock"))
        .hint("see which it is: rbd lock ls POOL/IMAGE; or attach with --read-only")
        .errno(libc::EBUSY)
}

fn refused(errno: Errno) -> Refusal {
    match errno {
        libc::EROFS | libc::EPERM | libc::EACCES => Refusal::new("the user may not write the image")
            .hint("attach with --read-only, or as another user: --ceph-id USER"),
        libc::EBUSY => Refusal::new("the image is in use: another client has its lock")
            .hint("see which it is: rbd lock ls POOL/IMAGE; or attach with --read-only"),
        libc::EINVAL => {
            Refusal::new("the image lacks the feature exclusive-lock, without which two hosts could write it")
                .hint("rbd feature enable POOL/IMAGE exclusive-lock; or attach with --read-only")
        }
        other => Refusal::new(format!("the image's lock cannot be had: {}", said(other))),
    }
}

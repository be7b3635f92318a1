//! Whether FUSE works here and what it can be for this user: a block device, or a file.
//! It mounts nothing.

use becket_image::Opened;

use super::mount;
use crate::loop_::LoopTransport;
use crate::{Error, Kind, Probe, Transport};

/// A file of becket's own file system, with a loop device over it where this user may have one.
#[derive(Debug, Clone, Copy)]
pub struct FuseTransport;

impl Transport for FuseTransport {
    fn kind(&self) -> Kind {
        Kind::Fuse
    }

    fn probe(&self) -> Probe {
        let what = if rustix::process::geteuid().is_root() { as_root() } else { as_anybody() };
        let (reason, mend) = match what {
            Ok(reason) => {
                return Probe { works: true, reason: reason.to_owned(), mend: None, details: Vec::new() };
            }
            Err(Error::Unavailable { reason, mend, .. }) => (reason, mend),
            Err(other) => (other.to_string(), other.hint()),
        };
        Probe { works: false, reason, mend, details: Vec::new() }
    }

    fn fits(&self, opened: &Opened) -> Result<(), String> {
        crate::serve::fits(opened)
    }
}

fn as_root() -> Result<&'static str, Error> {
    mount::open_device()?;
    let below = LoopTransport.probe();
    if below.works {
        return Ok("the kernel's FUSE and loop drivers are there");
    }
    let reason = format!("FUSE is there, but no loop device over its file: {}", below.reason);
    Err(Error::Unavailable { kind: Kind::Fuse, reason, mend: below.mend })
}

fn as_anybody() -> Result<&'static str, Error> {
    match mount::without_helper() {
        Some(missing) => Err(missing),
        None => Ok("FUSE gives a file and no block device, which needs root"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_that_fails_says_why() {
        let probe = FuseTransport.probe();
        assert!(probe.works || !probe.reason.is_empty(), "{probe:?}");
    }
}

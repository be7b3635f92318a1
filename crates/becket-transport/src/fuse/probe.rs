//! Whether FUSE works here and what it can be for this user: a block device, or a file.
//! It leaves nothing mounted.

use becket_image::{Opened, Source};

use super::{Connection, MAX_IO, mount};
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
        match what {
            Ok(reason) => Probe { works: true, reason: reason.to_owned(), fix: None, details: Vec::new() },
            Err(error) => failed(error),
        }
    }

    fn fits(&self, opened: &Opened) -> Result<(), String> {
        crate::serve::fits(opened)?;
        match Source::smallest_unit(&opened.sources) {
            Some(unit) if unit > 1 && !rustix::process::geteuid().is_root() => Err(format!(
                "without root FUSE gives a file, which is read at any byte, and the image's server takes \
                 requests in multiples of {unit} bytes only (becket copy makes a file of the image)"
            )),
            _ => Ok(()),
        }
    }
}

/// The same for a person who asks about the machine: also what becomes of a device whose server dies.
pub fn examine() -> Probe {
    let mut probe = FuseTransport.probe();
    if !probe.works {
        return probe;
    }
    let root = rustix::process::geteuid().is_root();
    let gives =
        if root { "a block device: a loop device over becket's file" } else { "a file, and no block device" };
    probe.details.push(("gives".to_owned(), gives.to_owned()));
    if root {
        match Connection::detached(1, 1, MAX_IO) {
            Ok((connection, _root)) => {
                let fate = fate(connection.resends());
                probe.details.push(("when its server dies".to_owned(), fate.to_owned()));
            }
            Err(error) => return failed(error),
        }
    }
    probe
}

/// What becomes of a device whose server dies.
fn fate(resends: bool) -> &'static str {
    match resends {
        true => "the next one goes on, with what the first had not answered",
        false => "its device is lost: from Linux 6.9 on the kernel lets the next one go on",
    }
}

fn failed(error: Error) -> Probe {
    let (reason, fix) = match error {
        Error::Unavailable { reason, fix, .. } => (reason, fix),
        other => (other.to_string(), other.hint()),
    };
    Probe { works: false, reason, fix, details: Vec::new() }
}

fn as_root() -> Result<&'static str, Error> {
    mount::open_device()?;
    let below = LoopTransport.probe();
    if below.works {
        return Ok("the kernel's FUSE and loop drivers are there");
    }
    let reason = format!("FUSE is there, but no loop device over its file: {}", below.reason);
    Err(Error::Unavailable { kind: Kind::Fuse, reason, fix: below.fix })
}

fn as_anybody() -> Result<&'static str, Error> {
    match mount::without_helper().or_else(mount::out_of_reach) {
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
        let examined = examine();
        assert!(!examined.works || examined.details.iter().any(|(what, _)| what == "gives"), "{examined:?}");
    }
}

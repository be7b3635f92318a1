//! What becket uses of the kernel beside its drivers: each is tried, and what is missing is explained.
//! It changes nothing: what it makes is closed again.

use std::io;

use becket_transport::{Probe, dm, has_driver};
use becket_uapi::{landlock, seccomp};
use rustix::process::{Resource, getrlimit};

/// A way to try one.
type Try = fn() -> Result<String, No>;

/// Why it does not work, and what would fix it.
struct No {
    reason: String,
    fix: Option<String>,
}

const FACILITIES: [(&str, Try); 5] = [
    ("io_uring", rings),
    ("long rings", memory),
    ("Landlock", paths),
    ("seccomp", calls),
    ("dm-crypt", encrypted),
];

/// All of them by their names, tried.
pub fn facilities() -> Vec<(&'static str, Probe)> {
    FACILITIES.into_iter().map(|(name, tried)| (name, probed(tried))).collect()
}

/// Whether cryptsetup can open LUKS on a device here.
pub fn dm_crypt() -> Probe {
    probed(encrypted)
}

fn probed(tried: Try) -> Probe {
    let (works, reason, fix) = match tried() {
        Ok(reason) => (true, reason, None),
        Err(No { reason, fix }) => (false, reason, fix),
    };
    Probe { works, reason, fix, details: Vec::new() }
}

fn no<T>(reason: impl Into<String>, fix: Option<&str>) -> Result<T, No> {
    Err(No { reason: reason.into(), fix: fix.map(str::to_owned) })
}

fn rings() -> Result<String, No> {
    let Err(error) = becket_engine::try_ring() else {
        return Ok("it moves the bytes of what becket serves itself: ublk, FUSE and exports".to_owned());
    };
    without_rings(&error, std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok().as_deref())
}

/// Why there are no rings, by the error and by what the switch in /proc says.
fn without_rings(error: &io::Error, switch: Option<&str>) -> Result<String, No> {
    let off = switch.map(str::trim).filter(|switch| *switch != "0");
    match error.raw_os_error() {
        Some(libc::ENOSYS) => no("this kernel was built without CONFIG_IO_URING", None),
        Some(libc::EPERM) if off.is_some() => {
            let reason = format!(
                "kernel.io_uring_disabled is {}: becket can serve no device",
                off.unwrap_or_default()
            );
            no(reason, Some("sysctl kernel.io_uring_disabled=0"))
        }
        Some(libc::EPERM) => no(
            "a filter of system calls forbids it, as in many containers: becket can serve no device",
            Some(
                "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile",
            ),
        ),
        Some(libc::ENOMEM) => no("too little memory may be locked for a ring", Some("ulimit -l unlimited")),
        Some(libc::EINVAL) => no("becket needs Linux 6.1 or newer for it", None),
        _ => no(format!("no ring can be made: {error}"), None),
    }
}

fn memory() -> Result<String, No> {
    let limit = getrlimit(Resource::Memlock).current;
    match limit.filter(|limit| *limit < becket_engine::LITTLE) {
        None => Ok("rings have their full length".to_owned()),
        Some(limit) => no(
            format!(
                "{} KiB of memory may be locked: rings are a quarter as long, and many workers find no room",
                limit >> 10
            ),
            Some("ulimit -l unlimited, or LimitMEMLOCK=infinity in a unit of systemd"),
        ),
    }
}

fn paths() -> Result<String, No> {
    match landlock::version() {
        Ok(version) => Ok(format!("version {version}: a process that moves bytes can open no file")),
        Err(error) => without_landlock(&error),
    }
}

fn without_landlock(error: &io::Error) -> Result<String, No> {
    let open = "a captured worker could open files";
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => no(
            format!("this kernel was started without it: {open}"),
            Some("add landlock to the list of lsm= on the kernel's command line"),
        ),
        Some(libc::ENOSYS) => {
            no(format!("this kernel was built without CONFIG_SECURITY_LANDLOCK: {open}"), None)
        }
        _ => no(format!("it cannot be asked ({error}): {open}"), None),
    }
}

fn calls() -> Result<String, No> {
    match seccomp::available() {
        Ok(()) => Ok("each process of becket's is left the few system calls that it needs".to_owned()),
        Err(error) => no(
            format!(
                "this kernel was built without CONFIG_SECCOMP_FILTER ({error}): system calls are not filtered"
            ),
            None,
        ),
    }
}

fn encrypted() -> Result<String, No> {
    let below = dm::examine();
    if !below.works {
        return no(below.reason, below.fix.as_deref());
    }
    match has_driver("dm-crypt") {
        Some(false) => no("this kernel was built without CONFIG_DM_CRYPT", None),
        _ => Ok("cryptsetup opens LUKS on becket's devices: `--key-file`".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_tried_here() {
        let found = facilities();
        assert_eq!(found.len(), FACILITIES.len());
        // The tests of this crate serve devices, so it has rings.
        assert!(found[0].1.works, "{found:?}");
        for (name, probe) in found {
            assert!(!probe.reason.is_empty() && (probe.fix.is_none() || !probe.works), "{name}");
        }
    }

    #[test]
    fn what_is_missing_is_explained_with_its_option_or_what_would_fix_it() {
        let error = io::Error::from_raw_os_error;
        for (tried, reason, fix) in [
            (without_rings(&error(libc::ENOSYS), None), "CONFIG_IO_URING", None),
            (
                without_rings(&error(libc::EPERM), Some("2\n")),
                "kernel.io_uring_disabled is 2",
                Some("sysctl "),
            ),
            (without_rings(&error(libc::EPERM), Some("0\n")), "a filter of system calls", Some("allow ")),
            (without_rings(&error(libc::EPERM), None), "a filter of system calls", Some("allow ")),
            (without_rings(&error(libc::ENOMEM), None), "memory", Some("ulimit -l")),
            (without_rings(&error(libc::EINVAL), None), "Linux 6.1", None),
            (without_landlock(&error(libc::ENOSYS)), "CONFIG_SECURITY_LANDLOCK", None),
            (without_landlock(&error(libc::EOPNOTSUPP)), "started without it", Some("add landlock")),
        ] {
            let Err(no) = tried else { panic!("it is missing") };
            assert!(no.reason.contains(reason), "{}", no.reason);
            assert_eq!(no.fix.is_some(), fix.is_some(), "{}", no.reason);
            assert!(no.fix.unwrap_or_default().starts_with(fix.unwrap_or_default()));
        }
    }
}

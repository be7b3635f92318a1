//! A worker of its own for one device, in the control group of its caller.
//! A descriptor from outside is written to only when it is what it is said to be.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use crate::contract::messages::Attach;
use crate::contract::{Error, ErrorKind, shape};

/// `CGROUP2_SUPER_MAGIC` of the kernel's `magic.h`.
const CGROUP2: u64 = 0x6367_7270;

/// Takes the control group's descriptor, which is the last, out of a request.
pub(super) fn take_cgroup(
    request: Attach,
    mut fds: Vec<OwnedFd>,
) -> Result<(Attach, Vec<OwnedFd>, Option<OwnedFd>), Error> {
    let bad = |what: &str| Error::Failed {
        kind: ErrorKind::InvalidOption,
        message: format!("the request makes no sense: {what}"),
        hint: None,
    };
    if !request.backing.cgroup {
        return Ok((request, fds, None));
    }
    if !request.isolate {
        return Err(bad("a control group without a worker of its own"));
    }
    let cgroup = fds.pop().filter(is_member_list).ok_or_else(|| bad("its control group is none"))?;
    Ok((request, fds, Some(cgroup)))
}

/// Takes what an export is reached at, which comes last of all, out of the descriptors of a request.
pub(super) fn take_door(
    request: &Attach,
    mut fds: Vec<OwnedFd>,
) -> Result<(Vec<OwnedFd>, Vec<OwnedFd>), Error> {
    let count = shape::of(request.transport).kept_descriptors;
    let first = fds.len().checked_sub(count);
    let door = first.map(|first| fds.split_off(first)).ok_or_else(|| Error::Failed {
        kind: ErrorKind::InvalidOption,
        message: "the request makes no sense: its socket is missing".to_owned(),
        hint: None,
    })?;
    Ok((fds, door))
}

/// Whether it is some group's `cgroup.procs`. The kernel checks at each write that the process that opened it
/// may move processes into that group.
pub(super) fn is_member_list(fd: &OwnedFd) -> bool {
    let on_cgroup = rustix::fs::fstatfs(fd).is_ok_and(|stat| u64::try_from(stat.f_type) == Ok(CGROUP2));
    let path = fs::read_link(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()));
    on_cgroup && path.is_ok_and(|path| path.file_name().is_some_and(|name| name == "cgroup.procs"))
}

//! What a long-lived process does not take over from its first caller: mounts and limits.
//! It never unmounts anything that another process can see.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use becket_uapi::handover::unshare_mounts;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Statx, StatxFlags, statx};
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What a server needs besides the root: devices, the kernel's tables, runtime directories.
const NEEDED: [&str; 5] = ["/", "/proc", "/sys", "/dev", "/run"];

/// The root directory, in the mount namespace of the one who started the server.
static ROOT: OnceLock<OwnedFd> = OnceLock::new();

/// Lifts the limits that a user's shell may have set, as far as permitted: all devices of the machine are
/// served under them, even if another user attached the first.
pub(crate) fn limits() {
    for (resource, most) in
        [(Resource::Fsize, None), (Resource::Cpu, None), (Resource::Nofile, most_open_files())]
    {
        let now = getrlimit(resource);
        // For root alone, or where it is no more than there may be already.
        if setrlimit(resource, Rlimit { current: most, maximum: most }).is_err() {
            // Always allowed. Should it fail, the limit is what it was.
            let _ = setrlimit(resource, Rlimit { current: now.maximum, ..now });
        }
    }
}

/// How many files a process may have open at most: a million on a usual kernel. Each device takes three in
/// each of the server's processes, and init gives its children 4,096 where no systemd raises it.
fn most_open_files() -> Option<u64> {
    fs::read_to_string("/proc/sys/fs/nr_open").ok()?.trim().parse().ok()
}

/// Takes the calling thread (and those it starts) into a mount namespace of its own and detaches all mounts
/// there that it does not need. A server that shares the namespace of a mount on its own device deadlocks
/// when it ends; one that keeps a copy of such a mount keeps the device in use for ever.
///
/// Answers with what the environment did not allow.
pub(crate) fn mounts(also_needed: &Path) -> Vec<String> {
    match unshare_mounts() {
        Ok(()) => {}
        Err(error) => return vec![format!("no mount namespace of its own: {error}")],
    }
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    if let Err(error) = rustix::mount::mount_change("/", private) {
        // Without this, what is unmounted here could vanish elsewhere.
        return vec![format!("its mounts stay shared: {error}")];
    }
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut needed: BTreeSet<PathBuf> = NEEDED.iter().map(PathBuf::from).collect();
    needed.insert(also_needed.to_owned());
    needed.extend(mapped(&maps));
    let mut stuck = Vec::new();
    // The last first: mounts lie upon each other.
    for place in unneeded(&table, &needed).into_iter().rev() {
        match rustix::mount::unmount(&place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            // Below another one that went already, or hidden by it.
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
            Err(error) => stuck.push(format!("keeps the mount {}: {error}", place.display())),
        }
    }
    stuck
}

/// Keeps the root directory as it is before [`mounts`]: that of the process, or else the working directory,
/// where the process succeeds one that has kept it.
///
/// # Errors
/// It cannot be opened.
pub(crate) fn keep_root(succeeds: bool) -> io::Result<()> {
    let path = if succeeds { "." } else { "/" };
    let root = rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    // Nothing keeps another one.
    let _ = ROOT.set(root);
    Ok(())
}

/// The working directory of a process that is started: the root directory that was kept.
pub(crate) fn root() -> PathBuf {
    ROOT.get().map_or("/".into(), |root| format!("/proc/self/fd/{}", root.as_raw_fd()).into())
}

/// Has paths lead where they lead for the one who started the server, for a process that was started in that
/// root directory: what a user names, a socket for example, may be on a mount that is detached here, and be
/// there only later. None of those mounts is in use by that, for nothing is open on them.
///
/// # Errors
/// It may not.
pub(crate) fn go_out() -> io::Result<()> {
    let look = |path: &str| statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID);
    let is_same = |path: &str| {
        let (theirs, ours) = (look(path)?, look("/")?);
        let file = |found: &Statx| (found.stx_dev_major, found.stx_dev_minor, found.stx_ino);
        Ok::<_, io::Error>(file(&theirs) == file(&ours))
    };
    if look(".")?.stx_mnt_id == look("/")?.stx_mnt_id {
        return Ok(());
    }
    // With the last process of a namespace its mounts go. Then init's are the next best, where they may be
    // seen, and else those that are left here.
    let lives = |root: &str| look(&format!("{root}/proc/self")).is_ok() && is_same(root).unwrap_or(false);
    match [".", "/proc/1/root"].into_iter().find(|root| lives(root)) {
        Some(root) => Ok(rustix::process::chroot(root)?),
        None => Ok(()),
    }
}

/// Files of the running program: it is started again from them.
fn mapped(maps: &str) -> impl Iterator<Item = PathBuf> + '_ {
    maps.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])))
}

/// Mount points that lie on the way to nothing that is needed, in the table's order.
fn unneeded(table: &str, needed: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
    table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|place| PathBuf::from(crate::system::users::unescape(place)))
        .filter(|place| !needed.iter().any(|path| path.starts_with(place)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
21 1 254:0 / / rw - ext4 /dev/vda rw
22 21 0:5 / /proc rw - proc proc rw
23 21 0:6 / /sys rw - sysfs sysfs rw
24 23 0:7 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
25 21 0:8 / /dev rw - devtmpfs dev rw
26 25 0:9 / /dev/shm rw - tmpfs tmpfs rw
27 21 0:10 / /run rw - tmpfs tmpfs rw
28 27 0:11 / /run/user/1000 rw - tmpfs tmpfs rw
29 21 254:1 / /usr rw - ext4 /dev/vdb rw
30 21 7:3 / /mnt/a\\040b rw - ext4 /dev/loop3 rw
31 21 254:2 / /usrlocal rw - ext4 /dev/vdc rw
";

    #[test]
    fn only_mounts_on_the_way_to_what_is_needed_stay() {
        let needed = |extra: &[&str]| NEEDED.iter().chain(extra).map(PathBuf::from).collect();
        let places = |extra: &[&str]| -> Vec<String> {
            unneeded(TABLE, &needed(extra)).iter().map(|place| place.display().to_string()).collect()
        };
        let all = ["/sys/fs/cgroup", "/dev/shm", "/run/user/1000", "/usr", "/mnt/a b", "/usrlocal"];
        assert_eq!(places(&[]), all);
        let kept = places(&["/run/user/1000/becket", "/usr/lib/libc.so.6"]);
        assert_eq!(kept, ["/sys/fs/cgroup", "/dev/shm", "/mnt/a b", "/usrlocal"]);
    }

    #[test]
    fn the_running_program_s_files_are_known() {
        let maps = "7f00-7f01 r-xp 00000000 fe:00 12   /usr/lib/libc.so.6\n7f02-7f03 rw-p 0 00:00 0 [heap]\n";
        assert_eq!(mapped(maps).collect::<Vec<_>>(), [PathBuf::from("/usr/lib/libc.so.6")]);
        let own = fs::read_to_string("/proc/self/maps").unwrap();
        assert!(mapped(&own).any(|path| path == std::env::current_exe().unwrap()));
    }
}

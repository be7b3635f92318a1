//! Mounting: as root a file system in no namespace, for other users a directory by the system's helper.
//! It never waits for an answer of the file system that it mounts, because it has no server yet.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};

use becket_uapi::fuse as uapi;
use rustix::fs::{Access, AtFlags, CWD, Mode};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
};
use rustix::thread::CapabilitySet;

use crate::{Error, Kind, module, node};

/// The device that connections begin at.
const DEVICE: &str = "/dev/fuse";
/// What mounts for those who may not.
pub(super) const HELPER: &str = "fusermount3";

/// Opens `/dev/fuse`, also where it has no node. Reads of it do not wait.
pub(super) fn open_device() -> Result<OwnedFd, Error> {
    let (major, minor) = uapi::FUSE_DEVICE;
    let device =
        match node::open_control(Kind::Fuse, Path::new(DEVICE), Some(rustix::fs::makedev(major, minor))) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => {
                return Err(module::missing(Kind::Fuse, "fuse", "CONFIG_FUSE_FS"));
            }
            other => other?,
        };
    rustix::io::ioctl_fionbio(&device, true).map_err(Error::io("open", DEVICE))?;
    Ok(device)
}

/// Mounts a file system of that device which is in no namespace: only holders of a descriptor of it can see
/// it, and it goes with the last one. Returns its root. No read of it will be longer than `max_read` bytes:
/// a connection's terms do not say so.
///
/// No mount point can be in the way, be seen, be left behind, or keep a server's namespace from ending.
pub(super) fn detached(device: &OwnedFd, max_read: u32) -> Result<OwnedFd, Error> {
    let mount = || -> rustix::io::Result<OwnedFd> {
        let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let context = context.as_fd();
        fsconfig_set_string(context, "source", "becket")?;
        fsconfig_set_string(context, "fd", device.as_raw_fd().to_string())?;
        fsconfig_set_string(context, "rootmode", "40000")?;
        fsconfig_set_string(context, "user_id", rustix::process::geteuid().as_raw().to_string())?;
        fsconfig_set_string(context, "group_id", rustix::process::getegid().as_raw().to_string())?;
        fsconfig_set_string(context, "max_read", max_read.to_string())?;
        fsconfig_create(context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    };
    mount().map_err(Error::io("mount a file system of", DEVICE))
}

/// Has the helper mount a file system on a directory; answers with its device. `max_read` as in [`detached`].
pub(super) fn on(directory: &Path, max_read: u32) -> Result<OwnedFd, Error> {
    fn failed<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> Error {
        Error::io(doing, HELPER)
    }
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(failed("make a socket for"))?;
    let output = Command::new(HELPER)
        .arg("-o")
        .arg(format!("rw,nosuid,nodev,noexec,fsname=becket,subtype=becket,max_read={max_read}"))
        .arg("--")
        .arg(directory)
        // The helper answers over the descriptor of this number, which is its standard input.
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(theirs))
        .output();
    let output = output.map_err(|error| without_helper().unwrap_or_else(|| failed("run")(error)))?;
    if !output.status.success() {
        return Err(refused("mount on", directory, &output.stderr));
    }
    let device = receive(&ours).map_err(failed("hear from"))?;
    rustix::io::ioctl_fionbio(&device, true).map_err(failed("use what came from"))?;
    Ok(device)
}

/// What the helper said, without its name in front.
fn refused(doing: &'static str, directory: &Path, said: &[u8]) -> Error {
    let said = String::from_utf8_lossy(said);
    let said = said.trim().trim_start_matches(HELPER).trim_start_matches(": ").to_owned();
    Error::Helper { doing, path: directory.to_owned(), said }
}

/// Unmounts a directory that the helper has mounted on; `false` when it is in use. With `lazily` it then only
/// becomes invisible.
///
/// # Errors
/// The helper is not there or refuses.
pub fn off(directory: &Path, lazily: bool) -> Result<bool, Error> {
    let mut command = Command::new(HELPER);
    command.arg(if lazily { "-uz" } else { "-u" }).arg("--").arg(directory);
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(Error::io("run", HELPER))?;
    let said = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(true),
        // Its words are all that it says; an unmounted one is what was wanted.
        false if said.contains("not found in") || said.contains("not mounted") => Ok(true),
        false if said.contains("busy") => Ok(false),
        false => Err(refused("unmount", directory, &output.stderr)),
    }
}

/// The error for a device that this user, as whom the helper will run, may not open. Nothing is opened.
pub(super) fn out_of_reach() -> Option<Error> {
    let access = Access::READ_OK | Access::WRITE_OK;
    let (reason, fix) = match rustix::fs::accessat(CWD, DEVICE, access, AtFlags::EACCESS) {
        Err(rustix::io::Errno::NOENT) => (format!("there is no {DEVICE}"), "as root: modprobe fuse"),
        Err(_) => (
            format!("this user may not open {DEVICE}, which everybody may where udev has set it up"),
            "as root: chmod 666 /dev/fuse",
        ),
        Ok(()) => return None,
    };
    Some(Error::Unavailable { kind: Kind::Fuse, reason, fix: Some(fix.to_owned()) })
}

/// The error for a helper that is not installed, or that cannot gain root's privileges when this process
/// starts it.
pub(super) fn without_helper() -> Option<Error> {
    let places = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&places).map(|place| place.join(HELPER)).find(|path| path.is_file());
    let unavailable =
        |reason, fix: &str| Some(Error::Unavailable { kind: Kind::Fuse, reason, fix: Some(fix.to_owned()) });
    let Some(helper) = found else {
        let reason = format!("mounting without root needs {HELPER}, which is not installed");
        return unavailable(reason, "apt install fuse3");
    };
    if let Some(why) = bound() {
        let reason = format!("mounting without root needs {HELPER}, which cannot become root here: {why}");
        return unavailable(reason, "becket as root, or outside of what took the privileges away");
    }
    match unprivileged(&helper) {
        Some(why) => {
            let reason =
                format!("mounting without root needs {HELPER} as a set-uid program of root, but {why}");
            unavailable(reason, "as root: apt install --reinstall fuse3")
        }
        None => None,
    }
}

/// Why no set-uid program that this process starts may mount, if so.
fn bound() -> Option<&'static str> {
    if rustix::thread::no_new_privs().unwrap_or(false) {
        return Some("no_new_privs is set for this process");
    }
    let admin = rustix::thread::capability_is_in_bounding_set(CapabilitySet::SYS_ADMIN);
    (!admin.unwrap_or(true)).then_some("CAP_SYS_ADMIN is not in the bounding set of this process")
}

/// Why running this file does not give root's privileges, if so. A capability of the file does as well as
/// set-uid.
fn unprivileged(helper: &Path) -> Option<String> {
    let stat = rustix::fs::stat(helper).ok()?;
    let capable = rustix::fs::getxattr(helper, "security.capability", &mut [0_u8; 0]).is_ok();
    let nosuid = rustix::fs::statvfs(helper)
        .is_ok_and(|system| system.f_flag.contains(rustix::fs::StatVfsMountFlags::NOSUID));
    if nosuid {
        return Some(format!("{} lies on a file system that is mounted with nosuid", helper.display()));
    }
    let set_uid = stat.st_uid == 0 && Mode::from_raw_mode(stat.st_mode).contains(Mode::SUID);
    (!set_uid && !capable).then(|| format!("{} is not one", helper.display()))
}

/// The descriptor that comes over a socket.
fn receive(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut passed) = message
            && let Some(device) = passed.next()
        {
            return Ok(device);
        }
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "no descriptor came"))
}

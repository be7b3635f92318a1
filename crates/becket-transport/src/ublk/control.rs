//! Commands to `/dev/ublk-control`: adding, describing, starting, stopping and deleting devices.
//! It never touches the data path, and holds no lock while a command runs: START_DEV blocks until the server
//! is ready.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use becket_engine::Geometry;
use becket_uapi::ublk::{self as uapi, ControlRing, CtrlCmd, Plain};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::{access, params};
use crate::{Error, ErrorKind, Kind, node, sysfs};

pub use becket_uapi::ublk::{DevInfo, Params};

const CONTROL: &str = "/dev/ublk-control";

/// A device to be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddRequest {
    /// Its number; `None` lets the kernel choose.
    pub id: Option<u32>,
    /// Number of queues. The kernel lowers it to the number of CPUs.
    pub queues: u16,
    /// Requests of each queue, at most [`uapi::UBLK_MAX_QUEUE_DEPTH`].
    pub depth: u16,
    /// `UBLK_F_*` that are wanted. Unknown ones are dropped in silence: look at [`DevInfo::flags`].
    pub flags: u64,
    /// Longest request in bytes; a multiple of the page size.
    pub max_io: u32,
    /// A number that the kernel keeps with the device and gives back in [`DevInfo::ublksrv_flags`], to
    /// distinguish one's own devices from those of others.
    pub mark: u64,
}

/// The control device. Commands may be sent from many threads at once; each travels on a ring of its own.
#[derive(Debug)]
pub struct Control {
    device: File,
    /// Rings that no command is using.
    idle: Mutex<Vec<ControlRing>>,
    /// What the driver can do, once it has said so: while its node is open it cannot be replaced.
    features: OnceLock<u64>,
    /// Devices of this process are those of a user without privileges (`UBLK_F_UNPRIVILEGED_DEV`): commands
    /// about them name the char device by its path, which this user must be able to open.
    unprivileged: bool,
    /// The major number of char devices, once one was seen whose minor number is that of its device. It stays
    /// for as long as the driver does.
    major: OnceLock<u32>,
}

/// What the kernel grants only to privileged servers: to leave requests waiting for a server, and to touch
/// the requester's pages.
const PRIVILEGED: u64 = uapi::UBLK_F_USER_RECOVERY
    | uapi::UBLK_F_USER_RECOVERY_REISSUE
    | uapi::UBLK_F_USER_RECOVERY_FAIL_IO
    | uapi::UBLK_F_QUIESCE
    | uapi::UBLK_F_SUPPORT_ZERO_COPY
    | uapi::UBLK_F_USER_COPY
    | uapi::UBLK_F_AUTO_BUF_REG;

/// How long udev may take to give a new node to its owner.
const GIVEN: Duration = Duration::from_secs(10);
/// How long the kernel may take to free the number of a device of a user's.
const FREED: Duration = Duration::from_secs(2);

impl Control {
    /// Opens `/dev/ublk-control`, also where it has no node.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the reason and what would fix it, or this user may not.
    pub fn open() -> Result<Control, Error> {
        let control = Control {
            device: open_control()?,
            idle: Mutex::default(),
            features: OnceLock::new(),
            unprivileged: !access::privileged(),
            major: OnceLock::new(),
        };
        // So that a sandbox without io_uring is found out now and not at the first command.
        let ring = control.ring()?;
        control.give_back(ring);
        Ok(control)
    }

    /// What the driver can do, as `UBLK_F_*`; 0 when it is too old to say (before Linux 6.5).
    ///
    /// # Errors
    /// The command fails for another reason than being unknown.
    pub fn features(&self) -> Result<u64, Error> {
        if let Some(&features) = self.features.get() {
            return Ok(features);
        }
        let features = self.ask_features()?;
        Ok(*self.features.get_or_init(|| features))
    }

    /// As [`open_char`], and without a look into sysfs where the node is there and is the right one.
    ///
    /// # Errors
    /// Those of [`open_char`].
    pub fn open_char(&self, id: u32) -> Result<OwnedFd, Error> {
        let path = char_node(id);
        if let Some(major) = self.major.get()
            && node::is_char(&path, rustix::fs::makedev(*major, id))
            && let Ok(device) = open_node(&path)
        {
            return Ok(device);
        }
        let device = open_char(id)?;
        if let Some((major, minor)) = node::numbers_of(&device)
            && minor == id
        {
            // Of two that come first, both say the same.
            let _ = self.major.set(major);
        }
        Ok(device)
    }

    /// What of that a device of this process can have.
    ///
    /// # Errors
    /// Those of [`Control::features`].
    pub fn granted(&self) -> Result<u64, Error> {
        let features = self.features()?;
        Ok(if self.unprivileged { features & !PRIVILEGED } else { features })
    }

    /// Whether devices of this process belong to a user without privileges.
    pub fn is_unprivileged(&self) -> bool {
        self.unprivileged
    }

    fn ask_features(&self) -> Result<u64, Error> {
        let mut features = 0u64;
        match self.send("GET_FEATURES", uapi::UBLK_U_CMD_GET_FEATURES, None, 0, Some(&mut features)) {
            Ok(_) => Ok(features),
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENODEV | libc::EINVAL)) =>
            {
                Ok(0)
            }
            Err(error) => Err(error),
        }
    }

    /// Adds a device and returns what the kernel made of the request: number, queues, depth, flags.
    ///
    /// # Errors
    /// `EEXIST`: the number is taken. `ENOSPC`: no number is left. `EINVAL`: a contradiction in the flags.
    pub fn add(&self, request: AddRequest) -> Result<DevInfo, Error> {
        let dev_id = request.id.unwrap_or(u32::MAX);
        let mut info = DevInfo {
            nr_hw_queues: request.queues,
            queue_depth: request.depth,
            max_io_buf_bytes: request.max_io,
            dev_id,
            ublksrv_pid: -1,
            flags: request.flags,
            ublksrv_flags: request.mark,
            ..DevInfo::default()
        };
        if self.unprivileged {
            info.flags = info.flags & !PRIVILEGED | uapi::UBLK_F_UNPRIVILEGED_DEV;
        }
        self.send("ADD_DEV", uapi::UBLK_U_CMD_ADD_DEV, Some(dev_id), 0, Some(&mut info))?;
        if self.unprivileged && !node::await_given(&char_node(info.dev_id), GIVEN) {
            // No command about it is allowed to who may not open its node, DEL_DEV neither.
            return Err(access::not_given(info.dev_id));
        }
        Ok(info)
    }

    /// Says what the device looks like; before it is started.
    ///
    /// Parameters that an older driver does not know (the memory alignment, before Linux 6.15) it omits
    /// silently; [`Control::params`] shows what it took.
    ///
    /// # Errors
    /// The geometry is none that ublk can have, or the device is live (`EACCES`).
    pub fn set_params(&self, id: u32, geometry: &Geometry) -> Result<(), Error> {
        let mut params = params::from_geometry(geometry)?;
        self.send("SET_PARAMS", uapi::UBLK_U_CMD_SET_PARAMS, Some(id), 0, Some(&mut params)).map(drop)
    }

    /// The device's parameters, with its device numbers.
    ///
    /// # Errors
    /// There is no such device (`ENODEV`).
    pub fn params(&self, id: u32) -> Result<Params, Error> {
        let mut params = Params { len: size_of::<Params>() as u32, ..Params::default() };
        self.send("GET_PARAMS", uapi::UBLK_U_CMD_GET_PARAMS, Some(id), 0, Some(&mut params))?;
        Ok(params)
    }

    /// Makes the disk appear. Blocks until the server has fetched every tag, or `patience` is over; `pid` is
    /// the process that opened the char device (its thread group).
    ///
    /// # Errors
    /// `EEXIST`: it is started. `EINVAL`: `pid` is not the server. `EINTR`: the server died before. Timed
    /// out: the driver did not take every FETCH, or the server died.
    pub fn start(&self, id: u32, pid: u32, patience: Duration) -> Result<(), Error> {
        self.patiently("START_DEV", uapi::UBLK_U_CMD_START_DEV, id, pid, patience)
    }

    /// Removes the disk, also one that is in use.
    ///
    /// # Errors
    /// There is no such device (`ENODEV`).
    pub fn stop(&self, id: u32) -> Result<(), Error> {
        self.command("STOP_DEV", uapi::UBLK_U_CMD_STOP_DEV, id, 0)
    }

    /// Removes the disk unless it is open: then `false`.
    ///
    /// # Errors
    /// The driver is too old (`EOPNOTSUPP`, before [`uapi::UBLK_F_SAFE_STOP_DEV`]), or there is no such
    /// device.
    pub fn try_stop(&self, id: u32) -> Result<bool, Error> {
        // To a user without privileges an older driver says EINVAL, as to anything that makes no sense.
        if self.features()? & uapi::UBLK_F_SAFE_STOP_DEV == 0 {
            let source = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
            return Err(Error::Command { command: "TRY_STOP_DEV", device: Some(id), source });
        }
        match self.command("TRY_STOP_DEV", uapi::UBLK_U_CMD_TRY_STOP_DEV, id, 0) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Deletes the device and waits until its number is free, for which every descriptor of it must be
    /// closed.
    ///
    /// # Errors
    /// There is no such device (`ENODEV`).
    pub fn del(&self, id: u32) -> Result<(), Error> {
        self.command("DEL_DEV", uapi::UBLK_U_CMD_DEL_DEV, id, 0)
    }

    /// Deletes the device without waiting. Before Linux 6.9 it waits.
    ///
    /// # Errors
    /// There is no such device (`ENODEV`).
    pub fn del_async(&self, id: u32) -> Result<(), Error> {
        if self.unprivileged {
            // The kernel has this command for privileged users only. The other one removes the device before
            // it waits for the number, and is cancelled there while the number is held.
            let deleted = self.patiently("DEL_DEV", uapi::UBLK_U_CMD_DEL_DEV, id, 0, FREED);
            return match deleted {
                Err(error) if error.raw_os_error() == Some(libc::ETIMEDOUT) => Ok(()),
                other => other,
            };
        }
        match self.command("DEL_DEV_ASYNC", uapi::UBLK_U_CMD_DEL_DEV_ASYNC, id, 0) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => self.del(id),
            other => other,
        }
    }

    /// What the kernel knows of the device; `None` when there is none, or none that this user may ask about.
    ///
    /// # Errors
    /// The command fails for another reason.
    pub fn info(&self, id: u32) -> Result<Option<DevInfo>, Error> {
        let mut info = DevInfo::default();
        match self.send("GET_DEV_INFO", uapi::UBLK_U_CMD_GET_DEV_INFO, Some(id), 0, Some(&mut info)) {
            Ok(_) => Ok(Some(info)),
            Err(error) if self.unprivileged && error.kind() == ErrorKind::Permission => Ok(None),
            // The driver answers ENODEV now and answered EINVAL once.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EINVAL)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Gives the nodes of a device to the user who has added it, if unprivileged; returns whether it was so.
    ///
    /// A number may go from one device to another at any time. So a node is opened first, and given away when
    /// the kernel names an owner after that: were the device another one by then, no path would lead
    /// to the node any more.
    ///
    /// # Errors
    /// There is no such device, or this process is not root's.
    pub fn give_to_owner(&self, id: u32) -> Result<bool, Error> {
        let mut given = false;
        for path in [char_node(id), sysfs::node(&format!("ublkb{id}"))] {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let node = match rustix::fs::open(&path, flags, Mode::empty()) {
                Ok(node) => node,
                // It has no disk yet.
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(Error::io("open", path)(error)),
            };
            let Some((uid, gid)) = self.owner(id)? else { return Ok(false) };
            let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
            rustix::fs::chownat(&node, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
                .map_err(Error::io("give to its owner", path))?;
            given = true;
        }
        Ok(given)
    }

    /// User and group of a device that was added without privileges.
    fn owner(&self, id: u32) -> Result<Option<(u32, u32)>, Error> {
        let (number, path) = (uapi::UBLK_U_CMD_GET_DEV_INFO2, path_argument(id));
        let mut info = DevInfo::default();
        self.send_within("GET_DEV_INFO2", number, Some(id), 0, &path, Some(&mut info), None)?;
        let theirs = info.flags & uapi::UBLK_F_UNPRIVILEGED_DEV != 0;
        Ok(theirs.then_some((info.owner_uid, info.owner_gid)))
    }

    /// Changes the length of a live device; `bytes` is cut to whole sectors.
    ///
    /// # Errors
    /// The device was not added with [`uapi::UBLK_F_UPDATE_SIZE`] (`EOPNOTSUPP`), or there is none.
    pub fn update_size(&self, id: u32, bytes: u64) -> Result<(), Error> {
        self.command("UPDATE_SIZE", uapi::UBLK_U_CMD_UPDATE_SIZE, id, bytes / 512)
    }

    /// Parks a live device so that its server can be replaced; fails with `EBUSY` when no tag was idle in
    /// time, and must then be repeated. There is no way back but recovery.
    ///
    /// # Errors
    /// `EOPNOTSUPP` without [`uapi::UBLK_F_QUIESCE`], `EBUSY`, or there is no such device.
    pub fn quiesce(&self, id: u32, timeout: Duration) -> Result<(), Error> {
        let milliseconds = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.command("QUIESCE_DEV", uapi::UBLK_U_CMD_QUIESCE_DEV, id, milliseconds)
    }

    /// Begins to take a device over whose server is gone.
    ///
    /// # Errors
    /// `EBUSY`: the old server's char device is not released yet, or the device is live.
    pub fn start_recovery(&self, id: u32) -> Result<(), Error> {
        self.command("START_USER_RECOVERY", uapi::UBLK_U_CMD_START_USER_RECOVERY, id, 0)
    }

    /// Completes the take-over. Blocks as [`Control::start`] does, whose `pid` it takes.
    ///
    /// # Errors
    /// `EINVAL`: `pid` is not the server. `EBUSY`: no take-over has begun. Timed out, as [`Control::start`].
    pub fn end_recovery(&self, id: u32, pid: u32, patience: Duration) -> Result<(), Error> {
        self.patiently("END_USER_RECOVERY", uapi::UBLK_U_CMD_END_USER_RECOVERY, id, pid, patience)
    }

    /// A command that waits for the server `pid`.
    fn patiently(
        &self,
        name: &'static str,
        number: u32,
        id: u32,
        pid: u32,
        patience: Duration,
    ) -> Result<(), Error> {
        let path = self.path_of(Some(id));
        self.send_within::<u64>(name, number, Some(id), u64::from(pid), &path, None, Some(patience)).map(drop)
    }

    /// A command about a device that has one inline argument and no buffer.
    fn command(&self, name: &'static str, number: u32, id: u32, data: u64) -> Result<(), Error> {
        self.send::<u64>(name, number, Some(id), data, None).map(drop)
    }

    fn send<T: Plain>(
        &self,
        name: &'static str,
        number: u32,
        id: Option<u32>,
        data: u64,
        buffer: Option<&mut T>,
    ) -> Result<i32, Error> {
        let path = if number == uapi::UBLK_U_CMD_ADD_DEV { Vec::new() } else { self.path_of(id) };
        self.send_within(name, number, id, data, &path, buffer, None)
    }

    /// What goes in front of a command's buffer.
    fn path_of(&self, id: Option<u32>) -> Vec<u8> {
        id.filter(|_| self.unprivileged).map(path_argument).unwrap_or_default()
    }

    #[expect(clippy::too_many_arguments, reason = "they are the command's own")]
    fn send_within<T: Plain>(
        &self,
        name: &'static str,
        number: u32,
        id: Option<u32>,
        data: u64,
        path: &[u8],
        buffer: Option<&mut T>,
        patience: Option<Duration>,
    ) -> Result<i32, Error> {
        let command =
            CtrlCmd { dev_id: id.unwrap_or(u32::MAX), queue_id: u16::MAX, data, ..CtrlCmd::default() };
        let mut ring = self.ring()?;
        let answer = ring.send(self.device.as_fd(), number, command, path, buffer, patience);
        if !answer.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
            self.give_back(ring);
        }
        // A number that the caller did not choose would only confuse.
        let device = id.filter(|&id| id != u32::MAX);
        answer.map_err(|source| Error::Command { command: name, device, source })
    }

    fn ring(&self) -> Result<ControlRing, Error> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle {
            Some(ring) => Ok(ring),
            None => ControlRing::new().map_err(|source| Error::Unavailable {
                kind: Kind::Ublk,
                reason: format!("this process may not use io_uring: {source}"),
                fix: Some("sysctl kernel.io_uring_disabled=0".to_owned()),
            }),
        }
    }

    fn give_back(&self, ring: ControlRing) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(ring);
    }
}

/// Opens the control device; when that is not possible the answer says why, for `doctor`.
fn open_control() -> Result<File, Error> {
    // Its number is not fixed, and known only while the driver is there.
    match node::open_control(Kind::Ublk, Path::new(CONTROL), access::misc_dev("ublk-control")) {
        Err(error) => Err(match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => access::unavailable(),
            Some(libc::EACCES) => access::not_allowed(),
            _ => error,
        }),
        Ok(device) => Ok(device.into()),
    }
}

/// Where the char device of a device is.
fn char_node(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{id}"))
}

/// The same as commands name it.
fn path_argument(id: u32) -> Vec<u8> {
    let mut path = char_node(id).into_os_string().into_encoded_bytes();
    path.push(0);
    path
}

/// Where the kernel has an entry for each device.
const DEVICES: &str = "/sys/class/ublk-char";

/// The numbers of all devices, with a disk or without, in their order; none where there is no driver.
pub fn numbers() -> Vec<u32> {
    let entries = std::fs::read_dir(DEVICES).into_iter().flatten().flatten();
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok();
    let mut numbers: Vec<u32> = entries.filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// The marks of live devices of which no one is `known` by its number; none where this user may not ask.
pub fn marks(known: impl Fn(u32) -> bool) -> Vec<u64> {
    let others: Vec<u32> = numbers().into_iter().filter(|number| !known(*number)).collect();
    // Without the right to ask there are none of ours.
    let Some(control) = (!others.is_empty()).then(|| Control::open().ok()).flatten() else {
        return Vec::new();
    };
    let infos = others.into_iter().filter_map(|number| control.info(number).ok().flatten());
    // One without a disk is being made, or on its way out.
    infos.filter(|info| !info.is_dead()).map(|info| info.ublksrv_flags).collect()
}

/// Opens `/dev/ublkcN`, whose node is made when it is missing. It can be opened once at a time: `EBUSY`
/// otherwise.
///
/// # Errors
/// There is no such device, its server has it open, or this user may not.
pub fn open_char(id: u32) -> Result<OwnedFd, Error> {
    let path = char_node(id);
    let attribute = Path::new(DEVICES).join(format!("ublkc{id}/dev"));
    let dev = sysfs::dev_at(&attribute)
        .ok_or_else(|| Error::io("open", &path)(io::Error::from_raw_os_error(libc::ENODEV)))?;
    node::ensure_char(&path, dev)?;
    open_node(&path).map_err(Error::io("open", path))
}

fn open_node(path: &Path) -> io::Result<OwnedFd> {
    OpenOptions::new().read(true).write(true).open(path).map(OwnedFd::from)
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;

//! What can go wrong while a device is offered, said so that a person knows what to do.
//! It never loses the errno: the source is kept beside the sentence.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::Kind;

/// The class of an [`Error`], for callers that decide by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// This user may not do it.
    Permission,
    /// There is no such device, or it is not attached.
    NotFound,
    /// What would have to change is in use, or another device has taken its number.
    InUse,
    /// This machine or this transport cannot do what was asked for.
    Unsupported,
    /// It did not happen in time.
    TimedOut,
    /// The system failed.
    Io,
}

/// Why a device was not attached, changed or detached. `Display` says what and why; [`Error::hint`] what to
/// do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried, to be followed by the path.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// The errno.
        source: io::Error,
    },
    /// The transport does not work on this machine.
    #[error("{kind} cannot be used here: {reason}")]
    Unavailable {
        /// Which.
        kind: Kind,
        /// Why.
        reason: String,
        /// The command that would fix it.
        fix: Option<String>,
    },
    /// The image cannot be offered by this transport.
    #[error("{} cannot be attached as a {kind} device: {reason}", image.display())]
    DoesNotFit {
        /// Which.
        kind: Kind,
        /// The image.
        image: PathBuf,
        /// Why.
        reason: String,
    },
    /// Others took every free loop device first.
    #[error("no free loop device: others took the {attempts} that were offered")]
    NoFreeLoop {
        /// How often it was tried.
        attempts: u32,
    },
    /// Direct I/O was demanded and the kernel's loop driver does not do it.
    #[error("the loop driver refuses direct I/O on {}: {reason}", image.display())]
    NoDirectIo {
        /// The image.
        image: PathBuf,
        /// Why.
        reason: String,
    },
    /// A block device below is claimed by a program or the kernel.
    #[error("{} is claimed: it, or a partition of it, is mounted, swapped to or part of another device", path.display())]
    Claimed {
        /// The image.
        path: PathBuf,
    },
    /// A device cannot take another size.
    #[error("{} keeps its size: {why}", device.display())]
    Fixed {
        /// Its node.
        device: PathBuf,
        /// Why.
        why: &'static str,
    },
    /// The device has no image.
    #[error("{} is not attached", device.display())]
    NotAttached {
        /// Its node.
        device: PathBuf,
    },
    /// The file system that the device's image lies on has not said a word about it.
    #[error("the file system below {} does not answer", device.display())]
    Silent {
        /// Its node.
        device: PathBuf,
    },
    /// The device's number belongs to another device by now.
    #[error("{} is another device by now (disk sequence {found}, expected {expected})", device.display())]
    OtherDevice {
        /// Its node.
        device: PathBuf,
        /// The one that was meant.
        expected: u64,
        /// The one that is there.
        found: u64,
    },
    /// Something that is not a device node is where one should be.
    #[error("{} is in the way of a device node", path.display())]
    NotANode {
        /// Where.
        path: PathBuf,
    },
    /// The kernel has a partition elsewhere than the image's table says.
    #[error("partition {number} of {disk} starts at byte {found}, but the image's table says {expected}")]
    PartitionElsewhere {
        /// The disk's name in sysfs.
        disk: String,
        /// Its number.
        number: u32,
        /// Where the table has it.
        expected: u64,
        /// Where the kernel has it.
        found: u64,
    },
    /// The table says otherwise by now, and the kernel keeps a partition that is used.
    #[error("{} is in use, so it stays as it was; the partition table says otherwise", node.display())]
    PartitionInUse {
        /// Its node.
        node: PathBuf,
    },
    /// Partitions did not appear.
    #[error("{disk} has no partitions {numbers:?} after {waited:?}")]
    PartitionsMissing {
        /// The disk's name in sysfs.
        disk: String,
        /// Which.
        numbers: Vec<u32>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// A ublk control command failed.
    #[error("ublk's {command} failed{}: {source}", device.map(|id| format!(" for device {id}")).unwrap_or_default())]
    Command {
        /// The kernel's name of it.
        command: &'static str,
        /// The device's number.
        device: Option<u32>,
        /// The errno.
        source: io::Error,
    },
    /// The helper that mounts for users other than root refused.
    #[error("fusermount3 cannot {doing} {}: {said}", path.display())]
    Helper {
        /// What it was to do, to be followed by the path.
        doing: &'static str,
        /// Where.
        path: PathBuf,
        /// Its words.
        said: String,
    },
    /// A device's geometry cannot be said to the kernel.
    #[error("ublk cannot offer a device with {what}")]
    Geometry {
        /// What is wrong with it.
        what: String,
    },
}

impl Error {
    /// For `map_err`: a system call on a path failed.
    pub(crate) fn io<E: Into<io::Error>>(
        doing: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Error {
        let path = path.into();
        move |source| Error::Io { doing, path, source: source.into() }
    }

    /// Its class.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Io { source, .. } | Error::Command { source, .. } => kind_of(source),
            Error::Unavailable { .. } | Error::DoesNotFit { .. } | Error::NoDirectIo { .. } => {
                ErrorKind::Unsupported
            }
            Error::Geometry { .. } | Error::Fixed { .. } => ErrorKind::Unsupported,
            Error::NoFreeLoop { .. }
            | Error::OtherDevice { .. }
            | Error::NotANode { .. }
            | Error::Claimed { .. } => ErrorKind::InUse,
            Error::NotAttached { .. } => ErrorKind::NotFound,
            Error::Helper { said, .. } if lacks_privilege(said) => ErrorKind::Permission,
            Error::PartitionInUse { .. } => ErrorKind::InUse,
            Error::PartitionElsewhere { .. } | Error::Helper { .. } => ErrorKind::Io,
            Error::PartitionsMissing { .. } | Error::Silent { .. } => ErrorKind::TimedOut,
        }
    }

    /// What to do next, where that is known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Unavailable { fix, .. } => fix.as_ref().map(|command| format!("run: {command}")),
            Error::NoFreeLoop { .. } => Some("try again, or detach devices that are not needed".to_owned()),
            Error::NoDirectIo { .. } => Some("use --direct-io auto, or another --block-size".to_owned()),
            Error::Claimed { path } => Some(format!(
                "see by what: lsblk {0}; findmnt {0}; or omit --via: other transports claim nothing",
                path.display()
            )),
            Error::Fixed { .. } => Some("detach it and attach it again".to_owned()),
            Error::Silent { device } => Some(format!(
                "try again when it answers (a network file system?); becket detach {} does not wait for it",
                device.display()
            )),
            Error::NotANode { path } => Some(format!("remove {}, then try again", path.display())),
            Error::PartitionInUse { node } => {
                Some(format!("unmount it (findmnt {0}; fuser -v {0}), then becket refresh", node.display()))
            }
            Error::PartitionElsewhere { .. } => {
                Some("use --partitions off, or repair the image's partition table".to_owned())
            }
            Error::Helper { doing, path, said } => Some(match said {
                said if lacks_privilege(said) => {
                    "run becket as root; without root, fusermount3 must be set-uid root \
                     (ls -l $(command -v fusermount3)), and a container must not take CAP_SYS_ADMIN from it"
                        .to_owned()
                }
                said if said.contains("too many") => "as root, raise mount_max in /etc/fuse.conf".to_owned(),
                said if said.contains("modprobe") => "run: as root: modprobe fuse".to_owned(),
                _ if *doing == "unmount" => {
                    format!("see what uses it: fuser -vm {0}; findmnt {0}", path.display())
                }
                _ => "run becket as root, or see `becket doctor`".to_owned(),
            }),
            _ if self.kind() == ErrorKind::Permission => Some(
                "run it as root; a container needs CAP_SYS_ADMIN, CAP_MKNOD and access to block devices"
                    .to_owned(),
            ),
            _ => None,
        }
    }

    /// The errno behind it, where there is one.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Error::Io { source, .. } | Error::Command { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// Whether the helper that mounts says that it may not.
fn lacks_privilege(said: &str) -> bool {
    ["Operation not permitted", "Permission denied"].iter().any(|why| said.contains(why))
}

fn kind_of(source: &io::Error) -> ErrorKind {
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => ErrorKind::Permission,
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => ErrorKind::NotFound,
        Some(libc::EBUSY | libc::EEXIST) => ErrorKind::InUse,
        Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS | libc::EINVAL) => ErrorKind::Unsupported,
        Some(libc::ETIMEDOUT) => ErrorKind::TimedOut,
        _ => ErrorKind::Io,
    }
}

//! What can go wrong in a device's life, with its class and what to do next.
//! It never hides an errno: the source stays beside the sentence.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use becket_transport::Kind;
use serde::{Deserialize, Serialize};

/// What the second supervisor says of the first.
pub(crate) const RUNS_ALREADY: &str = "runs already";
/// What fails where there is no place for records.
pub(crate) const RUNTIME_DIR: &str = "make the directory";

/// The class of an [`Error`], for callers that decide by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// No such image or device.
    NotFound,
    /// This user may not.
    Permission,
    /// There is something, but not something that has bytes to attach.
    NotAnImage,
    /// An option that does not fit, or fits nothing.
    InvalidOption,
    /// Another device or program has the image.
    InUse,
    /// Another device has the name.
    NameInUse,
    /// The device is in use.
    Busy,
    /// This machine cannot do what was asked for.
    Unsupported,
    /// It is open for reading only.
    ReadOnly,
    /// More than one device fits what was named.
    Ambiguous,
    /// It took too long.
    Timeout,
    /// The server or its worker failed or went away.
    Server,
    /// The system failed.
    Io,
}

/// Who keeps a device from going away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// The process, or 0 where the kernel itself is the user.
    pub pid: u32,
    /// Its command, or the kernel's word for what uses it.
    pub command: String,
    /// What it does with the device: `open`, `mounted on /mnt`, `swap`, `held by dm-0`.
    pub how: String,
}

/// What a [`User`] that is the clients of an export is called: they have no process here.
pub(crate) const CLIENTS: &str = "clients of the export";

/// What was to be done when bytes of programs did not reach the image of their device.
pub(crate) const WRITE_BACK: &str = "write back";
const EIO: i32 = rustix::io::Errno::IO.raw_os_error();

/// What a [`User`] of becket's own is called.
const BECKET: &str = "becket";

impl User {
    /// A device or an export of becket's by its name, whose image is the device.
    pub(crate) fn served(name: &str) -> User {
        User { pid: 0, command: BECKET.to_owned(), how: format!("{IMAGE_OF}{name}") }
    }

    /// Whether it is a process of becket's.
    pub(crate) fn is_becket(&self) -> bool {
        self.pid != 0 && self.command == BECKET
    }

    /// The command that ends a use by the kernel, where one is known.
    fn end(&self) -> Option<String> {
        let of = |words: &str| self.how.strip_prefix(words).filter(|_| self.pid == 0);
        let mounted = of(MOUNTED).map(|place| format!("umount {}", quoted(place)));
        let swap = || of(SWAP).map(|path| format!("swapoff {}", quoted(path)));
        let or = if self.command == BECKET { "" } else { " (or losetup --detach)" };
        let stacked = || of(IMAGE_OF).map(|device| format!("becket detach {device}{or}"));
        mounted.or_else(swap).or_else(stacked)
    }
}

/// How the kernel uses a device, before the place, the path, or the device over it.
pub(crate) const MOUNTED: &str = "mounted on ";
pub(crate) const SWAP: &str = "swap on ";
pub(crate) const IMAGE_OF: &str = "image of ";

fn quoted(path: &str) -> String {
    becket_image::quoted(Path::new(path))
}

impl std::fmt::Display for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.pid {
            0 => write!(f, "{} ({})", self.how, self.command),
            pid => write!(f, "{} by {} (pid {pid})", self.how, self.command),
        }
    }
}

/// Why something did not work. `Display` says what and why; [`Error::hint`] says what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The image could not be opened.
    #[error(transparent)]
    Image(becket_image::Error),
    /// The image is held by a device of becket's.
    #[error("{}: {}already attached as {name} ({})", image.display(), other(part), device.display())]
    Attached {
        /// As it was given.
        image: PathBuf,
        /// What the device has, if that is not just what was asked for.
        part: Option<String>,
        /// Name of the device that has it.
        name: String,
        /// Node of that device.
        device: PathBuf,
        /// What the locks said.
        source: Box<becket_image::Error>,
    },
    /// A name that no device can have.
    #[error("{name:?} cannot be a device's name: {why}")]
    Name {
        /// As it was given.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The name is taken.
    #[error("the name {name} is in use: {}", taken_by(image, device))]
    NameInUse {
        /// The name.
        name: String,
        /// The image attached under it, where that is known already.
        image: Option<PathBuf>,
        /// The device, where that is known already.
        device: Option<PathBuf>,
    },
    /// Nothing of becket's goes by that name.
    #[error("{target}: no device or image of becket's")]
    NoDevice {
        /// As it was given.
        target: String,
    },
    /// More than one device fits.
    #[error("{target}: attached more than once, as {}", names.join(", "))]
    Ambiguous {
        /// As it was given.
        target: String,
        /// The devices' names.
        names: Vec<String>,
    },
    /// The device is in use.
    #[error("{} is in use: {}", device.display(), list(users))]
    Busy {
        /// The device.
        device: PathBuf,
        /// By whom, as far as this user may see.
        users: Vec<User>,
    },
    /// No transport can take the image.
    #[error("{}: no transport can take it: {}", image.display(), reasons(rejected))]
    NoTransport {
        /// As it was given.
        image: PathBuf,
        /// Why not, each.
        rejected: Vec<(Kind, String)>,
        /// A command that would help, where there is one.
        fix: Option<String>,
    },
    /// The transport that was insisted on cannot take the image.
    #[error("{}: {kind} cannot take it: {reason}", image.display())]
    Transport {
        /// As it was given.
        image: PathBuf,
        /// Which.
        kind: Kind,
        /// Why not.
        reason: String,
        /// A command that would help, where there is one.
        fix: Option<String>,
    },
    /// Partitions were insisted on, and there are none.
    #[error("{}: has no partition table", image.display())]
    NoPartitions {
        /// As it was given.
        image: PathBuf,
    },
    /// The transport failed.
    #[error(transparent)]
    Device(becket_transport::Error),
    /// It did not go in time.
    #[error("{}: still there after {} s", device.display(), seconds)]
    Timeout {
        /// The device.
        device: PathBuf,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The supervisor could not be started or does not answer.
    #[error("becket's server {what}{}", colon(log))]
    Server {
        /// What is the matter.
        what: String,
        /// Last words of its log.
        log: Option<String>,
    },
    /// The worker failed.
    #[error("becket's worker {what}")]
    Worker {
        /// What is the matter.
        what: String,
    },
    /// A table of the worker has no room for the device.
    #[error("becket's worker {what}")]
    Full {
        /// Which, and for what.
        what: String,
        /// How deep its queues could be without copying, where that is what stands in the way.
        room: Option<u16>,
    },
    /// A failure with a sentence of its own: found here, or as the supervisor answered it.
    #[error("{message}")]
    Failed {
        /// The class.
        kind: ErrorKind,
        /// What and why.
        message: String,
        /// What next.
        hint: Option<String>,
    },
    /// The system failed.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// The errno.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err` around a system call on a path.
    pub(crate) fn io<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> Error {
        let path = path.to_owned();
        move |source| Error::Io { what, path, source: source.into() }
    }

    /// For a device that is there while its server is not.
    pub(crate) fn unserved(name: &str) -> Error {
        Error::Failed {
            kind: ErrorKind::Server,
            message: format!("{name} has lost its server"),
            hint: Some(format!("becket detach {name}, and attach or export it again")),
        }
    }

    /// Speaks of the image by the path that it was given as.
    pub(crate) fn of_image(mut self, path: &Path) -> Error {
        if let Error::NoTransport { image, .. } | Error::Transport { image, .. } = &mut self {
            *image = path.to_owned();
        }
        self
    }

    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Image(error) => match error.kind() {
                becket_image::ErrorKind::NotFound => ErrorKind::NotFound,
                becket_image::ErrorKind::Permission => ErrorKind::Permission,
                becket_image::ErrorKind::NotAnImage => ErrorKind::NotAnImage,
                becket_image::ErrorKind::InvalidOption => ErrorKind::InvalidOption,
                becket_image::ErrorKind::InUse => ErrorKind::InUse,
                becket_image::ErrorKind::Unsupported => ErrorKind::Unsupported,
                _ => ErrorKind::Io,
            },
            Error::Attached { .. } => ErrorKind::InUse,
            Error::Name { .. } | Error::NoPartitions { .. } => ErrorKind::InvalidOption,
            Error::NameInUse { .. } => ErrorKind::NameInUse,
            Error::NoDevice { .. } => ErrorKind::NotFound,
            Error::Ambiguous { .. } => ErrorKind::Ambiguous,
            Error::Busy { .. } => ErrorKind::Busy,
            Error::NoTransport { .. } | Error::Transport { .. } => ErrorKind::Unsupported,
            Error::Timeout { .. } => ErrorKind::Timeout,
            Error::Server { .. } | Error::Worker { .. } | Error::Full { .. } => ErrorKind::Server,
            Error::Device(error) => match error.kind() {
                becket_transport::ErrorKind::Permission => ErrorKind::Permission,
                becket_transport::ErrorKind::NotFound => ErrorKind::NotFound,
                becket_transport::ErrorKind::InUse => ErrorKind::InUse,
                becket_transport::ErrorKind::Unsupported => ErrorKind::Unsupported,
                becket_transport::ErrorKind::TimedOut => ErrorKind::Timeout,
                _ => ErrorKind::Io,
            },
            Error::Failed { kind, .. } => *kind,
            Error::Io { source, .. } => match source.kind() {
                io::ErrorKind::PermissionDenied => ErrorKind::Permission,
                _ => ErrorKind::Io,
            },
        }
    }

    /// What to do next, where there is something to say.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Error::Image(becket_image::Error::Io { source, .. }) => {
                return what_is_short(source.raw_os_error()).map(str::to_owned);
            }
            Error::Image(error) => return error.hint(),
            Error::Attached { name, part: Some(_), .. } => {
                return Some(format!(
                    "detach it first: becket detach {name}; or attach with --shared if both users expect each other"
                ));
            }
            Error::Attached { name, .. } => {
                return Some(format!(
                    "use that device, or detach it first: becket detach {name}; or attach with --shared if both \
                     users expect each other"
                ));
            }
            Error::Name { .. } => {
                "a name begins with a letter or digit and has only letters, digits, '.', '_' and '-', 63 at most"
            }
            Error::NameInUse { .. } => {
                "choose another --name, or detach that device first; see `becket list`"
            }
            Error::NoDevice { .. } => "see `becket list`",
            Error::Ambiguous { .. } => "use the name of the device; see `becket list`",
            Error::Busy { users, .. } if users.iter().any(|user| user.command == CLIENTS) => {
                "end their connections with --force, or use --lazy: it is then detached when the last has gone"
            }
            Error::Busy { users, .. } => {
                let first = ending(users);
                return Some(format!(
                    "{first}, or use --lazy: the device is then detached when its last user closes it"
                ));
            }
            Error::NoTransport { fix: Some(fix), .. } | Error::Transport { fix: Some(fix), .. } => {
                return Some(fix.clone());
            }
            Error::NoTransport { .. } => "see `becket doctor`",
            Error::Transport { .. } => "omit --via, or see `becket doctor`",
            Error::NoPartitions { .. } => "use --partitions auto",
            Error::Timeout { .. } => "run the command again: becket detach names the users of the device",
            Error::Server { what, .. } if what == RUNS_ALREADY => {
                "replace it with --takeover, or stop it first: it ends by SIGTERM, or after becket detach --all"
            }
            Error::Server { .. } => "run the server in the foreground to see why: becket serve",
            Error::Full { .. } => {
                "detach devices that are not needed, use fewer --queues per device, or use --via loop"
            }
            Error::Worker { .. } => "see `becket doctor` and the log of the server",
            Error::Failed { hint, .. } => return hint.clone(),
            Error::Device(error) => {
                return error.hint().or_else(|| what_is_short(error.raw_os_error()).map(str::to_owned));
            }
            Error::Io { what: RUNTIME_DIR, .. } => {
                "set XDG_RUNTIME_DIR or BECKET_RUNTIME_DIR to a directory that you may write to, or run it as root"
            }
            Error::Io { what: WRITE_BACK, source, .. } if source.raw_os_error() == Some(EIO) => {
                "bytes that programs have written may be lost; detach the device and attach it again, and write \
                 them anew"
            }
            Error::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => "run it as root",
            Error::Io { source, .. } => return what_is_short(source.raw_os_error()).map(str::to_owned),
        };
        Some(hint.to_owned())
    }
}

impl From<becket_image::Error> for Error {
    fn from(error: becket_image::Error) -> Self {
        Error::Image(error)
    }
}

fn other(part: &Option<String>) -> String {
    part.as_ref().map(|part| format!("{part} is ")).unwrap_or_default()
}

fn taken_by(image: &Option<PathBuf>, device: &Option<PathBuf>) -> String {
    match (image, device) {
        (Some(image), Some(device)) => format!("{} has it, for {}", device.display(), image.display()),
        (Some(image), None) => format!("it is being attached, for {}", image.display()),
        _ => "it is being attached".to_owned(),
    }
}

/// What to do about something that the system has too little of.
fn what_is_short(errno: Option<i32>) -> Option<&'static str> {
    match errno? {
        libc::EMFILE | libc::ENFILE => Some(
            "allow more open files (ulimit -n); a server keeps the limit that it began with, and ends with its \
             last device",
        ),
        libc::ENOSPC | libc::EDQUOT => Some("make room there"),
        _ => None,
    }
}

/// What ends the use of a device.
pub(crate) fn ending(users: &[User]) -> String {
    let mut ends: Vec<String> = users.iter().filter_map(User::end).collect();
    ends.dedup();
    match ends.is_empty() {
        true => "end the users first".to_owned(),
        false => format!("end the use first: {}", ends.join("; ")),
    }
}

fn list(users: &[User]) -> String {
    match users {
        [] => "by whom cannot be seen from here".to_owned(),
        users => users.iter().map(User::to_string).collect::<Vec<_>>().join("; "),
    }
}

fn reasons(rejected: &[(Kind, String)]) -> String {
    let mut text = String::new();
    for (kind, reason) in rejected {
        let separator = if text.is_empty() { "" } else { "; " };
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{kind}: {reason}");
    }
    text
}

fn colon(log: &Option<String>) -> String {
    log.as_ref().map(|log| format!(": {log}")).unwrap_or_default()
}

/// A message that makes no sense.
pub(crate) fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_is_short_of_is_said_with_a_next_step() {
        let path = || Path::new("/run/becket/devices/loop0.json").to_owned();
        for (errno, wanted) in [
            (libc::EMFILE, "allow more open files"),
            (libc::ENFILE, "allow more open files"),
            (libc::ENOSPC, "make room there"),
            (libc::EDQUOT, "make room there"),
        ] {
            let source = || io::Error::from_raw_os_error(errno);
            let image =
                becket_image::Error::Io { path: path(), what: "it cannot be opened", source: source() };
            let device = becket_transport::Error::Io { doing: "open", path: path(), source: source() };
            for error in [Error::io("write", &path())(source()), Error::Image(image), Error::Device(device)] {
                assert!(error.hint().is_some_and(|hint| hint.starts_with(wanted)), "{error}");
            }
        }
    }

    #[test]
    fn the_hint_of_a_busy_device_fits_its_users() {
        let hint = |pid, command: &str, how: &str| {
            let users = vec![User { pid, command: command.to_owned(), how: how.to_owned() }];
            Error::Busy { device: "/dev/loop0".into(), users }.hint().unwrap()
        };
        for (user, wanted) in [
            ((0, "mount", "mounted on /mnt/a b"), "end the use first: umount '/mnt/a b', or use --lazy"),
            ((0, "swap", "swap on /dev/loop0p1"), "end the use first: swapoff /dev/loop0p1, or use --lazy"),
            ((0, "loop", "image of /dev/loop3"), "end the use first: becket detach /dev/loop3 "),
            ((0, BECKET, "image of disk"), "end the use first: becket detach disk, or use --lazy"),
            ((0, "dm-0", "held by dm-0"), "end the users first, or use --lazy"),
            ((7, "sleep", "open"), "end the users first, or use --lazy"),
            ((0, CLIENTS, "2 connected"), "end their connections with --force"),
        ] {
            let hint = hint(user.0, user.1, user.2);
            assert!(hint.starts_with(wanted), "{user:?}: {hint}");
        }
    }
}

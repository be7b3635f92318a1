//! Landlock: a thread gives up every right to files, sockets and signals outside that it could still acquire.
//! It never touches what is open already, and there is no way back.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};

/// Asks for the version instead of making a ruleset.
const VERSION: libc::c_ulong = 1;
/// All rights that the kernel knows in each version, from the first: to files, to TCP ports, and what stays
/// inside.
const RIGHTS: [Ruleset; 6] = [
    rights(1 << 13, 0, 0),
    // Moving files between directories.
    rights(1 << 14, 0, 0),
    // Truncating.
    rights(1 << 15, 0, 0),
    // Binding and connecting of TCP.
    rights(1 << 15, 1 << 2, 0),
    // Ioctls of devices.
    rights(1 << 16, 1 << 2, 0),
    // Abstract sockets and signals.
    rights(1 << 16, 1 << 2, 1 << 2),
];

/// `struct landlock_ruleset_attr`: the rights that are taken away unless a rule gives them back.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ruleset {
    files: u64,
    network: u64,
    scoped: u64,
}

/// Of each kind the rights below that bit.
const fn rights(files: u64, network: u64, scoped: u64) -> Ruleset {
    const fn below(bit: u64) -> u64 {
        bit.saturating_sub(1)
    }
    Ruleset { files: below(files), network: below(network), scoped: below(scoped) }
}

/// `struct landlock_path_beneath_attr`: the rights that a rule gives back to a file, or to all below a
/// directory.
#[repr(C, packed)]
struct PathBeneath {
    rights: u64,
    place: libc::c_int,
}

/// The rule's type: a path and what lies beneath it.
const PATH_BENEATH: libc::c_long = 1;
/// `LANDLOCK_ACCESS_FS_READ_FILE` and `LANDLOCK_ACCESS_FS_READ_DIR`.
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
/// `LANDLOCK_ACCESS_NET_CONNECT_TCP`.
const CONNECT: u64 = 1 << 1;

/// What [`allow_only`] leaves to a thread. By default that is nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Left<'a> {
    /// Files and directories that may be read, with everything below them. Those that do not exist are left
    /// out. A link counts as the file that it leads to at that time.
    pub readable: &'a [&'a str],
    /// TCP connections to any port may be made.
    pub connect: bool,
}

/// The version of this kernel's Landlock.
///
/// # Errors
/// `ENOSYS`: the kernel was built without it. `EOPNOTSUPP`: it was started without it.
pub fn version() -> io::Result<u32> {
    let none = std::ptr::null::<Ruleset>();
    // SAFETY: no attributes are given, which is what asking for the version wants.
    let version = answer(unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0, VERSION) })?;
    Ok(version.unsigned_abs())
}

/// Takes from the calling thread, and those that it starts, every right that this kernel's Landlock governs:
/// no path can be opened any more. Descriptors stay what they are. Returns Landlock's version; a later one
/// may govern more.
///
/// The thread must have set `no_new_privs`. Threads that run already are not affected.
///
/// # Errors
/// `ENOSYS` or `EOPNOTSUPP` if the kernel has no Landlock or was started without it. `E2BIG`: the thread is
/// under too many rulesets already.
pub fn allow_nothing() -> io::Result<u32> {
    allow_only(Left::default())
}

/// The same as [`allow_nothing`], but for what is `left`.
///
/// # Errors
/// As [`allow_nothing`]; and those of opening what is left readable.
pub fn allow_only(left: Left<'_>) -> io::Result<u32> {
    let version = version()?;
    let known = usize::try_from(version).unwrap_or(0).clamp(1, RIGHTS.len());
    let mut ruleset = RIGHTS[known - 1];
    if left.connect {
        ruleset.network &= !CONNECT;
    }
    // Kernels that do not know the last fields want them to be zero, which they are then.
    let size = size_of::<Ruleset>();
    // SAFETY: the kernel reads `size` bytes of a structure that lives until the call returns.
    let fd =
        answer(unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const ruleset, size, 0) })?;
    // SAFETY: the kernel has just made this descriptor, and only this code has it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    for path in left.readable {
        allow_reading(&fd, Path::new(path))?;
    }
    // SAFETY: takes a descriptor and no memory.
    answer(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, fd.as_raw_fd(), 0) })?;
    Ok(version)
}

/// Adds the rule for one path, if it exists.
fn allow_reading(ruleset: &OwnedFd, path: &Path) -> io::Result<()> {
    let place = match rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(place) => place,
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR | rustix::io::Errno::ACCESS) => {
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let directory = FileType::from_raw_mode(rustix::fs::fstat(&place)?.st_mode) == FileType::Directory;
    let rights = if directory { READ_FILE | READ_DIR } else { READ_FILE };
    let rule = PathBeneath { rights, place: place.as_raw_fd() };
    let (ruleset, rule) = (ruleset.as_raw_fd(), &raw const rule);
    // SAFETY: the kernel reads one structure of that type, which lives until the call returns.
    answer(unsafe { libc::syscall(libc::SYS_landlock_add_rule, ruleset, PATH_BENEATH, rule, 0) })?;
    Ok(())
}

fn answer(result: libc::c_long) -> io::Result<libc::c_int> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // Descriptors and versions are small.
    libc::c_int::try_from(result).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn no_version_has_fewer_rights_than_the_one_before() {
        for pair in RIGHTS.windows(2) {
            let (old, new) = (pair[0], pair[1]);
            for (less, more) in [(old.files, new.files), (old.network, new.network), (old.scoped, new.scoped)]
            {
                assert_eq!(less & !more, 0, "{pair:?}");
            }
            assert_ne!(old, new);
        }
        assert_eq!(RIGHTS[0], Ruleset { files: 0x1fff, network: 0, scoped: 0 });
        assert_eq!(RIGHTS[5], Ruleset { files: 0xffff, network: 3, scoped: 3 });
    }

    /// Rulesets belong to threads: one of its own is under it, the test's thread is not.
    #[test]
    fn what_is_open_stays_and_nothing_else_opens() {
        let outcome = std::thread::spawn(|| -> io::Result<_> {
            let mut before = File::open("/proc/self/stat")?;
            rustix::thread::set_no_new_privs(true)?;
            let version = match allow_nothing() {
                Ok(version) => version,
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EOPNOTSUPP)) => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            };
            let mut text = String::new();
            before.read_to_string(&mut text)?;
            let denied = [
                File::open("/etc/passwd").map(drop),
                std::fs::read_dir("/").map(drop),
                File::create(std::env::temp_dir().join("becket-landlock")).map(drop),
                std::fs::remove_file("/proc/self/stat"),
            ];
            let port = TcpListener::bind("127.0.0.1:0").map(drop);
            Ok(Some((version, text, denied, port)))
        });
        let Ok(outcome) = outcome.join() else { unreachable!("it does not panic") };
        let Some((version, text, denied, port)) = outcome.unwrap() else {
            return becket_testkit::skip(
                "what_is_open_stays_and_nothing_else_opens",
                "this kernel has no Landlock",
            );
        };
        assert!(!text.is_empty());
        for result in denied {
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        }
        assert_eq!(port.is_err(), version >= 4, "{port:?}");
        assert!(File::open("/etc/passwd").is_ok(), "other threads go on");
    }

    #[test]
    fn what_is_left_readable_can_be_read_and_its_neighbours_cannot() {
        let temp = std::env::temp_dir().join(format!("becket-landlock-{}", std::process::id()));
        std::fs::create_dir_all(temp.join("open/below")).unwrap();
        for name in ["open/below/a", "one", "other"] {
            std::fs::write(temp.join(name), b"x").unwrap();
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let (place, address) = (temp.clone(), port.local_addr().unwrap());
        let outcome = std::thread::spawn(move || -> io::Result<_> {
            rustix::thread::set_no_new_privs(true)?;
            let paths = [place.join("open"), place.join("one"), place.join("missing")];
            let paths: Vec<&str> = paths.iter().map(|path| path.to_str().unwrap()).collect();
            match allow_only(Left { readable: &paths, connect: true }) {
                Ok(_) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EOPNOTSUPP)) => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
            let read = |name: &str| File::open(place.join(name)).map(drop);
            let written = File::options().write(true).open(place.join("one")).map(drop);
            let connected = std::net::TcpStream::connect(address).map(drop);
            Ok(Some((read("open/below/a"), read("one"), read("other"), written, connected)))
        });
        let outcome = outcome.join().unwrap().unwrap();
        std::fs::remove_dir_all(&temp).unwrap();
        let Some((below, one, other, written, connected)) = outcome else {
            return becket_testkit::skip(
                "what_is_left_readable_can_be_read_and_its_neighbours_cannot",
                "this kernel has no Landlock",
            );
        };
        below.unwrap();
        one.unwrap();
        connected.unwrap();
        assert_eq!(other.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}

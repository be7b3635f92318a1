//! Loop devices as the kernel has them: which there are, and what each is, from sysfs and one ioctl.
//! Never opens a device unless there is no other way to get the answer.

use super::columns::Column;
use super::table::Value;
use becket_transport::sysfs;
use becket_uapi::loop_::{self as uapi, LOOP_MAJOR, LoopInfo64};
use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::cell::OnceCell;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Where the kernel shows whole disks, each as a link.
const DISKS: &str = "/sys/block";
/// Where the links of loop devices lead: half the price of a look.
const VIRTUAL_DISKS: &str = "/sys/devices/virtual/block";
/// Longest attribute that is read: a path with its ` (deleted)`.
const LONGEST: usize = 4096 + 32;

/// A loop device, in use or not.
#[derive(Debug)]
pub(super) struct Loop {
    /// As it is shown.
    pub(super) path: PathBuf,
    /// The kernel's name of it, where the kernel knows it.
    pub(super) name: Option<String>,
    /// Its directory in sysfs.
    attributes: Option<OwnedFd>,
    info: OnceCell<Option<LoopInfo64>>,
}

/// The number in `loop12`.
pub(super) fn number(name: &[u8]) -> Option<u32> {
    let digits = name.strip_prefix(b"loop")?;
    let plain = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    plain.then(|| std::str::from_utf8(digits).ok()?.parse().ok()).flatten()
}

/// All devices in use, in the order of their numbers. Reads one directory, and the state of each loop device
/// in it.
pub(super) fn in_use() -> Vec<Loop> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = |path| rustix::fs::open(path, flags, Mode::empty());
    let Ok(disks) = open(VIRTUAL_DISKS).or_else(|_| open(DISKS)) else { return Vec::new() };
    let Ok(entries) = Dir::read_from(&disks) else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| number(entry.file_name().to_bytes()));
    let mut numbers: Vec<u32> = numbers.collect();
    numbers.sort_unstable();
    numbers.into_iter().filter_map(|number| bound(disks.as_fd(), number)).collect()
}

fn bound(disks: BorrowedFd<'_>, number: u32) -> Option<Loop> {
    let name = format!("loop{number}");
    // It is there exactly as long as the device is bound.
    rustix::fs::accessat(
        disks,
        format!("{name}/loop"),
        rustix::fs::Access::EXISTS,
        rustix::fs::AtFlags::empty(),
    )
    .ok()?;
    let attributes = directory(disks, &name)?;
    Some(Loop {
        path: sysfs::node(&name),
        name: Some(name),
        attributes: Some(attributes),
        info: OnceCell::new(),
    })
}

fn directory(base: BorrowedFd<'_>, path: &str) -> Option<OwnedFd> {
    rustix::fs::openat(base, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// The path that a word means: a name without a slash is one in /dev.
pub(super) fn path_of(word: &OsStr) -> PathBuf {
    if word.as_bytes().starts_with(b"/") { word.into() } else { Path::new("/dev").join(word) }
}

/// The name in sysfs of the whole disk whose node is at `path`.
pub(super) fn disk_at(path: &Path) -> Option<String> {
    let stat = block_at(path)?;
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    let link = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let name = link.file_name()?.to_str()?.to_owned();
    (!sysfs::directory(&name).join("partition").exists()).then_some(name)
}

fn block_at(path: &Path) -> Option<Stat> {
    let stat = rustix::fs::stat(path).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice).then_some(stat)
}

impl Loop {
    /// The device that a word of the command line means; `None` if that is not a loop device. A device whose
    /// node is gone is found by its name, and one that the kernel has not made yet by its node's number.
    pub(super) fn named(word: &OsStr) -> Option<Loop> {
        let path = path_of(word);
        let name = match block_at(&path) {
            Some(stat) => match disk_at(&path) {
                Some(name) => Some(name).filter(|name| name.starts_with("loop"))?.into(),
                None if rustix::fs::major(stat.st_rdev) == LOOP_MAJOR => None,
                None => return None,
            },
            // Whatever else is there is not the device.
            None if rustix::fs::stat(&path).is_ok() => return None,
            None => {
                let name = path
                    .strip_prefix("/dev")
                    .ok()?
                    .to_str()
                    .filter(|name| number(name.as_bytes()).is_some())?;
                sysfs::directory(name).exists().then(|| name.to_owned())?.into()
            }
        };
        let attributes = name.as_deref().and_then(|name| directory(CWD, &format!("{DISKS}/{name}")));
        Some(Loop { path, name, attributes, info: OnceCell::new() })
    }

    /// Whether it has a file. What went away meanwhile has none.
    pub(super) fn is_bound(&self) -> bool {
        self.attribute("loop/offset").is_some()
    }

    /// Whether there is no node to open it by.
    pub(super) fn is_lost(&self) -> bool {
        block_at(&self.path).is_none()
    }

    /// Opens its node, which is made when it is missing and may be made.
    pub(super) fn open(&self, writable: bool) -> io::Result<File> {
        if self.name.is_none() && sysfs::is_there() {
            // A stale node; opening it would make the kernel make a device.
            return Err(rustix::io::Errno::NXIO.into());
        }
        let open = || File::options().read(true).write(writable).open(&self.path);
        match (open(), &self.name) {
            (Err(error), Some(name)) if error.kind() == io::ErrorKind::NotFound => {
                let dev = sysfs::dev(name).ok_or(error)?;
                becket_transport::node::ensure_block(&sysfs::node(name), dev).map_err(io::Error::other)?;
                open()
            }
            (opened, _) => opened,
        }
    }

    fn attribute(&self, name: &str) -> Option<Vec<u8>> {
        let directory = self.attributes.as_ref()?;
        let file =
            rustix::fs::openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let mut text = [0; LONGEST];
        let length = rustix::io::read(&file, &mut text).ok()?;
        let text = text.get(..length)?;
        Some(text.strip_suffix(b"\n").unwrap_or(text).to_vec())
    }

    fn number(&self, name: &str) -> Option<u64> {
        std::str::from_utf8(&self.attribute(name)?).ok()?.trim().parse().ok()
    }

    fn flag(&self, name: &str) -> bool {
        self.number(name).is_some_and(|value| value != 0)
    }

    /// What only the driver says; it needs the device open, and answers root only.
    pub(super) fn info(&self) -> Option<&LoopInfo64> {
        let ask = || {
            let device = File::open(&self.path).ok()?;
            uapi::get_status64(device.as_fd()).ok()
        };
        self.info.get_or_init(ask).as_ref()
    }

    /// Path of the file, as the kernel reports it.
    pub(super) fn backing_file(&self) -> Option<Vec<u8>> {
        self.attribute("loop/backing_file")
    }

    pub(super) fn offset(&self) -> Option<u64> {
        self.number("loop/offset")
    }

    pub(super) fn size_limit(&self) -> Option<u64> {
        self.number("loop/sizelimit")
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.flag("ro")
    }

    /// Device number.
    pub(super) fn dev(&self) -> Option<u64> {
        let text = self.attribute("dev")?;
        let (major, minor) = std::str::from_utf8(&text).ok()?.split_once(':')?;
        Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
    }

    /// The kernel's number of this use of the node.
    pub(super) fn sequence(&self) -> Option<u64> {
        self.number("diskseq")
    }

    /// What stands in a column.
    pub(super) fn cell(&self, column: Column) -> Option<Value> {
        let back = || self.info().map(|info| info.lo_device).filter(|&dev| dev != 0);
        let part = |number: u32| Value::Text(number.to_string().into_bytes());
        match column {
            Column::Name => Some(Value::Text(self.shown())),
            Column::Autoclear => Some(Value::Flag(self.flag("loop/autoclear"))),
            Column::BackFile => self.backing_file().map(Value::Text),
            Column::BackIno => {
                self.info().map(|info| info.lo_inode).filter(|&ino| ino != 0).map(Value::Number)
            }
            Column::BackMajMin => back().map(|dev| pair(dev, 8)),
            Column::BackMaj => back().map(|dev| part(rustix::fs::major(dev))),
            Column::BackMin => back().map(|dev| part(rustix::fs::minor(dev))),
            Column::MajMin => self.dev().map(|dev| pair(dev, 3)),
            Column::Maj => self.dev().map(|dev| Value::Number(rustix::fs::major(dev).into())),
            Column::Min => self.dev().map(|dev| Value::Number(rustix::fs::minor(dev).into())),
            Column::Offset => self.offset().map(Value::Number),
            Column::Partscan => Some(Value::Flag(self.partscan())),
            Column::Ref => self.info().map(|info| Value::Text(reference(info))),
            Column::Ro => Some(Value::Flag(self.is_read_only())),
            Column::SizeLimit => self.size_limit().map(Value::Number),
            Column::Dio => Some(Value::Flag(self.flag("loop/dio"))),
            Column::LogSec => self.number("queue/logical_block_size").map(Value::Number),
        }
    }

    /// Where the driver says nothing, it could scan: all of them can since Linux 3.2.
    fn partscan(&self) -> bool {
        self.number("loop/partscan").is_none_or(|value| value != 0)
    }

    /// The path, with a word when nothing is there.
    pub(super) fn shown(&self) -> Vec<u8> {
        let mut path = self.path.as_os_str().as_bytes().to_vec();
        if self.is_lost() {
            path.extend(b" (lost)");
        }
        path
    }
}

pub(super) fn pair(dev: u64, wide: usize) -> Value {
    Value::Pair(rustix::fs::major(dev), rustix::fs::minor(dev), wide)
}

fn reference(info: &LoopInfo64) -> Vec<u8> {
    info.lo_file_name.iter().copied().take_while(|&byte| byte != 0).collect()
}

/// A path without links and dots; as it is when there is none.
pub(super) fn real(path: &OsStr) -> OsString {
    std::fs::canonicalize(path).map_or_else(|_| path.to_owned(), PathBuf::into_os_string)
}

/// Tries while dirty pages stand in the way.
pub(super) fn patiently(mut attempt: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    for _ in 0..10 {
        match attempt() {
            Err(error) if is(&error, Errno::AGAIN) => thread::sleep(Duration::from_millis(250)),
            other => return other,
        }
    }
    attempt()
}

pub(super) fn is(error: &io::Error, errno: Errno) -> bool {
    Errno::from_io_error(error) == Some(errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_devices_have_a_number() {
        for (name, expected) in [
            ("loop0", Some(0)),
            ("loop1048575", Some(1_048_575)),
            ("loop", None),
            ("loop0p1", None),
            ("loop-control", None),
            ("loop+1", None),
            ("sda", None),
            ("loop99999999999", None),
        ] {
            assert_eq!(number(name.as_bytes()), expected, "{name}");
        }
    }

    #[test]
    fn what_is_no_loop_device_is_none() {
        for word in ["/dev/null", "/etc/passwd", "null", "/dev/loop1048575", "loop-control", "/nowhere/loop0"]
        {
            assert!(Loop::named(OsStr::new(word)).is_none(), "{word}");
        }
    }

    #[test]
    fn names_stand_for_nodes() {
        assert_eq!(path_of(OsStr::new("loop3")), Path::new("/dev/loop3"));
        assert_eq!(path_of(OsStr::new("/x/loop3")), Path::new("/x/loop3"));
    }
}

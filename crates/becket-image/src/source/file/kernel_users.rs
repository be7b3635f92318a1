//! Uses of an image by the kernel that take no locks: loop devices and swap space.
//! It only asks the kernel, and changes nothing.
//!
//! Most images are open nowhere else, which one query shows ([`lease::is_sole_opener`]): the kernel
//! keeps the file of a loop device, and a swap file, open. Only otherwise, and for block devices, the loop
//! devices are asked one by one.
//!
//! The locks are taken first, so programs that lock are excluded by then. A loop device that is bound after
//! the question is the same case as one that is bound later, beside an attached image: the loop driver
//! checks no locks.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use becket_uapi::{lease, loop_};
use rustix::fs::{FallocateFlags, FileType, Stat};
use rustix::io::Errno;

use super::facts::proc_path;
use super::locks::{self, Claim};
use super::place::Place;
use crate::error::quoted;
use crate::resolve::io;
use crate::{Error, FileKind};

/// Longest that the file system of one loop device may take to say which file that is.
const ANSWER: Duration = Duration::from_secs(1);

/// Fails when the kernel uses the bytes of a claim in a way that excludes it. A writer excludes all others; a
/// reader excludes writers. `fd` is the file at `path`, open as `claim` says.
pub(crate) fn refuse(path: &Path, fd: BorrowedFd<'_>, kind: FileKind, claim: &Claim) -> Result<(), Error> {
    if claim.shared || kind == FileKind::Regular && lease::is_sole_opener(fd, claim.write).unwrap_or(false) {
        return Ok(());
    }
    let stat = rustix::fs::fstat(fd).map_err(|errno| io(path, "it cannot be looked at", errno))?;
    let real = fs::read_link(proc_path(fd)).unwrap_or_else(|_| path.to_owned());
    let wanted = Wanted { id: Id::of(&stat), block: kind == FileKind::Block, real, claim };
    let mut attempt = 0;
    loop {
        let found = wanted.loop_device(Path::new("/sys/block"), &ask).map(|disk| shown(&disk, claim.write));
        let Some((user, end)) = found.or_else(|| wanted.swap(fd)) else { return Ok(()) };
        // A device that is going is not a user.
        if !locks::a_moment(attempt) {
            return Err(Error::UsedByKernel { path: path.to_owned(), user, end });
        }
        attempt += 1;
    }
}

/// Which file or block device it is, whatever its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Id {
    File { dev: u64, ino: u64 },
    Device(u64),
}

impl Id {
    fn of(stat: &Stat) -> Id {
        if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
            return Id::Device(stat.st_rdev);
        }
        Id::File { dev: stat.st_dev, ino: stat.st_ino }
    }
}

/// What to use.
struct Wanted<'a> {
    id: Id,
    block: bool,
    /// Its path, where the kernel cannot say what a loop device has.
    real: PathBuf,
    claim: &'a Claim,
}

/// A bound loop device that may be over the image.
#[derive(Debug, Clone)]
struct Disk {
    name: String,
    /// The path in sysfs; `None` if there is none.
    backing: Option<PathBuf>,
    read_only: bool,
    /// The bytes of its file that it shows.
    shows: Range<u64>,
}

/// What a disk has. `Err`: its file system does not answer. `None`: this process cannot find out.
type Answer = Result<Option<Id>, RecvTimeoutError>;

impl Wanted<'_> {
    /// A loop device that excludes the claim. `disks` is sysfs' directory of them, and `ask` asks what they
    /// have.
    fn loop_device(&self, disks: &Path, ask: &dyn Fn(&[Disk]) -> Vec<Answer>) -> Option<Disk> {
        let names = fs::read_dir(disks).ok()?.flatten().map(|entry| entry.file_name());
        let meet: Vec<Disk> = names.filter_map(|name| self.candidate(disks, name)).collect();
        let answers = if meet.is_empty() { Vec::new() } else { ask(&meet) };
        meet.into_iter().zip(answers).find_map(|(disk, answer)| {
            let taken = match (answer, &disk.backing) {
                (Ok(Some(id)), _) if id == self.id => self.claim.meets(disk.shows.start, disk.shows.end),
                (Ok(Some(id)), _) => self.is_same_disk(id, &disk.shows),
                // What has no name and says nothing may be the image.
                (Ok(None), None) => true,
                (_, backing) => backing.as_ref() == Some(&self.real),
            };
            taken.then_some(disk)
        })
    }

    /// A bound loop device that shows bytes of the range, by its name; one that does not say which may show
    /// any.
    fn candidate(&self, disks: &Path, name: OsString) -> Option<Disk> {
        let name = name.into_string().ok().filter(|name| name.starts_with("loop"))?;
        let disk = disks.join(&name);
        let backing = match fs::read(disk.join("loop/backing_file")) {
            Ok(text) => Some(OsString::from_vec(text.strip_suffix(b"\n").unwrap_or(&text).to_vec()).into()),
            // It is not bound (any more).
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => return None,
            Err(_) => None,
        };
        // Asking a device about its file takes an open each, and block devices have their names here.
        if self.block && backing.as_ref().is_some_and(|path: &PathBuf| !path.starts_with("/dev")) {
            return None;
        }
        let number = |attribute: &str| -> Option<u64> {
            fs::read_to_string(disk.join(attribute)).ok()?.trim().parse().ok()
        };
        let mut shows = locks::WHOLE;
        if let (Some(start), Some(limit)) = (number("loop/offset"), number("loop/sizelimit")) {
            shows = start..if limit == 0 { u64::MAX } else { start.saturating_add(limit) };
        }
        // Of a block device it may be another partition, or the disk.
        if !self.block && !self.claim.meets(shows.start, shows.end) {
            return None;
        }
        let read_only = number("ro") == Some(1);
        (self.claim.write || !read_only).then_some(Disk { name, backing, read_only, shows })
    }

    /// Whether that range of another device is in the claim: one is a partition of the other, or both are of
    /// one disk.
    fn is_same_disk(&self, other: Id, shows: &Range<u64>) -> bool {
        let (Id::Device(ours), Id::Device(theirs)) = (self.id, other) else { return false };
        let (ours, theirs) = (Place::of(ours), Place::of(theirs));
        let (claimed, shown) = (ours.inner(&self.claim.range), theirs.inner(shows));
        ours.disk == theirs.disk && claimed.start < shown.end && shown.start < claimed.end
    }

    /// Whether the file is active swap space.
    fn swap(&self, fd: BorrowedFd<'_>) -> Option<(String, String)> {
        let listed = swaps().into_iter().find(|path| {
            // One of a file system that does not answer would be another: ours has.
            !self.block && path.file_name() == self.real.file_name() && self.is_at(path)
        });
        // The kernel refuses to allocate in a swap file before it looks at the place, which is past the end
        // of all files. That detects a swap file of another mount namespace, too.
        let refused = || {
            self.claim.write
                && rustix::fs::fallocate(fd, FallocateFlags::empty(), i64::MAX as u64, 1)
                    == Err(Errno::TXTBSY)
        };
        let path = listed.or_else(|| refused().then(|| self.real.clone()))?;
        Some(("it is used as swap space".to_owned(), format!("swapoff {}", quoted(&path))))
    }

    fn is_at(&self, path: &Path) -> bool {
        rustix::fs::stat(path).is_ok_and(|stat| Id::of(&stat) == self.id)
    }
}

/// Asks loop devices what they have. A file system that does not answer holds up only the thread that
/// asks it.
fn ask(disks: &[Disk]) -> Vec<Answer> {
    let mut answers = Vec::new();
    while let Some(rest) = disks.get(answers.len()..).filter(|rest| !rest.is_empty()) {
        let rest = rest.to_vec();
        let (tell, hear) = mpsc::channel();
        let asking = std::thread::Builder::new().spawn(move || {
            // The receiver is gone if one took too long.
            rest.iter().all(|disk| tell.send(id_of(disk)).is_ok())
        });
        if asking.is_err() {
            answers.resize(disks.len(), Ok(None));
            break;
        }
        loop {
            match hear.recv_timeout(ANSWER) {
                Ok(id) => answers.push(Ok(id)),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(silent @ RecvTimeoutError::Timeout) => {
                    answers.push(Err(silent));
                    break;
                }
            }
        }
    }
    answers
}

/// What a loop device has: by the driver, since a path may mean another file in another mount namespace; else
/// by its path.
fn id_of(disk: &Disk) -> Option<Id> {
    status_of(disk).or_else(|| {
        let path = disk.backing.as_ref()?;
        rustix::fs::stat(path).ok().map(|stat| Id::of(&stat))
    })
}

fn status_of(disk: &Disk) -> Option<Id> {
    let number: u32 = disk.name.strip_prefix("loop")?.parse().ok()?;
    let device = File::open(Path::new("/dev").join(&disk.name)).ok()?;
    let metadata = device.metadata().ok()?;
    let found = loop_::get_status64(device.as_fd()).ok()?;
    // A node that stayed behind leads to another device.
    if FileType::from_raw_mode(metadata.mode()) != FileType::BlockDevice || found.lo_number != number {
        return None;
    }
    Some(match found.lo_rdevice {
        0 => Id::File { dev: loop_::decode_dev(found.lo_device), ino: found.lo_inode },
        device => Id::Device(loop_::decode_dev(device)),
    })
}

/// A loop device for people: what it does, and the command that ends it.
fn shown(disk: &Disk, write: bool) -> (String, String) {
    let node = Path::new("/dev").join(&disk.name);
    let doing = match (disk.read_only, write) {
        (false, _) => "has it for writing",
        (true, _) => "shows it read-only, and its reader must not see the bytes change",
    };
    let directory = Path::new("/sys/block").join(&disk.name);
    let entries = |path: &Path| -> Vec<String> {
        let names = fs::read_dir(path).into_iter().flatten().flatten();
        names.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let parts = entries(&directory).into_iter().filter(|name| name.starts_with(&disk.name));
    let all: Vec<PathBuf> =
        std::iter::once(directory.clone()).chain(parts.map(|name| directory.join(name))).collect();
    let numbers: Vec<String> = all
        .iter()
        .filter_map(|path| Some(fs::read_to_string(path.join("dev")).ok()?.trim().to_owned()))
        .collect();
    let holders: Vec<String> = all.iter().flat_map(|path| entries(&path.join("holders"))).collect();
    let swapped = swaps().into_iter().filter(|path| {
        let name = path.file_name().unwrap_or_default();
        path.starts_with("/dev") && all.iter().any(|directory| directory.file_name() == Some(name))
    });

    let mut uses = Vec::new();
    let mut ends = Vec::new();
    for place in mounts(&numbers, &all) {
        uses.push(format!("mounted on {}", place.display()));
        ends.push(format!("umount {}", quoted(&place)));
    }
    for path in swapped {
        uses.push("used as swap space".to_owned());
        ends.push(format!("swapoff {}", quoted(&path)));
    }
    for holder in holders {
        ends.push(end_of(&holder));
        uses.push(format!("part of /dev/{holder}"));
    }
    // `mount -o loop` has asked the driver to clear the device by itself.
    let clears = fs::read_to_string(directory.join("loop/autoclear")).is_ok_and(|text| text.trim() == "1");
    if ends.is_empty() || !clears {
        ends.push(format!("losetup --detach {}", quoted(&node)));
    }
    let uses = if uses.is_empty() { String::new() } else { format!(" ({})", uses.join(", ")) };
    (format!("{}{uses} {doing}", node.display()), ends.join("; "))
}

/// The command that takes a disk of that name apart.
fn end_of(holder: &str) -> String {
    let node = format!("/dev/{holder}");
    match holder.trim_end_matches(|c: char| c.is_ascii_digit() || c == '_') {
        "md" => format!("mdadm --stop {node}"),
        "zram" => format!("zramctl --reset {node}"),
        _ => {
            let name = fs::read_to_string(format!("/sys/block/{holder}/dm/name"));
            format!("dmsetup remove {}", name.map_or(node, |name| quoted(Path::new(name.trim()))))
        }
    }
}

/// Where block devices with these numbers (`MAJOR:MINOR`) and names are mounted, as this process sees it.
fn mounts(numbers: &[String], named: &[PathBuf]) -> Vec<PathBuf> {
    let text = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let places = text.split(|&byte| byte == b'\n').filter_map(|line| {
        let mut fields = line.split(|&byte| byte == b' ').skip(2);
        let number = fields.next()?;
        let place = fields.nth(1)?;
        // Btrfs has numbers of its own, and says its device behind the separator and the type.
        let source = unescaped(fields.skip_while(|field| *field != b"-").nth(2)?);
        let is_named =
            || source.starts_with("/dev") && named.iter().any(|path| path.file_name() == source.file_name());
        (numbers.iter().any(|wanted| wanted.as_bytes() == number) || is_named()).then(|| unescaped(place))
    });
    places.collect()
}

/// The files and devices that are active swap space.
fn swaps() -> Vec<PathBuf> {
    let text = fs::read("/proc/swaps").unwrap_or_default();
    let lines = text.split(|&byte| byte == b'\n').skip(1);
    lines
        .filter_map(|line| {
            line.split(|&byte| byte == b' ' || byte == b'\t').next().filter(|path| !path.is_empty())
        })
        .map(unescaped)
        .collect()
}

/// A path in the lists of /proc, where some bytes stand as `\ooo`.
fn unescaped(text: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.get(..3).filter(|_| first == b'\\');
        let byte = digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(byte.unwrap_or(first));
        rest = if byte.is_some() { behind.get(3..).unwrap_or_default() } else { behind };
    }
    OsStr::from_bytes(&bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said_nothing(disks: &[Disk]) -> Vec<Answer> {
        disks
            .iter()
            .map(|disk| {
                Ok(disk.backing.as_ref().and_then(|path| Some(Id::of(&rustix::fs::stat(path).ok()?))))
            })
            .collect()
    }

    struct Fake {
        _dir: tempfile::TempDir,
        disks: PathBuf,
        host: PathBuf,
    }

    impl Fake {
        fn new() -> Fake {
            let dir = tempfile::tempdir().unwrap();
            let root = fs::canonicalize(dir.path()).unwrap();
            let (host, disks) = (root.join(OsStr::from_bytes(b"im\xffage")), root.join("block"));
            fs::write(&host, "").unwrap();
            fs::create_dir_all(disks.join("sda")).unwrap();
            fs::create_dir_all(disks.join("loop0/loop")).unwrap();
            Fake { _dir: dir, disks, host }
        }

        fn set(&self, attribute: &str, text: &[u8]) {
            fs::write(self.disks.join("loop0").join(attribute), [text, b"\n"].concat()).unwrap();
        }

        fn taken(&self, claim: &Claim) -> bool {
            self.taken_as(claim, &said_nothing)
        }

        fn taken_as(&self, claim: &Claim, ask: &dyn Fn(&[Disk]) -> Vec<Answer>) -> bool {
            let id = Id::of(&rustix::fs::stat(&self.host).unwrap());
            let wanted = Wanted { id, block: false, real: self.host.clone(), claim };
            wanted.loop_device(&self.disks, ask).is_some()
        }
    }

    fn claim(write: bool, range: std::ops::Range<u64>) -> Claim {
        Claim { write, shared: false, range }
    }

    #[test]
    fn a_loop_device_is_seen_whatever_its_file_is_called() {
        let fake = Fake::new();
        let write = claim(true, 4096..8192);
        let link = fake.host.with_file_name("other name");
        fs::hard_link(&fake.host, &link).unwrap();
        assert!(!fake.taken(&write), "nothing is bound");
        for (path, expected) in
            [(&fake.host, true), (&link, true), (&fake.host.with_file_name("another"), false)]
        {
            fake.set("loop/backing_file", path.as_os_str().as_bytes());
            assert_eq!(fake.taken(&write), expected, "{}", path.display());
        }
        // In another mount namespace the name means another file: the driver knows.
        let id = Id::of(&rustix::fs::stat(&fake.host).unwrap());
        assert!(fake.taken_as(&write, &|_| vec![Ok(Some(id))]));
        fake.set("loop/backing_file", fake.host.as_os_str().as_bytes());
        assert!(!fake.taken_as(&write, &|_| vec![Ok(Some(Id::File { dev: 1, ino: 2 }))]));
        assert!(
            fake.taken_as(&write, &|_| vec![Err(RecvTimeoutError::Timeout)]),
            "silent, and by its name ours"
        );
        let backing = fake.disks.join("loop0/loop/backing_file");
        fs::remove_file(&backing).unwrap();
        fs::create_dir(&backing).unwrap();
        assert!(fake.taken(&write), "what cannot be read may be the image");
    }

    #[test]
    fn ranges_meet_in_whole_pages() {
        let fake = Fake::new();
        fake.set("loop/backing_file", fake.host.as_os_str().as_bytes());
        for (offset, limit, expected) in [
            ("0", "4096", false),
            ("0", "4097", true),
            ("8191", "0", true),
            ("8192", "0", false),
            ("0", "x", true),
        ] {
            fake.set("loop/offset", offset.as_bytes());
            fake.set("loop/sizelimit", limit.as_bytes());
            assert_eq!(fake.taken(&claim(true, 4096..8192)), expected, "{limit} bytes from {offset}");
            assert_eq!(fake.taken(&claim(true, 4100..8000)), expected, "{limit} bytes from {offset}");
        }
    }

    #[test]
    fn readers_exclude_writers_and_no_readers() {
        let fake = Fake::new();
        fake.set("loop/backing_file", fake.host.as_os_str().as_bytes());
        for (ro, write, expected) in
            [("0", true, true), ("0", false, true), ("1", true, true), ("1", false, false)]
        {
            fake.set("ro", ro.as_bytes());
            assert_eq!(fake.taken(&claim(write, locks::WHOLE)), expected, "ro {ro}, write {write}");
        }
    }

    #[test]
    fn names_in_proc_are_read_back() {
        for (text, path) in [("/a\\040b\\134", "/a b\\"), ("/x\\04", "/x\\04"), ("\\777", "\\777")] {
            assert_eq!(unescaped(text.as_bytes()), Path::new(path), "{text}");
        }
    }

    #[test]
    fn each_kind_of_holder_has_its_command() {
        for (holder, command) in
            [("md127", "mdadm --stop /dev/md127"), ("zram0", "zramctl --reset /dev/zram0")]
        {
            assert_eq!(end_of(holder), command);
        }
        assert_eq!(end_of("dm-999999"), "dmsetup remove /dev/dm-999999");
    }
}

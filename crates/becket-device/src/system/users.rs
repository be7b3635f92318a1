//! Who uses a block device: mounts, swap, devices stacked on it, open descriptors.
//! It only looks. What this user may not see is missing, so an empty answer proves nothing. It never waits
//! for the server of a network file system: any process may have files open there, and a whole machine's
//! loop devices may be on one.

use std::collections::HashSet;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use becket_transport::{dm, loop_, sysfs};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};
use rustix::io::Errno;

use crate::contract::{IMAGE_OF, MOUNTED, SWAP, User};

/// What a process with an open descriptor does with a device.
const OPEN: &str = "open";

/// A block device: the kernel's name and number of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Block {
    /// The directory in /sys/class/block.
    pub(crate) name: String,
    /// `MAJOR:MINOR`.
    pub(crate) number: String,
}

/// The disk of that name and all its partitions, as sysfs has them now.
pub(crate) fn blocks(disk: &str) -> Vec<Block> {
    let dir = Path::new("/sys/class/block").join(disk);
    let mut blocks: Vec<Block> = block(&dir, disk).into_iter().collect();
    for item in fs::read_dir(&dir).into_iter().flatten().flatten() {
        let path = item.path();
        if path.join("partition").exists()
            && let Some(name) = item.file_name().to_str()
        {
            blocks.extend(block(&path, name));
        }
    }
    // Those of device-mapper are disks of their own.
    for (_, name) in dm::partitions(disk) {
        blocks.extend(block(&Path::new("/sys/class/block").join(&name), &name));
    }
    blocks
}

fn block(dir: &Path, name: &str) -> Option<Block> {
    let number = fs::read_to_string(dir.join("dev")).ok()?;
    Some(Block { name: name.to_owned(), number: number.trim().to_owned() })
}

/// Who uses the disk of that name in sysfs (`loop3`) or a partition of it, other than this process.
pub fn of(disk: &str) -> Vec<User> {
    look(&blocks(disk))
}

/// Who has a file below that directory open, other than this process.
pub(crate) fn below(dir: &Path) -> Vec<User> {
    let own = std::process::id();
    let mut users = Vec::new();
    for (pid, process) in all_processes().filter(|(pid, _)| *pid != own) {
        let opens = |path: PathBuf| path.starts_with(dir) && path != dir;
        if descriptors(&process).any(|link| fs::read_link(link).is_ok_and(opens)) {
            users.push(User { pid, command: command(&process), how: OPEN.to_owned() });
        }
    }
    users
}

/// All processes, with their directories.
fn all_processes() -> impl Iterator<Item = (u32, PathBuf)> {
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|item| {
        let pid = item.file_name().to_str()?.parse().ok()?;
        Some((pid, item.path()))
    })
}

/// Who has claimed the disk or a partition of it: those who do not merely have it open.
pub(crate) fn claims(disk: &str) -> Vec<User> {
    of(disk).into_iter().filter(|user| !passing(user)).collect()
}

/// The same, without mounts of file systems that are read-only.
pub(crate) fn writers(disk: &str) -> Vec<User> {
    let blocks = blocks(disk);
    let mut users = Vec::new();
    holders(&blocks, &mut users);
    swaps(&blocks, &mut users);
    backed(&blocks, &mut users);
    processes(&blocks, Mounts::ForWriting, &mut users);
    users.retain(|user| !passing(user));
    users
}

/// Whether that use may end by itself in a moment. Mounts, swap and stacked devices do not; an open
/// descriptor may be one of the many programs that look at every new device (udev's, blkid, lsblk, partx
/// ...).
pub(crate) fn passing(user: &User) -> bool {
    user.how == OPEN
}

/// Whether the disk or a partition of it is in use at this moment.
pub(crate) fn any(disk: &str) -> bool {
    !look(&blocks(disk)).is_empty()
}

/// Whether there is one that could still want what it reads from the disk. A process that was killed ends
/// only when its direct reads do, and has the disk open until then.
pub(crate) fn any_alive(disk: &str) -> bool {
    look(&blocks(disk)).iter().any(|user| user.how != OPEN || !is_killed(user.pid))
}

/// Whether SIGKILL waits for a process, which nothing can undo (proc_pid_status(5)).
fn is_killed(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mut pending = status
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:")));
    pending
        .any(|set| u64::from_str_radix(set.trim(), 16).is_ok_and(|set| set >> (libc::SIGKILL - 1) & 1 == 1))
}

fn look(blocks: &[Block]) -> Vec<User> {
    let mut users = Vec::new();
    holders(blocks, &mut users);
    swaps(blocks, &mut users);
    backed(blocks, &mut users);
    processes(blocks, Mounts::All, &mut users);
    users
}

fn holders(blocks: &[Block], users: &mut Vec<User>) {
    for block in blocks {
        let dir = Path::new("/sys/class/block").join(&block.name).join("holders");
        for item in fs::read_dir(dir).into_iter().flatten().flatten() {
            let holder = item.file_name().to_string_lossy().into_owned();
            // A partition that stands on its disk is part of it.
            if blocks.iter().any(|block| block.name == holder) {
                continue;
            }
            users.push(User { pid: 0, how: format!("held by {holder}"), command: holder });
        }
    }
}

fn swaps(blocks: &[Block], users: &mut Vec<User>) {
    let table = fs::read_to_string("/proc/swaps").unwrap_or_default();
    for line in table.lines().skip(1) {
        let path = unescape(line.split_ascii_whitespace().next().unwrap_or_default());
        if is_one_of(blocks, number_at_hand(Path::new(&path))) {
            users.push(User { pid: 0, command: "swap".to_owned(), how: format!("{SWAP}{path}") });
        }
    }
}

/// Loop devices over the disk: the kernel has it open for them, and no process does.
fn backed(blocks: &[Block], users: &mut Vec<User>) {
    for number in loop_::numbers() {
        let backing = sysfs::text(&format!("loop{number}"), "loop/backing_file").unwrap_or_default();
        if is_one_of(blocks, number_at_hand(Path::new(&backing))) {
            users.push(User {
                pid: 0,
                command: "loop".to_owned(),
                how: format!("{IMAGE_OF}/dev/loop{number}"),
            });
        }
    }
}

/// Which mounts are of interest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mounts {
    All,
    /// Of file systems that are written to.
    ForWriting,
}

/// Mounts of every mount namespace, and descriptors, in one walk over /proc.
fn processes(blocks: &[Block], which: Mounts, users: &mut Vec<User>) {
    let mut namespaces = HashSet::new();
    let own = std::process::id();
    // Our own namespace first, so that its mounts are reported without a process.
    if let Ok(space) = fs::metadata("/proc/self/ns/mnt") {
        namespaces.insert(space.ino());
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for place in mounts(&table, blocks, which) {
            users.push(User { pid: 0, command: "mount".to_owned(), how: format!("{MOUNTED}{place}") });
        }
    }
    for (pid, dir) in all_processes() {
        if let Ok(space) = fs::metadata(dir.join("ns/mnt"))
            && !namespaces.contains(&space.ino())
            && let Ok(table) = fs::read_to_string(dir.join("mountinfo"))
        {
            namespaces.insert(space.ino());
            for place in mounts(&table, blocks, which) {
                let how = format!("mounted on {place} in the mount namespace");
                users.push(User { pid, command: command(&dir), how });
            }
        }
        if pid != own && opens(&dir, blocks) {
            users.push(User { pid, command: command(&dir), how: OPEN.to_owned() });
        }
    }
}

/// Mount points of the devices in a mountinfo table (see proc_pid_mountinfo(5)).
fn mounts<'t>(table: &'t str, blocks: &'t [Block], which: Mounts) -> impl Iterator<Item = String> + 't {
    table.lines().filter_map(move |line| {
        let (fields, tail) = line.split_once(" - ")?;
        let mut fields = fields.split(' ');
        let number = fields.nth(2)?;
        let place = fields.nth(1)?;
        // btrfs and others show an anonymous number: their source names the device.
        let mut tail = tail.split(' ').skip(1);
        let source = unescape(tail.next()?);
        // Of the file system, not of one of its mounts.
        let writable = tail.next().is_none_or(|options| options.split(',').all(|option| option != "ro"));
        if which == Mounts::ForWriting && !writable {
            return None;
        }
        let ours = |block: &Block| {
            block.number == number
                || (number.starts_with("0:")
                    && source.starts_with("/dev/")
                    && number_of(Path::new(&source)).as_ref() == Some(&block.number))
        };
        blocks.iter().any(ours).then(|| unescape(place))
    })
}

/// The links of a process's descriptors. One whose first thread has ended shows them at its others only.
fn descriptors(process: &Path) -> impl Iterator<Item = PathBuf> {
    use std::os::unix::fs::MetadataExt as _;
    let entries = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|item| item.path());
    let mut own = entries(process.join("fd")).peekable();
    let tasks = process.join("task");
    // Threads of the kernel have none, and are alone. A directory has two links of its own.
    let has_others = own.peek().is_none() && fs::metadata(&tasks).is_ok_and(|tasks| tasks.nlink() > 3);
    let others = has_others.then(|| entries(tasks));
    let of_others = others.into_iter().flatten().flat_map(move |thread| entries(thread.join("fd")));
    own.chain(of_others)
}

fn opens(process: &Path, blocks: &[Block]) -> bool {
    // A descriptor's link is read first: it is cheap, and only names under /dev can be block devices.
    // A node that was removed still reads as its old path, with " (deleted)" behind it.
    descriptors(process).any(|path| {
        fs::read_link(&path).is_ok_and(|target| target.is_absolute())
            && is_one_of(blocks, number_as_known(CWD, &path, AtFlags::empty()))
    })
}

/// `MAJOR:MINOR` of a block device's node.
pub(crate) fn number_of(path: &Path) -> Option<String> {
    use std::os::unix::fs::FileTypeExt;
    let meta = fs::metadata(path).ok()?;
    let dev = meta.rdev();
    meta.file_type()
        .is_block_device()
        .then(|| format!("{}:{}", rustix::fs::major(dev), rustix::fs::minor(dev)))
}

/// The same of a path that the kernel knows already; nothing for one about which a file system would have to
/// be asked. Nodes under /dev are always known.
fn number_at_hand(path: &Path) -> Option<String> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    match openat2(CWD, path, flags, Mode::empty(), ResolveFlags::CACHED) {
        Ok(found) => number_as_known(&found, Path::new(""), AtFlags::EMPTY_PATH),
        // Before Linux 5.12.
        Err(Errno::INVAL | Errno::NOSYS) => number_of(path),
        Err(_) => None,
    }
}

/// The same as the kernel knows it, without asking the file system.
fn number_as_known(dir: impl AsFd, path: &Path, flags: AtFlags) -> Option<String> {
    let flags = flags | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let known = statx(dir, path, flags, StatxFlags::TYPE).ok()?;
    (FileType::from_raw_mode(known.stx_mode.into()) == FileType::BlockDevice)
        .then(|| format!("{}:{}", known.stx_rdev_major, known.stx_rdev_minor))
}

fn is_one_of(blocks: &[Block], number: Option<String>) -> bool {
    number.is_some_and(|number| blocks.iter().any(|block| block.number == number))
}

fn command(process: &Path) -> String {
    fs::read_to_string(process.join("comm"))
        .map_or_else(|_| "?".to_owned(), |text| text.trim_end().to_owned())
}

/// Tables in /proc write space, tab, newline and backslash as three octal digits.
pub(crate) fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal =
            |at: usize| tail.get(at).filter(|digit| (b'0'..=b'7').contains(digit)).map(|digit| digit - b'0');
        match (first, octal(0), octal(1), octal(2)) {
            (b'\\', Some(a @ 0..=3), Some(b), Some(c)) => {
                bytes.push(a << 6 | b << 3 | c);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<Block> {
        vec![
            Block { name: "loop3".into(), number: "7:3".into() },
            Block { name: "loop3p1".into(), number: "259:0".into() },
        ]
    }

    #[test]
    fn mounts_are_found_by_number_and_not_by_name() {
        let table = "\
36 35 7:3 / /mnt/a\\040b rw,noatime master:1 - ext4 /dev/becket/x rw
37 35 7:30 / /mnt/other rw - ext4 /dev/loop30 rw
38 35 259:0 / /mnt/p1 rw shared:3 - vfat /dev/loop3p1 rw
39 35 0:50 / /tmp rw - tmpfs tmpfs rw
nonsense
40 35 7:3";
        assert_eq!(mounts(table, &sample(), Mounts::All).collect::<Vec<_>>(), ["/mnt/a b", "/mnt/p1"]);
        let table = table.replace("/dev/loop3p1 rw", "/dev/loop3p1 ro,errors=continue");
        let written: Vec<_> = mounts(&table, &sample(), Mounts::ForWriting).collect();
        assert_eq!(written, ["/mnt/a b"], "a file system that is read-only is written to by nobody");
    }

    #[test]
    fn octal_escapes_are_undone_and_nothing_else() {
        assert_eq!(unescape("a\\040b\\134c\\012"), "a b\\c\n");
        for same in ["\\", "\\0", "\\04", "\\08x", "\\777", "plain", ""] {
            assert_eq!(unescape(same), same);
        }
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_is_a_user() {
        let name = "system::users::tests::a_process_whose_first_thread_has_ended_is_a_user";
        if !becket_testkit::require_plain_machine(name, &["python3"]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let program = "import ctypes, sys, threading, time
f = open(sys.argv[1])
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)";
        let mut child =
            std::process::Command::new("python3").args(["-c", program]).arg(&file).spawn().unwrap();
        let status = format!("/proc/{}/status", child.id());
        let ended = || fs::read_to_string(&status).unwrap_or_default().contains("State:\tZ");
        let ends = becket_testkit::wait_until(std::time::Duration::from_secs(20), ended);
        let users = below(dir.path());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(ends && users.iter().any(|user| user.pid == child.id()), "{users:?}");
    }

    #[test]
    fn an_open_descriptor_is_a_user_and_our_own_is_not() {
        // Any block device of the machine will do.
        let Some(name) = fs::read_dir("/sys/class/block").into_iter().flatten().flatten().find_map(|item| {
            let name = item.file_name().into_string().ok()?;
            fs::File::open(Path::new("/dev").join(&name)).ok().map(|_| name)
        }) else {
            becket_testkit::skip("users", "no block device can be opened here");
            return;
        };
        let node = Path::new("/dev").join(&name);
        let blocks: Vec<Block> =
            block(&Path::new("/sys/class/block").join(&name), &name).into_iter().collect();
        assert_eq!(blocks.len(), 1);
        let _own = fs::File::open(&node).unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .stdin(fs::File::open(&node).unwrap())
            .spawn()
            .unwrap();
        let users = look(&blocks);
        let pid = child.id();
        child.kill().unwrap();
        child.wait().unwrap();
        let found = users.iter().find(|user| user.pid == pid).expect("the child is a user");
        assert_eq!(found.how, "open");
        assert!(users.iter().all(|user| user.pid != std::process::id()), "{users:?}");
    }
}

//! A control group of its own for the command of `becket run`: every process in it ends with it.
//! Never touches a group that it did not make, and needs none: without one the guard ends what it can find.

use rustix::fs::{Access, AtFlags};
use std::{
    fs,
    io::{self, Write as _},
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// A group made for one command.
#[derive(Debug)]
pub(crate) struct Cgroup {
    dir: PathBuf,
}

impl Cgroup {
    /// Makes a group named `name` below our own, if this machine and user can.
    pub(crate) fn make(name: &str) -> io::Result<Self> {
        let parent =
            own().ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no cgroup v2 is mounted here"))?;
        let dir = parent.join(name);
        fs::create_dir(&dir)?;
        let group = Self { dir };
        // Killing needs Linux 5.14, joining needs the right to write here: know it now.
        for file in ["cgroup.kill", "cgroup.procs"] {
            if let Err(error) = fs::OpenOptions::new().write(true).open(group.dir.join(file)) {
                group.remove();
                return Err(error);
            }
        }
        Ok(group)
    }

    /// A group that another process of ours made.
    pub(crate) fn existing(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Moves the calling process into the group.
    pub(crate) fn join(&self) -> io::Result<()> {
        self.write("cgroup.procs", "0")
    }

    /// Kills everyone in the group and waits until it is empty, at most `patience`.
    pub(crate) fn kill(&self, patience: Duration) -> io::Result<()> {
        self.write("cgroup.kill", "1")?;
        let until = Instant::now() + patience;
        while self.populated()? {
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Removes the group, and those that the command made in it; a group in use stays.
    pub(crate) fn remove(&self) {
        remove_tree(&self.dir, 0);
    }

    fn populated(&self) -> io::Result<bool> {
        let events = fs::read_to_string(self.dir.join("cgroup.events"))?;
        Ok(events.lines().any(|line| line == "populated 1"))
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        fs::OpenOptions::new().write(true).open(self.dir.join(file))?.write_all(text.as_bytes())
    }
}

/// Whether this machine and user can make a group below our own.
pub(crate) fn possible() -> io::Result<()> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "no cgroup v2 is mounted here");
    let parent = own().ok_or_else(none)?;
    for place in [parent.clone(), parent.join("cgroup.procs")] {
        rustix::fs::accessat(rustix::fs::CWD, &place, Access::WRITE_OK, AtFlags::EACCESS)?;
    }
    // The root group has no `cgroup.kill`; each of its children has one if the kernel knows it.
    let mut children = fs::read_dir(&parent)?.flatten().map(|entry| entry.path());
    let kill = |group: PathBuf| group.join("cgroup.kill").exists();
    if kill(parent.clone()) || children.find(|path| path.is_dir()).is_none_or(kill) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "killing a cgroup needs Linux 5.14"))
}

/// Removes empty groups from the leaves up. The kernel bounds their depth by memory only, this by a number.
fn remove_tree(dir: &Path, depth: u32) {
    if depth < 64 {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                remove_tree(&entry.path(), depth + 1);
            }
        }
    }
    // Nothing hangs on it: an empty directory that stays is untidy and no more.
    let _ = fs::remove_dir(dir);
}

/// The directory of our own group, where cgroup v2 is mounted.
pub(crate) fn own() -> Option<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    own_group(&own, &fs::read("/proc/self/mountinfo").ok()?)
}

/// Where our own group is: its path from /proc/self/cgroup below where cgroup v2 is mounted.
fn own_group(own: &str, mounts: &[u8]) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    crate::mounts::parse(mounts).into_iter().filter(|mount| mount.fs_type == b"cgroup2").find_map(|mount| {
        // The mount may show only a part of the hierarchy, and our group may lie outside of it.
        let below =
            Path::new(path).strip_prefix(PathBuf::from(std::ffi::OsString::from_vec(mount.root))).ok()?;
        Some(mount.point.join(below))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_group_wherever_it_is_mounted() {
        let hybrid = b"30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
            31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            32 30 0:28 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 cgroup2 rw\n";
        assert_eq!(own_group("4:memory:/m\n0::/\n", hybrid), Some("/sys/fs/cgroup/unified/".into()));
        assert_eq!(own_group("0::/a/b\n", hybrid), Some("/sys/fs/cgroup/unified/a/b".into()));
        assert_eq!(own_group("4:memory:/m\n", hybrid), None);
        let part = b"32 30 0:28 /a /cg rw - cgroup2 cgroup2 rw\n";
        assert_eq!(own_group("0::/a/b\n", part), Some("/cg/b".into()));
        assert_eq!(own_group("0::/c\n", part), None);
    }
}

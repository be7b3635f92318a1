//! When to look whether a device is still used: its nodes are opened and closed, and file systems mounted.
//! It only hears; whether anybody uses the device is asked of the kernel, each time anew.
//!
//! Two sources: inotify tells of opens and closes by a node's path, also of those that are over before anybody could
//! look. Mounts open devices without their nodes, so the table of mounts is heard as well, that of process 1. What
//! neither tells (swap, devices stacked on it, other mount namespaces, nodes that are not devtmpfs's) is found by
//! looking now and then.

use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

/// How long nothing may happen before a use is taken to be over.
const QUIET: Duration = Duration::from_millis(200);
/// The same for the first use: mount(8) and others open a device, look, close it, and only then do what they came for.
const QUIET_AT_FIRST: Duration = Duration::from_secs(3);
/// How often is looked where opens are heard, and where they are not.
const NOW_AND_THEN: Duration = Duration::from_secs(1);
const OFTEN: Duration = QUIET;
/// How long udev is waited for when it looks at a device.
const UDEV: Duration = Duration::from_secs(5);
/// There while udev's daemon has something to do.
const UDEV_AT_WORK: &str = "/run/udev/queue";

/// What is heard of a device's users.
pub(super) struct Uses {
    nodes: Option<OwnedFd>,
    mounts: Option<File>,
}

/// What has happened.
#[derive(Debug, Default, PartialEq, Eq)]
struct Heard {
    anything: bool,
    /// Somebody opened a node. They may have closed it again.
    opened: bool,
}

impl Uses {
    /// Hears from now on of these nodes.
    pub(super) fn of<'a>(nodes: impl IntoIterator<Item = &'a PathBuf>) -> Uses {
        let heard = WatchFlags::OPEN | WatchFlags::CLOSE_WRITE | WatchFlags::CLOSE_NOWRITE;
        let queue = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        let nodes = queue.filter(|queue| {
            nodes.into_iter().all(|node| inotify::add_watch(queue, node.as_path(), heard).is_ok())
        });
        Uses { nodes, mounts: File::open("/proc/1/mountinfo").ok() }
    }

    /// Waits until something has happened and all is quiet again, or it is time to look. Whether somebody opened the
    /// device; looks that udev takes at new devices do not count, for they are no use. `used`: it has been used before.
    pub(super) fn wait(&self, used: bool) -> bool {
        let quiet = if used { QUIET } else { QUIET_AT_FIRST };
        let (mut opened, mut udev) = (false, false);
        let mut patience = if self.nodes.is_some() { NOW_AND_THEN } else { OFTEN };
        let mut first = None;
        loop {
            let heard = self.hear(patience);
            opened |= heard.opened;
            // Asked at once: it is quicker than the time that we wait for quiet.
            udev |= heard.opened && udev_at_work();
            let first = *first.get_or_insert_with(Instant::now);
            // Someone who opens it again and again does not keep us from looking.
            if !heard.anything || first.elapsed() > quiet * 5 {
                break;
            }
            patience = quiet;
        }
        if udev {
            // Whoever else has opened it meanwhile, and still uses it then, is found by looking.
            let begin = Instant::now();
            while udev_at_work() && begin.elapsed() < UDEV {
                std::thread::sleep(QUIET);
            }
        }
        opened && !udev
    }

    /// Waits for the next thing to happen, and takes all that has happened until then.
    fn hear(&self, patience: Duration) -> Heard {
        let mut heard = Heard::default();
        let nodes = self.nodes.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
        let mounts = self.mounts.as_ref().map(|fd| PollFd::new(fd, PollFlags::PRI));
        let mut fds: Vec<PollFd<'_>> = nodes.into_iter().chain(mounts).collect();
        let timeout = Timespec::try_from(patience).ok();
        heard.anything = match poll(&mut fds, timeout.as_ref()) {
            Ok(ready) => ready > 0,
            // What cannot be waited for is looked for.
            Err(_) => {
                std::thread::sleep(patience);
                false
            }
        };
        drop(fds);
        let Some(queue) = &self.nodes else { return heard };
        let mut space = [MaybeUninit::uninit(); 1024];
        let mut events = Reader::new(queue, &mut space);
        while let Ok(event) = events.next() {
            // Where some are missing, an open may be among them.
            heard.opened |= event.events().intersects(ReadFlags::OPEN | ReadFlags::QUEUE_OVERFLOW);
        }
        heard
    }
}

fn udev_at_work() -> bool {
    Path::new(UDEV_AT_WORK).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_is_heard_also_when_it_is_over() {
        let temp = tempfile::tempdir().unwrap();
        let node = temp.path().join("node");
        File::create(&node).unwrap();
        let mut uses = Uses::of([&node]);
        // Other tests mount and unmount.
        uses.mounts = None;
        assert_eq!(uses.hear(Duration::ZERO), Heard::default());
        drop(File::open(&node).unwrap());
        assert_eq!(uses.hear(QUIET), Heard { anything: true, opened: true });
        assert_eq!(uses.hear(Duration::ZERO), Heard::default(), "once");
        let open = File::open(&node).unwrap();
        assert!(uses.hear(QUIET).opened);
        drop(open);
        assert_eq!(uses.hear(QUIET), Heard { anything: true, opened: false }, "a close");
    }

    #[test]
    fn without_nodes_time_passes() {
        let uses = Uses { mounts: None, ..Uses::of([&PathBuf::from("/nowhere/at/all")]) };
        assert!(uses.nodes.is_none());
        assert!(!uses.wait(true));
    }
}

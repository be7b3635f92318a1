//! When to look whether a device is still used: its nodes are opened and closed, and file systems mounted.
//! It only hears; whether the device is in use is asked of the kernel, each time anew.
//!
//! Two sources: inotify reports opens and closes by a node's path, also those that are over before they could
//! be looked for, from the moment on that the device is watched. Mounts open devices without their nodes, so
//! the mount table of process 1 is polled as well. What neither reports (swap, devices stacked on it, other
//! mount namespaces, nodes that are not devtmpfs's) is found by looking now and then.

use std::collections::BTreeMap;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

/// There while udev's daemon has something to do.
const UDEV_AT_WORK: &str = "/run/udev/queue";

/// The nodes that are heard, of devices each of which goes by a number here.
#[derive(Default)]
pub(super) struct Nodes {
    queue: Option<Arc<OwnedFd>>,
    /// The owner of each watch: a node may be that of a device which is gone, and already that of the next.
    watches: BTreeMap<i32, Vec<u64>>,
}

impl Nodes {
    pub(super) fn new() -> Nodes {
        let queue = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        Nodes { queue: queue.map(Arc::new), watches: BTreeMap::new() }
    }

    /// Hears from now on of these nodes; `false` when it cannot.
    pub(super) fn watch(&mut self, device: u64, nodes: &[PathBuf]) -> bool {
        let heard = WatchFlags::OPEN | WatchFlags::CLOSE_WRITE | WatchFlags::CLOSE_NOWRITE;
        let Some(queue) = &self.queue else { return false };
        let all = nodes.iter().all(|node| match inotify::add_watch(queue, node.as_path(), heard) {
            Ok(watch) => {
                self.watches.entry(watch).or_default().push(device);
                true
            }
            Err(_) => false,
        });
        if !all {
            self.forget(device);
        }
        all
    }

    /// Hears no more of a device.
    pub(super) fn forget(&mut self, device: u64) {
        let queue = self.queue.as_ref();
        self.watches.retain(|watch, devices| {
            devices.retain(|other| *other != device);
            if devices.is_empty()
                && let Some(queue) = queue
            {
                // With its node it has gone by itself.
                let _ = inotify::remove_watch(queue, *watch);
            }
            !devices.is_empty()
        });
    }

    /// Of which devices a node was opened or closed; `true`: opened, and perhaps closed again.
    pub(super) fn whose(&self, heard: &Heard) -> BTreeMap<u64, bool> {
        let mut whose = BTreeMap::new();
        for (watch, opened) in &heard.nodes {
            for device in self.watches.get(watch).into_iter().flatten() {
                *whose.entry(*device).or_default() |= *opened;
            }
        }
        whose
    }
}

/// What is heard of the users of devices.
pub(super) struct Uses {
    queue: Option<Arc<OwnedFd>>,
    mounts: Option<File>,
}

/// What has happened.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Heard {
    /// The watches of nodes that were opened or closed; `true`: opened, and perhaps closed again.
    nodes: BTreeMap<i32, bool>,
    /// Something was mounted or unmounted.
    pub(super) mounts: bool,
    /// More has happened than could be reported.
    pub(super) missed: bool,
    /// Which of the others have something to say, or are closed.
    pub(super) others: Vec<bool>,
}

impl Uses {
    pub(super) fn new(nodes: &Nodes) -> Uses {
        Uses { queue: nodes.queue.clone(), mounts: File::open("/proc/1/mountinfo").ok() }
    }

    /// Waits for the next event, also for one of the `others`, and takes all that have happened until then.
    pub(super) fn hear(&self, patience: Duration, others: &[BorrowedFd<'_>]) -> Heard {
        let mut fds: Vec<PollFd<'_>> =
            others.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        fds.extend(self.queue.as_ref().map(|fd| PollFd::new(&**fd, PollFlags::IN)));
        let mounts = self.mounts.as_ref().map(|fd| PollFd::new(fd, PollFlags::PRI));
        let mounts_at = mounts.is_some().then_some(fds.len());
        fds.extend(mounts);
        let timeout = Timespec::try_from(patience).ok();
        if poll(&mut fds, timeout.as_ref()).is_err() {
            // What cannot be waited for is looked for.
            std::thread::sleep(patience);
        }
        let said = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let mut heard = Heard {
            others: fds.iter().take(others.len()).map(said).collect(),
            mounts: mounts_at.and_then(|at| fds.get(at)).is_some_and(said),
            ..Heard::default()
        };
        drop(fds);
        let Some(queue) = &self.queue else { return heard };
        let mut space = [MaybeUninit::uninit(); 1024];
        let mut events = Reader::new(queue, &mut space);
        while let Ok(event) = events.next() {
            heard.missed |= event.events().contains(ReadFlags::QUEUE_OVERFLOW);
            let opened = event.events().contains(ReadFlags::OPEN);
            let closed = event.events().intersects(ReadFlags::CLOSE_WRITE | ReadFlags::CLOSE_NOWRITE);
            if opened || closed {
                *heard.nodes.entry(event.wd()).or_default() |= opened;
            }
        }
        heard
    }
}

pub(super) fn udev_at_work() -> bool {
    Path::new(UDEV_AT_WORK).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other tests mount and unmount.
    fn deaf_to_mounts(nodes: &Nodes) -> Uses {
        Uses { mounts: None, ..Uses::new(nodes) }
    }

    #[test]
    fn an_open_is_heard_also_when_it_is_over() {
        let temp = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| temp.path().join(name));
        paths.iter().for_each(|path| drop(File::create(path).unwrap()));
        let mut nodes = Nodes::new();
        let uses = deaf_to_mounts(&nodes);
        assert!(nodes.watch(1, &paths[..1]) && nodes.watch(2, &paths[1..]));
        let now = |nodes: &Nodes| nodes.whose(&uses.hear(Duration::ZERO, &[]));
        let heard = |devices: &[(u64, bool)]| devices.iter().copied().collect::<BTreeMap<_, _>>();
        assert_eq!(now(&nodes), heard(&[]));
        drop(File::open(&paths[0]).unwrap());
        assert_eq!(now(&nodes), heard(&[(1, true)]));
        assert_eq!(now(&nodes), heard(&[]), "once");
        let open = File::open(&paths[1]).unwrap();
        assert_eq!(now(&nodes), heard(&[(2, true)]));
        drop(open);
        assert_eq!(now(&nodes), heard(&[(2, false)]), "a close");

        // A node that has become another device's, before the first one was forgotten.
        assert!(nodes.watch(3, &paths[1..]));
        nodes.forget(2);
        drop(File::open(&paths[1]).unwrap());
        assert_eq!(now(&nodes), heard(&[(3, true)]));
        nodes.forget(3);
        drop(File::open(&paths[1]).unwrap());
        assert_eq!(uses.hear(Duration::ZERO, &[]), Heard::default());
    }

    #[test]
    fn what_cannot_be_watched_leaves_nothing_behind() {
        let temp = tempfile::tempdir().unwrap();
        let mut nodes = Nodes::new();
        let uses = deaf_to_mounts(&nodes);
        assert!(!nodes.watch(1, &[temp.path().to_owned(), PathBuf::from("/nowhere/at/all")]));
        assert!(nodes.watches.is_empty());
        assert_eq!(nodes.whose(&uses.hear(Duration::ZERO, &[])), BTreeMap::new());
    }

    #[test]
    fn a_closed_pipe_is_heard() {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let uses = deaf_to_mounts(&Nodes::new());
        use std::os::fd::AsFd;
        assert_eq!(uses.hear(Duration::ZERO, &[read.as_fd()]).others, [false]);
        drop(write);
        // A process that another test is just starting has a copy for a moment.
        assert_eq!(uses.hear(Duration::from_secs(60), &[read.as_fd()]).others, [true]);
    }
}

//! A device for as long as its lease is held: what `run` and `mount` hold.
//! It never takes a device from its users: one that is in use when the lease ends goes with the last of them.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::record::device::Device;
use crate::record::judge::lives;
use crate::record::register::forget;
use crate::record::store::Store;
use crate::system::kernel::System;

/// How long a device without other users may take to go when its lease ends.
const GONE_WITHIN: Duration = Duration::from_millis(200);

/// Keeps a device. When this is dropped, or its process dies, it goes as soon as it has no other user.
#[derive(Debug)]
pub struct Lease {
    pub(crate) held: Option<Held>,
}

#[derive(Debug)]
pub(crate) enum Held {
    /// The device's own descriptors: the kernel takes the device away at its last close.
    Kernel { fds: Vec<OwnedFd>, store: Store, device: Box<Device> },
    /// The writing end of a pipe that the supervisor watches.
    Server { _pipe: OwnedFd },
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(Held::Kernel { fds, store, device }) = self.held.take() else { return };
        drop(fds);
        let deadline = Instant::now() + GONE_WITHIN;
        while lives(&System, &device) {
            if Instant::now() >= deadline {
                // It has a user: a mount that outlives us. `list` drops the record once it is gone.
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        forget(&store, &device);
    }
}

//! Gives leases of images up when somebody wants to write to one.
//! Nothing that is told depends on it: it only spares the writer the wait for the next read.

use std::sync::Weak;

use becket_transport::serve::Served;
use becket_uapi::lease::BREAK_SIGNAL;
use becket_uapi::signal::SignalFd;
use rustix::event::{PollFd, PollFlags, poll};

use super::Worker;
use crate::{Error, log};

/// The signal that the kernel sends when a lease is to end. Before the first thread, so that all of them leave it alone.
pub(super) fn listen() -> Result<SignalFd, Error> {
    SignalFd::block(&[BREAK_SIGNAL])
        .map_err(|error| Error::Worker { what: format!("could not block signals: {error}") })
}

/// Waits for such signals as long as the process lives. One may stand for many leases: all are looked at.
pub(super) fn watch(worker: Weak<Worker>, signals: SignalFd) -> Result<(), Error> {
    let failed = |error| Error::Worker { what: format!("could not start its threads: {error}") };
    let watch = move || {
        loop {
            let mut fds = [PollFd::new(&signals, PollFlags::IN)];
            // An interrupted wait looks once more than it had to.
            let _ = poll(&mut fds, None);
            while matches!(signals.take(), Ok(Some(_))) {}
            let Some(worker) = worker.upgrade() else { return };
            worker.yield_leases();
        }
    };
    std::thread::Builder::new().name("becket-leases".to_owned()).spawn(watch).map(drop).map_err(failed)
}

impl Worker {
    /// Has every device read through its file again where somebody waits for that.
    pub(super) fn yield_leases(&self) {
        let open = self.devices();
        let served: Vec<_> =
            open.iter().filter_map(|(id, charge)| Some((*id, charge.served.clone()?))).collect();
        // Who holds the list of the open may not wait for an I/O thread.
        drop(open);
        for (id, served) in served {
            self.yield_lease(id, &served);
        }
    }

    /// The same with one.
    pub(super) fn yield_lease(&self, id: u32, served: &Served) {
        match served.yield_lease(&self.threads) {
            Ok(false) => {}
            Ok(true) => log::warn(format_args!(
                "worker: ublk device {id} reads through its file again: somebody wants to write to that"
            )),
            Err(error) => log::warn(format_args!("worker: {error}")),
        }
    }
}

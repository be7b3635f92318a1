//! A new device, made once more if its worker dies meanwhile: another device may have ended that.
//! Never hides a worker that dies of the device itself: the second death is an error.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use tracing::warn;

use super::devices::Supervisor;
use super::isolation;
use super::make::{Made, Maker};
use super::workers::Worker;
use crate::contract::Error;
use crate::contract::messages::Attach;

impl Supervisor {
    /// Makes a device, and says who serves it.
    pub(super) fn make(&self, request: Attach, fds: Vec<OwnedFd>) -> Result<(Made, Arc<dyn Worker>), Error> {
        let (fds, door) = isolation::take_door(&request, fds)?;
        let (request, fds, cgroup) = isolation::take_cgroup(request, fds)?;
        let (isolated, cgroup) = (request.isolate, cgroup.as_ref());
        let any = || match isolated {
            true => self.own_worker(cgroup.map(|group| group.as_fd())),
            false => self.shared_worker(),
        };
        let driver = self.driver(request.transport)?;
        let offer = self.drivers.offer(request.transport)?;
        let (store, driver) = (&self.store, &*driver);
        let connect = |request: &Attach, sources: &mut [_], mark| {
            let alone = request.alone == Some(true);
            self.connector(&request.spec, (sources, &request.map), mark, alone, None)
        };
        let attempt = |worker: &dyn Worker| {
            let maker = Maker { store, offer, driver, worker, connect: &connect, owned: self.owns() };
            maker.make(request.clone(), &fds, cgroup, &door)
        };
        let mut worker = any()?;
        let mut made = attempt(&*worker);
        // Undoing it has waited for the worker's end.
        if let Err(error) = &made
            && worker.died()
        {
            warn!(event = "attach_repeated", "made once more, by another worker: {error}");
            worker = any()?;
            made = attempt(&*worker);
        }
        match made {
            Ok(made) => Ok((made, worker)),
            Err(error) => {
                if isolated {
                    worker.dismiss();
                }
                Err(error)
            }
        }
    }
}

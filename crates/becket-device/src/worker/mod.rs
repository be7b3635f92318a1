//! The worker: the process that moves bytes. It serves the devices that the supervisor hands it.
//! It opens nothing, holds no capability, and outlives a supervisor that dies.

pub(crate) mod harden;
mod leases;
pub(crate) mod protocol;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::num::NonZero;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use becket_engine::IoThreads;
use becket_transport::ublk;
use becket_uapi::handover::{close_inherited, inherited_fd};
use becket_uapi::signal::SignalFd;
use rustix::fs::FileType;
use rustix::process::Signal;

use crate::{Error, log};
use protocol::{Order, Report, Serve};

/// The worker's main. Standard input is its connection to the supervisor that started it; it returns when
/// that is gone and so are the devices.
///
/// # Errors
/// It was not started by a supervisor, or a precaution failed that could have worked.
pub fn worker_main() -> Result<(), Error> {
    let control = control()?;
    close_inherited()
        .map_err(|error| Error::Worker { what: format!("cannot tell what it was handed: {error}") })?;
    // It ends when its devices are gone and not when a terminal or a service manager says so: whoever waits
    // for a write could wait for ever. Nor does it end by a write beyond a limit on the size of files: that write
    // fails. Read by nobody on purpose; blocked in all threads.
    let _signals = SignalFd::block(&[Signal::INT, Signal::TERM, Signal::HUP, Signal::XFSZ])
        .map_err(|error| Error::Worker { what: format!("could not block signals: {error}") })?;
    let breaks = leases::listen()?;
    let prepared = harden::harden().and_then(|notes| {
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads = IoThreads::start(threads)
            .map_err(|error| Error::Worker { what: format!("could not start its threads: {error}") })?;
        Ok((Arc::new(threads), notes))
    });
    let (threads, notes) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            let why = error.to_string();
            // When even this cannot be said, the closed connection says it.
            let _ = protocol::send(&control, &Report::Refused { why }, &[]);
            return Err(error);
        }
    };
    let worker = Arc::new(Worker::new(control));
    leases::watch(Arc::clone(&worker), Arc::downgrade(&threads), breaks)?;
    worker.report(&Report::Started { threads: threads.count(), notes });
    worker.obey(&threads);
    worker.await_the_end();
    Ok(())
}

/// The connection to the supervisor, moved away from standard input.
fn control() -> Result<OwnedFd, Error> {
    let failed = |error: io::Error| Error::Worker { what: format!("has no connection to a server: {error}") };
    let control = inherited_fd(0).map_err(failed)?;
    let kind = rustix::fs::fstat(&control).map(|stat| FileType::from_raw_mode(stat.st_mode));
    if kind != Ok(FileType::Socket) {
        return Err(Error::Worker { what: "is started by becket's server, not by hand".to_owned() });
    }
    let null = File::open("/dev/null").map_err(failed)?;
    rustix::stdio::dup2_stdin(null.as_fd()).map_err(|error| failed(error.into()))?;
    Ok(control)
}

struct Worker {
    control: OwnedFd,
    /// The devices that have queues.
    open: Mutex<BTreeSet<u32>>,
    closed: Condvar,
    /// What is known of them, and for a while of those that have closed.
    served: Mutex<BTreeMap<u32, ublk::Served>>,
}

impl Worker {
    fn new(control: OwnedFd) -> Worker {
        Worker { control, open: Mutex::default(), closed: Condvar::new(), served: Mutex::default() }
    }

    fn obey(self: &Arc<Self>, threads: &IoThreads) {
        loop {
            match protocol::receive::<Order>(&self.control) {
                Ok(Some((Order::Serve(serve), fds))) => {
                    let new = self.serve(threads, *serve, fds);
                    {
                        // In this order: who holds the list of the open may not wait for an I/O thread.
                        let mut served = lock(&self.served);
                        let open = self.devices();
                        served.extend(new);
                        served.retain(|id, _| open.contains(id));
                    }
                    // Somebody may have begun to wait for a lease before it was known whom to tell.
                    self.yield_leases(threads);
                }
                Ok(Some((Order::Remap { id, map }, _))) => {
                    let served = lock(&self.served);
                    let served = served.get(&id).filter(|_| self.devices().contains(&id));
                    self.answer(id, served.map(|served| served.remap(threads, map)));
                }
                Ok(Some((Order::DirectIo { id, on }, _))) => {
                    let served = lock(&self.served);
                    let served = served.get(&id).filter(|_| self.devices().contains(&id));
                    self.answer(id, served.map(|served| served.switch(threads, on)));
                }
                Ok(Some((Order::Stat { id }, _))) => {
                    let served = lock(&self.served);
                    self.count(served.get(&id).filter(|_| self.devices().contains(&id)), id);
                }
                Ok(None) => return,
                // The next one may make sense; whoever deals with this one alone hears no more.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    log::warn(format_args!("worker: an order made no sense: {error}"));
                }
                Err(error) => {
                    log::warn(format_args!("worker: cannot hear orders: {error}"));
                    return;
                }
            }
        }
    }

    fn serve(
        self: &Arc<Self>,
        threads: &IoThreads,
        serve: Serve,
        fds: Vec<OwnedFd>,
    ) -> Option<(u32, ublk::Served)> {
        let id = serve.id;
        let setup = match serve.with(fds) {
            Ok(setup) => setup,
            Err(error) => {
                self.report(&Report::Failed { id, why: error.to_string() });
                self.report(&Report::Closed { id });
                return None;
            }
        };
        if let Some(below) = &setup.below
            && let Err(error) = below.lease.hear_of_breaks()
        {
            log::warn(format_args!(
                "worker: nobody will tell when the image of ublk device {id} is wanted: {error}"
            ));
        }
        self.devices().insert(id);
        let worker = Arc::clone(self);
        match ublk::serve(threads, setup, Box::new(move || worker.let_go(id))) {
            Ok(served) => {
                self.report(&Report::Ready { id });
                Some((id, served))
            }
            Err(error) => {
                self.report(&Report::Failed { id, why: error.to_string() });
                None
            }
        }
    }

    /// Reports what came of an order about a device that is served here, if it is.
    fn answer(&self, id: u32, outcome: Option<Result<(), ublk::ServeError>>) {
        let outcome = match outcome {
            Some(outcome) => outcome.map_err(|error| error.to_string()),
            None => Err("it is not served here".to_owned()),
        };
        match outcome {
            Ok(()) => self.report(&Report::Ready { id }),
            Err(why) => self.report(&Report::Failed { id, why }),
        }
    }

    fn count(&self, served: Option<&ublk::Served>, id: u32) {
        self.report(&Report::Counted { id, stats: served.map(|served| Box::new(served.stats())) });
    }

    /// A device is closed.
    fn let_go(&self, id: u32) {
        // Locked before it is reported: the next device may get this number at once, and must stay in the list.
        let mut open = self.devices();
        // Reported first: whoever sees that no device is open may end the process.
        self.report(&Report::Closed { id });
        open.remove(&id);
        self.closed.notify_all();
    }

    fn report(&self, report: &Report) {
        match protocol::send(&self.control, report, &[]) {
            Ok(()) => {}
            // The supervisor is gone; its successor reads the kernel's state instead.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
            Err(error) => log::warn(format_args!("worker: cannot report {report:?}: {error}")),
        }
    }

    fn await_the_end(&self) {
        let mut open = self.devices();
        while !open.is_empty() {
            open = self.closed.wait(open).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn devices(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        lock(&self.open)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_device_that_is_not_served_has_no_numbers() {
        let (control, supervisor) = protocol::pair().unwrap();
        let worker = Arc::new(Worker::new(control));
        let threads = IoThreads::start(1).unwrap();
        protocol::send(&supervisor, &Order::Stat { id: 3 }, &[]).unwrap();
        rustix::net::shutdown(&supervisor, rustix::net::Shutdown::Write).unwrap();
        worker.obey(&threads);
        let answer = protocol::receive::<Report>(&supervisor).unwrap().unwrap().0;
        assert_eq!(answer, Report::Counted { id: 3, stats: None });
    }

    #[test]
    fn a_number_that_is_taken_again_at_once_stays_open() {
        let (control, supervisor) = protocol::pair().unwrap();
        let worker = Arc::new(Worker::new(control));
        worker.devices().insert(3);
        // Nobody reads, so that the report of the closing waits and the rest can overtake it.
        rustix::io::ioctl_fionbio(&worker.control, true).unwrap();
        while protocol::send(&worker.control, &Report::Ready { id: 9 }, &[]).is_ok() {}
        rustix::io::ioctl_fionbio(&worker.control, false).unwrap();
        let closing = thread::spawn({
            let worker = Arc::clone(&worker);
            move || worker.let_go(3)
        });
        thread::sleep(Duration::from_millis(200));
        let serving = thread::spawn({
            let worker = Arc::clone(&worker);
            move || worker.devices().insert(3)
        });
        thread::sleep(Duration::from_millis(200));
        while protocol::receive::<Report>(&supervisor).unwrap().unwrap().0 != (Report::Closed { id: 3 }) {}
        closing.join().unwrap();
        serving.join().unwrap();
        assert!(worker.devices().contains(&3), "the worker would end under a live device");
    }
}

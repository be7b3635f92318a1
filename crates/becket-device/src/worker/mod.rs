//! The worker: the process that moves bytes. It serves the devices that the supervisor hands it.
//! It opens nothing, holds no capability, and outlives a supervisor that dies.

mod errands;
mod exports;
mod growing;

use std::collections::BTreeMap;
use std::io;
use std::num::NonZero;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::thread;

use becket_engine::{Decoding, Ending, IoThreads, Serving};
use becket_image::Source;
use becket_transport::nbd::Nbd;
use becket_transport::serve::{self, Decoded, ServeError, Served};
use becket_transport::vhost_user::VhostUser;
use becket_transport::{fuse, ublk};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use tracing::{error, warn};

use crate::contract::kept::{self, Keepsakes, Kept, Own};
use crate::contract::protocol::{self, Change, Handed, Order, Report, Serve};
use crate::contract::rendezvous;
use crate::contract::versions::Speech;
use crate::contract::{DeviceId, Error, spec, table};
use crate::system::role::{self, Begun, Role};
use crate::system::sync::{DEVICES, Held, LAST, Ranked, SHARED, lock};
use crate::system::{confine, harden, moment};
use errands::aside;
use exports::{Count, Front, Taker, Tell};
use growing::grower;

/// The worker's main. Standard input is its connection to the supervisor that started it. When that is gone
/// it goes on serving and waits for the next one; it returns when there is neither a supervisor nor a device.
/// It keeps up to `cache_size` bytes of decoded blocks until a device says otherwise; when not given, as many
/// as suit the machine.
///
/// # Errors
/// It was not started by a supervisor, or a precaution failed that could have worked.
pub fn worker_main(cache_size: Option<u64>) -> Result<(), Error> {
    let Begun { control, _signals } = role::begin(Role::Worker)?;
    // Read from files, some of it.
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let prepared = harden::harden(Role::Worker).and_then(|mut notes| {
        notes.extend(confine::shut(Role::Worker)?);
        let threads = IoThreads::start(threads)
            .map_err(|error| Error::Worker { what: format!("could not start its threads: {error}") })?;
        // The rings are made: no other one is made.
        notes.extend(confine::filter(Role::Worker)?);
        Ok((threads, notes))
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
    let failed = |error| Error::Worker { what: format!("could not make an event: {error}") };
    let worker = Worker::new(control, threads, notes, cache_size).map_err(failed)?;
    worker.report(&Report::Started { threads: worker.threads.count(), notes: worker.notes.clone() });
    let mut successors = None;
    loop {
        worker.obey(&mut successors);
        if !worker.await_successor(successors.as_ref()) {
            return Ok(());
        }
    }
}

struct Worker {
    /// The connection to the supervisor, or to the last one that there was.
    control: Ranked<LAST, Arc<OwnedFd>>,
    /// The devices that have queues.
    open: Ranked<DEVICES, BTreeMap<DeviceId, Charge>>,
    /// Rings when the last of them is closed.
    idle: OwnedFd,
    threads: Arc<IoThreads>,
    /// Held while a device's queues are given to them.
    adding: Ranked<SHARED, ()>,
    /// Made when the first device needs it.
    decoding: Mutex<Option<Arc<Decoding>>>,
    /// Bytes that it begins with, if a size was given.
    cache_size: Option<u64>,
    notes: Vec<String>,
}

/// A device that is served, as a successor gets it.
struct Charge {
    serve: Serve,
    keepsakes: Keepsakes,
    /// Its own descriptors without the first, for a successor.
    link: Vec<OwnedFd>,
    /// Once it can be started.
    served: Option<Arc<Served>>,
    /// What takes the clients of an export.
    front: Option<Front>,
    /// Its end, once that was spoken of.
    ending: Option<Arc<Ending>>,
}

impl Worker {
    fn new(
        control: OwnedFd,
        threads: IoThreads,
        notes: Vec<String>,
        cache_size: Option<u64>,
    ) -> io::Result<Arc<Worker>> {
        let idle = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (control, open) = (Ranked::new(Arc::new(control)), Ranked::default());
        Ok(Arc::new(Worker {
            control,
            open,
            idle,
            threads: Arc::new(threads),
            adding: Ranked::default(),
            decoding: Mutex::default(),
            cache_size,
            notes,
        }))
    }

    /// Carries out orders until the supervisor is gone. Long ones run beside those that follow; all are done
    /// when this returns, so that a successor gets the result.
    fn obey(self: &Arc<Self>, successors: &mut Option<OwnedFd>) {
        let control = self.control();
        let errands = AtomicUsize::new(0);
        thread::scope(|scope| {
            loop {
                match protocol::receive::<Order>(&*control) {
                    Ok(Some((Order::Serve(serve), fds))) if is_long(&serve) => {
                        aside(scope, &errands, move || self.serve(*serve, fds));
                    }
                    Ok(Some((Order::Serve(serve), fds))) => self.serve(*serve, fds),
                    Ok(Some((Order::Change(change), fds))) => {
                        aside(scope, &errands, move || self.change_and_tell(&change, fds));
                    }
                    Ok(Some((Order::Leave { id }, _))) => self.leave(id),
                    Ok(Some((Order::Expect { id, end }, _))) => self.expect(id, end),
                    Ok(Some((Order::GiveUpReads { id, before }, _))) => self.give_up_reads(id, before),
                    Ok(Some((Order::Stat { id }, _))) => {
                        let stats = self.served(id).map(|served| Box::new(served.stats()));
                        self.report(&Report::Counted { id, stats });
                    }
                    Ok(Some((Order::Connect { id, visitor }, fds))) => match self.front(id) {
                        Some(front) => front.connect(id, &self.threads, visitor, fds, &self.teller()),
                        None => warn!("a client of {id} is turned away"),
                    },
                    Ok(Some((Order::Await, fds))) => *successors = self.listen(fds),
                    Ok(None) => return,
                    // The next one may make sense; a sender of this one alone hears no more.
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                        warn!("an order made no sense: {error}");
                    }
                    Err(error) => {
                        error!("cannot hear orders: {error}");
                        return;
                    }
                }
            }
        });
    }

    /// Decodes a device's blocks, if some are encoded: one for all devices, made for the first that needs it.
    fn decoded(&self, kept: &Kept) -> io::Result<Option<Decoded>> {
        let (Some(encoding), Some(table)) = (&kept.serve.backing.encoded, &kept.keepsakes.table) else {
            return Ok(None);
        };
        let encoded = table::unpack(table)?;
        let mut decoding = lock(&self.decoding);
        let decoding = match &*decoding {
            Some(decoding) => Arc::clone(decoding),
            None => {
                let threads = self.threads.count();
                let made = match self.cache_size {
                    Some(size) => Decoding::start(threads, size),
                    None => Decoding::usual(threads, machine_memory()),
                };
                Arc::clone(decoding.insert(made.map_err(io::Error::other)?))
            }
        };
        if let Some(size) = encoding.cache_size {
            decoding.resize(size);
        }
        Ok(Some(Decoded { decoding, encoded }))
    }

    fn serve(self: &Arc<Self>, serve: Serve, mut fds: Vec<OwnedFd>) {
        let id = serve.id;
        let check = || -> io::Result<_> {
            let others = fds.split_off(serve.own_descriptors().min(fds.len()));
            let link = fds.iter().skip(1).map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
            let own = Own::new(&serve, fds)?;
            let kept = Kept::new(serve.clone(), others)?;
            let decoded = self.decoded(&kept)?;
            let grow = grower(&kept, decoded.as_ref())?;
            let (setup, keepsakes) = kept.into_setup(decoded, grow);
            Ok((own, setup, keepsakes, link))
        };
        let checked = check();
        let (own, setup, keepsakes, link) = match checked {
            Ok(checked) => checked,
            Err(error) => {
                self.report(&Report::Failed { id, why: error.to_string() });
                self.report(&Report::Closed { id });
                return;
            }
        };
        let (flags, partitions) = (serve.abilities.flags(), serve.partitions.clone());
        let serial = serial_of(&setup.content.sources);
        self.devices().insert(id, Charge::new(serve, keepsakes, link));
        let worker = Arc::clone(self);
        let on_closed = Box::new(move || worker.let_go(id));
        // One at a time: what one has counted as free no other one takes.
        let adding = lock(&self.adding);
        let plain = |served| (Arc::new(served), None);
        let served = match own {
            Own::Ublk { char_device } => {
                ublk::serve(&self.threads, setup, flags, char_device, on_closed).map(plain)
            }
            Own::Fuse { tether, devices } => {
                fuse::serve(&self.threads, setup, devices, tether, partitions, on_closed).map(plain)
            }
            Own::VhostUser { tether } => VhostUser::serve(&self.threads, setup, &serial, tether, on_closed)
                .map(|front| (Arc::clone(front.served()), Some(Taker::VhostUser(Arc::new(front))))),
            Own::Nbd { tether } => Nbd::serve(setup, tether, on_closed)
                .map(|nbd| (Arc::clone(nbd.served()), Some(Taker::Nbd(Arc::new(nbd))))),
        };
        drop(adding);
        match served {
            Ok((served, taker)) => {
                let first = served.first();
                let worker = Arc::clone(self);
                let count = Count::new(move |visits| worker.report(&Report::Visits { id, visits }));
                if let Some(charge) = self.devices().get_mut(&id) {
                    charge.serve.first = first;
                    charge.served = Some(served);
                    charge.front = taker.map(|taker| Front::new(taker, count));
                }
                self.report(&Report::Ready { id, first });
            }
            Err(error) => self.report(&refusal(id, &error)),
        }
    }

    fn change_and_tell(&self, change: &Change, fds: Vec<OwnedFd>) {
        let id = change.id;
        match self.change(change, fds) {
            Ok(first) => self.report(&Report::Ready { id, first }),
            Err(why) => self.report(&Report::Failed { id, why }),
        }
    }

    /// Serves a device otherwise, if it is served here, and notes that for a successor; else the reason why
    /// not. Its queues begin where they did.
    fn change(&self, change: &Change, fds: Vec<OwnedFd>) -> Result<u32, String> {
        let served = self.served(change.id).ok_or("it is not served here")?;
        let sources = change.files.clone().map(|files| spec::all_sources(files, fds.into_iter()));
        let sources = sources.transpose().map_err(|error| error.to_string())?;
        let Change { map, read_only, direct_io, .. } = change.clone();
        let new = serve::Change { map, sources, read_only, direct_io };
        served.change(&self.threads, new).map_err(|error| error.to_string())?;
        let mut devices = self.devices();
        let front = devices.get_mut(&change.id).and_then(|charge| {
            change.apply(&mut charge.serve);
            Some((charge.front.clone()?, charge.serve.geometry.clone()))
        });
        drop(devices);
        if let Some((front, geometry)) = front {
            front.changed(geometry);
        }
        Ok(served.first())
    }

    /// Begins to release a device that another worker will serve. If that fails the device is not closed in
    /// time, and the supervisor ends us.
    fn leave(&self, id: DeviceId) {
        let left = match self.front(id) {
            Some(front) => Some(front.leave(&self.threads)),
            None => self.served(id).map(|served| served.leave(&self.threads)),
        };
        if let Some(Err(error)) = left {
            warn!("cannot leave: {error}");
        }
    }

    /// Notes whether a device is about to end for good.
    fn expect(&self, id: DeviceId, end: bool) {
        let served = self.served(id).and_then(|served| Some((served.first(), served.ending()?)));
        let Some((first, ending)) = served else {
            return self.report(&Report::Failed { id, why: "it is not served here".to_owned() });
        };
        ending.expect(end);
        if let Some(charge) = self.devices().get_mut(&id) {
            charge.ending = Some(ending);
        }
        self.report(&Report::Ready { id, first });
    }

    fn give_up_reads(&self, id: DeviceId, before: u64) {
        let before = moment::instant(before);
        if let Some(Err(error)) = self.served(id).map(|served| served.give_up_reads(&self.threads, before)) {
            warn!("reads of {id} wait on: {error}");
        }
    }

    fn front(&self, id: DeviceId) -> Option<Front> {
        self.devices().get(&id).and_then(|charge| charge.front.clone())
    }

    /// The device's queues. Not under the lock: an I/O thread may want that to let go of a device.
    fn served(&self, id: DeviceId) -> Option<Arc<Served>> {
        self.devices().get(&id).and_then(|charge| charge.served.clone())
    }

    fn listen(&self, fds: Vec<OwnedFd>) -> Option<OwnedFd> {
        let socket = fds.into_iter().next()?;
        match rendezvous::take_over(&socket) {
            Ok(()) => Some(socket),
            Err(error) => {
                warn!("no later server will find it: {error}");
                None
            }
        }
    }

    /// A device is closed.
    fn let_go(&self, id: DeviceId) {
        // Locked before it is reported: the next device may get this number at once, and must stay in the
        // list.
        let mut open = self.devices();
        if let Some(why) = open.get(&id).and_then(|charge| charge.ending.as_ref()?.unsaved()) {
            self.report(&Report::Unsaved { id, why });
        }
        // Reported first: a supervisor that sees no open device may end the process.
        self.report(&Report::Closed { id });
        open.remove(&id);
        if open.is_empty() {
            // Full means that it rings already.
            let _ = rustix::io::write(&self.idle, &1u64.to_ne_bytes());
        }
    }

    /// Tells the supervisor of an export's clients.
    fn teller(self: &Arc<Self>) -> Tell {
        let worker = Arc::clone(self);
        Arc::new(move |report, fds| worker.tell(report, fds))
    }

    fn report(&self, report: &Report) {
        self.tell(report, &[]);
    }

    fn tell(&self, report: &Report, fds: &[BorrowedFd<'_>]) {
        match protocol::send(&*self.control(), report, fds) {
            Ok(()) => {}
            // The supervisor is gone; its successor asks.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
            Err(error) => error!("cannot report {report:?}: {error}"),
        }
    }

    /// Waits for the next supervisor and reports everything to it; `false` when there is no device left to
    /// wait for.
    fn await_successor(&self, successors: Option<&OwnedFd>) -> bool {
        while !self.devices().is_empty() {
            let mut fds = vec![PollFd::new(&self.idle, PollFlags::IN)];
            fds.extend(successors.map(|socket| PollFd::new(socket, PollFlags::IN)));
            if let Err(error) = rustix::event::poll(&mut fds, None) {
                error!("cannot wait: {error}");
            }
            let [idle, calls] = [0, 1].map(|index| fds.get(index).is_some_and(|fd| !fd.revents().is_empty()));
            if idle {
                // Only that it rang matters.
                let _ = rustix::io::read(&self.idle, &mut [0; 8]);
            }
            if let Some(socket) = successors.filter(|_| calls) {
                match rendezvous::answer(socket) {
                    Ok((control, successor)) => {
                        self.introduce(control, &successor);
                        return true;
                    }
                    Err(error) => warn!("a call came to nothing: {error}"),
                }
            }
        }
        false
    }

    /// Tells a new supervisor what there is, as far as it understands that.
    fn introduce(&self, control: OwnedFd, successor: &Speech) {
        let ours = Speech::ours();
        let Some(version) = ours.common(successor) else {
            warn!(
                "a server of another version called (it speaks {}): waits for one that speaks {}",
                successor.version, ours.version
            );
            let handed = Handed { version: ours.version, features: ours.features, withheld: 0 };
            // One that is gone again needs no answer.
            let _ = protocol::send(&control, &Report::Handed(handed), &[]);
            return;
        };
        let mut withheld = 0;
        let held: Vec<_> = {
            let mut open = self.devices();
            *lock(&self.control) = Arc::new(control);
            // What closes from here on is reported to the new one. What closed already has no files any more.
            let mut held = Vec::with_capacity(open.len());
            for charge in open.values_mut() {
                if !successor.understands(&charge.serve.needs) {
                    withheld += 1;
                    continue;
                }
                let serving = charge.served.as_ref().and_then(|served| served.serving());
                held.extend(serving.map(|serving| charge.held(serving)));
            }
            held
        };
        self.report(&Report::Started { threads: self.threads.count(), notes: self.notes.clone() });
        for held in held {
            match held {
                Ok((serve, serving, keepsakes, link)) => {
                    // Those of the way below are behind them, and stay here.
                    let own = serving.crossing(serve.backing.files.len());
                    let mut fds = kept::descriptors(own, &keepsakes);
                    fds.extend(link.iter().map(AsFd::as_fd));
                    self.tell(&Report::Held(Box::new(serve)), &fds);
                }
                Err(error) => warn!("cannot hand a device over: {error}"),
            }
        }
        // One that says nothing of what it understands would not understand what we do.
        let negotiates = successor.oldest.is_some();
        let features = if negotiates { ours.features } else { Vec::new() };
        let withheld = if negotiates { withheld } else { 0 };
        self.report(&Report::Handed(Handed { version, features, withheld }));
        let fronts: Vec<Front> = self.devices().values().filter_map(|charge| charge.front.clone()).collect();
        fronts.iter().for_each(Front::say);
    }

    fn control(&self) -> Arc<OwnedFd> {
        Arc::clone(&lock(&self.control))
    }

    fn devices(&self) -> Held<'_, BTreeMap<DeviceId, Charge>> {
        lock(&self.open)
    }
}

/// The serial number of a disk: which file its image is, which stays when it is exported again.
fn serial_of(sources: &[Source]) -> String {
    let identity = sources.first().and_then(Source::identity);
    identity.map_or_else(|| "becket".to_owned(), |file| format!("{:x}-{:x}", file.dev, file.ino))
}

/// Whether it takes long before a device can be served: tables that grow with the image are read first.
fn is_long(serve: &Serve) -> bool {
    serve.backing.grows || serve.backing.encoded.is_some()
}

/// The machine's memory in bytes.
fn machine_memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into())
}

fn refusal(id: DeviceId, error: &ServeError) -> Report {
    use becket_engine::Error::Full;
    let why = error.to_string();
    match error {
        ServeError::Full { room, .. } => Report::Full { id, why, room: Some(*room) },
        ServeError::Engine { source: Full { .. }, .. } => Report::Full { id, why, room: None },
        _ => Report::Failed { id, why },
    }
}

impl Charge {
    fn new(serve: Serve, keepsakes: Keepsakes, link: Vec<OwnedFd>) -> Charge {
        Charge { serve, keepsakes, link, served: None, front: None, ending: None }
    }

    /// What a successor needs of it, in copies.
    fn held(&self, serving: Arc<Serving>) -> io::Result<(Serve, Arc<Serving>, Keepsakes, Vec<OwnedFd>)> {
        let copy = |fd: &Option<OwnedFd>| fd.as_ref().map(OwnedFd::try_clone).transpose();
        let Keepsakes { lease, cgroup, table } = &self.keepsakes;
        let link = self.link.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        let keepsakes = Keepsakes { lease: copy(lease)?, cgroup: copy(cgroup)?, table: copy(table)? };
        Ok((self.serve.clone(), serving, keepsakes, link))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::contract::protocol::tests::serve;

    #[test]
    fn a_device_that_is_not_served_has_no_numbers() {
        let (control, supervisor) = protocol::pair().unwrap();
        let worker = Worker::new(control, IoThreads::start(1).unwrap(), Vec::new(), None).unwrap();
        protocol::send(&supervisor, &Order::Stat { id: 3.into() }, &[]).unwrap();
        rustix::net::shutdown(&supervisor, rustix::net::Shutdown::Write).unwrap();
        worker.obey(&mut None);
        let answer = protocol::receive::<Report>(&supervisor).unwrap().unwrap().0;
        assert_eq!(answer, Report::Counted { id: 3.into(), stats: None });
    }

    #[test]
    fn a_number_that_is_taken_again_at_once_stays_open() {
        let (control, supervisor) = protocol::pair().unwrap();
        let worker = Worker::new(control, IoThreads::start(1).unwrap(), Vec::new(), None).unwrap();
        let charge = || Charge::new(serve(Vec::new()), Keepsakes::default(), Vec::new());
        worker.devices().insert(3.into(), charge());
        // The other end does not read, so that the report of the closing waits and the rest can overtake it.
        rustix::io::ioctl_fionbio(&*worker.control(), true).unwrap();
        while protocol::send(&*worker.control(), &Report::Ready { id: 9.into(), first: 0 }, &[]).is_ok() {}
        rustix::io::ioctl_fionbio(&*worker.control(), false).unwrap();
        let closing = thread::spawn({
            let worker = Arc::clone(&worker);
            move || worker.let_go(3.into())
        });
        thread::sleep(Duration::from_millis(200));
        let serving = thread::spawn({
            let worker = Arc::clone(&worker);
            move || drop(worker.devices().insert(3.into(), charge()))
        });
        thread::sleep(Duration::from_millis(200));
        while protocol::receive::<Report>(&supervisor).unwrap().unwrap().0
            != (Report::Closed { id: 3.into() })
        {}
        closing.join().unwrap();
        serving.join().unwrap();
        assert!(worker.devices().contains_key(&3.into()), "the worker would end under a live device");
    }
}

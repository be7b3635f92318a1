//! What another offer needs: this driver, and its line in a table. It shows an image at a socket and has no
//! disk. It stands in for a kind that becket does not have: there is no served kind beside ublk and FUSE yet.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use becket_engine::Geometry;
use becket_transport::{Abilities, Kind};

use super::{Drivers, fuse, ublk};
use crate::contract::messages::{Attach, Detach, Set};
use crate::contract::{DeviceState, Error};
use crate::control::server::Service;
use crate::supervisor::devices::Supervisor;
use crate::supervisor::doubles::{Bench, FakeWorker, FakeWorkers};
use crate::supervisor::driver::{Added, Driver, NewDevice, Offer};
use crate::supervisor::guard::Guard;
use crate::system::sync::lock;

const KIND: Kind = Kind::Dm;
static OFFERS: [Offer; 3] = [ublk::OFFER, fuse::OFFER, SOCKETS];
const SOCKETS: Offer =
    Offer { open: |_| Ok(Arc::new(Sockets::default())), numbered_here: true, ..Offer::of(KIND) };

#[derive(Default)]
struct Sockets {
    made: Mutex<BTreeMap<u32, Added>>,
}

impl Sockets {
    fn with(&self, number: u32, change: impl FnOnce(&mut Added)) -> Result<(), Error> {
        let none = || Error::NoDevice { target: self.default_name(number) };
        lock(&self.made).get_mut(&number).map(change).ok_or_else(none)
    }
}

impl Driver for Sockets {
    fn abilities(&self) -> Result<Abilities, Error> {
        Ok(Abilities::SERVED.with(Abilities::RECOVERS).with(Abilities::RESIZES))
    }
    fn has_disk(&self) -> bool {
        false
    }
    fn default_name(&self, number: u32) -> String {
        format!("socket{number}")
    }
    fn node(&self, number: u32) -> PathBuf {
        format!("/run/becket/sockets/{number}").into()
    }
    fn add(&self, wanted: NewDevice) -> Result<Added, Error> {
        let NewDevice { queues, depth, abilities, mark, .. } = wanted;
        let mut made = lock(&self.made);
        let number = made.keys().next_back().map_or(0, |last| last + 1);
        let added = Added { number, queues, depth, abilities, mark, stopped: true };
        made.insert(number, added);
        Ok(added)
    }
    fn set_params(&self, number: u32, _: &Geometry) -> Result<(), Error> {
        self.with(number, |_| {})
    }
    fn open(&self, _: u32) -> Result<Vec<OwnedFd>, Error> {
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        Ok(vec![socket.into()])
    }
    fn start(&self, number: u32, _: u32) -> Result<(), Error> {
        self.with(number, |added| added.stopped = false)
    }
    fn stop(&self, number: u32) -> Result<(), Error> {
        self.with(number, |added| added.stopped = true)
    }
    fn stop_unused(&self, number: u32) -> Result<bool, Error> {
        self.stop(number).map(|()| true)
    }
    fn del(&self, number: u32) -> Result<(), Error> {
        lock(&self.made).remove(&number);
        Ok(())
    }
    fn info(&self, number: u32) -> Result<Option<Added>, Error> {
        Ok(lock(&self.made).get(&number).copied())
    }
    fn start_recovery(&self, _: u32) -> Result<bool, Error> {
        Ok(true)
    }
    fn end_recovery(&self, number: u32, _: u32) -> Result<(), Error> {
        self.with(number, |_| {})
    }
    fn quiesce(&self, _: u32, leave: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        leave()
    }
    fn update_size(&self, number: u32, _: u64) -> Result<(), Error> {
        self.with(number, |_| {})
    }
}

#[test]
fn an_offer_without_a_disk_is_one_file_and_one_line() {
    let bench = Bench::new();
    let workers = Arc::new(FakeWorkers::default());
    let (boxed, drivers) = (Box::new(Arc::clone(&workers)), Drivers::new(&OFFERS));
    let supervisor =
        Supervisor::new(bench.store.clone(), Vec::new(), boxed, Guard::default(), drivers, || {});
    let worker = |at: usize| -> Arc<FakeWorker> { Arc::clone(&lock(&workers.started)[at]) };

    let request = Attach { transport: KIND, ..bench.request(Some("one")) };
    let info = supervisor.attach(request, vec![bench.fd(true, 0)]).unwrap();
    assert_eq!((info.number, info.state), (0, DeviceState::Live));
    assert_eq!(info.device, PathBuf::from("/run/becket/sockets/0"));
    assert!(info.partitions.is_empty() && info.diskseq.is_none(), "nobody can see a disk");
    assert!(!bench.store.device("one").unwrap().unwrap().starting);

    let set = Set {
        name: "one".to_owned(),
        direct_io: None,
        read_only: Some(true),
        size_limit: Some(4096),
        shortest: 0,
        image: None,
    };
    let info = supervisor.set(set, Vec::new()).unwrap();
    assert_eq!((info.size, info.spec.read_only), (4096, true));

    worker(0).die();
    assert_eq!(lock(&worker(1).served)[0].geometry.size, 4096, "the next worker goes on");
    assert_eq!(supervisor.list()[0].recoveries, 1);

    supervisor.detach(&Detach { name: "one".to_owned(), lazy: false, force: None }).unwrap();
    assert!(supervisor.idle());
    assert_eq!(bench.left_behind(), Vec::<String>::new());
}

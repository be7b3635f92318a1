use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Mutex;

use becket_engine::Geometry;
use becket_image::{Facts, Map};

use super::*;
use crate::contract::DataMode;
use crate::supervisor::doubles::{Bench, facts, granted, with};
use crate::supervisor::offers::OFFERS;
use crate::supervisor::smaller::DEPTH_WITH_BUFFERS;
use becket_image::FileFacts;

/// Where the worker puts queues, whatever its order says.
const ELSEWHERE: u32 = 77;

/// A driver and worker that keep a journal, and fail at the step that the test chooses.
struct Double {
    journal: Mutex<Vec<&'static str>>,
    fail_at: &'static str,
    abilities: Abilities,
    records: PathBuf,
    /// How deep queues may be that copy nothing.
    room: u16,
    /// Whether there was a record when the disk appeared.
    recorded: Mutex<Option<bool>>,
}

impl Double {
    fn step(&self, name: &'static str) -> Result<(), Error> {
        self.journal.lock().unwrap().push(name);
        if name == self.fail_at {
            return Err(Error::Worker { what: format!("has to fail at {name}") });
        }
        Ok(())
    }

    fn did(&self, name: &str) -> bool {
        self.journal.lock().unwrap().contains(&name)
    }
}

impl Driver for Double {
    fn abilities(&self) -> Result<Abilities, Error> {
        self.step("abilities").map(|()| self.abilities)
    }
    fn add(&self, wanted: NewDevice) -> Result<Added, Error> {
        self.step("add")?;
        assert_ne!(wanted.mark, 0);
        Ok(granted(900_001, wanted))
    }
    fn default_name(&self, number: u32) -> String {
        format!("ublkb{number}")
    }
    fn node(&self, number: u32) -> PathBuf {
        format!("/dev/ublkb{number}").into()
    }
    fn set_params(&self, _: u32, geometry: &Geometry) -> Result<(), Error> {
        assert_eq!(geometry.size, 8192);
        assert!(!geometry.read_only, "nobody could make it writable again");
        self.step("set_params")
    }
    fn open(&self, _: u32) -> Result<Vec<OwnedFd>, Error> {
        self.step("open_char").map(|()| vec![File::open("/dev/null").unwrap().into()])
    }
    fn start_recovery(&self, _: u32) -> Result<bool, Error> {
        unreachable!()
    }
    fn end_recovery(&self, _: u32, _: u32) -> Result<(), Error> {
        unreachable!()
    }
    fn quiesce(&self, _: u32, _: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        unreachable!()
    }
    fn watchful(&self, _: u32) {
        // Its outcome does not matter.
    }
    fn start(&self, _: u32, pid: u32) -> Result<(), Error> {
        assert_eq!(pid, std::process::id());
        let records = fs::read_dir(&self.records).unwrap();
        let files =
            records.flatten().filter(|item| item.path().extension().is_some_and(|e| e == "json")).count();
        *self.recorded.lock().unwrap() = Some(files == 1);
        self.step("start")
    }
    fn settle(&self, _: u32, promised: &[Partition]) -> Result<Settled, Error> {
        assert_eq!(promised.len(), 1);
        self.step("settle").map(|()| Settled::default())
    }
    fn stop(&self, _: u32) -> Result<(), Error> {
        self.step("stop")
    }
    fn stop_unused(&self, _: u32) -> Result<bool, Error> {
        self.step("stop_unused").map(|()| true)
    }
    fn del(&self, _: u32) -> Result<(), Error> {
        self.step("del")
    }
    fn size(&self, _: u32) -> Option<u64> {
        unreachable!()
    }
    fn update_size(&self, _: u32, _: u64) -> Result<(), Error> {
        unreachable!()
    }
    fn set_read_only(&self, _: u32, on: bool) -> Result<(), Error> {
        assert!(on);
        self.step("freeze")
    }
    fn repartition(&self, _: u32, _: &[Partition]) -> Result<(), Error> {
        unreachable!()
    }
    fn info(&self, _: u32) -> Result<Option<Added>, Error> {
        Ok(None)
    }
}

impl Worker for Double {
    fn id(&self) -> ProcessId {
        ProcessId::own()
    }
    fn notes(&self) -> &[String] {
        &[]
    }
    fn alive(&self) -> bool {
        true
    }
    fn dismiss(&self) {
        unreachable!()
    }
    fn kill(&self) {
        unreachable!()
    }
    fn serve(&self, serve: Serve, fds: &[BorrowedFd<'_>]) -> Result<u32, Error> {
        let kept = usize::from(serve.backing.lease) + usize::from(serve.backing.encoded.is_some());
        assert_eq!((serve.map.len(), fds.len()), (8192, 2 + kept));
        self.step("serve")?;
        if serve.abilities.data_mode().is_zero_copy() && serve.depth > self.room {
            return Err(Error::Full { what: "is full".into(), room: Some(self.room) });
        }
        Ok(ELSEWHERE)
    }
    fn change(&self, _: crate::contract::protocol::Change, _: &[BorrowedFd<'_>]) -> Result<(), Error> {
        unreachable!()
    }
    fn stats(&self, _: DeviceId) -> Result<becket_engine::Summary, Error> {
        unreachable!()
    }
    fn leave(&self, _: DeviceId) -> Result<(), Error> {
        unreachable!()
    }
    fn await_closed(&self, _: DeviceId, _: Duration) -> bool {
        self.journal.lock().unwrap().push("closed");
        true
    }
}

fn maker<'a>(bench: &'a Bench, double: &'a Double) -> Maker<'a> {
    Maker {
        store: &bench.store,
        offer: &OFFERS[0],
        driver: double,
        worker: double,
        connect: &|_, _, _| Ok(None),
        owned: 0,
    }
}

fn double(bench: &Bench, fail_at: &'static str) -> Double {
    Double {
        journal: Mutex::default(),
        fail_at,
        abilities: Abilities::SERVED,
        records: bench.store.runtime().records(),
        room: u16::MAX,
        recorded: Mutex::default(),
    }
}

#[test]
fn a_device_is_recorded_before_anybody_can_see_it() {
    let bench = Bench::new();
    let double = double(&bench, "");
    let made =
        maker(&bench, &double).make(bench.request(Some("one")), &[bench.fd(true, 0)], None, &[]).unwrap();
    let steps = ["abilities", "add", "set_params", "open_char", "serve", "start", "settle"];
    assert_eq!(*double.journal.lock().unwrap(), steps);
    assert_eq!(*double.recorded.lock().unwrap(), Some(true));
    let stored = bench.store.device("one").unwrap().unwrap();
    assert!(!stored.starting);
    assert_eq!(stored.mark, made.device.mark);
    assert_eq!(
        (made.device.info.spec.depth, made.device.info.spec.mode.map(|mode| mode.to_string()).as_deref()),
        (Some(DEPTH_WITH_BUFFERS), Some("copy"))
    );
    assert_eq!((made.kept.sources.len(), made.kept.serve.first), (1, ELSEWHERE));
    assert!(bench.store.runtime().links().join("one").is_symlink());
}

#[test]
fn without_a_name_the_kernel_s_is_taken() {
    let bench = Bench::new();
    let double = double(&bench, "");
    let made = maker(&bench, &double).make(bench.request(None), &[bench.fd(true, 0)], None, &[]).unwrap();
    assert_eq!(made.device.info.name, "ublkb900001");
}

#[test]
fn whatever_fails_nothing_stays_behind() {
    let steps = ["abilities", "add", "set_params", "open_char", "serve", "start", "settle"];
    for (at, step) in steps.into_iter().enumerate() {
        for name in [Some("one"), None] {
            let bench = Bench::new();
            let double = double(&bench, step);
            let error = maker(&bench, &double)
                .make(bench.request(name), &[bench.fd(true, 0)], None, &[])
                .unwrap_err();
            assert!(error.to_string().contains(step), "{error}");
            assert_eq!(bench.left_behind(), Vec::<String>::new(), "after {step}");
            assert_eq!(
                double.did("del"),
                at > 1,
                "after {step}: what was added is deleted, and nothing else"
            );
            let served = at >= 4;
            assert_eq!(double.did("stop"), served, "after {step}");
            if served {
                let journal = double.journal.lock().unwrap();
                let tail: Vec<_> = journal.iter().rev().take(3).rev().copied().collect();
                assert_eq!(tail, ["stop", "closed", "del"], "after {step}");
            }
        }
    }
}

#[test]
fn a_name_in_use_is_found_out_before_the_kernel_is_asked() {
    let bench = Bench::new();
    let double = double(&bench, "");
    let _claim = bench.store.claim("one", "/other".as_ref(), |_| true).unwrap();
    let error =
        maker(&bench, &double).make(bench.request(Some("one")), &[bench.fd(true, 0)], None, &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NameInUse);
    assert!(!double.did("add"));
}

#[test]
fn requests_that_lie_are_refused_before_anything_is_done() {
    let bench = Bench::new();
    let good = || bench.request(Some("one"));
    let direct = || vec![FileFacts { facts: facts(), direct: true, heard: false }.into()];
    let pipe = || rustix::pipe::pipe().unwrap().0;
    let append = i32::try_from(OFlags::APPEND.bits()).unwrap();
    let dir = || OwnedFd::from(File::open("/proc").unwrap());
    let block = Facts { kind: FileKind::Block, ..facts() };
    let cases: Vec<(&str, Attach, Vec<OwnedFd>)> = vec![
        ("no descriptor", good(), vec![]),
        ("too many descriptors", good(), vec![bench.fd(true, 0), bench.fd(true, 0)]),
        ("a pipe as image", good(), vec![pipe()]),
        ("a directory as image", good(), vec![dir()]),
        ("not writable", good(), vec![bench.fd(false, 0)]),
        ("append only", good(), vec![bench.fd(true, append)]),
        (
            "not for direct I/O",
            with(good(), |it| it.backing.files = direct()),
            vec![bench.fd(true, 0), bench.fd(true, 0)],
        ),
        (
            "direct of another file",
            with(good(), |it| it.backing.files = direct()),
            vec![bench.fd(true, 0), dir()],
        ),
        (
            "a file as block device",
            with(good(), |it| {
                it.backing.files = vec![FileFacts { facts: block, direct: false, heard: false }.into()]
            }),
            vec![bench.fd(true, 0)],
        ),
        (
            "lease is not a pipe",
            with(good(), |it| it.backing.lease = true),
            vec![bench.fd(true, 0), bench.fd(true, 0)],
        ),
        ("no lease", with(good(), |it| it.backing.lease = true), vec![bench.fd(true, 0)]),
        ("block size 0", with(good(), |it| it.spec.block_size = 0), vec![bench.fd(true, 0)]),
        ("block size 513", with(good(), |it| it.spec.block_size = 513), vec![bench.fd(true, 0)]),
        ("block size 1 MiB", with(good(), |it| it.spec.block_size = 1 << 20), vec![bench.fd(true, 0)]),
        (
            "shorter than a block",
            Attach { map: Map::contiguous(0, 0, 511), ..good() },
            vec![bench.fd(true, 0)],
        ),
        ("a foreign file", Attach { map: Map::contiguous(1, 0, 8192), ..good() }, vec![bench.fd(true, 0)]),
        ("no queue", with(good(), |it| it.spec.queues = Some(0)), vec![bench.fd(true, 0)]),
        ("too deep", with(good(), |it| it.spec.depth = Some(u16::MAX)), vec![bench.fd(true, 0)]),
        ("no file", with(good(), |it| it.backing.files = vec![]), vec![]),
        ("a path as name", Attach { name: Some("../x".into()), ..good() }, vec![bench.fd(true, 0)]),
    ];
    for (what, request, fds) in cases {
        let double = double(&bench, "");
        let error = maker(&bench, &double).make(request, &fds, None, &[]).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{what}: {error}");
        assert!(!double.did("add"), "{what}");
        assert_eq!(bench.left_behind(), Vec::<String>::new(), "{what}");
    }
}

#[test]
fn read_only_needs_no_writable_descriptor() {
    let bench = Bench::new();
    let double = double(&bench, "");
    let request = with(bench.request(Some("one")), |it| {
        it.spec.read_only = true;
        it.backing.lease = true;
    });
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    let made = maker(&bench, &double).make(request, &[bench.fd(false, 0), reader], None, &[]).unwrap();
    assert!(made.device.info.spec.read_only);
    assert!(double.did("freeze"), "its users see it");
    assert!(made.kept.keepsakes.lease.is_some());
}

#[test]
fn an_encoded_image_comes_with_its_table_and_is_not_written() {
    let place = becket_image::Place::Encoded { layer: 0, offset: 0 };
    let map = Map::from_extents(vec![becket_image::Extent { start: 0, len: 8192, place }]).unwrap();
    let encoded = Some(crate::contract::table::Encoding { cache_size: Some(1 << 25), direct_io: false });
    let table = || crate::contract::table::pack(&[crate::contract::table::tests::layer()]).unwrap().unwrap();
    let bench = Bench::new();
    let whole = with(bench.request(Some("one")), |it| {
        (it.map, it.backing.encoded) = (map, encoded);
        it.spec.read_only = true;
    });
    let cases = [
        ("no table", with(whole.clone(), |it| it.backing.encoded = None), vec![bench.fd(false, 0)]),
        ("a table that can change", whole.clone(), vec![bench.fd(false, 0), bench.fd(false, 0)]),
        (
            "to be written",
            with(whole.clone(), |it| it.spec.read_only = false),
            vec![bench.fd(true, 0), table()],
        ),
    ];
    for (what, request, fds) in cases {
        let error = maker(&bench, &double(&bench, "")).make(request, &fds, None, &[]).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{what}: {error}");
    }
    let zero_copy = Abilities::SERVED.with(Abilities::ZERO_COPY);
    let double = Double { abilities: zero_copy, ..double(&bench, "") };
    let made = maker(&bench, &double).make(whole, &[bench.fd(false, 0), table()], None, &[]).unwrap();
    assert_eq!(made.device.info.spec.mode, Some(DataMode::Copy), "we write the bytes");
    assert_eq!(made.kept.serve.backing.encoded, encoded);
    // Its next worker, and its next supervisor, get it.
    let kept = made.kept.keepsakes.table.unwrap();
    assert_eq!(crate::contract::table::unpack(&kept).unwrap(), [crate::contract::table::tests::layer()]);
}

#[test]
fn a_map_that_lies_beside_its_request_is_read_there() {
    let bench = Bench::new();
    let whole = bench.request(Some("one"));
    let map = whole.map.clone();
    let aside = || crate::contract::sealed::write_json("m", &map).unwrap();
    let request = Attach { map: Map::default(), map_aside: true, ..whole };
    for fds in [vec![bench.fd(true, 0)], vec![bench.fd(true, 0), bench.fd(true, 0)]] {
        let error =
            maker(&bench, &double(&bench, "")).make(request.clone(), &fds, None, &[]).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    }
    let made =
        maker(&bench, &double(&bench, "")).make(request, &[bench.fd(true, 0), aside()], None, &[]).unwrap();
    assert_eq!(made.kept.serve.map, map);
}

#[test]
fn where_there_is_less_room_the_device_is_smaller_and_nothing_of_the_attempts_stays() {
    let zero_copy = Abilities::SERVED.with(Abilities::ZERO_COPY).with(Abilities::BATCH);
    for (room, depth, mode) in [(100, 64, "batch-zero-copy"), (3, DEPTH_WITH_BUFFERS, "batch-copy")] {
        for name in [Some("one"), None] {
            let bench = Bench::new();
            let double = Double { room, abilities: zero_copy, ..double(&bench, "") };
            let made =
                maker(&bench, &double).make(bench.request(name), &[bench.fd(true, 0)], None, &[]).unwrap();
            let info = &made.device.info;
            assert_eq!(
                (info.spec.depth, info.spec.mode.map(|mode| mode.to_string()).as_deref()),
                (Some(depth), Some(mode))
            );
            assert!(info.spec.reason.contains("nearly full"), "{}", info.spec.reason);
            assert_eq!(
                bench.store.device(&info.name).unwrap().unwrap().info.spec.depth,
                Some(depth),
                "in the record too"
            );
            let journal = double.journal.lock().unwrap();
            let count = |step| journal.iter().filter(|&&done| done == step).count();
            assert_eq!((count("add"), count("del"), count("start")), (2, 1, 1), "{journal:?}");
            assert_eq!(bench.left_behind().len(), 2, "a record and a link");
        }
    }
}

#[test]
fn a_forced_mode_for_which_there_is_no_room_fails_and_leaves_nothing() {
    let bench = Bench::new();
    let abilities = Abilities::SERVED.with(Abilities::ZERO_COPY);
    let double = Double { room: 0, abilities, ..double(&bench, "") };
    let request = with(bench.request(Some("one")), |it| it.spec.mode = Some(DataMode::ZeroCopy));
    let error = maker(&bench, &double).make(request, &[bench.fd(true, 0)], None, &[]).map(drop).unwrap_err();
    assert!(error.hint().unwrap().contains("--queues"), "{error}");
    assert_eq!(bench.left_behind(), Vec::<String>::new());
}

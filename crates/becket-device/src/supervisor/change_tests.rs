use std::fs;
use std::sync::atomic::Ordering;

use becket_image::Place;

use super::*;
use crate::contract::DeviceInfo;
use crate::contract::messages::{Attach, Refresh, Set, TableEntry};
use crate::control::server::Service;
use crate::supervisor::doubles::{ALL, Fate, Stage, facts, with};
use crate::system::sync::lock;
use becket_image::FileFacts;

const NAME: &str = "one";

/// A supervisor with a device of 8,192 bytes.
fn stage(abilities: Abilities, change: impl FnOnce(Attach) -> Attach) -> Stage {
    let stage = Stage::with(abilities);
    let request = change(stage.bench.request(Some(NAME)));
    stage.supervisor.attach(request, vec![stage.bench.fd(true, 0)]).unwrap();
    stage.done();
    stage
}

fn plain() -> Stage {
    stage(ALL, |request| request)
}

impl Stage {
    fn set(&self, change: Set) -> Result<DeviceInfo, Error> {
        self.supervisor.set(Set { name: NAME.to_owned(), ..change }, Vec::new())
    }

    /// What was done, without the device's number and the worker's.
    fn steps(&self) -> Vec<String> {
        self.done().iter().map(|step| step.replace(" 900001", "").replace(" by 0", "")).collect()
    }

    fn cut(&self, len: u64) {
        fs::File::options().write(true).open(&self.bench.image).unwrap().set_len(len).unwrap();
    }

    /// Makes the image so long and has that taken over; returns what was done, and the device's size.
    fn refresh(&self, len: u64) -> (Result<u64, Error>, Vec<String>) {
        self.cut(len);
        let outcome = self.supervisor.refresh(&Refresh { name: NAME.to_owned(), partitions: None });
        (outcome.map(|info| info.size), self.steps())
    }

    /// Puts another image of so many bytes in the place of the one that there is.
    fn replace(&self, len: u64, change: Set) -> (Result<DeviceInfo, Error>, PathBuf) {
        let path = self.bench.image.with_extension("new");
        fs::write(&path, vec![0; usize::try_from(len).unwrap()]).unwrap();
        let file = fs::File::options().read(true).write(true).open(&path).unwrap();
        let image = NewImage {
            path: path.clone(),
            format: None,
            map: Map::contiguous(0, 0, len),
            files: vec![FileFacts { facts: facts(), direct: false, heard: false }.into()],
            partitions: vec![TableEntry { number: 1, start: 512, len: 512, label: None, uuid: None }],
        };
        let request = Set { name: NAME.to_owned(), image: Some(image), ..change };
        (self.supervisor.set(request, vec![file.into()]), path)
    }

    fn record(&self) -> Device {
        self.bench.store.device(NAME).unwrap().unwrap()
    }

    /// What the next worker would get.
    fn served_next(&self) -> crate::contract::protocol::Serve {
        self.worker(0).die();
        self.done();
        lock(&self.worker(1).served).last().cloned().unwrap()
    }
}

#[test]
fn growing_tells_the_worker_first_and_shrinking_the_kernel() {
    let stage = plain();
    let (size, steps) = stage.refresh(16384 + 511);
    assert_eq!(size.unwrap(), 16384);
    assert_eq!(steps, ["change to 16384 bytes for writing", "show 16384 bytes of"]);
    let (size, steps) = stage.refresh(4096);
    assert_eq!(size.unwrap(), 4096);
    assert_eq!(steps, ["show 4096 bytes of", "change to 4096 bytes for writing"]);
    assert_eq!(stage.record().info.size, 4096);
    let (size, steps) = stage.refresh(4096);
    assert_eq!((size.unwrap(), steps.len()), (4096, 0), "nothing has changed");
    assert_eq!(stage.served_next().map.len(), 4096);
}

#[test]
fn a_disk_that_asks_its_worker_comes_after_it() {
    let stage = plain();
    stage.driver.follows.store(true, Ordering::SeqCst);
    assert_eq!(stage.refresh(16384).1, ["change to 16384 bytes for writing", "show 16384 bytes of"]);
    assert_eq!(stage.refresh(4096).1, ["change to 4096 bytes for writing", "show 4096 bytes of"]);
    stage.driver.refuse.store(1, Ordering::SeqCst);
    let (size, steps) = stage.refresh(512);
    size.unwrap_err();
    let back = ["change to 512 bytes for writing", "refuse 512 bytes of", "change to 4096 bytes for writing"];
    assert_eq!(steps, back);
}

#[test]
fn offset_and_limit_hold() {
    let request = |request| {
        let request = Attach { map: Map::contiguous(0, 4096, 4096), ..request };
        with(request, |it| it.spec.offset = 4096)
    };
    assert_eq!(stage(ALL, request).refresh(16384).0.unwrap(), 12288);
    let limited = stage(ALL, |request| with(request, |it| it.spec.size_limit = Some(8192)));
    assert_eq!(limited.refresh(1 << 20).0.unwrap(), 8192);
}

#[test]
fn a_limit_can_come_and_go() {
    let stage = plain();
    let limited = stage.set(Set { size_limit: Some(5000), ..Set::default() }).unwrap();
    assert_eq!((limited.size, limited.spec.size_limit), (4608, Some(5000)), "whole blocks");
    assert_eq!(stage.steps(), ["show 4608 bytes of", "change to 4608 bytes for writing"]);
    assert_eq!(stage.refresh(1 << 20).0.unwrap(), 4608, "it holds");
    let free = stage.set(Set { size_limit: Some(0), ..Set::default() }).unwrap();
    assert_eq!((free.size, free.spec.size_limit), (1 << 20, None));
    let error = stage.set(Set { size_limit: Some(100), ..Set::default() }).unwrap_err();
    assert!(error.to_string().contains("no block left"), "{error}");
}

#[test]
fn no_change_takes_more_than_its_users_were_looked_at_for() {
    let stage = plain();
    stage.refresh(16384).0.unwrap();
    stage.cut(4096);
    let limit = Set { size_limit: Some(8192), shortest: 8192, ..Set::default() };
    let error = stage.set(limit.clone()).unwrap_err();
    assert!(error.to_string().contains("4096 bytes") && error.hint().unwrap().contains("refresh"), "{error}");
    assert_eq!((stage.record().info.size, stage.steps()), (16384, Vec::<String>::new()));
    assert_eq!(stage.set(Set { shortest: 4096, ..limit }).unwrap().size, 4096);
}

#[test]
fn a_kernel_that_refuses_leaves_everything_as_it_was() {
    let stage = plain();
    stage.driver.refuse.store(1, Ordering::SeqCst);
    let (size, steps) = stage.refresh(16384);
    size.unwrap_err();
    let worker =
        ["change to 16384 bytes for writing", "refuse 16384 bytes of", "change to 8192 bytes for writing"];
    assert_eq!(steps, worker);
    stage.driver.refuse.store(1, Ordering::SeqCst);
    let (size, steps) = stage.refresh(512);
    size.unwrap_err();
    assert_eq!(steps, ["refuse 512 bytes of"]);
    assert_eq!(stage.record().info.size, 8192);
    assert_eq!(stage.served_next().map.len(), 8192);
}

#[test]
fn an_old_kernel_and_an_empty_image_are_refused_with_a_way_out() {
    for (abilities, len) in [(ALL.without(Abilities::RESIZES), 16384), (ALL, 100)] {
        let (outcome, steps) = stage(abilities, |request| request).refresh(len);
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.hint().is_some());
        assert!(steps.is_empty(), "{steps:?}");
    }
}

/// A program that reaches a server says how long the image is there.
#[test]
fn a_served_length_is_followed_by_the_whole_image_only() {
    let follow = |stage: &Stage, size| {
        let owned = lock(&stage.supervisor.devices).get(NAME).cloned().unwrap();
        let mut state = lock(&owned.state);
        stage.supervisor.follow(&mut state, size).map(|()| state.device.info.size)
    };
    let stage_of = plain();
    assert_eq!(follow(&stage_of, 16384 + 511).unwrap(), 16384);
    assert_eq!(stage_of.steps(), ["change to 16384 bytes for writing", "show 16384 bytes of"]);
    assert_eq!(follow(&stage_of, 4096).unwrap(), 4096);
    stage_of.steps();
    assert_eq!(follow(&stage_of, 4096 + 511).unwrap(), 4096);
    assert!(stage_of.steps().is_empty(), "nothing is done again");
    assert!(follow(&stage_of, 511).unwrap_err().to_string().contains("no block left"));
    assert_eq!(stage_of.served_next().map.len(), 4096);
    // A partition of it keeps its length.
    let part = stage(ALL, |request| Attach { map: Map::contiguous(0, 4096, 4096), ..request });
    assert_eq!(follow(&part, 1 << 20).unwrap(), 4096);
    assert!(part.steps().is_empty());
}

/// Its length is not that of a file, so a refresh finds nothing to do.
#[test]
fn a_disk_in_pieces_keeps_its_length() {
    let place = |offset| becket_image::Place::Data { source: 0, offset };
    let extent = |start, offset| becket_image::Extent { start, len: 4096, place: place(offset) };
    let map = Map::from_extents(vec![extent(0, 4096), extent(4096, 0)]).unwrap();
    let stage = stage(ALL, |request| Attach { map, ..request });
    let (size, steps) = stage.refresh(16384);
    assert_eq!((size.unwrap(), steps.len()), (8192, 0));
    let error = stage.set(Set { size_limit: Some(4096), ..Set::default() }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn users_hear_of_read_only_before_the_worker_and_of_writable_after_it() {
    let stage = plain();
    assert!(stage.set(Set { read_only: Some(true), ..Set::default() }).unwrap().spec.read_only);
    assert_eq!(stage.steps(), ["freeze", "change to 8192 bytes for reading"]);
    assert!(stage.record().info.spec.read_only);
    assert!(!stage.set(Set { read_only: Some(false), ..Set::default() }).unwrap().spec.read_only);
    assert_eq!(stage.steps(), ["change to 8192 bytes for writing", "thaw"]);
    stage.set(Set { read_only: Some(true), ..Set::default() }).unwrap();
    assert!(stage.served_next().geometry.read_only, "the next worker refuses writes, too");
}

#[test]
fn a_worker_that_refuses_leaves_everything_as_it_was() {
    let stage = plain();
    let refuse = || lock(&stage.worker(0).changes).push_back(Fate::Refuses);
    refuse();
    stage.set(Set { read_only: Some(true), ..Set::default() }).unwrap_err();
    assert_eq!(stage.steps(), ["freeze", "not change to 8192 bytes for reading", "thaw"]);
    refuse();
    stage.set(Set { size_limit: Some(4096), ..Set::default() }).unwrap_err();
    let steps = ["show 4096 bytes of", "not change to 4096 bytes for writing", "show 8192 bytes of"];
    assert_eq!(stage.steps(), steps);
    refuse();
    stage.replace(8192, Set::default()).0.unwrap_err();
    let recorded = stage.record();
    assert_eq!((recorded.info.size, recorded.info.spec.read_only), (8192, false));
    assert_eq!(recorded.info.spec.image, stage.bench.image);
    assert_eq!(stage.served_next().backing.files.len(), 1);
}

#[test]
fn an_image_open_for_reading_only_is_not_made_writable() {
    let facts = becket_image::Facts { writable: false, ..facts() };
    let files = vec![FileFacts { facts, direct: false, heard: false }.into()];
    let stage =
        stage(ALL, |request| with(request, |it| (it.spec.read_only, it.backing.files) = (true, files)));
    let error = stage.set(Set { read_only: Some(false), ..Set::default() }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
    assert!(stage.steps().is_empty());
    // One that was opened for writing is all it takes.
    let (info, _) = stage.replace(8192, Set { read_only: Some(false), ..Set::default() });
    assert!(!info.unwrap().spec.read_only);
}

#[test]
fn another_image_comes_with_its_files_its_size_and_its_partitions() {
    let stage = plain();
    let (info, path) = stage.replace(16384, Set::default());
    let info = info.unwrap();
    assert_eq!((info.size, &info.spec.image), (16384, &path));
    let steps = ["change to 16384 bytes of another image for writing", "show 16384 bytes of", "partition"];
    assert_eq!(stage.steps(), steps);
    let recorded = stage.record();
    assert_eq!(recorded.image.ino, std::os::unix::fs::MetadataExt::ino(&fs::metadata(&path).unwrap()));
    // It is the one that the next worker gets, and that a refresh measures.
    fs::File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    let refreshed = stage.supervisor.refresh(&Refresh { name: NAME.to_owned(), partitions: None }).unwrap();
    assert_eq!(refreshed.size, 4096);
    assert_eq!(stage.served_next().map.len(), 4096);
}

#[test]
fn an_image_with_holes_takes_another_s_place_in_any_mode() {
    let extent = |start, place| becket_image::Extent { start, len: 4096, place };
    let zero_copy = Abilities::ZERO_COPY;
    for more in [Abilities::default(), zero_copy, zero_copy.with(Abilities::BATCH)] {
        let stage = stage(ALL.with(more), |request| request);
        let data = extent(0, Place::Data { source: 0, offset: 0 });
        let map = Map::from_extents(vec![data, extent(4096, Place::Zero)]).unwrap();
        let files = vec![FileFacts { facts: facts(), direct: false, heard: false }.into()];
        let image = NewImage { path: "/n".into(), format: None, map, files, partitions: Vec::new() };
        let request = Set { name: NAME.to_owned(), image: Some(image), ..Set::default() };
        stage.supervisor.set(request, vec![stage.bench.fd(true, 0)]).unwrap();
        assert_eq!(stage.served_next().map.extents().len(), 2);
    }
}

#[test]
fn a_change_that_cannot_be_recorded_is_done_all_the_same() {
    let stage = plain();
    let records = stage.bench.store.runtime().records();
    let aside = records.with_extension("aside");
    // As a full file system would.
    fs::rename(&records, &aside).unwrap();
    let changed = stage.set(Set { read_only: Some(true), ..Set::default() }).unwrap();
    assert!(changed.spec.read_only);
    assert!(changed.warnings.iter().any(|warning| warning.contains("could not be recorded")), "{changed:?}");
    assert_eq!(stage.steps(), ["freeze", "change to 8192 bytes for reading"], "and is not undone");
    fs::rename(&aside, &records).unwrap();
    assert!(!stage.record().info.spec.read_only, "the record lags behind");
    // The next change goes on from what is, and its record says all.
    let limited = stage.set(Set { size_limit: Some(4096), ..Set::default() }).unwrap();
    assert!(limited.spec.read_only && limited.warnings.is_empty());
    assert_eq!(stage.steps(), ["show 4096 bytes of", "change to 4096 bytes for reading"]);
    assert!(stage.record().info.spec.read_only);
}

#[test]
fn a_worker_that_dies_of_a_change_leaves_it_to_the_next_one() {
    let stage = plain();
    lock(&stage.worker(0).changes).push_back(Fate::Dies);
    let (info, path) = stage.replace(16384, Set { read_only: Some(true), ..Set::default() });
    assert_eq!(info.unwrap().size, 16384);
    let next = stage.served_next();
    assert!(next.geometry.read_only);
    assert_eq!(next.map.len(), 16384);
    assert_eq!(stage.record().info.spec.image, path);
}

#[test]
fn images_that_lie_are_refused_before_anything_is_done() {
    let stage = plain();
    let image = |map, files| NewImage { path: "/n".into(), format: None, map, files, partitions: Vec::new() };
    let file = |direct| vec![FileFacts { facts: facts(), direct, heard: false }.into()];
    let whole = || Map::contiguous(0, 0, 8192);
    for (what, image, fds) in [
        ("no descriptor", image(whole(), file(false)), vec![]),
        ("too many", image(whole(), file(false)), vec![stage.bench.fd(true, 0), stage.bench.fd(true, 0)]),
        ("no file", image(whole(), vec![]), vec![]),
        ("not writable", image(whole(), file(false)), vec![stage.bench.fd(false, 0)]),
        ("half a block", image(Map::contiguous(0, 0, 8000), file(false)), vec![stage.bench.fd(true, 0)]),
        ("a foreign file", image(Map::contiguous(1, 0, 8192), file(false)), vec![stage.bench.fd(true, 0)]),
    ] {
        let request = Set { name: NAME.to_owned(), image: Some(image), ..Set::default() };
        let error = stage.supervisor.set(request, fds).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{what}: {error}");
        assert!(stage.steps().is_empty(), "{what}");
    }
}

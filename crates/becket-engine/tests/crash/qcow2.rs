//! qcow2 images that grow while they are written: in each state the image opens, its reference counts are
//! right, and it holds what was promised; QEMU's own tools say the same of a sample.

use std::{
    cell::RefCell,
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, mpsc::channel},
};

use becket_engine::Serving;
use becket_engine::fault::Faults;
use becket_image::{Budget, Format, Grower, Image, ReadAt, Source, look, unpack_alone, unpack_over};
use becket_testkit::image::random_bytes;
use becket_testkit::{require_plain_machine, tool};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::file::{Keep, Recorded, State};
use crate::record::{Event, GROWER, Log, Step, Watched, all_faults, lists, serve, steps, without_syncs};
use crate::script::{Random, place, source_of};
use crate::{LANES, LEN, counts, losses, runs};

/// An image to begin with.
#[derive(Debug, Clone, Copy)]
struct Kind {
    cluster: u64,
    version: &'static str,
    /// Length of the disk; the lanes are its last bytes.
    size: u64,
    /// It lies over a raw file, which ends in the lanes.
    over: bool,
    /// All its clusters are compressed.
    compressed: bool,
    /// The first bytes of the disk, written before.
    full: u64,
    /// It has a persistent bitmap, which the first write makes invalid.
    bitmap: bool,
}

const MIB: u64 = 1 << 20;
/// The lanes begin and end within clusters.
const TAIL: u64 = LEN as u64 / 2 + 5 * 512;

const KINDS: [Kind; 6] = [
    Kind {
        cluster: 4096,
        version: "1.1",
        size: 2 * MIB + TAIL,
        over: true,
        compressed: false,
        full: 0,
        bitmap: false,
    },
    Kind {
        cluster: 4096,
        version: "0.10",
        size: 2 * MIB + TAIL,
        over: false,
        compressed: false,
        full: 0,
        bitmap: false,
    },
    Kind {
        cluster: 4096,
        version: "1.1",
        size: LEN as u64 + 512,
        over: false,
        compressed: true,
        full: 0,
        bitmap: false,
    },
    Kind {
        cluster: 65536,
        version: "1.1",
        size: LEN as u64 + 5 * 512,
        over: true,
        compressed: false,
        full: 0,
        bitmap: false,
    },
    Kind {
        cluster: 512,
        version: "1.1",
        size: LEN as u64 + 5 * 512,
        over: true,
        compressed: false,
        full: 0,
        bitmap: false,
    },
    BITMAP,
];

const BITMAP: Kind = Kind {
    cluster: 4096,
    version: "1.1",
    size: LEN as u64 + 512,
    over: false,
    compressed: false,
    full: LEN as u64 / 2,
    bitmap: true,
};

/// With the next room that is reserved the table of counts becomes too short.
const OUTGROWN: Kind = Kind {
    cluster: 512,
    version: "1.1",
    size: 7 * MIB + LEN as u64,
    over: false,
    compressed: false,
    full: 7 * MIB,
    bitmap: false,
};

/// An image with what lies below it, in a directory of its own.
struct Made {
    dir: tempfile::TempDir,
    kind: Kind,
    /// What the image's file holds now, and what is below.
    bytes: Vec<u8>,
    below: Option<Image>,
}

impl Made {
    fn new(kind: Kind) -> Made {
        let dir = tempfile::tempdir_in(place()).unwrap();
        let at = |name: &str| dir.path().join(name);
        let qemu_img = |words: &[&str]| tool(Command::new("qemu-img").current_dir(&dir).args(words));
        let options = format!("cluster_size={},compat={}", kind.cluster, kind.version);
        let size = kind.size.to_string();
        let create = ["create", "-q", "-f", "qcow2", "-o", &options];
        let mut below = None;
        if kind.over {
            let len = kind.size - LEN as u64 / 3;
            let bytes = random_bytes(LEN, 1);
            let mut raw = vec![0; len as usize];
            let from = raw.len().saturating_sub(LEN);
            let filled = raw.len() - from;
            raw[from..].copy_from_slice(&bytes[..filled]);
            fs::write(at("base"), &raw).unwrap();
            qemu_img(&[&create[..], &["-F", "raw", "-b", "base", "image", &size]].concat());
            below = Some(Image::raw(Arc::new(raw), len, 512));
        } else if kind.compressed {
            let half: Vec<u8> =
                random_bytes(kind.size as usize / 2, 2).iter().flat_map(|b| [*b, b & 3]).collect();
            fs::write(at("plain"), &half[..half.len() / 512 * 512]).unwrap();
            qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, "plain", "image"]);
        } else {
            qemu_img(&[&create[..], &["image", &size]].concat());
        }
        // Some of it is there already.
        let mut written = vec![format!("write -P 9 {} 9k", kind.size - 20 * 1024)];
        written.extend((kind.full > 0).then(|| format!("write -P 7 0 {}", kind.full)));
        let words = written.iter().flat_map(|words| ["-c", words]);
        tool(Command::new("qemu-io").current_dir(&dir).args(["-f", "qcow2"]).args(words).arg("image"));
        if kind.bitmap {
            qemu_img(&["bitmap", "--add", "image", "b0"]);
        }
        let bytes = whole_sectors(fs::read(at("image")).unwrap());
        Made { dir, kind, bytes, below }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Where the lanes begin.
    fn base(&self) -> u64 {
        self.kind.size - LEN as u64
    }

    /// Serves these steps on an image of these bytes.
    fn recorded(&self, before: &[u8], lanes: &[Vec<Step>], how: &How) -> Vec<Event> {
        write_sparse(&self.path("image"), before);
        let open = || File::options().read(true).write(true).open(self.path("image")).unwrap();
        let walk = look(&self.path("image"), Format::Qcow2, &[], &Budget::default()).unwrap();
        let map = walk.last().unwrap().image.map().clone();
        let encoded = walk.last().unwrap().image.encoded().cloned().collect();
        let mut files = vec![source_of(&open(), how.direct && self.kind.cluster >= 4096)];
        let mut readers: Vec<Arc<dyn ReadAt>> = vec![Arc::new(open())];
        if self.kind.over {
            let base = File::open(self.path("base")).unwrap();
            readers.push(Arc::new(base.try_clone().unwrap()));
            files.push(source_of(&base, false));
            files[1].facts.writable = false;
        }
        let log = Log::default();
        let random = Mutex::new(Random(how.seed));
        let watched = Watched { log: Arc::clone(&log), file: open(), failing: how.failing, random };
        let old = Image::assembled(map.clone(), readers, encoded).unwrap();
        let grower = Grower::over(Arc::new(watched), old).unwrap();
        let (keep, closed) = channel::<()>();
        let serving = Serving::new(map, files.into_iter().map(Source::from).collect(), false, 1);
        let serving = serving.growing_by(Box::new(grower), Box::new(Mutex::new(keep))).unwrap();
        serve(serving, self.base(), lists(lanes, how.version), how.faults.clone(), &log);
        closed.recv().unwrap_err();
        Arc::into_inner(log).unwrap().into_inner().unwrap().events
    }

    /// What lies in the lanes, by becket's reader; or what is wrong with the image.
    fn read(&self, state: &State) -> Result<Vec<u8>, String> {
        let file = Image::raw(Arc::new(state.clone()), state.len, 512);
        let disk = match &self.below {
            Some(below) => unpack_over(&file, below),
            None => unpack_alone(&file),
        };
        let disk = disk.map_err(|error| error.to_string())?.ok_or("it is not a qcow2 any more")?;
        counts::check(state)?;
        let bytes = disk.read_vec(self.base(), LEN).map_err(|error| error.to_string())?;
        self.check_bitmaps(state, &bytes)?;
        Ok(bytes)
    }

    /// A bitmap that is said to be consistent is that of a disk without writes.
    fn check_bitmaps(&self, state: &State, bytes: &[u8]) -> Result<(), String> {
        let mut autoclear = [0; 8];
        state.read_at(&mut autoclear, 88).map_err(|error| error.to_string())?;
        if !self.kind.bitmap || autoclear == [0; 8] {
            return Ok(());
        }
        let first = Image::raw(Arc::new(self.bytes.clone()), self.bytes.len() as u64, 512);
        let disk = unpack_alone(&first).unwrap().unwrap();
        let written = disk.read_vec(self.base(), LEN).unwrap() != bytes;
        if written {
            Err("the disk was written to, and its bitmap says that it was not".to_owned())
        } else {
            Ok(())
        }
    }

    /// The same by QEMU's tools.
    fn read_by_qemu(&self, state: &State) -> Result<Vec<u8>, String> {
        write_sparse(&self.path("state"), &state.bytes());
        let ran =
            |words: &[&str]| Command::new("qemu-img").current_dir(&self.dir).args(words).output().unwrap();
        let check = ran(&["check", "-f", "qcow2", "state"]);
        // 3: unused clusters.
        if ![Some(0), Some(3)].contains(&check.status.code()) {
            return Err(String::from_utf8_lossy(&[check.stdout, check.stderr].concat()).into_owned());
        }
        let convert = ran(&["convert", "-f", "qcow2", "-O", "raw", "state", "disk"]);
        assert!(convert.status.success(), "{convert:?}");
        Ok(fs::read(self.path("disk")).unwrap().split_off(self.base() as usize))
    }

    /// What is lost in the course of a run.
    fn lost(&self, before: &[u8], events: &[Event], seed: u64, count: &mut Count) -> Option<String> {
        count.runs += 1;
        count.events += events.len();
        losses(before, events, seed, |state| {
            let read = self.read(state);
            count.states += 1;
            if count.states.is_multiple_of(SAMPLE) {
                count.by_qemu += 1;
                match (&read, self.read_by_qemu(state)) {
                    (Ok(ours), Ok(theirs)) => assert!(*ours == theirs, "QEMU reads it otherwise"),
                    (Err(_), Err(_)) => {}
                    (ours, theirs) => panic!("becket: {:?}, QEMU: {:?}", ours.as_ref().err(), theirs.err()),
                }
            }
            read
        })
    }
}

/// How a run goes.
#[derive(Debug, Default)]
struct How {
    /// Of the first write.
    version: u64,
    faults: Faults,
    /// How often in a million what makes room is failed.
    failing: u64,
    direct: bool,
    seed: u64,
}

/// One state of so many is shown to QEMU.
const SAMPLE: usize = 400;

#[derive(Debug, Default)]
struct Count {
    runs: usize,
    events: usize,
    states: usize,
    by_qemu: usize,
}

/// A file of these bytes that takes no room for zeroes.
fn write_sparse(path: &Path, bytes: &[u8]) {
    let file = File::create(path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    for (at, part) in
        (0..).step_by(4096).zip(bytes.chunks(4096)).filter(|(_, part)| part.iter().any(|b| *b != 0))
    {
        file.write_all_at(part, at).unwrap();
    }
}

/// A state that the power, going in the middle of a run, could leave.
fn cut(before: &[u8], events: &[Event], seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut file = Recorded::new(before);
    let count = random.below(events.len() as u64 + 1) as usize;
    events[..count].iter().for_each(|event| file.take(event));
    whole_sectors(file.state(Keep::Chance, &mut random).bytes())
}

fn whole_sectors(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn ready(name: &str) -> bool {
    require_plain_machine(&format!("qcow2::{name}"), &["qemu-img", "qemu-io"])
}

/// Twice each: what a power cut has left is written to again, and cut again.
#[test]
fn a_power_cut_leaves_an_image_with_all_that_was_promised() {
    if !ready("a_power_cut_leaves_an_image_with_all_that_was_promised") {
        return;
    }
    let count = RefCell::new(Count::default());
    for kind in KINDS {
        let made = Made::new(kind);
        let config =
            Config { cases: runs(2), failure_persistence: None, max_shrink_iters: 30, ..Config::default() };
        let strategy = (steps(), steps(), any::<u64>(), any::<bool>(), 0..3);
        let run = |(first, second, seed, direct, faulty): (Vec<Vec<Step>>, _, _, _, _)| {
            let mut before = made.bytes.clone();
            for (turn, lanes) in [first, second].into_iter().enumerate() {
                let faults = if faulty == 1 { all_faults(seed) } else { Faults::default() };
                let failing = if faulty == 2 { 20_000 } else { 0 };
                let how = How { version: (turn as u64) << 32, faults, failing, direct, seed };
                let events = made.recorded(&before, &lanes, &how);
                let lost = made.lost(&before, &events, seed, &mut count.borrow_mut());
                prop_assert!(lost.is_none(), "{kind:?}, turn {turn}: {}", lost.unwrap());
                before = cut(&before, &events, seed);
            }
            Ok(())
        };
        TestRunner::new(config).run(&strategy, run).unwrap_or_else(|error| panic!("{error}"));
    }
    println!("{:?}", count.into_inner());
}

/// Writes alone, so that only the writer syncs.
fn writes() -> Vec<Vec<Step>> {
    let write = |at| Step::Write { at, sectors: 3, durable: false };
    vec![vec![write(1), write(11), write(26)]; LANES as usize]
}

#[test]
fn a_table_of_counts_that_becomes_too_short_is_replaced_safely() {
    if !ready("a_table_of_counts_that_becomes_too_short_is_replaced_safely") {
        return;
    }
    let made = Made::new(OUTGROWN);
    let table = |bytes: &[u8]| u64::from_be_bytes(bytes[48..56].try_into().unwrap());
    let events = made.recorded(&made.bytes, &writes(), &How::default());
    assert_ne!(table(&fs::read(made.path("image")).unwrap()), table(&made.bytes), "it was long enough");
    assert_eq!(made.lost(&made.bytes, &events, 1, &mut Count::default()), None);
}

/// The checker itself: a writer that forgets one of its syncs is found out. Exceptions are syncs on which
/// nothing depends here: the one after the entries of the table of counts, because what they count comes into
/// use later, and those of the end, of which the first only matters where clusters have lost their user.
#[test]
fn a_writer_that_forgets_a_sync_is_found_out() {
    if !ready("a_writer_that_forgets_a_sync_is_found_out") {
        return;
    }
    // Where all clusters are there, nothing but the end of the bitmap is synced before the first write.
    let full = Kind { full: BITMAP.size, ..BITMAP };
    for (kind, of_the_end, unneeded) in [(KINDS[0], 2, 1), (KINDS[2], 1, 1), (OUTGROWN, 2, 1), (full, 2, 9)] {
        let made = Made::new(kind);
        let events = made.recorded(&made.bytes, &writes(), &How::default());
        let lost = |events: &[Event]| made.lost(&made.bytes, events, 1, &mut Count::default());
        assert_eq!(lost(&events), None);
        let syncs = events.iter().filter(|event| **event == Event::Syncs(GROWER)).count();
        let needed: Vec<usize> = (0..syncs - of_the_end).filter(|number| *number != unneeded).collect();
        assert!(!needed.is_empty());
        for forgotten in needed {
            let mut number = 0..;
            let lying = without_syncs(&events, |who| who == GROWER && number.next() == Some(forgotten));
            assert!(lost(&lying).is_some(), "{kind:?}: nobody missed sync {forgotten} of {syncs}");
        }
    }
}

/// The same for the engine: a durable write needs a sync, for what says where its bytes are.
#[test]
fn a_durable_write_without_its_place_is_found_out() {
    if !ready("a_durable_write_without_its_place_is_found_out") {
        return;
    }
    let made = Made::new(KINDS[0]);
    let lanes = vec![vec![Step::Write { at: 1, sectors: 3, durable: true }]; LANES as usize];
    let events = made.recorded(&made.bytes, &lanes, &How::default());
    assert_eq!(made.lost(&made.bytes, &events, 1, &mut Count::default()), None);
    let lying = without_syncs(&events, |who| who != GROWER);
    assert!(made.lost(&made.bytes, &lying, 1, &mut Count::default()).is_some());
}

//! All at once, for hours: loads, faults below, deaths of servers, live changes, devices that come and go,
//! queries. Anything wrong, late or left over ends it.
//!
//! It goes in stretches: a rough one, in which the servers are disturbed, then a calm one without
//! disturbance. After each all but the loads pauses, and what supervisor and worker hold is counted.

mod change;
mod churn;
mod faulty;
mod questions;

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Command, exit},
    sync::{
        Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use becket_testkit::{
    Ran, Scratch, image, require_device, require_fuse, require_tools, scaled, skip, wait_until,
};
use serde_json::{Value, json};

use crate::common::disturb::{PATIENCE, WORKER, await_device};
use crate::common::load::{SIZE, Seen, under_load};
use crate::common::scratch;
use crate::course::{Course, RAW};
use crate::held::{Held, held, no_leak, processes};
use crate::script::{self, Script, TRANSACTIONS};
use crate::{kernel, report, reported};

/// The first device is longer than its load needs, and this much of that comes and goes.
const TAIL: u64 = 8 << 20;
/// How long all is rough, and then half as long calm, where there is time for that.
const STRETCH: Duration = Duration::from_secs(60);
/// A soak that takes so much longer than it should hangs.
const GRACE: Duration = Duration::from_secs(600);

#[test]
fn a_soak_finds_nothing() {
    let name = "soak::a_soak_finds_nothing";
    if let Some(length) = length(name)
        && require_device(name)
        && require_tools(name, &TOOLS)
    {
        soak(&becket_testkit::via(), length);
    }
}

#[test]
fn a_soak_over_fuse_finds_nothing() {
    let name = "soak::a_soak_over_fuse_finds_nothing";
    if let Some(length) = length(name)
        && require_fuse(name)
        && require_tools(name, &TOOLS)
    {
        soak("fuse", length);
    }
}

/// How long it is to take; CI has no time for it.
fn length(name: &str) -> Option<Duration> {
    let reported = reported("BECKET_SOAK");
    if reported.is_none() {
        skip(name, "cargo xtask soak runs it");
    }
    reported.map(Duration::from_secs)
}

const TOOLS: [&str; 8] = ["fio", "git", "sqlite3", "mkfs.ext4", "sfdisk", "mksquashfs", "qemu-img", "e2fsck"];

/// What all who take part share.
struct Soak<'a> {
    place: &'a Scratch,
    via: &'a str,
    seed: u64,
    /// Those who load the first device, and those who load the ones under faults.
    seen: &'a Seen,
    faulty: &'a Seen,
    stop: AtomicBool,
    /// Held for reading by each thread at work, and for writing by the one that wants all to rest.
    busy: RwLock<()>,
    /// Grows when a disturbance begins, and when it is over: odd while something may fail for it.
    unrest: AtomicU64,
    counts: Mutex<BTreeMap<String, u64>>,
}

impl Soak<'_> {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn count(&self, what: impl Into<String>) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner).entry(what.into()).or_default() += 1;
    }

    /// Does something again and again until all is to end.
    fn again_and_again(&self, pause: Duration, mut once: impl FnMut()) {
        while !self.stopped() {
            let busy = self.busy.read().unwrap_or_else(PoisonError::into_inner);
            once();
            drop(busy);
            thread::sleep(scaled(pause));
        }
    }

    /// Calls becket. A call that fails as its server dies is repeated, unless `has` says that it has taken
    /// effect.
    fn call(&self, words: &[&str], has: impl Fn(&Ran) -> bool) -> Ran {
        let begun = Instant::now();
        loop {
            let before = self.unrest.load(Ordering::SeqCst);
            let ran = self.place.run(words);
            if ran.code == 0 || has(&ran) {
                return ran;
            }
            let undisturbed = before.is_multiple_of(2) && self.unrest.load(Ordering::SeqCst) == before;
            assert!(!undisturbed, "nobody was disturbed, but becket {words:?}: {ran:?}");
            assert!(begun.elapsed() < scaled(PATIENCE), "becket {words:?} fails for ever: {ran:?}");
            self.count("calls made again");
            thread::sleep(scaled(Duration::from_millis(100)));
        }
    }

    fn ok(&self, words: &[&str]) -> Ran {
        self.call(words, |_| false)
    }

    /// Attaches an image by that name.
    fn attach(&self, words: &[&str], name: &str) {
        let words: Vec<&str> = ["attach", "--name", name].iter().chain(words).copied().collect();
        // The server may have died after it was done, before it could say so.
        let lives = || self.device(name).is_some_and(|info| info["state"] == "live");
        let reported = self.call(&words, |_| lives());
        // Its link is then made by the next server.
        let there = || self.place.links().join(name).exists();
        assert!(
            if reported.code == 0 { there() } else { wait_until(PATIENCE, there) },
            "{name} has no link: {reported:?}"
        );
    }

    fn detach(&self, name: &str) {
        // One that failed may have been carried out.
        self.call(&["detach", name], |ran| ran.err.contains("no device or image of becket's"));
        assert!(self.device(name).is_none(), "{name} is there although it was detached");
    }

    fn device(&self, name: &str) -> Option<Value> {
        self.place.devices().into_iter().find(|info| info["name"] == name)
    }

    /// Waits until everything is as if there had been no disturbance.
    fn await_calm(&self) {
        let fine = |info: &Value| ["live", "detaching"].iter().any(|state| info["state"] == *state);
        let calm = wait_until(PATIENCE, || self.place.devices().iter().all(fine));
        assert!(calm, "not all are served again: {:#?}", self.place.devices());
    }

    /// What is held while all but the loads rest.
    fn at_rest(&self) -> Held {
        let _all = self.busy.write().unwrap_or_else(PoisonError::into_inner);
        held(&await_device(self.place, RAW, |_| true))
    }
}

/// Ends all when one who takes part has failed, and when the one who leads them comes to an end.
struct EndAll<'a, 'b> {
    soak: &'a Soak<'b>,
    always: bool,
}

impl Drop for EndAll<'_, '_> {
    fn drop(&mut self) {
        if self.always || thread::panicking() {
            self.soak.stop.store(true, Ordering::SeqCst);
        }
    }
}

fn soak(via: &str, length: Duration) {
    let seed = reported("BECKET_SOAK_SEED").unwrap_or(0);
    let begun = Instant::now();
    let place = scratch();
    let runtime = place.runtime();
    thread::spawn(move || {
        thread::sleep(scaled(length + GRACE));
        give_up(&runtime);
    });
    let attach = |name: &str, size: u64| {
        image::sparse(&place.path(name), size);
        place.ok(["attach", "--via", via, "--cache-size", "16M", "--name", name, name]);
        place.links().join(name)
    };
    let raw = attach(RAW, SIZE as u64 + TAIL);
    let served = !place.devices()[0][WORKER].is_null();
    let mut scripts = script::start(&place, attach);
    let (seen, under_faults) = (Seen { seed, ..Seen::default() }, Seen { seed, ..Seen::default() });
    let soak = Soak {
        place: &place,
        via,
        seed,
        seen: &seen,
        faulty: &under_faults,
        stop: AtomicBool::new(false),
        busy: RwLock::new(()),
        unrest: AtomicU64::new(0),
        counts: Mutex::default(),
    };
    let mut course = Course::new(seed);
    let mut rests: Vec<Held> = Vec::new();
    let (ended, model) = under_load(&raw, &seen, || {
        thread::scope(|scope| {
            let takes_part = |part: fn(&Soak<'_>)| {
                let soak = &soak;
                scope.spawn(move || {
                    let _tell = EndAll { soak, always: false };
                    part(soak);
                })
            };
            let mut threads = vec![
                takes_part(|soak| churn::churn(soak, 0)),
                takes_part(|soak| churn::churn(soak, 1)),
                takes_part(change::change),
                takes_part(questions::ask),
            ];
            if served {
                threads.push(takes_part(faulty::load));
            }
            let end = EndAll { soak: &soak, always: true };
            let stretch = STRETCH.min(length / 3);
            while begun.elapsed() < length && !soak.stopped() {
                let rough = Instant::now();
                while served && rough.elapsed() < scaled(stretch) && !soak.stopped() {
                    thread::sleep(course.moment());
                    soak.unrest.fetch_add(1, Ordering::SeqCst);
                    course.next(&place, &seen, &mut scripts);
                    soak.await_calm();
                    soak.unrest.fetch_add(1, Ordering::SeqCst);
                }
                rests.push(soak.at_rest());
                thread::sleep(scaled(stretch / 2));
                assert!(seen.goes_on(PATIENCE), "the load does not go on");
                scripts.iter_mut().for_each(Script::goes_on);
                rests.push(soak.at_rest());
            }
            drop(end);
            // What failed has said why.
            threads.into_iter().all(|thread| thread.join().is_ok())
        })
    });
    assert!(ended, "one who took part has failed");
    let turns = scripts.each_mut().map(Script::end);
    wait_until(Duration::from_secs(20), || {
        rests.push(soak.at_rest());
        no_leak(&rests[0], &rests[rests.len() - 1])
    });
    seen.compare(&fs::read(&raw).unwrap(), &model, 0);
    place.ok(["detach", "--all"]);
    seen.compare(&fs::read(place.path(RAW)).unwrap(), &model, 0);
    tell(&soak, &mut course, turns, &rests, begun.elapsed());
}

/// Ends a soak that hangs. Its servers go first: a process that waits for a stopped one may keep others from
/// their loop devices, and gets an error then.
fn give_up(runtime: &Path) -> ! {
    println!("soak: something hangs");
    for process in processes(runtime) {
        println!("soak: killed {process}");
        let _ = Command::new("kill").args(["-KILL", process.split(' ').next().unwrap_or_default()]).status();
    }
    thread::sleep(Duration::from_secs(30));
    exit(101)
}

/// Says what came of it, and fails when anything was wrong.
fn tell(soak: &Soak<'_>, course: &mut Course, turns: [usize; 3], rests: &[Held], took: Duration) {
    let Soak { place, via, seed, seen, faulty, .. } = soak;
    let devices = place.devices().len();
    wait_until(PATIENCE, || processes(&place.runtime()).is_empty());
    let processes = processes(&place.runtime());
    let number = |number: &AtomicU64| number.load(Ordering::Relaxed);
    let (first, last) = (rests[0], rests[rests.len() - 1]);
    let [pause, disturbances] = course.pauses();
    let counts = soak.counts.lock().unwrap();
    let kernel = kernel();
    let operations = number(&seen.operations) + number(&faulty.operations);
    let wrong = number(&seen.wrong_bytes) + number(&faulty.wrong_bytes);
    let (errors, due) =
        (number(&seen.errors) + number(&faulty.errors), counts.get("errors on purpose").unwrap_or(&0));
    let [clones, sqlite, fio] = turns;
    report(
        "soak",
        &json!({
            "via": via, "seed": seed, "kernel": kernel, "seconds": took.as_secs(), "operations": operations, "wrong_bytes": wrong,
            "errors": errors, "clones": clones, "transactions": TRANSACTIONS * sqlite, "fio_runs": fio, "counts": *counts,
            "devices_left": devices, "processes_left": processes, "descriptors_threads_kib": rests, "pause": pause,
            "disturbances": disturbances,
        }),
    );
    println!("soak over {via}, Linux {kernel}, {} s, seed {seed}", took.as_secs());
    println!(
        "  {operations} operations that know each byte, {clones} clones, {} transactions, {fio} fio runs: {wrong} wrong bytes",
        TRANSACTIONS * sqlite
    );
    println!("  {} disturbances of those who serve, survived; pause {pause}", course.done);
    println!("  {due} injected errors, each reported to its request; {errors} others");
    for (what, count) in counts.iter().filter(|(what, _)| *what != "errors on purpose") {
        println!("  {count} {what}");
    }
    println!("  left behind: {devices} devices, {} processes", processes.len());
    println!(
        "  descriptors, threads, KiB of supervisor and worker, {} times: {first:?} first, {last:?} last",
        rests.len()
    );
    for seen in [seen, faulty] {
        assert!(seen.nothing_wrong(), "{:?}", seen.first.lock().unwrap());
    }
    assert!(devices == 0 && processes.is_empty(), "{devices} devices and {processes:?} are left behind");
    assert!(no_leak(&first, &last), "{rests:?}");
}

//! Everything that must hold before a change is taken, in one command: `make test` and CI run exactly this.
//! Never calls a run good that lost a test: a step that dies, a report that is missing or a skip that
//! is not allowed fails it.

mod allow;
mod build;
mod case;
mod guest;
mod host;
mod libtest;
mod report;
mod steps;

use std::collections::VecDeque;
use std::sync::mpsc::{self, RecvError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::exec;
use crate::vm::show;
use allow::Allowed;
pub(crate) use build::{Binaries, test_of_becket};
use case::Finished;
pub(crate) use case::{Case, Outcome, count};
use guest::InGuest;
pub(crate) use host::tested;
use steps::{NAMED_ONLY, STEPS, Step, choose};

/// Arguments of `cargo xtask ci`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only these steps, or groups of them (`guest`, `guest-7.x`); `--list` shows the names
    #[arg(long, value_name = "STEP")]
    only: Vec<String>,
    /// Print the steps' names and end
    #[arg(long)]
    list: bool,
    /// Run the conformance suite in full in each mode that runs; otherwise random operations are fewer in
    /// some modes
    #[arg(long)]
    whole: bool,
}

/// Longest that what the guests run is waited for.
const BUILD: Duration = Duration::from_secs(3600);
/// Cargo's arguments for the tests of `Step::Unit`.
const UNIT: [&str; 4] = ["--lib", "--bins", "--test", "words"];

/// Runs the steps and reports; 0 when everything is as it must be.
pub(crate) fn run(args: &Args) -> Result<u8> {
    if args.list {
        STEPS.iter().for_each(|(name, _)| println!("{name}"));
        return Ok(0);
    }
    let chosen = choose(&args.only)?;
    let allowed = Allowed::read()?;
    let begin = Instant::now();

    let boots = Boots::of(&chosen);
    let host = chosen.iter().filter(|(_, step)| !matches!(step, Step::Guest { .. }));
    // Tests wait much of their time, on the host and in guests: both run at once, and a second guest once the
    // host has nothing to do any more.
    let mut finished = std::thread::scope(|scope| {
        let (making, made) = mpsc::channel();
        let guests = scope.spawn(|| {
            let mut finished = boots.prepare(making);
            finished.extend(boots.boot_all(args.whole));
            finished
        });
        let mut finished = Vec::new();
        for (name, step) in host {
            if step.attaches() {
                let _: Result<(), RecvError> = made.recv();
            }
            finished.push(on_host((name, *step)));
        }
        finished.extend(boots.boot_all(args.whole));
        finished.extend(guests.join().unwrap_or_else(|_| {
            let cases = vec![Case::of_step("guests", Outcome::Failed, "xtask panicked".to_owned())];
            vec![Finished { name: "guests", cases, took: begin.elapsed() }]
        }));
        finished
    });
    finished.sort_by_key(|one| STEPS.iter().position(|(name, _)| *name == one.name));
    for step in &mut finished {
        allowed.judge(&mut step.cases);
    }
    report::write_conformance(&finished)?;
    let left_out: &[&str] = if args.only.is_empty() { &NAMED_ONLY } else { &[] };
    Ok(report::print(&finished, left_out, begin.elapsed()))
}

/// Runs a step under a heading; an error is a failed case of the step's own name.
fn timed(name: &'static str, step: impl FnOnce() -> Result<Vec<Case>>) -> Finished {
    println!("\n== {name}");
    let begin = Instant::now();
    let cases =
        step().unwrap_or_else(|error| vec![Case::of_step(name, Outcome::Failed, format!("{error:#}"))]);
    let took = begin.elapsed();
    println!("== {name}: {}", report::summary(&cases, took));
    Finished { name, cases, took }
}

/// Runs a step of this machine.
fn on_host((name, step): (&'static str, Step)) -> Finished {
    timed(name, || match step {
        Step::Cargo(words) => host::check(words),
        Step::Unit => host::tests(&UNIT),
        Step::Test => host::all_tests(),
        Step::Install => host::install(),
        Step::Packages => host::packages(),
        Step::HostConformance { via, over_nbd } => {
            host::conformance(&Binaries::conformance()?, via, over_nbd)
        }
        Step::LosetupSuite => crate::suite::cases(&exec::shipped()?),
        Step::Guest { .. } => bail!("a guest runs it"),
    })
}

/// The guests that are to be booted, for all who boot them.
struct Boots {
    left: Mutex<VecDeque<Vec<InGuest>>>,
    /// What they run, once it is built; `None` if it could not be.
    binaries: (Mutex<Option<Option<Arc<Binaries>>>>, Condvar),
}

impl Boots {
    fn of(chosen: &[(&'static str, Step)]) -> Boots {
        let left = Mutex::new(guest::boots(chosen).into());
        Boots { left, binaries: (Mutex::default(), Condvar::new()) }
    }

    /// Makes the guests' root file system and builds what they run. `making` is dropped once the root file
    /// system is there.
    fn prepare(&self, making: Sender<()>) -> Vec<Finished> {
        let left = self.left();
        let (any, tests) = (!left.is_empty(), left.iter().flatten().any(InGuest::needs_tests));
        drop(left);
        let mut built = None;
        let finished = any.then(|| {
            timed("build", || {
                let made = crate::vm::prepare();
                drop(making);
                made?;
                built = Some(Arc::new(if tests { Binaries::all()? } else { Binaries::conformance()? }));
                Ok(vec![Case::of_step("build", Outcome::Passed, String::new())])
            })
        });
        *self.binaries.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(built);
        self.binaries.1.notify_all();
        finished.into_iter().collect()
    }

    /// Boots one after another, until none is left.
    fn boot_all(&self, whole: bool) -> Vec<Finished> {
        let (binaries, ready) = &self.binaries;
        let binaries = binaries.lock().unwrap_or_else(PoisonError::into_inner);
        // One who has panicked builds nothing.
        let binaries = ready.wait_timeout_while(binaries, BUILD, |built| built.is_none());
        let binaries = binaries.unwrap_or_else(PoisonError::into_inner).0.clone().flatten();
        // That nothing could be built was reported.
        let Some(binaries) = binaries else { return Vec::new() };
        let mut finished = Vec::new();
        while let Some(steps) = { self.left().pop_front() } {
            let names = guest::names(&steps);
            println!("\n== {names}");
            // Whole lines, among those of the host and of another guest.
            let prefix = format!("{}| ", steps.first().map_or("guest", |step| step.name()));
            let reported = guest::run(&steps, whole, &binaries, &mut |line| {
                show(&[prefix.as_bytes(), line].concat());
            });
            for step in &reported {
                println!("== {}: {}", step.name, report::summary(&step.cases, step.took));
            }
            finished.extend(reported);
        }
        finished
    }

    fn left(&self) -> MutexGuard<'_, VecDeque<Vec<InGuest>>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

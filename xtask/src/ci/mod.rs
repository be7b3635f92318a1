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

use std::sync::mpsc::{self, RecvError, Sender};
use std::time::Instant;

use anyhow::{Result, bail};

use crate::exec;
use crate::vm::show;
use allow::Allowed;
pub(crate) use build::{Binaries, test_of_becket};
use case::Finished;
pub(crate) use case::{Case, Outcome, count};
use guest::InGuest;
pub(crate) use host::tested;
use steps::{STEPS, Step, choose};

/// Arguments of `cargo xtask ci`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only these steps, or groups of them (`guest`, `guest-7.x`); `--list` shows the names
    #[arg(long, value_name = "STEP")]
    only: Vec<String>,
    /// Print the steps' names and end
    #[arg(long)]
    list: bool,
    /// Run the conformance suite in full in each mode; otherwise file systems are tested in some modes only
    #[arg(long)]
    whole: bool,
}

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

    let boots = guest::boots(&chosen);
    let host = chosen.into_iter().filter(|(_, step)| !matches!(step, Step::Guest { .. }));
    // Tests wait much of their time, on the host and in guests: both run at once.
    let mut finished = std::thread::scope(|scope| {
        let (making, made) = mpsc::channel();
        let guests = scope
            .spawn(|| if boots.is_empty() { Vec::new() } else { all_guests(&boots, args.whole, making) });
        let mut finished = Vec::new();
        for (name, step) in host {
            if step.attaches() {
                let _: Result<(), RecvError> = made.recv();
            }
            finished.push(on_host((name, step)));
        }
        finished.extend(guests.join().unwrap_or_else(|_| {
            let cases = vec![Case::of_step("guests", Outcome::Failed, "xtask panicked".to_owned())];
            vec![Finished { name: "guests", cases, took: begin.elapsed() }]
        }));
        finished
    });
    for step in &mut finished {
        allowed.judge(&mut step.cases);
    }
    report::write_conformance(&finished)?;
    Ok(report::print(&finished, begin.elapsed()))
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
        Step::HostConformance(via) => host::conformance(&Binaries::conformance()?, via),
        Step::LosetupSuite => crate::suite::cases(&exec::shipped()?),
        Step::Guest { .. } => bail!("a guest runs it"),
    })
}

/// Shows whole lines of a guest, among those of the host.
fn shown(line: &[u8]) {
    show(&[b"guest| ", line].concat());
}

/// Makes the guests' root file system, builds what they run, and boots one after another. `making` is dropped
/// once the root file system is there.
fn all_guests(boots: &[Vec<InGuest>], whole: bool, making: Sender<()>) -> Vec<Finished> {
    let mut binaries = None;
    let mut finished = vec![timed("build", || {
        let made = crate::vm::prepare();
        drop(making);
        made?;
        let tests = boots.iter().flatten().any(InGuest::needs_tests);
        binaries = Some(if tests { Binaries::all()? } else { Binaries::conformance()? });
        Ok(vec![Case::of_step("build", Outcome::Passed, String::new())])
    })];
    let Some(binaries) = binaries else { return finished };
    for steps in boots {
        println!("\n== {}", guest::names(steps));
        let reported = guest::run(steps, whole, &binaries, &mut shown);
        for step in &reported {
            println!("== {}: {}", step.name, report::summary(&step.cases, step.took));
        }
        finished.extend(reported);
    }
    finished
}

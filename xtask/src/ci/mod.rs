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

use std::sync::mpsc::{self, RecvError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::exec;
use crate::vm::{Series, show};
use allow::Allowed;
pub(crate) use build::{Binaries, test_of_becket};
pub(crate) use case::{Case, Outcome, count};
use guest::InGuest;
pub(crate) use host::tested;

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

/// One thing that is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A command of cargo's that is one check.
    Cargo(&'static [&'static str]),
    /// A part of `Test`, which needs neither root nor devices: runs only when it is named.
    Unit,
    Test,
    /// `make install`, and then `make uninstall`.
    Install,
    /// The conformance suite over a transport of this machine.
    HostConformance(&'static str),
    LosetupSuite,
    Guest {
        series: Series,
        load: Load,
    },
}

impl Step {
    /// Whether it attaches devices of this machine. Not while the guests' root file system is made, in a mount
    /// namespace: that would keep a copy of each mount of a device, and so keep the device in use.
    fn attaches(self) -> bool {
        !matches!(self, Step::Cargo(_) | Step::Unit)
    }
}

/// What a guest is booted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// The conformance suite over a transport, and how that moves data.
    Conformance { via: &'static str, mode: Option<&'static str> },
    /// The tests of the packages that use ublk.
    Tests,
    /// What users without privileges have.
    Users,
    /// A start of the machine with systemd and so many images in /etc/beckettab.
    Boot { images: u32 },
}

const fn guest(series: Series, load: Load) -> Step {
    Step::Guest { series, load }
}

const fn suite(series: Series, via: &'static str, mode: Option<&'static str>) -> Step {
    guest(series, Load::Conformance { via, mode })
}

/// All steps, in their order: what is quick and likely to fail first.
const STEPS: [(&str, Step); 19] = [
    ("fmt", Step::Cargo(&["fmt", "--all", "--check"])),
    ("clippy", Step::Cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])),
    ("doc", Step::Cargo(&DOC)),
    ("unit", Step::Unit),
    ("test", Step::Test),
    ("install", Step::Install),
    ("conformance-host", Step::HostConformance("loop")),
    ("conformance-host-fuse", Step::HostConformance("fuse")),
    ("losetup-suite", Step::LosetupSuite),
    ("guest-7.x-zero-copy", suite(Series::V7, "ublk", Some("zero-copy"))),
    ("guest-7.x-copy", suite(Series::V7, "ublk", Some("copy"))),
    ("guest-7.x-batch-zero-copy", suite(Series::V7, "ublk", Some("batch-zero-copy"))),
    ("guest-7.x-batch-copy", suite(Series::V7, "ublk", Some("batch-copy"))),
    ("guest-7.x-dm", suite(Series::V7, "dm", None)),
    ("guest-7.x-tests", guest(Series::V7, Load::Tests)),
    ("guest-7.x-boot", guest(Series::V7, Load::Boot { images: 8 })),
    ("guest-6.12", suite(Series::V6_12, "ublk", Some("copy"))),
    ("guest-6.12-users", guest(Series::V6_12, Load::Users)),
    ("guest-6.1", suite(Series::V6_1, "loop", None)),
];

/// With `--examples` cargo chooses the features that the tests have: no dependency is checked twice.
const DOC: [&str; 7] =
    ["doc", "--workspace", "--no-deps", "--document-private-items", "--lib", "--bins", "--examples"];

/// Cargo's arguments for the tests of `Step::Unit`.
const UNIT: [&str; 4] = ["--lib", "--bins", "--test", "words"];

/// What a step found out, and how long it took.
pub(crate) struct Finished {
    name: &'static str,
    cases: Vec<Case>,
    took: Duration,
}

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

fn choose(only: &[String]) -> Result<Vec<(&'static str, Step)>> {
    for wanted in only {
        if !STEPS.iter().any(|(name, _)| is_or_begins(name, wanted)) {
            let names: Vec<&str> = STEPS.iter().map(|(name, _)| *name).collect();
            bail!("there is no step `{wanted}`; there are {}", names.join(", "));
        }
    }
    let chosen = |(name, step): &(&str, Step)| {
        let named = only.iter().any(|wanted| is_or_begins(name, wanted));
        named || (only.is_empty() && *step != Step::Unit)
    };
    Ok(STEPS.into_iter().filter(chosen).collect())
}

/// Whether a step is the wanted one, or belongs to the wanted group: `guest-6.1` is no part of `guest-6.12`.
fn is_or_begins(name: &str, wanted: &str) -> bool {
    name.strip_prefix(wanted).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_chosen_by_name_or_group() {
        let names = |only: &[&str]| -> Vec<&str> {
            let only: Vec<String> = only.iter().map(|&word| word.to_owned()).collect();
            choose(&only).unwrap().into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(&["guest-6.1"]), ["guest-6.1"]);
        let all: Vec<_> =
            STEPS.iter().map(|(name, _)| *name).filter(|name| name.starts_with("guest-7.x-")).collect();
        assert_eq!(names(&["guest-7.x"]), all);
        assert!(all.len() > 1);
        assert_eq!(names(&["fmt", "doc"]), ["fmt", "doc"]);
        assert_eq!(names(&["unit"]), ["unit"]);
        assert_eq!(names(&[]).len(), STEPS.len() - 1, "`test` has the tests of `unit`");
        assert!(choose(&["nothing".to_owned()]).is_err());
    }
}

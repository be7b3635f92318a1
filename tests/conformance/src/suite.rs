//! Runs the tests one after the other and says how each ended.
//! Must never lose a failure: a test that panics, hangs or is ignored without leave fails the run.

use std::fs;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::bench::{Bench, Skip, load};
use crate::bytes::mix;
use crate::driver::{Driver, Via};
use crate::tests;

/// What a test needs from the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Any block device attached by anything.
    Device,
    /// What becket promises beyond the kernel's own tool.
    Becket,
}

/// One test.
#[derive(Clone, Copy)]
pub(crate) struct Test {
    /// Its name, as `--only` and `--allow-skip` take it.
    pub(crate) name: &'static str,
    /// Whether the kernel's own tool could pass it.
    pub(crate) needs: Needs,
    /// Its body.
    pub(crate) body: fn(&Bench) -> Result<()>,
}

/// How a test ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Passed,
    Failed,
    Ignored,
}

/// A line of the JSON report.
#[derive(Debug, Serialize)]
struct Report<'a> {
    test: &'static str,
    via: &'a str,
    mode: Option<&'a str>,
    kernel: &'a str,
    outcome: Outcome,
    seconds: f64,
    note: String,
}

/// The whole run.
pub(crate) struct Suite {
    /// Who attaches.
    pub(crate) driver: Arc<dyn Driver>,
    /// The transport.
    pub(crate) via: Via,
    /// How it moves data, when that was said.
    pub(crate) mode: Option<String>,
    /// Where images go.
    pub(crate) scratch: PathBuf,
    /// Decides everything random.
    pub(crate) seed: u64,
    /// Operations of the random tests.
    pub(crate) ops: u64,
    /// A part of the names of the tests to run.
    pub(crate) only: Option<String>,
    /// Tests that may be ignored.
    pub(crate) allow_skip: Vec<String>,
    /// After this a test counts as hung.
    pub(crate) limit: Duration,
}

impl Suite {
    fn chosen(&self) -> Vec<Test> {
        let wanted = |test: &Test| self.only.as_deref().is_none_or(|part| test.name.contains(part));
        let possible = |test: &Test| test.needs == Needs::Device || self.driver.is_becket();
        tests::all().into_iter().filter(|test| wanted(test) && possible(test)).collect()
    }

    /// Prints the names.
    pub(crate) fn list(&self) {
        for test in self.chosen() {
            println!("{}", test.name);
        }
    }

    /// Runs all; true when everything is as it must be.
    pub(crate) fn run(&self, json: Option<&Path>) -> Result<bool> {
        let known: Vec<_> = tests::all().iter().map(|test| test.name).collect();
        for name in &self.allow_skip {
            ensure!(known.contains(&name.as_str()), "--allow-skip {name}: there is no such test");
        }
        let chosen = self.chosen();
        ensure!(!chosen.is_empty(), "no test has that in its name; --list shows them");
        // The loop driver also for ublk: some tests stand on a plain loop device.
        load("loop", || Path::new("/dev/loop-control").exists());
        if self.via == Via::Ublk {
            load("ublk_drv", || Path::new("/dev/ublk-control").exists());
        }
        if self.via == Via::Dm {
            load("dm-mod", || Path::new("/dev/mapper/control").exists());
        }
        let uname = rustix::system::uname();
        let kernel = uname.release().to_string_lossy();
        let (mut reports, mut good) = (Vec::new(), true);
        println!("running {} tests, seed {}", chosen.len(), self.seed);
        for test in chosen {
            print!("test {} ... ", test.name);
            stdout().flush()?;
            let started = Instant::now();
            let (outcome, note, hung) = self.one(test);
            let seconds = started.elapsed().as_secs_f64();
            match outcome {
                Outcome::Passed => println!("ok, {seconds:.1} s"),
                Outcome::Ignored => {
                    println!("ignored, {}", note.split_whitespace().collect::<Vec<_>>().join(" "))
                }
                Outcome::Failed => {
                    println!("FAILED");
                    println!("    {}", note.replace('\n', "\n    "));
                    println!("    repeat with: {}", self.repeat(test));
                }
            }
            let allowed = outcome == Outcome::Ignored && self.allow_skip.iter().any(|name| name == test.name);
            good &= outcome == Outcome::Passed || allowed;
            reports.push(Report {
                test: test.name,
                via: self.via.name(),
                mode: self.mode.as_deref(),
                kernel: &kernel,
                outcome,
                seconds: (seconds * 1000.0).round() / 1000.0,
                note,
            });
            // After each test, so that a machine that dies leaves a report of what went before.
            if let Some(path) = json {
                let text = serde_json::to_string_pretty(&reports)?;
                fs::write(path, text).with_context(|| format!("{}", path.display()))?;
            }
            if hung {
                println!(
                    "    the devices of a hung test cannot be put away; no test after it would mean anything"
                );
                good = false;
                break;
            }
        }
        let count = |outcome| reports.iter().filter(|report| report.outcome == outcome).count();
        println!(
            "conformance {} {kernel}: {} passed; {} failed; {} ignored",
            self.via.name(),
            count(Outcome::Passed),
            count(Outcome::Failed),
            count(Outcome::Ignored)
        );
        Ok(good)
    }

    /// Runs one test in a thread of its own, so that a panic or a hang has a name.
    fn one(&self, test: Test) -> (Outcome, String, bool) {
        let dir = self.scratch.join(test.name);
        let prepared = fs::remove_dir_all(&dir).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        });
        if let Err(error) = prepared.and_then(|()| fs::create_dir_all(&dir)) {
            return (Outcome::Failed, format!("{}: {error}", dir.display()), false);
        }
        let bench = Bench {
            driver: Arc::clone(&self.driver),
            via: self.via,
            dir: dir.clone(),
            // The seed includes the name, so that a test does the same alone as among all. 48 bits leave room
            // to count on.
            seed: test.name.bytes().fold(self.seed, |seed, byte| mix(seed ^ u64::from(byte))) >> 16,
            ops: self.ops,
        };
        let (sender, receiver) = mpsc::channel();
        let thread = thread::spawn(move || {
            let result = (test.body)(&bench);
            // The receiver is gone if the time was over.
            let _ = sender.send(result);
        });
        let result = match receiver.recv_timeout(self.limit) {
            Err(mpsc::RecvTimeoutError::Timeout) => {
                return (Outcome::Failed, format!("no end after {} s", self.limit.as_secs()), true);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(anyhow::anyhow!("the test panicked")),
            Ok(result) => result,
        };
        let _ = thread.join();
        let cleaned = fs::remove_dir_all(&dir);
        match result {
            Err(error) => match error.downcast_ref::<Skip>() {
                Some(Skip(why)) => (Outcome::Ignored, why.clone(), false),
                None => (Outcome::Failed, format!("{error:#}"), false),
            },
            Ok(()) => match cleaned {
                Ok(()) => (Outcome::Passed, String::new(), false),
                Err(error) => (Outcome::Failed, format!("left {} behind: {error}", dir.display()), false),
            },
        }
    }

    fn repeat(&self, test: Test) -> String {
        let mode = self.mode.as_deref().map(|mode| format!(" --mode {mode}")).unwrap_or_default();
        let driver = if self.driver.is_becket() { "" } else { " --driver losetup" };
        format!(
            "becket-conformance --via {}{mode}{driver} --scratch {} --only {} --seed {} --ops {}",
            self.via.name(),
            self.scratch.display(),
            test.name,
            self.seed,
            self.ops
        )
    }
}

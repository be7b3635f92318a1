//! A grid: contestants by workloads by rounds, all in one guest. `cost`, `wall` and `latency` are grids.
//! Never mixes builds: a partial run is merged only into a record of the same becket on the same kernel.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::build::Build;
use super::contestant::Field;
use super::fio::{self, Workload};
use super::guest::{self, Guest};
use super::metric::Metric;
use super::record::{self, Clock, Entrant, Outcome, Run, Sample, Setting};
use crate::vm::quoted;

/// The loop over rounds, contestants and workloads.
const SCRIPT: &str = include_str!("guest/grid.sh");

/// What a grid's command may choose.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Choice {
    #[command(flatten)]
    pub(crate) guest: guest::Options,
    /// Runs of each contestant under each workload, in turn
    #[arg(long)]
    pub(crate) rounds: Option<u32>,
    /// Only these contestants (default: those of the scenario)
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    pub(crate) only: Vec<String>,
    /// Only workloads whose name starts so, as `rand` or `randread-4k-d64` (default: all of the scenario)
    #[arg(long, value_delimiter = ',', value_name = "PREFIX,...")]
    pub(crate) workloads: Vec<String>,
    /// fio's engine: libaio or io_uring
    #[arg(long, default_value = "libaio")]
    pub(crate) engine: String,
    /// Keep the rows of earlier runs of the same build that this run does not measure
    #[arg(long)]
    pub(crate) merge: bool,
}

/// Which contestants are measured by which workloads, and how often.
pub(crate) struct Plan {
    /// The record's file, below target/bench.
    pub(crate) json: &'static str,
    pub(crate) clock: Clock,
    pub(crate) cpus: u32,
    pub(crate) rounds: u32,
    pub(crate) metrics: Vec<Metric>,
    pub(crate) workloads: Vec<Workload>,
}

/// A record: `target/bench/cost.json` and others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Grid {
    /// Where and when; each run names its own.
    pub(crate) boots: Vec<Setting>,
    pub(crate) metrics: Vec<Metric>,
    pub(crate) entrants: Vec<Entrant>,
    pub(crate) workloads: Vec<Workload>,
    pub(crate) runs: Vec<Run>,
}

/// Measures and keeps the record.
pub(crate) fn run(options: &Choice, build: &Build, plan: Plan, mut field: Field) -> Result<Grid> {
    field.keep(&options.only)?;
    let workloads = chosen(&options.workloads, plan.workloads)?;
    let rounds = options.rounds.unwrap_or(plan.rounds);
    let old = if options.merge { record::load::<Grid>(plan.json)? } else { None };
    // Before minutes are spent on what could not be merged; the kernel is known only when it has booted.
    if let Some(old) = &old {
        old.is_of(&build.hash)?;
    }
    let guest = Guest::new(&options.guest, build, plan.clock, plan.cpus);
    let load = Load { engine: &options.engine, clock: plan.clock };
    let script = script(&field, &workloads, load, rounds);
    let report = guest.run(&field, Vec::new(), &script)?;
    let mut grid = Grid {
        boots: Vec::new(),
        metrics: plan.metrics,
        entrants: field.contestants.into_iter().map(|one| one.entrant).collect(),
        workloads,
        runs: Vec::new(),
    };
    let (kernel, fio) = grid.gather(&report, load)?;
    let notes = vec![
        format!("load: {fio}, engine {}", options.engine),
        guest::IMAGE.to_owned(),
        format!(
            "{rounds} rounds in one boot, one contestant attached at a time, every other round backwards"
        ),
    ];
    grid.boots.push(guest.setting(&kernel, notes)?);
    if let Some(old) = old {
        grid = old.merged(grid)?;
    }
    eprintln!("xtask: everything is in {}", record::save(plan.json, &grid)?.display());
    Ok(grid)
}

/// How fio is run.
#[derive(Clone, Copy)]
struct Load<'a> {
    engine: &'a str,
    clock: Clock,
}

/// Those of the workloads whose names start as asked.
fn chosen(prefixes: &[String], mut all: Vec<Workload>) -> Result<Vec<Workload>> {
    if !prefixes.is_empty() {
        let names: Vec<String> = all.iter().map(|one| one.name.clone()).collect();
        all.retain(|one| prefixes.iter().any(|prefix| one.name.starts_with(prefix.as_str())));
        if all.is_empty() {
            bail!("no workload is called {}; there are {}", prefixes.join(" or "), names.join(", "));
        }
    }
    Ok(all)
}

fn script(field: &Field, workloads: &[Workload], load: Load<'_>, rounds: u32) -> String {
    let entrants: Vec<String> = field.present().map(|one| quoted(&one.entrant.name)).collect();
    let pair = |name: &str, arguments: String| quoted(&format!("{name}|{arguments}"));
    let jobs: Vec<String> =
        workloads.iter().map(|one| pair(&one.name, one.arguments(load.engine, load.clock))).collect();
    format!("ENTRANTS=({})\nWORKLOADS=({})\nROUNDS={rounds}\n{SCRIPT}", entrants.join(" "), jobs.join("\n"),)
}

impl Grid {
    /// Takes the guest's report in; its kernel and its load generator's version.
    fn gather(&mut self, report: &str, how: Load<'_>) -> Result<(String, String)> {
        let (mut kernel, mut load) = (String::new(), String::new());
        for section in fio::sections(report) {
            match section.words[..] {
                ["kernel", release] => kernel = release.to_owned(),
                ["fio", version] => load = version.to_owned(),
                ["absent", name] => {
                    let entrant = self.entrants.iter_mut().find(|one| one.name == name);
                    let entrant = entrant.context("the guest reports an unknown contestant")?;
                    let why = if section.body.is_empty() { "it said nothing" } else { section.body };
                    entrant.absent.get_or_insert_with(|| format!("it could not be attached: {why}"));
                }
                ["run", name, workload, round, code, device] => {
                    let job = self.workloads.iter().find(|one| one.name == workload);
                    let job = job.context("the guest reports an unknown workload")?;
                    self.runs.push(Run {
                        entrant: name.to_owned(),
                        workload: workload.to_owned(),
                        round: round.parse().context("the guest counts strangely")?,
                        boot: 0,
                        command: format!("fio --filename={device} {}", job.arguments(how.engine, how.clock)),
                        outcome: fio::outcome(code, section.body),
                    });
                }
                _ => bail!("the guest's report has a section `{}`", section.words.join(" ")),
            }
        }
        Ok((kernel, load))
    }

    /// Refuses to have rows of this build of becket merged into a record of another.
    fn is_of(&self, build: &str) -> Result<()> {
        match self.boots.first() {
            Some(old) if old.build != build => {
                bail!("the record is of another build, becket {}: measure without --merge", old.build)
            }
            _ => Ok(()),
        }
    }

    /// This record with another's rows in the place of its own.
    fn merged(mut self, new: Grid) -> Result<Grid> {
        let like = |one: &Setting| (one.build.clone(), one.kernel.clone(), one.clock, one.cpus);
        if let (Some(old), Some(now)) = (self.boots.first(), new.boots.first())
            && like(old) != like(now)
        {
            bail!(
                "the record is of another build, kernel or machine (becket {}, {}, {} CPUs): measure without --merge",
                old.build,
                old.kernel,
                old.cpus
            );
        }
        let first = self.boots.len();
        let again = |entrant: &str, workload: &str| {
            new.runs.iter().any(|run| run.entrant == entrant && run.workload == workload)
        };
        self.runs.retain(|run| !again(&run.entrant, &run.workload));
        self.boots.extend(new.boots);
        self.runs.extend(new.runs.into_iter().map(|run| Run { boot: first + run.boot, ..run }));
        for entrant in new.entrants {
            match self.entrants.iter_mut().find(|one| one.name == entrant.name) {
                Some(one) => *one = entrant,
                None => self.entrants.push(entrant),
            }
        }
        for workload in new.workloads {
            if !self.workloads.contains(&workload) {
                self.workloads.push(workload);
            }
        }
        Ok(self)
    }

    /// One contestant under one workload, over all rounds that succeeded.
    pub(crate) fn sample(&self, entrant: &str, workload: &str, metric: Metric) -> Option<Sample> {
        let values: Vec<f64> = self
            .of(entrant, workload)
            .filter_map(|run| match &run.outcome {
                Outcome::Measured(measure) => Some(metric.of(measure)),
                Outcome::Failed(_) => None,
            })
            .collect();
        Sample::of(&values)
    }

    /// Runs that failed: how many were made again with success, and how many were not.
    pub(crate) fn failed(&self, entrant: &str, workload: &str) -> (usize, usize) {
        let measured = |round| {
            self.of(entrant, workload)
                .any(|run| run.round == round && matches!(run.outcome, Outcome::Measured(_)))
        };
        let failed = self.of(entrant, workload).filter(|run| matches!(run.outcome, Outcome::Failed(_)));
        let (repeated, lost): (Vec<&Run>, Vec<&Run>) = failed.partition(|run| measured(run.round));
        (repeated.len(), lost.len())
    }

    /// Why a contestant has no number under a workload.
    pub(crate) fn failure(&self, entrant: &Entrant, workload: &str) -> String {
        let failed = self.of(&entrant.name, workload).find_map(|run| match &run.outcome {
            Outcome::Failed(why) => Some(why),
            Outcome::Measured(_) => None,
        });
        let why = entrant.absent.as_ref().or(failed).map_or("it was not run", String::as_str);
        why.lines().next().unwrap_or_default().to_owned()
    }

    /// The best peer's name and number under a workload.
    pub(crate) fn best_peer(&self, workload: &str, metric: Metric) -> Option<(&str, f64)> {
        let peers = self.entrants.iter().filter(|entrant| entrant.peer);
        let numbers = peers.filter_map(|entrant| {
            Some((entrant.name.as_str(), self.sample(&entrant.name, workload, metric)?.median))
        });
        let better = |a: f64, b: f64| if metric.less_is_better() { b.total_cmp(&a) } else { a.total_cmp(&b) };
        numbers.max_by(|a, b| better(a.1, b.1))
    }

    /// The boots that a workload's runs are of.
    pub(crate) fn boots_of(&self, entrant: &str, workload: &str) -> Vec<usize> {
        let mut boots: Vec<usize> = self.of(entrant, workload).map(|run| run.boot).collect();
        boots.dedup();
        boots
    }

    /// Whether each of becket's contestants has a number everywhere.
    pub(crate) fn complete(&self) -> bool {
        let ours = self.entrants.iter().filter(|one| one.ours);
        let lost = |one: &Entrant| self.workloads.iter().any(|job| self.failed(&one.name, &job.name).1 > 0);
        ours.into_iter().all(|one| one.absent.is_none() && !lost(one))
    }

    fn of<'a>(&'a self, entrant: &'a str, workload: &'a str) -> impl Iterator<Item = &'a Run> {
        self.runs.iter().filter(move |run| run.entrant == entrant && run.workload == workload)
    }
}

#[cfg(test)]
#[path = "grid_tests.rs"]
pub(crate) mod tests;

//! `cargo xtask bench wall`: I/Os per second by time on two emulated CPUs, and how they grow with jobs and
//! queues.
//! Never measures one contestant after the other has finished: they alternate, so that a slow minute affects
//! them all.

use std::fmt::Write;

use anyhow::Result;

use super::build::Build;
use super::contestant::{Field, MAIN};
use super::fio::Workload;
use super::grid::{self, Choice, Grid, Plan};
use super::metric::Metric;
use super::record::Clock;
use super::{goal, table};

/// becket with one queue; by default it has one for each CPU.
const ONE_QUEUE: &str = "becket-1-queue";

/// Measures, prints the table, and keeps the record.
pub(crate) fn run(choice: &Choice) -> Result<u8> {
    let build = Build::new(&choice.guest)?;
    let mut field = Field::all(build.path.clone(), &[]);
    field.becket(ONE_QUEUE, "becket", " --queues 1");
    let mut names = MAIN.to_vec();
    names.push(ONE_QUEUE);
    let plan = Plan {
        json: "wall.json",
        clock: Clock::Time,
        cpus: 2,
        rounds: 5,
        metrics: vec![Metric::Rate],
        workloads: workloads(),
    };
    let grid = grid::run(choice, &build, plan, field.narrowed(&names, &choice.only))?;
    print!("{}\n{}{}", table::text(&grid), growth(&grid), goal::text(&goal::of("wall", &grid)));
    Ok(u8::from(!grid.complete()))
}

/// I/Os per second of each contestant by the number of jobs; nothing where only one job ran.
pub(crate) fn growth(grid: &Grid) -> String {
    let mut jobs: Vec<u32> = grid.workloads.iter().map(|one| one.jobs).collect();
    jobs.sort_unstable();
    jobs.dedup();
    if jobs.len() < 2 {
        return String::new();
    }
    let heads: String = jobs.iter().map(|jobs| format!(" {jobs} jobs | to one |")).collect();
    let mut text = format!("| |{heads}\n| --- |{}\n", " ---: | ---: |".repeat(jobs.len()));
    for one in grid.workloads.iter().filter(|one| one.jobs == 1) {
        let name_of = |jobs: u32| if jobs == 1 { one.name.clone() } else { one.clone().with_jobs(jobs).name };
        if !grid.workloads.iter().any(|other| jobs[1..].iter().any(|&jobs| other.name == name_of(jobs))) {
            continue;
        }
        for entrant in &grid.entrants {
            let rate = |jobs| grid.sample(&entrant.name, &name_of(jobs), Metric::Rate).map(|one| one.median);
            let base = rate(1);
            let cell = |&jobs: &u32| match (rate(jobs), base) {
                (Some(rate), Some(base)) => format!(" {rate:.0} | {:.2} |", rate / base),
                _ => " - | - |".to_owned(),
            };
            let cells: String = jobs.iter().map(cell).collect();
            let _ = writeln!(text, "| {}, {} |{cells}", one.title(), entrant.name);
        }
    }
    text
}

/// The rows of `cost`, and the two most telling with more jobs.
fn workloads() -> Vec<Workload> {
    let mut all = Workload::all();
    for pattern in ["randread", "randwrite"] {
        all.extend([2, 4].map(|jobs| Workload::new(pattern, 4, 64).with_jobs(jobs)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::grid::tests::{example, run};

    #[test]
    fn growth_is_to_one_job() {
        let mut grid = example();
        assert_eq!(growth(&grid), "");
        let two = grid.workloads[0].clone().with_jobs(2);
        let mut twice = run("becket", 1, 66_000.0);
        twice.workload.clone_from(&two.name);
        grid.workloads.push(two);
        grid.runs.push(twice);
        let text = growth(&grid);
        assert!(
            text.contains("| 4 KiB random read, depth 64, becket | 44000 | 1.00 | 66000 | 1.50 |"),
            "{text}"
        );
        assert!(text.contains("kublk | 40000 | 1.00 | - | - |"), "{text}");
    }

    #[test]
    fn each_of_the_rows_is_there_once() {
        let names: std::collections::BTreeSet<String> = workloads().into_iter().map(|one| one.name).collect();
        assert_eq!(names.len(), workloads().len());
        assert!(names.contains("randwrite-4k-d64-j4"));
    }
}

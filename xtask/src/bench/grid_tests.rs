//! Tests of [`super`], and the example that other tests use.

use super::*;
use crate::bench::fio::Measure;

const LOAD: Load<'_> = Load { engine: "libaio", clock: Clock::Instructions };
const JOB: &str = "randread-4k-d64";

/// A run with this many I/Os per second.
pub(crate) fn run(name: &str, round: u32, iops: f64) -> Run {
    Run {
        entrant: name.into(),
        workload: JOB.into(),
        round,
        boot: 0,
        command: "fio --x".into(),
        outcome: Outcome::Measured(Measure {
            iops,
            bytes_per_second: iops * 4096.0,
            latency_mean_ns: 1.0,
            latency_p50_ns: 1.0,
            latency_p99_ns: 1.0,
            load_user_percent: 1.0,
            load_system_percent: 1.0,
        }),
    }
}

/// One that did not end.
pub(crate) fn failed_run(name: &str, round: u32) -> Run {
    Run { outcome: Outcome::Failed("stuck".into()), ..run(name, round, 1.0) }
}

/// Two peers, one of which did not start; becket between them and loop.
pub(crate) fn example() -> Grid {
    let entrant = |name: &str, peer, ours, absent: Option<&str>| Entrant {
        name: name.into(),
        about: format!("about {name}"),
        peer,
        ours,
        absent: absent.map(str::to_owned),
    };
    Grid {
        boots: vec![Setting {
            date: "2026-01-31 12:00".into(),
            commit: "abc".into(),
            build: "0123456789ab".into(),
            clock: Clock::Instructions,
            kernel: "7.3".into(),
            cpus: 1,
            emulator: "QEMU 10".into(),
            command: "cargo xtask bench cost".into(),
            notes: vec!["fio 3".into()],
        }],
        metrics: vec![Metric::Rate],
        entrants: vec![
            entrant("loop-direct", false, false, None),
            entrant("becket", false, true, None),
            entrant("kublk", true, false, None),
            entrant("rublk", true, false, Some("no libclang")),
        ],
        workloads: vec![Workload::all().swap_remove(0)],
        runs: vec![
            run("loop-direct", 1, 50_000.0),
            run("becket", 1, 44_000.0),
            run("becket", 2, 44_440.0),
            run("becket", 3, 43_560.0),
            run("kublk", 1, 40_000.0),
        ],
    }
}

#[test]
fn the_best_peer_is_one_that_ran() {
    let grid = example();
    assert_eq!(grid.best_peer(JOB, Metric::Rate), Some(("kublk", 40_000.0)));
    assert_eq!(grid.failure(&grid.entrants[3], JOB), "no libclang");
    assert_eq!(grid.failure(&grid.entrants[0], "other"), "it was not run");
}

#[test]
fn the_best_price_is_the_lowest() {
    let mut grid = example();
    grid.entrants[3].absent = None;
    grid.runs.push(run("rublk", 1, 20_000.0));
    assert_eq!(grid.best_peer(JOB, Metric::Price), Some(("kublk", 25_000.0)));
}

#[test]
fn a_record_survives_being_written() {
    let text = serde_json::to_string(&example()).unwrap();
    let back: Grid = serde_json::from_str(&text).unwrap();
    assert_eq!(back.runs, example().runs);
    assert_eq!(back.entrants, example().entrants);
    assert_eq!(back.boots, example().boots);
}

#[test]
fn a_part_takes_the_place_of_what_it_measured_again() {
    let mut part = example();
    part.boots[0].date = "2026-02-01 08:00".into();
    part.entrants.retain(|one| one.name == "becket");
    part.runs = vec![run("becket", 1, 48_000.0)];
    let merged = example().merged(part).unwrap();
    let sample = merged.sample("becket", JOB, Metric::Rate).unwrap();
    assert_eq!((sample.median, sample.count), (48_000.0, 1));
    assert_eq!(merged.boots_of("becket", JOB), [1]);
    assert_eq!(merged.boots_of("kublk", JOB), [0]);
    assert_eq!(merged.entrants.len(), 4);
    let rows = crate::bench::table::rows(&merged, JOB, Metric::Rate);
    assert_eq!(rows[1].when.as_deref(), Some("2026-02-01 08:00"));
    assert_eq!(rows[2].when.as_deref(), Some("2026-01-31 12:00"));
}

#[test]
fn another_build_is_never_merged() {
    let mut part = example();
    part.boots[0].build = "ffffffffffff".into();
    let error = example().merged(part).unwrap_err().to_string();
    assert!(error.contains("another build"), "{error}");
    let error = example().is_of("ffffffffffff").unwrap_err().to_string();
    assert!(error.contains("another build"), "{error}");
    example().is_of(&example().boots[0].build).unwrap();
}

#[test]
fn the_guests_report_becomes_runs() {
    let mut grid = example();
    grid.runs.clear();
    let report = format!(
        "@@ kernel 7.3\n@@ fio fio-3\n@@ run becket {JOB} 1 124 /dev/ublkb0\nstuck\n\
         @@ absent kublk\nno module\n"
    );
    assert_eq!(grid.gather(&report, LOAD).unwrap(), ("7.3".into(), "fio-3".into()));
    assert!(grid.runs[0].command.starts_with("fio --filename=/dev/ublkb0 --name=randread-4k-d64 "));
    assert_eq!(grid.failed("becket", JOB), (0, 1));
    assert!(!grid.complete());
    assert_eq!(grid.entrants[2].absent.as_deref(), Some("it could not be attached: no module"));
    assert!(grid.gather("@@ surprise\n", LOAD).is_err());
    assert!(grid.gather("@@ run nobody what 1 0 /dev/x\n", LOAD).is_err());
}

#[test]
fn workloads_are_chosen_by_how_they_begin() {
    let names = |prefixes: &[&str]| {
        let prefixes: Vec<String> = prefixes.iter().map(|&one| one.to_owned()).collect();
        chosen(&prefixes, Workload::all()).map(|all| all.len())
    };
    assert_eq!(names(&[]).unwrap(), 8);
    assert_eq!(names(&["rand"]).unwrap(), 4);
    assert_eq!(names(&["randread-4k-d64"]).unwrap(), 1);
    assert!(names(&["nothing"]).is_err());
}

//! `cargo xtask bench report`: from the results in target/bench, `docs/benchmarks.md` with its charts, which
//! has what the README claims and all goals, and `target/bench/report.md`, which has all figures.
//! Never writes a number that is not in the data beside it.

use std::fmt::Write;

use anyhow::{Context, Result};

use super::goal;
use super::record::{self, Record, Row, Setting};
use super::scenario::{SCENARIOS, Scenario};
use super::svg;
use crate::exec;

const INTRODUCTION: &str = "# Benchmarks

`cargo xtask bench report` writes this page and its charts from the results in `target/bench`. It has the
figures that the README claims, and all goals, met and missed; a scenario that was not measured again keeps
its part, with its date. `target/bench/report.md`, which belongs to a release, has all figures, and the JSON
files beside it have each run.

The numbers of one table come from one run on one machine, so their ratios can be compared: *ratio* is to the
kernel's loop driver with direct I/O (*loop-direct*, *losetup* or *loops*), to the file itself (*file*), or
to the peer that is named first, where those are not among them: it is 1.000 there. Do not compare numbers of
different tables or of different machines.
*median* is over the rounds (*runs*), *spread* is (largest - smallest) / median.
[TESTING.md](TESTING.md#benchmarks) says how to measure; what was tried to improve these numbers is in
[decisions/](decisions/README.md).
";

/// What the README claims: the scenario and how the figures' names begin; the first has the chart.
const CLAIMS: [(&str, &[&str]); 10] = [
    ("cost", &["randread-4k-d64", "randwrite-4k-d64", "read-1m-d4"]),
    ("latency", &["randread-4k-d1-p50", "randwrite-4k-d1-p50"]),
    ("storm", &["attach-500"]),
    ("fuse", &["randread-4k-d64", "randwrite-4k-d64", "read-1m-d4", "write-1m-d4", "randread-4k-d1"]),
    ("vhost", &["cached-d64", "direct-d64"]),
    ("nbd", &["cached-d64", "cached-256k", "cached-d1", "cached-fio", "copy-s", "tls-"]),
    ("remote", &["d1-", "d8-", "many-"]),
    ("fetch", &["whole-", "first-", "nested-", "warm-", "stream-"]),
    ("rbd", &["randread-4k-d64", "randwrite-4k-d64", "randread-4k-d1", "randwrite-4k-d1"]),
    ("nested", &["gzip-4-readers-2-cpus-s", "zstd-4-readers-2-cpus-s", "xz-4-readers-2-cpus-s"]),
];

/// Writes both pages. What was not measured again stays on the first one as it is.
pub(crate) fn run() -> Result<u8> {
    let docs = exec::workspace().join("docs/benchmarks.md");
    let before = std::fs::read_to_string(&docs).unwrap_or_default();
    let (mut page, mut everything) = (INTRODUCTION.to_owned(), INTRODUCTION.to_owned());
    for scenario in &SCENARIOS {
        let Some(record) = Record::load(scenario.name)? else {
            eprintln!("xtask: target/bench has no {}.json: its part of the page stays", scenario.name);
            page += part(&before, scenario.title);
            continue;
        };
        everything += &section(scenario, &record, "", |_| true);
        let claims = CLAIMS.iter().find(|claim| claim.0 == scenario.name).map_or(&[][..], |claim| claim.1);
        let charts = claims.first().map_or(Ok(String::new()), |claim| charts(scenario, &record, claim))?;
        let claimed = |row: &Row| claims.iter().any(|claim| row.what.starts_with(claim));
        page += &section(scenario, &record, &charts, claimed);
    }
    let report = record::dir()?.join("report.md");
    for (path, text) in [(docs, page), (report, everything)] {
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(0)
}

/// The part of a page that has this title, with the empty line before it; empty if there is none.
fn part<'a>(page: &'a str, title: &str) -> &'a str {
    let Some(begin) = page.find(&format!("\n## {title}\n")) else { return "" };
    let rest = &page[begin + 1..];
    rest.find("\n## ").map_or(&page[begin..], |end| &page[begin..=begin + end])
}

/// A scenario's heading, settings, charts, the tables of the rows that are wanted, and all its goals.
fn section(scenario: &Scenario, record: &Record, charts: &str, wanted: impl Fn(&Row) -> bool) -> String {
    let mut text = format!("\n## {}\n\n{}\n\n", scenario.title, scenario.about);
    for setting in &record.settings {
        let Setting { place, date, commit, build, kernel, cpus, emulator, command, notes } = setting;
        // Writing to a string cannot fail.
        let _ = writeln!(text, "- {place}: {date} UTC, becket {commit}, SHA-256 {build}");
        text = text + &point(&format!("`{command}`")) + &point(&format!("Linux {kernel}, {cpus} CPU(s)"));
        text += &point(emulator);
        for note in notes {
            text += &point(note);
        }
    }
    let goals = goal::table(&goal::of(scenario.name, record));
    for part in [charts, &record.table(wanted), &goals] {
        if !part.trim().is_empty() {
            text = text + "\n" + part.trim() + "\n";
        }
    }
    text
}

/// The first line of a note as a point of a list, in lines of at most 110 columns.
fn point(note: &str) -> String {
    let (mut text, mut column) = ("  -".to_owned(), 3);
    for word in note.lines().next().unwrap_or_default().split(' ') {
        if column + 1 + word.chars().count() > 110 {
            text += "\n   ";
            column = 3;
        }
        text = text + " " + word;
        column += 1 + word.chars().count();
    }
    text + "\n"
}

/// Writes the chart of the first place that has the figure whose name begins so; how the page shows it.
fn charts(scenario: &Scenario, record: &Record, claim: &str) -> Result<String> {
    let of = |row: &&Row, place: &str| row.place == place && row.what.starts_with(claim);
    let Some(first) =
        scenario.places.iter().find_map(|place| record.rows.iter().find(|row| of(row, place.name)))
    else {
        return Ok(String::new());
    };
    let rows: Vec<&Row> =
        record.rows.iter().filter(|row| row.place == first.place && row.what == first.what).collect();
    let title = format!("{}, {}: {}", scenario.title, first.place, first.what);
    let name = format!("{}-{claim}.svg", scenario.name);
    let path = exec::workspace().join("docs").join(&name);
    std::fs::write(&path, chart(&title, &rows, record))
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(format!("![{title}]({name})\n\n"))
}

fn chart(title: &str, rows: &[&Row], record: &Record) -> String {
    let mark = record::BASES.iter().find_map(|name| rows.iter().find(|row| row.entrant == *name));
    let value = |row: &Row| record.value(&row.place, &row.what, &row.entrant);
    let mark = mark.and_then(|row| value(row));
    let bars: Vec<svg::Bar<'_>> = rows
        .iter()
        .map(|row| {
            let value = value(row);
            let note = match (value, mark) {
                (Some(value), Some(mark)) => format!("{} ({:.3})", record::number(value), value / mark),
                (Some(value), None) => record::number(value),
                (None, _) => "not measured".to_owned(),
            };
            (row.entrant.as_str(), value, note)
        })
        .collect();
    svg::bars(title, &bars, mark)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::example;

    #[test]
    fn the_page_has_the_claims_and_how_to_repeat_them() {
        let record = example("guest");
        let text = section(&SCENARIOS[0], &record, "", |_| true);
        for word in ["2026-01-31 12:00 UTC, becket abc", "7.3", "fio-3.33", "0.880"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        let goals = section(&SCENARIOS[0], &record, "", |_| false);
        assert!(goals.contains("abc") && goals.contains("**missed**") && !goals.contains("0.880"), "{goals}");
        let rows: Vec<&Row> = record.rows.iter().collect();
        let svg = chart("t", &rows, &record);
        assert!(svg.contains("not measured") && svg.contains("44000 (0.880)"), "{svg}");
    }

    #[test]
    fn long_notes_go_on_in_the_next_line() {
        let text = point(&format!("{} `end`\nand more", "word ".repeat(40).trim()));
        assert!(text.lines().all(|line| line.chars().count() <= 110) && text.lines().count() == 2, "{text}");
        assert!(text.starts_with("  - word") && text.ends_with(" `end`\n"), "{text}");
        assert_eq!(point("one"), "  - one\n");
    }

    #[test]
    fn what_was_not_measured_again_stays() {
        let page = "# Page\n\n## One\n\n1\n\n## One more\n\n2\n";
        assert_eq!(part(page, "One"), "\n## One\n\n1\n");
        assert_eq!(part(page, "One more"), "\n## One more\n\n2\n");
        assert_eq!(part(page, "Page"), "");
        let (one, more) = (part(page, "One"), part(page, "One more"));
        assert_eq!(format!("# Page\n{one}{more}"), page);
    }

    #[test]
    fn what_is_claimed_is_measured() {
        for (name, claims) in CLAIMS {
            assert!(SCENARIOS.iter().any(|one| one.name == name) && !claims.is_empty());
        }
    }

    #[test]
    fn the_guide_to_testing_has_every_scenario() {
        let text = std::fs::read_to_string(exec::workspace().join("docs/TESTING.md")).unwrap();
        for Scenario { name, .. } in &SCENARIOS {
            assert!(text.contains(&format!("| `{name}` | ")), "{name} is not in the table");
        }
        let names: Vec<&str> = SCENARIOS.iter().map(|one| one.name).collect();
        assert!(text.contains(&format!("for scenario in {}; do", names.join(" "))), "{names:?}");
    }

    /// Numbers of the README stand on the page, rounded.
    #[test]
    fn the_readme_claims_what_the_page_has() {
        let cells = |path: &str| -> Vec<String> {
            let text = std::fs::read_to_string(exec::workspace().join(path)).unwrap();
            let (_, section) = text.split_once("\n## ").unwrap();
            let section = section.split_once("How fast\n").map_or(section, |(_, rest)| rest);
            let section = if path == "README.md" { section.split("\n## ").next().unwrap() } else { section };
            let rows = section.lines().filter(|line| line.starts_with("| "));
            rows.flat_map(|row| row.split('|').skip(2)).map(|cell| cell.trim().replace(',', "")).collect()
        };
        let numbers = |path| -> Vec<(f64, String)> {
            cells(path).into_iter().filter_map(|cell| Some((cell.parse().ok()?, cell))).collect()
        };
        let (claimed, measured) = (numbers("README.md"), numbers("docs/benchmarks.md"));
        assert!(claimed.len() > 10, "{claimed:?}");
        for (_, claim) in claimed {
            let digits = claim.split_once('.').map_or(0, |(_, digits)| digits.len());
            let same = measured.iter().any(|(value, _)| format!("{value:.digits$}") == claim);
            assert!(same, "docs/benchmarks.md does not have {claim}");
        }
    }
}

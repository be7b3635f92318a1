//! What a scenario leaves behind: every number, its setting, and the table of both.
//! Never drops a number that is missing: its row says why.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::exec::{self, aligned};

/// Where and when something was measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Setting {
    pub(crate) place: String,
    /// UTC, as `2026-01-31 12:00`.
    pub(crate) date: String,
    /// becket's commit; `+` when the checkout had changes.
    pub(crate) commit: String,
    /// The beginning of becket's SHA-256: which program this was, whatever the checkout was.
    pub(crate) build: String,
    /// `uname -r` where it ran.
    pub(crate) kernel: String,
    pub(crate) cpus: u32,
    pub(crate) emulator: String,
    /// The command line that repeats it.
    pub(crate) command: String,
    /// What else matters.
    pub(crate) notes: Vec<String>,
}

/// One contestant's numbers of one kind in one place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) place: String,
    /// What was measured, with its unit at the end: `attach-500-ms`.
    pub(crate) what: String,
    pub(crate) entrant: String,
    /// One of each round.
    pub(crate) values: Vec<f64>,
    /// Why one is missing.
    pub(crate) absent: Option<String>,
}

/// `target/bench/cost.json` and others.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) settings: Vec<Setting>,
    pub(crate) rows: Vec<Row>,
}

/// What others are compared with: the first of these that is among them, or else the first row.
pub(crate) const BASES: [&str; 10] =
    ["loop-direct", "losetup", "loops", "file", "curl", "nbdkit", "nbdkit-1M", "qsd", "librbd", "alone"];

/// `target/bench` of the checkout: built peers and results.
pub(crate) fn dir() -> Result<PathBuf> {
    let dir = exec::workspace().join("target/bench");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

impl Record {
    /// What was kept under this name, if anything.
    pub(crate) fn load(name: &str) -> Result<Option<Record>> {
        let path = dir()?.join(format!("{name}.json"));
        let Ok(text) = std::fs::read_to_string(&path) else { return Ok(None) };
        let hint = || format!("{} is not as expected; if an older xtask wrote it, remove it", path.display());
        serde_json::from_str(&text).with_context(hint).map(Some)
    }

    pub(crate) fn save(&self, name: &str) -> Result<()> {
        let path = dir()?.join(format!("{name}.json"));
        let home = std::env::var("HOME").unwrap_or_default();
        let text = placeless(&serde_json::to_string_pretty(self)?, &home);
        std::fs::write(&path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
    }

    /// Takes one place's report instead of what was there before.
    pub(crate) fn take(&mut self, report: &str, mut setting: Setting) -> Result<()> {
        let place = setting.place.clone();
        self.rows.retain(|row| row.place != place);
        self.settings.retain(|one| one.place != place);
        for (words, body) in sections(report) {
            match words[..] {
                ["kernel", release] => setting.kernel = release.to_owned(),
                ["note", ..] => setting.notes.push(words[1..].join(" ")),
                ["figure", what, entrant, value] => {
                    let value = value.parse().with_context(|| format!("{what} is not a number: {value}"))?;
                    self.row(&place, what, entrant).values.push(value);
                }
                ["absent", entrant, what] => {
                    let why = if body.is_empty() { "it printed nothing" } else { body };
                    self.row(&place, what, entrant).absent = Some(why.to_owned());
                }
                ["fio", entrant, workload, ..] => {
                    for figure in &words[3..] {
                        let row = self.row(&place, &format!("{workload}-{figure}"), entrant);
                        match fio(body, figure) {
                            Ok(value) => row.values.push(value),
                            Err(error) => row.absent = Some(format!("{error:#}")),
                        }
                    }
                }
                _ => bail!("the report has a section `{}`", words.join(" ")),
            }
        }
        self.settings.push(setting);
        // Scripts go from contestant to contestant; readers go from figure to figure.
        let mut order: Vec<String> = Vec::new();
        for row in &self.rows {
            if !order.contains(&row.what) {
                order.push(row.what.clone());
            }
        }
        let at = |row: &Row| order.iter().position(|what| *what == row.what);
        self.rows.sort_by(|a, b| a.place.cmp(&b.place).then(at(a).cmp(&at(b))));
        Ok(())
    }

    fn row(&mut self, place: &str, what: &str, entrant: &str) -> &mut Row {
        let is = |row: &Row| row.place == place && row.what == what && row.entrant == entrant;
        let at = self.rows.iter().position(is).unwrap_or_else(|| {
            let [place, what, entrant] = [place, what, entrant].map(str::to_owned);
            self.rows.push(Row { place, what, entrant, values: Vec::new(), absent: None });
            self.rows.len() - 1
        });
        &mut self.rows[at]
    }

    /// A figure of a contestant: the median, or with a name that ends in `.p99` the 99th percentile. `PEER`
    /// is the best peer.
    pub(crate) fn value(&self, place: &str, what: &str, entrant: &str) -> Option<f64> {
        let (what, per_cent) = match what.split_once(".p") {
            Some((what, number)) => (what, number.parse().ok()?),
            None => (what, 50.0),
        };
        let is_it = |name: &str| match entrant {
            "PEER" => name.starts_with("kublk") || name.starts_with("rublk"),
            _ => name == entrant,
        };
        let rows =
            self.rows.iter().filter(|row| row.place == place && row.what == what && is_it(&row.entrant));
        let values = rows.filter_map(|row| quantile(&row.values, per_cent));
        values.reduce(if what.ends_with("iops") { f64::max } else { f64::min })
    }

    /// Whether all of becket's rows have numbers and no failure.
    pub(crate) fn complete(&self) -> bool {
        !self.rows.iter().any(|row| row.entrant.starts_with("becket") && row.absent.is_some())
    }

    /// The rows that are wanted, one table for each place: for a document, and as readable at a terminal.
    pub(crate) fn table(&self, wanted: impl Fn(&Row) -> bool) -> String {
        let mut text = String::new();
        let rows: Vec<&Row> = self.rows.iter().filter(|row| wanted(row)).collect();
        for rows in rows.chunk_by(|a, b| a.place == b.place) {
            let mut cells = vec![["", "", "median", "ratio", "p99", "spread", "runs"].map(str::to_owned)];
            cells[0][0].clone_from(&rows[0].place);
            for same in rows.chunk_by(|a, b| a.what == b.what) {
                let named = |name: &&str| same.iter().find(|row| row.entrant == *name);
                let base = BASES.iter().find_map(named).unwrap_or(&same[0]);
                let base = quantile(&base.values, 50.0).filter(|base| *base != 0.0);
                for (index, row) in same.iter().enumerate() {
                    let what = if index == 0 { row.what.as_str() } else { "" };
                    cells.push(row.cells(what, base));
                }
            }
            text.push_str(&aligned(&cells, 2));
            text.push('\n');
        }
        text
    }
}

impl Row {
    fn cells(&self, what: &str, base: Option<f64>) -> [String; 7] {
        let name = if self.entrant == "becket" { "**becket**" } else { &self.entrant };
        let lost =
            self.absent.as_deref().map(|why| why.lines().next().unwrap_or_default().replace('|', "\\|"));
        let Some(median) = quantile(&self.values, 50.0) else {
            let why = lost.unwrap_or_default();
            return [what, name, &why, "", "", "", "0"].map(str::to_owned);
        };
        let [low, high] = [0.0, 100.0].map(|at| quantile(&self.values, at).unwrap_or(median));
        let spread = if median == 0.0 { 0.0 } else { (high - low) / median * 100.0 };
        let p99 = quantile(&self.values, 99.0).filter(|_| self.values.len() >= 20);
        let lost = lost.map_or_else(String::new, |why| format!(", one failed: {why}"));
        [
            what.to_owned(),
            name.to_owned(),
            number(median),
            base.map_or_else(|| "-".to_owned(), |base| format!("{:.3}", median / base)),
            p99.map_or_else(String::new, number),
            format!("{spread:.1} %"),
            format!("{}{lost}", self.values.len()),
        ]
    }
}

/// Five digits are enough of anything that is measured here.
pub(crate) fn number(value: f64) -> String {
    if value < 1000.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

/// By the nearest rank; the median of an even number is the mean of the two in the middle.
pub(crate) fn quantile(values: &[f64], per_cent: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if per_cent == 50.0 && !sorted.is_empty() && sorted.len().is_multiple_of(2) {
        return Some((sorted[middle - 1] + sorted[middle]) / 2.0);
    }
    let rank = (per_cent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

/// A figure of fio's answer for one job in one direction: `iops`, `per-io` (nanoseconds of the clock for each
/// I/O), `p50-us` or `p99-us`.
fn fio(text: &str, figure: &str) -> Result<f64> {
    // Warnings may stand before the object.
    let text = text.find("\n{").map_or(text, |at| &text[at..]);
    let answer: Value = serde_json::from_str(text.trim()).context("fio's answer is not as expected")?;
    let job = match answer["jobs"].as_array().map(Vec::as_slice) {
        Some([job]) if job["error"] == 0 => job,
        _ => bail!("fio did not finish one job without an error"),
    };
    let done = |direction: &&Value| direction["total_ios"].as_u64().is_some_and(|count| count > 0);
    let done: Vec<&Value> = [&job["read"], &job["write"]].into_iter().filter(done).collect();
    let [direction] = done[..] else { bail!("fio finished reads and writes, or neither") };
    let micros = |name: &str| direction["lat_ns"]["percentile"][name].as_f64().map(|ns| ns / 1000.0);
    let value = match figure {
        "iops" => direction["iops"].as_f64(),
        "per-io" => direction["iops"].as_f64().map(|iops| 1e9 / iops),
        "p50-us" => micros("50.000000"),
        "p99-us" => micros("99.000000"),
        _ => None,
    };
    value.with_context(|| format!("fio's answer has no {figure}"))
}

/// The pieces of a report: a line `@@ WORD WORD ...`, then text up to the next such line.
fn sections(text: &str) -> Vec<(Vec<&str>, &str)> {
    const MARK: &str = "@@ ";
    let mut starts: Vec<usize> = text.match_indices("\n@@ ").map(|(at, _)| at + 1).collect();
    if text.starts_with(MARK) {
        starts.insert(0, 0);
    }
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    let pieces = starts.iter().zip(ends).map(|(&start, end)| &text[start + MARK.len()..end]);
    pieces
        .map(|piece| {
            let (head, body) = piece.split_once('\n').unwrap_or((piece, ""));
            (head.split_whitespace().collect(), body.trim())
        })
        .collect()
}

/// A record is published, and programs that fail name places of the machine that they were built on.
fn placeless(text: &str, home: &str) -> String {
    let text = text.replace(&format!("{}/", exec::workspace().display()), "");
    if home.len() > 1 { text.replace(&format!("{home}/"), "~/") } else { text }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const ANSWER: &str = r#"fio: a warning
{"fio version":"fio-3.33","jobs":[{"jobname":"x @@ y","error":0,
"read":{"total_ios":43000,"iops":43123.5,"lat_ns":{"percentile":{"50.000000":1400000,"99.000000":2000000}}},
"write":{"total_ios":0,"iops":0.0,"lat_ns":{"mean":0.0}}}]}"#;

    /// becket between loop and a peer, and a peer that failed.
    pub(crate) fn example(place: &str) -> Record {
        let mut record = Record::default();
        let figure = "figure randread-4k-d64-iops";
        let report = format!(
            "noise\n@@ kernel 7.3\n@@ note load: fio-3.33\n@@ {figure} becket 44000\n@@ {figure} loop-direct 50000\n\
             @@ {figure} becket 44440\n@@ {figure} becket 43560\n@@ {figure} kublk-copy 40000\n\
             @@ absent rublk-copy randread-4k-d64-iops\nno | driver\nno more\n"
        );
        let setting = Setting {
            place: place.into(),
            date: "2026-01-31 12:00".into(),
            commit: "abc".into(),
            ..Setting::default()
        };
        record.take(&report, setting).unwrap();
        record
    }

    #[test]
    fn rows_are_compared_with_loop_and_say_why_a_number_is_missing() {
        let record = example("guest");
        let table = record.table(|_| true);
        let lines: Vec<String> =
            table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines[2], "| randread-4k-d64-iops | **becket** | 44000 | 0.880 | | 2.0 % | 3 |");
        assert_eq!(lines[3], "| | loop-direct | 50000 | 1.000 | | 0.0 % | 1 |");
        assert_eq!(lines[5], "| | rublk-copy | no \\| driver | | | | 0 |");
        assert_eq!(record.settings[0].kernel, "7.3");
        assert_eq!(record.settings[0].notes, ["load: fio-3.33"]);
        assert!(record.complete(), "only a peer failed");
    }

    #[test]
    fn a_place_that_is_measured_again_replaces_itself_alone() {
        let mut record = example("guest");
        let setting = |place: &str| Setting { place: place.into(), ..Setting::default() };
        record.take("@@ figure x-ms becket 1\n", setting("host")).unwrap();
        record.take("@@ figure y-ms becket 7\n@@ absent becket z-ms\nwhy\n", setting("guest")).unwrap();
        assert_eq!(record.value("guest", "y-ms", "becket"), Some(7.0));
        assert_eq!(record.value("guest", "randread-4k-d64-iops", "becket"), None);
        assert_eq!(record.value("host", "x-ms", "becket"), Some(1.0));
        assert_eq!(record.settings.len(), 2);
        assert!(!record.complete());
        assert!(record.take("@@ strange thing\n", setting("guest")).is_err());
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap().rows, record.rows);
    }

    #[test]
    fn the_best_peer_is_one_that_ran() {
        assert_eq!(example("guest").value("guest", "randread-4k-d64-iops", "PEER"), Some(40_000.0));
    }

    #[test]
    fn medians_and_percentiles() {
        let values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!((quantile(&values, 50.0), quantile(&values, 99.0)), (Some(100.5), Some(198.0)));
        assert_eq!((quantile(&[3.0], 99.0), quantile(&[], 50.0)), (Some(3.0), None));
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 50.0), Some(2.0));
    }

    #[test]
    fn fios_answer_is_read() {
        assert_eq!(fio(ANSWER, "iops").unwrap(), 43123.5);
        assert_eq!((fio(ANSWER, "p50-us").unwrap(), fio(ANSWER, "p99-us").unwrap()), (1400.0, 2000.0));
        assert!((fio(ANSWER, "per-io").unwrap() - 23189.2).abs() < 0.1);
        for (from, to) in [("43000", "0"), ("\"error\":0", "\"error\":5"), ("\"iops\":43123.5,", "")] {
            assert!(fio(&ANSWER.replace(from, to), "iops").is_err(), "{from}");
        }
        assert!(fio("fio: cannot open", "iops").is_err());
    }

    #[test]
    fn reports_are_cut_at_their_marks() {
        let all = sections("noise\n@@ run a 1 0\n{\"x\": \"@@ y\"}\n@@ run b 1 1\ntwo\nlines\n@@ end\n");
        assert_eq!(all[0], (vec!["run", "a", "1", "0"], "{\"x\": \"@@ y\"}"));
        assert_eq!(all[1].1, "two\nlines");
        assert_eq!(all[2], (vec!["end"], ""));
    }

    #[test]
    fn records_name_no_place_of_this_machine() {
        let text = format!("panicked at /home/me/.cargo/x.rs, {}/xtask/y.rs", exec::workspace().display());
        assert_eq!(placeless(&text, "/home/me"), "panicked at ~/.cargo/x.rs, xtask/y.rs");
        assert_eq!(placeless("/a/b", "/"), "/a/b");
    }
}

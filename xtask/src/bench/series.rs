//! Measurements of many kinds by one script: what `storm`, `losetup` and `nested` are made of.
//! Never drops one that failed: its row says why.

use std::fmt::Write;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::fio;
use super::goal::Verdict;
use super::record::{Sample, Setting};

/// A record: `target/bench/storm.json` and others.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Series {
    /// One for each place that was measured in.
    pub(crate) settings: Vec<Setting>,
    pub(crate) rows: Vec<Row>,
}

/// One contestant's numbers of one kind in one place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// `host`, `host-ext4`, `guest` ...
    pub(crate) place: String,
    /// What was measured, with its unit at the end: `attach-500-ms`.
    pub(crate) what: String,
    pub(crate) entrant: String,
    /// One of each round.
    pub(crate) values: Vec<f64>,
    /// Why one is missing.
    pub(crate) absent: Option<String>,
}

impl Series {
    /// Takes one place's report in the place of what was there before.
    pub(crate) fn take(&mut self, place: &str, report: &str, setting: Setting) -> Result<()> {
        self.rows.retain(|row| row.place != place);
        let here = format!("{place}: ");
        self.settings.retain(|one| !one.notes.iter().any(|note| note.starts_with(&here)));
        self.settings.push(setting);
        for section in fio::sections(report) {
            match section.words[..] {
                ["kernel", _] | ["fio", _] => {}
                ["figure", what, entrant, value] => {
                    let value = value.parse().with_context(|| format!("{what} is no number: {value}"))?;
                    self.row(place, what, entrant).values.push(value);
                }
                ["absent", entrant, what] | ["absent", entrant, what, ..] => {
                    let why = if section.body.is_empty() { "it said nothing" } else { section.body };
                    self.row(place, what, entrant).absent = Some(why.to_owned());
                }
                _ => bail!("the report has a section `{}`", section.words.join(" ")),
            }
        }
        Ok(())
    }

    fn row(&mut self, place: &str, what: &str, entrant: &str) -> &mut Row {
        let is = |row: &Row| row.place == place && row.what == what && row.entrant == entrant;
        let at = self.rows.iter().position(is).unwrap_or_else(|| {
            self.rows.push(Row {
                place: place.to_owned(),
                what: what.to_owned(),
                entrant: entrant.to_owned(),
                values: Vec::new(),
                absent: None,
            });
            self.rows.len() - 1
        });
        &mut self.rows[at]
    }

    /// The median of one kind.
    pub(crate) fn median(&self, place: &str, what: &str, entrant: &str) -> Option<f64> {
        Sample::of(self.values(place, what, entrant)?).map(|sample| sample.median)
    }

    /// The value that so many of a hundred do not exceed.
    pub(crate) fn percentile(&self, place: &str, what: &str, entrant: &str, per_cent: f64) -> Option<f64> {
        percentile(self.values(place, what, entrant)?, per_cent)
    }

    fn values(&self, place: &str, what: &str, entrant: &str) -> Option<&[f64]> {
        let is = |row: &&Row| row.place == place && row.what == what && row.entrant == entrant;
        self.rows.iter().find(is).map(|row| row.values.as_slice())
    }

    /// Whether all of becket's rows have numbers and no failure.
    pub(crate) fn complete(&self) -> bool {
        !self.rows.iter().any(|row| row.entrant.starts_with("becket") && row.absent.is_some())
    }

    /// The tables, one for each place: for a document, and as readable at a terminal.
    pub(crate) fn markdown(&self) -> String {
        let mut text = String::new();
        let mut places: Vec<&str> = self.rows.iter().map(|row| row.place.as_str()).collect();
        places.dedup();
        for place in places {
            let _ = writeln!(
                text,
                "| {place} | | median | 99th percentile | to the first | spread | runs |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |"
            );
            let mut before = "";
            for row in self.rows.iter().filter(|row| row.place == place) {
                let head = if before == row.what { "" } else { row.what.as_str() };
                before = &row.what;
                text.push_str(&self.line(head, row));
            }
            text.push('\n');
        }
        text
    }

    fn line(&self, head: &str, row: &Row) -> String {
        let name = &row.entrant;
        let lost =
            row.absent.as_deref().map(|why| why.lines().next().unwrap_or_default().replace('|', "\\|"));
        let Some(sample) = Sample::of(&row.values) else {
            return format!("| {head} | {name} | {} | | | | 0 |\n", lost.unwrap_or_default());
        };
        let first = self.rows.iter().find(|one| one.place == row.place && one.what == row.what);
        let base = first.and_then(|first| Sample::of(&first.values)).filter(|base| base.median != 0.0);
        let ratio = base.map_or_else(|| "-".to_owned(), |base| format!("{:.3}", sample.median / base.median));
        let high = percentile(&row.values, 99.0).filter(|_| sample.count >= 20);
        let high = high.map_or_else(String::new, |high| format!("{high:.2}"));
        let lost = lost.map_or_else(String::new, |why| format!(", one failed: {why}"));
        let (median, spread, count) = (sample.median, sample.spread * 100.0, sample.count);
        format!("| {head} | {name} | {median:.2} | {high} | {ratio} | {spread:.0} % | {count}{lost} |\n")
    }
}

/// By the nearest rank.
fn percentile(values: &[f64], per_cent: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (per_cent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

/// A ratio's goal: both must have been measured.
pub(crate) fn ratio(what: &str, most: f64, ours: Option<f64>, theirs: Option<f64>) -> Verdict {
    let got = ours.zip(theirs.filter(|theirs| *theirs > 0.0)).map(|(ours, theirs)| ours / theirs);
    Verdict::at_most(what.to_owned(), most, got)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// becket at half of losetup's time, and something that failed.
    pub(crate) fn example(place: &str, what: &str) -> Series {
        let mut series = Series::default();
        let setting = crate::bench::grid::tests::example().boots.swap_remove(0);
        let report = format!(
            "@@ kernel 7\n@@ figure {what} losetup 10\n@@ figure {what} becket 4\n@@ figure {what} becket 5\n\
             @@ figure {what} becket 6\n@@ absent becket-ublk {what}\nno | driver\nno more\n"
        );
        series.take(place, &report, setting).unwrap();
        series
    }

    #[test]
    fn rows_are_compared_with_the_first_of_their_kind() {
        let series = example("host", "attach-500-ms");
        let text = series.markdown();
        assert!(text.contains("| attach-500-ms | losetup | 10.00 |  | 1.000 | 0 % | 1 |"), "{text}");
        assert!(text.contains("|  | becket | 5.00 |  | 0.500 | 40 % | 3 |"), "{text}");
        assert!(text.contains("|  | becket-ublk | no \\| driver | | | | 0 |"), "{text}");
        assert!(!series.complete(), "one of becket's has no number");
    }

    #[test]
    fn a_place_that_is_measured_again_replaces_itself_alone() {
        let mut series = example("host", "x-ms");
        let setting = || crate::bench::grid::tests::example().boots.swap_remove(0);
        series.take("guest", "@@ figure y-ms becket 1\n", setting()).unwrap();
        series.take("host", "@@ figure x-ms becket 7\n", setting()).unwrap();
        assert_eq!(series.median("host", "x-ms", "becket"), Some(7.0));
        assert_eq!(series.median("host", "x-ms", "losetup"), None);
        assert_eq!(series.median("guest", "y-ms", "becket"), Some(1.0));
        assert!(series.take("guest", "@@ strange thing\n", setting()).is_err());
    }

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!((percentile(&values, 50.0), percentile(&values, 99.0)), (Some(100.0), Some(198.0)));
        assert_eq!((percentile(&[3.0], 99.0), percentile(&[], 99.0)), (Some(3.0), None));
    }

    #[test]
    fn a_ratio_needs_both() {
        assert!(ratio("x", 0.5, Some(1.0), Some(4.0)).met);
        assert!(!ratio("x", 0.5, Some(1.0), None).met);
        assert!(!ratio("x", 0.5, None, Some(4.0)).met);
    }
}

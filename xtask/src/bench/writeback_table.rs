//! The tables of `writeback`, and what they mean for its goal.
//! Never leaves out a file system: one that was not measured is a missed goal.

use std::fmt::Write;

use super::goal::Verdict;
use super::record::Sample;
use super::table::LOOP_DIRECT;
use super::writeback::{PLACES, Row, SYSTEMS, Writeback};

/// For a document, before the tables.
pub(crate) const INTRODUCTION: &str =
    "A file system on a loop device writes back into the page cache of the file system below, where
it may have to wait until there are fewer dirty pages. The table has the seconds to fill a new
file system and to sync it. Less is better.";

/// becket's time to that of loop with direct I/O may be at most this.
const GOAL: f64 = 1.05;

fn sample(record: &Writeback, place: &str, system: &str, entrant: &str) -> Option<Sample> {
    let is = |row: &&Row| row.place == place && row.system == system && row.entrant == entrant;
    Sample::of(&record.rows.iter().find(is)?.seconds)
}

fn rows<'a>(record: &'a Writeback, place: &'a str, system: &'a str) -> impl Iterator<Item = &'a Row> {
    record.rows.iter().filter(move |row| row.place == place && row.system == system)
}

/// Cells of one row: seconds, ratio, spread, rounds; or the reason.
fn cells(record: &Writeback, row: &Row) -> Result<[String; 4], String> {
    let base = sample(record, &row.place, &row.system, LOOP_DIRECT);
    let Some(sample) = Sample::of(&row.seconds) else {
        let why = row.absent.as_deref().unwrap_or("it was not run");
        return Err(why.lines().next().unwrap_or_default().to_owned());
    };
    let lost = row.absent.as_ref().map_or("", |_| ", one failed");
    Ok([
        format!("{:.2}", sample.median),
        base.map_or_else(|| "-".to_owned(), |base| format!("{:.3}", sample.median / base.median)),
        format!("{:.1} %", sample.spread * 100.0),
        format!("{}{lost}", sample.count),
    ])
}

/// For the terminal.
pub(crate) fn text(record: &Writeback) -> String {
    let mut text = String::new();
    for place in PLACES {
        for system in SYSTEMS {
            let mut head = format!("\n{place}, {system:<24}   seconds  to loop   spread  rounds\n");
            for row in rows(record, place, system) {
                text.push_str(&std::mem::take(&mut head));
                let _ = match cells(record, row) {
                    Ok([seconds, ratio, spread, count]) => {
                        writeln!(
                            text,
                            "  {:<28}  {seconds:>8}  {ratio:>7}  {spread:>7}  {count:>6}",
                            row.entrant
                        )
                    }
                    Err(why) => writeln!(text, "  {:<28}  {why}", row.entrant),
                };
            }
        }
    }
    text.push_str("\nWhat becket chose\n");
    for (place, backing, words) in modes(record) {
        let _ = writeln!(text, "  {place:<6} {backing:<18} {words}");
    }
    text
}

/// For a document.
pub(crate) fn markdown(record: &Writeback) -> String {
    let mut text = String::from(
        "| where | below | contestant | seconds | to loop with direct I/O | spread | rounds |\n\
         | --- | --- | --- | ---: | ---: | ---: | ---: |\n",
    );
    for place in PLACES {
        for row in SYSTEMS.into_iter().flat_map(|system| rows(record, place, system)) {
            let name = if row.entrant == "becket" { "**becket**" } else { &row.entrant };
            let cells = cells(record, row)
                .map_or_else(|why| format!("{} | | | 0", why.replace('|', "\\|")), |cells| cells.join(" | "));
            let _ = writeln!(text, "| {place} | {} | {name} | {cells} |", row.system);
        }
    }
    text.push_str("\nWhat becket chose by default, also where direct I/O may be impossible:\n\n");
    text.push_str("| where | image on | choice |\n| --- | --- | --- |\n");
    for (place, backing, words) in modes(record) {
        let _ = writeln!(text, "| {place} | {backing} | {} |", words.replace('|', "\\|"));
    }
    text
}

fn modes(record: &Writeback) -> impl Iterator<Item = (&str, &str, String)> {
    record.modes.iter().map(|mode| {
        let words = match &mode.said {
            Ok(said) => {
                let way = if said.direct_io { "direct I/O" } else { "through the page cache" };
                format!("{}, {way}: {}", said.transport, said.direct_io_reason)
            }
            Err(why) => format!("not tried: {}", why.lines().next().unwrap_or_default()),
        };
        (mode.place.as_str(), mode.backing.as_str(), words)
    })
}

/// The goal, for each place and file system.
pub(crate) fn verdicts(record: &Writeback) -> Vec<Verdict> {
    let places = PLACES.into_iter().flat_map(|place| SYSTEMS.map(|system| (place, system)));
    let verdict = |(place, system): (&str, &str)| {
        let ours = sample(record, place, system, "becket");
        let base = sample(record, place, system, LOOP_DIRECT);
        let got = ours.zip(base).map(|(ours, base)| ours.median / base.median);
        Verdict::at_most(format!("write-back, {place}, {system}: time, to loop with direct I/O"), GOAL, got)
    };
    places.map(verdict).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::writeback::tests::example;

    #[test]
    fn the_tables_hold_everybody_and_every_reason() {
        let record = example();
        for text in [text(&record), markdown(&record)] {
            for word in [
                "2.20",
                "1.100",
                "no room",
                "btrfs",
                "it was not run",
                "loop, direct I/O: it says so",
                "no server",
            ] {
                assert!(text.contains(word), "{word} is not in\n{text}");
            }
        }
    }

    #[test]
    fn slower_than_loop_or_not_measured_is_a_goal_not_met() {
        let verdicts = verdicts(&example());
        assert_eq!(verdicts.len(), 6);
        assert!(verdicts.iter().all(|one| !one.met));
        assert_eq!(verdicts[0].got.map(|got| (got * 10.0).round()), Some(11.0));
        assert_eq!(verdicts[1].got, None);
    }
}

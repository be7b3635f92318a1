//! `cargo xtask bench attach`: how long attaching and detaching one raw image takes, beside losetup and the peers.
//! Never leaves a device behind: what was attached is detached before the next one's turn.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::build::Build;
use super::contestant::Field;
use super::guest::{self, Guest};
use super::host::{self, Host};
use super::record::{self, Clock, Sample, Setting};
use super::{fio, table};
use crate::vm::quoted;

const SCRIPT: &str = include_str!("guest/attach.sh");

/// Arguments of `cargo xtask bench attach`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    guest: guest::Options,
    /// Times that each contestant is attached, in turn
    #[arg(long, default_value_t = 9)]
    rounds: u32,
    /// Only in the guest: root and a loop driver are needed otherwise
    #[arg(long)]
    no_host: bool,
}

/// `target/bench/attach.json`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Attach {
    pub(crate) setting: Setting,
    pub(crate) rows: Vec<Row>,
}

/// One contestant in one place.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// `host`, by time, or `guest`, by instructions.
    pub(crate) place: String,
    pub(crate) entrant: String,
    /// Microseconds of each round.
    pub(crate) attach: Vec<f64>,
    pub(crate) detach: Vec<f64>,
    /// Why there are no numbers.
    pub(crate) absent: Option<String>,
}

/// Measures on the host and in the guest, prints the table, and keeps the record.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let build = Build::new(&args.guest)?;
    let mut rows = Vec::new();
    if !args.no_host {
        rows.extend(on_host(args, &build.path)?);
    }
    let mut field = Field::all(build.path.clone(), &[]);
    field.add(
        "becket-loop",
        "becket attach --via loop",
        "DEVICE=$(becket attach --via loop $IMAGE)",
        "becket detach $DEVICE",
    );
    let names = [table::LOOP_DIRECT, "becket-loop", "becket", "kublk-batch-zero-copy", "rublk-zero-copy"];
    field.keep(&names.map(str::to_owned))?;
    let present: Vec<&str> = field.present().map(|one| one.entrant.name.as_str()).collect();
    let script = script(&present, args.rounds);
    let guest = Guest::new(&args.guest, &build, Clock::Instructions, 1);
    let report = guest.run(&field, Vec::new(), &script)?;
    rows.extend(gather("guest", &field, &report)?);
    let kernel = guest::kernel_of(&report)?;
    let notes = vec![
        format!("{} rounds, one after another in turn, after one that does not count", args.rounds),
        "host: by the clock, a file in the temporary directory; guest: the clock counts instructions"
            .to_owned(),
    ];
    let attach = Attach { setting: guest.setting(&kernel, notes)?, rows };
    print!("{}", text(&attach));
    eprintln!("xtask: everything is in {}", record::save("attach.json", &attach)?.display());
    Ok(0)
}

fn script(entrants: &[&str], rounds: u32) -> String {
    let entrants: Vec<String> = entrants.iter().map(|name| quoted(name)).collect();
    format!("ENTRANTS=({})\nROUNDS={rounds}\n{SCRIPT}", entrants.join(" "))
}

/// losetup and becket on the kernel's loop driver, here.
fn on_host(args: &Args, becket: &Path) -> Result<Vec<Row>> {
    let host = Host::new()?;
    let becket = host::word(becket);
    let mut field = Field::none();
    field.loop_device("losetup", "--direct-io=on");
    field.add(
        "becket-loop",
        "becket attach --via loop",
        &format!("DEVICE=$({becket} attach --via loop $IMAGE)"),
        &format!("{becket} detach $DEVICE"),
    );
    let image = host.word("image");
    let script = script(&["losetup", "becket-loop"], args.rounds);
    let report = host.run(&field, &format!("IMAGE={image}\ntruncate -s 256M $IMAGE\n{script}"))?;
    gather("host", &field, &report)
}

fn gather(place: &str, field: &Field, report: &str) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = field
        .contestants
        .iter()
        .map(|one| Row {
            place: place.to_owned(),
            entrant: one.entrant.name.clone(),
            attach: Vec::new(),
            detach: Vec::new(),
            absent: one.entrant.absent.clone(),
        })
        .collect();
    for section in fio::sections(report) {
        match section.words[..] {
            ["kernel", _] | ["fio", _] => {}
            ["took", name, attach, detach] => {
                let row = row_of(&mut rows, name)?;
                row.attach.push(attach.parse().context("no number of microseconds")?);
                row.detach.push(detach.parse().context("no number of microseconds")?);
            }
            ["absent", name] => {
                row_of(&mut rows, name)?.absent.get_or_insert_with(|| section.body.to_owned());
            }
            _ => bail!("the report has a section `{}`", section.words.join(" ")),
        }
    }
    Ok(rows)
}

fn row_of<'a>(rows: &'a mut [Row], name: &str) -> Result<&'a mut Row> {
    rows.iter_mut().find(|row| row.entrant == name).context("the report names somebody unknown")
}

/// For the terminal and for the document.
pub(crate) fn text(attach: &Attach) -> String {
    let mut text = String::from(
        "\n                                 attach ms   spread  to loop  detach ms   spread  to loop\n",
    );
    for row in &attach.rows {
        let name = format!("{} {}", row.place, row.entrant);
        let base = attach.rows.iter().find(|one| one.place == row.place);
        let (Some(up), Some(down)) = (Sample::of(&row.attach), Sample::of(&row.detach)) else {
            let why = row.absent.as_deref().unwrap_or("it was not run");
            let _ = writeln!(text, "  {name:<28}  {}", why.lines().next().unwrap_or_default());
            continue;
        };
        let to = |sample: Sample, of: fn(&Row) -> &Vec<f64>| {
            base.and_then(|base| Sample::of(of(base)))
                .map_or_else(|| "-".to_owned(), |base| format!("{:.2}", sample.median / base.median))
        };
        let _ = writeln!(
            text,
            "  {name:<28}  {:>10.2}  {:>6.0}%  {:>7}  {:>9.2}  {:>6.0}%  {:>7}",
            up.median / 1000.0,
            up.spread * 100.0,
            to(up, |row| &row.attach),
            down.median / 1000.0,
            down.spread * 100.0,
            to(down, |row| &row.detach)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_gathered_and_compared_within_one_place() {
        let mut field = Field::none();
        field.add("losetup", "", "", "");
        field.add("becket-loop", "", "", "");
        field.add("rublk", "", "", "");
        let report = "@@ kernel 7\n@@ took losetup 2000 1000\n@@ took losetup 2000 1000\n@@ took becket-loop 3000 500\n\
                      @@ absent rublk\nno device\n";
        let rows = gather("host", &field, report).unwrap();
        assert_eq!(rows[0].attach, [2000.0, 2000.0]);
        let setting = crate::bench::grid::tests::example().boots.swap_remove(0);
        let text = text(&Attach { setting, rows });
        for word in ["1.50", "0.50", "no device", "3.00"] {
            assert!(text.contains(word), "{word} is not in {text}");
        }
    }

    #[test]
    fn a_stranger_in_the_report_is_an_error() {
        assert!(gather("host", &Field::none(), "@@ took x 1 2\n").is_err());
    }
}

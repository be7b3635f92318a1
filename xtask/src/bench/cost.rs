//! `cargo xtask bench cost`: I/Os for a thousand million instructions, of becket, the kernel's loop and the peers.
//! Never compares numbers of different boots: all contestants of one table ran in one guest, in turn.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};

use super::contestant::{Field, Other};
use super::fio::{self, Workload};
use super::record::{self, Cost, Outcome, Run};
use super::{guest, table};
use crate::vm::quoted;

/// The loop over rounds, contestants and workloads.
const SCRIPT: &str = include_str!("guest/cost.sh");

/// Arguments of `cargo xtask bench cost`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    guest: guest::Options,
    /// Runs of each contestant under each workload, in turn
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Only these contestants (default: all)
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    only: Vec<String>,
    /// Only workloads whose name starts so, as `rand` or `randread-4k-d64` (default: all)
    #[arg(long, value_delimiter = ',', value_name = "PREFIX,...")]
    workloads: Vec<String>,
    /// fio's engine: libaio or io_uring
    #[arg(long, default_value = "libaio")]
    engine: String,
    /// Another build of becket to measure beside this one
    #[arg(long, value_name = "NAME=PATH")]
    beside: Vec<Other>,
    /// Where the result is written, below target/bench
    #[arg(long, default_value = "cost.json", value_name = "FILE")]
    json: String,
}

/// Measures, prints the table, and keeps the record.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let mut field = Field::all(guest::becket(&args.guest)?, &args.beside);
    field.keep(&args.only)?;
    let mut workloads = Workload::all();
    if !args.workloads.is_empty() {
        workloads.retain(|one| args.workloads.iter().any(|prefix| one.name.starts_with(prefix.as_str())));
        if workloads.is_empty() {
            bail!("no workload is called {}", args.workloads.join(" or "));
        }
    }
    let report = guest::run(&args.guest, &field, Vec::new(), &script(args, &field, &workloads))?;
    let cost = gather(args, field, workloads, &report)?;
    print!("{}", table::text(&cost));
    eprintln!("xtask: everything is in {}", record::save(&args.json, &cost)?.display());
    let measured = |run: &Run| matches!(run.outcome, Outcome::Measured(_));
    let broken: BTreeSet<&str> =
        cost.runs.iter().filter(|run| !measured(run)).map(|run| run.entrant.as_str()).collect();
    let ours = cost.entrants.iter().filter(|one| one.ours);
    // A peer that does not run is a row of the table; becket not running is a failure.
    Ok(u8::from(ours.into_iter().any(|one| one.absent.is_some() || broken.contains(one.name.as_str()))))
}

fn script(args: &Args, field: &Field, workloads: &[Workload]) -> String {
    let entrants: Vec<String> = field.present().map(|one| quoted(&one.entrant.name)).collect();
    let jobs: Vec<String> = workloads
        .iter()
        .map(|one| quoted(&format!("{}|{}", one.name, one.arguments(&args.engine))))
        .collect();
    format!(
        "ENTRANTS=({})\nWORKLOADS=({})\nROUNDS={}\n{SCRIPT}",
        entrants.join(" "),
        jobs.join("\n"),
        args.rounds
    )
}

/// Makes a record of the guest's report.
fn gather(args: &Args, field: Field, workloads: Vec<Workload>, report: &str) -> Result<Cost> {
    let mut entrants: Vec<_> = field.contestants.into_iter().map(|one| one.entrant).collect();
    let mut runs = Vec::new();
    let (mut kernel, mut generator) = (String::new(), String::new());
    for section in fio::sections(report) {
        match section.words[..] {
            ["kernel", release] => kernel = release.to_owned(),
            ["fio", version] => generator = version.to_owned(),
            ["absent", name] => {
                let entrant = entrants.iter_mut().find(|one| one.name == name);
                let entrant = entrant.context("the guest reports somebody unknown")?;
                let why = if section.body.is_empty() { "it said nothing" } else { section.body };
                entrant.absent.get_or_insert_with(|| format!("it could not be attached: {why}"));
            }
            ["run", name, workload, round, code, device] => {
                let job = workloads.iter().find(|one| one.name == workload);
                let job = job.context("the guest reports an unknown workload")?;
                let outcome = match (code, fio::parse(section.body)) {
                    ("0", Ok(measure)) => Outcome::Measured(measure),
                    ("0", Err(error)) => Outcome::Failed(format!("{error:#}")),
                    (code, _) => Outcome::Failed(format!("fio ended with {code}: {}", section.body)),
                };
                runs.push(Run {
                    entrant: name.to_owned(),
                    workload: workload.to_owned(),
                    round: round.parse().context("the guest counts strangely")?,
                    command: format!("fio --filename={device} {}", job.arguments(&args.engine)),
                    outcome,
                });
            }
            _ => bail!("the guest's report has a section `{}`", section.words.join(" ")),
        }
    }
    let notes = vec![
        format!("load: {generator}, engine {}", args.engine),
        "image: 256 MiB on ext4 on a memory-backed null_blk (queue_mode=2, irqmode=0, 512-byte blocks)"
            .to_owned(),
        format!(
            "{} rounds in one boot, one contestant attached at a time, page cache dropped before each",
            args.rounds
        ),
    ];
    Ok(Cost { setting: guest::setting(&args.guest, &kernel, notes)?, entrants, workloads, runs })
}

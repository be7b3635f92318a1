//! `cargo xtask campaign`: devices under load whose servers are killed, stopped, starved or replaced, again and again.
//! The tests are those of CI (`crates/becket/tests/campaign.rs` and `survival.rs`), only longer: ublk's in a virtual machine,
//! FUSE's on this machine.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::ci::test_of_becket;
use crate::exec;
use crate::vm::{Machine, Place, Series, quoted};

/// Where the guest leaves its report.
const REPORT: &str = "/root/campaign.json";

/// Arguments of `cargo xtask campaign`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What is done to the server; unless said, each of all faults in turn, under fio, git, SQLite and a verifying load
    #[arg(value_enum)]
    what: Option<What>,
    /// How often
    #[arg(long, visible_alias = "kills", default_value_t = 50)]
    count: u32,
    /// Over which transport: ublk in a virtual machine, fuse on this machine (as root)
    #[arg(long, value_enum, default_value_t = Via::Ublk)]
    via: Via,
    /// Which kernel to boot
    #[arg(long, default_value = "7.x")]
    kernel: Series,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum What {
    /// Its worker is killed
    Kill,
    /// Its supervisor is killed, then the worker
    Succession,
    /// A new server takes over
    Takeover,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Via {
    Ublk,
    Fuse,
}

/// Runs the campaign and shows what it says; its exit code. What it reports is kept below the target directory.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let (program, test) = match (args.what, args.via) {
        (None, Via::Ublk) => ("campaign", "a_campaign_is_not_noticed"),
        (None, Via::Fuse) => ("campaign", "a_campaign_over_fuse_is_not_noticed"),
        (Some(What::Kill), Via::Ublk) => ("survival", "killed_workers_are_not_noticed"),
        (Some(What::Kill), Via::Fuse) => ("survival", "fuse_workers_that_are_killed_are_not_noticed"),
        (Some(What::Succession), Via::Ublk) => {
            ("survival", "killed_supervisors_and_their_workers_are_not_noticed")
        }
        (Some(What::Succession), Via::Fuse) => {
            ("survival", "fuse_supervisors_that_are_killed_are_not_noticed")
        }
        (Some(What::Takeover), _) => ("survival", "upgrades_are_not_noticed"),
    };
    let (binary, becket) = test_of_becket(program)?;
    let folder = exec::target_dir().join("campaign");
    std::fs::create_dir_all(&folder)?;
    let word = match args.via {
        Via::Ublk => format!("ublk-{}", args.kernel),
        Via::Fuse => "fuse".to_owned(),
    };
    let report = folder.join(format!("{word}.json"));
    let code = match args.via {
        Via::Ublk => in_a_guest(args, &becket, &binary, test, &report)?,
        Via::Fuse => here(args, &binary, test, &report)?,
    };
    if args.what.is_none() && report.exists() {
        println!("the report is kept in {}", report.display());
    }
    Ok(code)
}

fn here(args: &Args, binary: &Path, test: &str, report: &Path) -> Result<u8> {
    let mut command = Command::new(binary);
    command.args(["--exact", test, "--nocapture"]);
    command.env("BECKET_CAMPAIGN", args.count.to_string()).env("BECKET_CAMPAIGN_REPORT", report);
    let status = command.status().with_context(|| format!("cannot run {}", binary.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

fn in_a_guest(args: &Args, becket: &Path, binary: &Path, test: &str, report: &Path) -> Result<u8> {
    // The test knows the command by the path that cargo gave it.
    let tested = quoted(&becket.display().to_string());
    let script = format!(
        "set -u; modprobe ublk_drv; export TMPDIR=/scratch/tmp; mkdir $TMPDIR\n\
         mkdir -p $(dirname {tested}); ln -sf /usr/local/bin/becket {tested}\n\
         export BECKET_TEST_GUEST=1 BECKET_TEST_VIA=ublk BECKET_TEST_SLOW=4 BECKET_CAMPAIGN={} BECKET_CAMPAIGN_REPORT={REPORT}\n\
         campaign --exact {test} --nocapture\n",
        args.count
    );
    let mut machine = Machine::new(args.kernel, script);
    machine.timeout = Duration::from_secs(300 + u64::from(args.count) * 30);
    let place = |host: &Path, name| Place { host: host.to_owned(), guest: format!("/usr/local/bin/{name}") };
    machine.files = vec![place(becket, "becket"), place(binary, "campaign")];
    if args.what.is_none() {
        machine.outs = vec![Place { host: report.to_owned(), guest: REPORT.to_owned() }];
    }
    machine.boot(&mut |bytes| {
        use std::io::Write as _;
        // A closed pipe on our side is no reason to lose the test's exit code.
        let _ = std::io::stdout().write_all(bytes);
    })
}

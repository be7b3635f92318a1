//! `cargo xtask campaign`: devices under load whose servers are killed, stopped, starved or replaced, again
//! and again. The tests are those of CI (`crates/becket/tests/campaign` and `survival.rs`), only longer:
//! ublk's in a virtual machine, the others' on this machine.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::ci::test_of_becket;
use crate::exec;
use crate::vm::{Machine, Place, Series, quoted, show};

/// Where the guest leaves its report.
const REPORT: &str = "/root/campaign.json";

/// Arguments of `cargo xtask campaign`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What is done to the server; unless said, each of all faults in turn, under fio, git, SQLite and a
    /// verifying load
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

/// Runs the campaign and shows its output; returns its exit code. Its report is kept below the target
/// directory.
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
        (Some(What::Takeover), Via::Ublk) => ("survival", "upgrades_are_not_noticed"),
        (Some(What::Takeover), Via::Fuse) => ("survival", "fuse_upgrades_are_not_noticed"),
    };
    let course = Course {
        program,
        test,
        via: if args.via == Via::Ublk { "ublk" } else { "fuse" },
        kernel: args.kernel,
        variables: vec![("BECKET_CAMPAIGN", args.count.to_string())],
        patience: Duration::from_secs(300 + u64::from(args.count) * 30),
        reports: args.what.is_none(),
    };
    course.run("campaign")
}

/// One test that runs for a given time, wherever its transport is available.
pub(crate) struct Course {
    /// The file of tests, and which of them.
    pub(crate) program: &'static str,
    pub(crate) test: &'static str,
    /// ublk runs in a guest of that kernel.
    pub(crate) via: &'static str,
    pub(crate) kernel: Series,
    /// Its environment variables.
    pub(crate) variables: Vec<(&'static str, String)>,
    /// How long a guest may take.
    pub(crate) patience: Duration,
    /// It leaves a report.
    pub(crate) reports: bool,
}

impl Course {
    /// Runs it and shows its output; returns its exit code. Its report is kept below the target directory, in
    /// a folder of that name.
    pub(crate) fn run(&self, name: &str) -> Result<u8> {
        let (binary, becket) = test_of_becket(self.program)?;
        let folder = exec::target_dir().join(name);
        std::fs::create_dir_all(&folder)?;
        let in_a_guest = self.via == "ublk";
        let word = if in_a_guest { format!("ublk-{}", self.kernel) } else { self.via.to_owned() };
        let report = folder.join(format!("{word}.json"));
        let code = if in_a_guest {
            self.in_a_guest(&becket, &binary, &report)?
        } else {
            self.here(&binary, &report)?
        };
        if self.reports && report.exists() {
            println!("the report is kept in {}", report.display());
        }
        Ok(code)
    }

    fn here(&self, binary: &Path, report: &Path) -> Result<u8> {
        let mut command = Command::new(binary);
        command.args(["--exact", self.test, "--nocapture"]);
        command.env("BECKET_TEST_VIA", self.via).env("BECKET_CAMPAIGN_REPORT", report);
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        let status = command.status().with_context(|| format!("cannot run {}", binary.display()))?;
        Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
    }

    fn in_a_guest(&self, becket: &Path, binary: &Path, report: &Path) -> Result<u8> {
        let variables = self.variables.iter().map(|(name, value)| format!(" {name}={}", quoted(value)));
        let environment = format!("BECKET_CAMPAIGN_REPORT={REPORT}{}", variables.collect::<String>());
        let mut machine = guest(self.kernel, becket, binary, self.test, &environment);
        machine.timeout = self.patience;
        if self.reports {
            machine.outs = vec![Place { host: report.to_owned(), guest: REPORT.to_owned() }];
        }
        machine.boot(&mut show)
    }
}

/// A guest that runs one of becket's own tests, with this environment. One that is skipped has failed.
pub(crate) fn guest(series: Series, becket: &Path, binary: &Path, test: &str, environment: &str) -> Machine {
    // The test knows the command by the path that cargo gave it.
    let tested = quoted(&becket.display().to_string());
    let script = format!(
        "set -u; modprobe ublk_drv; modprobe -q loop; modprobe -q dm_mod; export TMPDIR=/scratch/tmp; mkdir $TMPDIR\n\
         mkdir -p $(dirname {tested}); ln -sf /usr/local/bin/becket {tested}\n\
         export BECKET_TEST_GUEST=1 BECKET_TEST_VIA=ublk BECKET_TEST_SLOW=4 {environment}\n\
         export BECKET_SKIP_LOG=/root/skipped\n\
         the-test --exact {test} --nocapture && [[ ! -e $BECKET_SKIP_LOG ]]\n"
    );
    let mut machine = Machine::new(series, script);
    let place = |host: &Path, name| Place { host: host.to_owned(), guest: format!("/usr/local/bin/{name}") };
    machine.files = vec![place(becket, "becket"), place(binary, "the-test")];
    machine
}

//! `cargo xtask campaign`, `soak` and `powercut`: tests of CI (`crates/becket/tests`) that take their time.
//! campaign: devices under load whose servers are killed, stopped, starved or replaced, again and again.
//! soak: everything at once for hours. powercut: file systems, looked at wherever the power could have gone.
//! ublk's run in a virtual machine, the others on this machine.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

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
    #[arg(long, default_value = "ublk", value_parser = ["ublk", "fuse"])]
    via: String,
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

/// Runs the campaign and shows its output; returns its exit code. Its report is kept below the target
/// directory.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let (program, ublk, fuse) = match args.what {
        None => ("campaign", "a_campaign_is_not_noticed", "a_campaign_over_fuse_is_not_noticed"),
        Some(What::Kill) => {
            ("survival", "killed_workers_are_not_noticed", "fuse_workers_that_are_killed_are_not_noticed")
        }
        Some(What::Succession) => (
            "survival",
            "killed_supervisors_and_their_workers_are_not_noticed",
            "fuse_supervisors_that_are_killed_are_not_noticed",
        ),
        Some(What::Takeover) => ("survival", "upgrades_are_not_noticed", "fuse_upgrades_are_not_noticed"),
    };
    let course = Course {
        program,
        test: if args.via == "ublk" { ublk } else { fuse },
        via: &args.via,
        kernel: args.kernel,
        variables: vec![("BECKET_CAMPAIGN", args.count.to_string())],
        patience: Duration::from_secs(300 + u64::from(args.count) * 30),
        reports: args.what.is_none(),
    };
    course.run("campaign")
}

/// Arguments of `cargo xtask soak`.
#[derive(clap::Args)]
pub(crate) struct Soak {
    /// How long, in hours; parts of one, too
    #[arg(long, default_value_t = 1.0)]
    hours: f64,
    /// Over which transport: ublk in a virtual machine, fuse and loop on this machine (as root)
    #[arg(long, default_value = "ublk", value_parser = ["ublk", "fuse", "loop"])]
    via: String,
    /// Other numbers, other operations and moments
    #[arg(long, default_value_t = 0)]
    seed: u32,
}

/// Loads, faults, crashes, changes, devices that come and go, queries: runs them and shows the output; the
/// exit code is 0 when nothing was wrong, lost, late or left behind.
pub(crate) fn soak(args: &Soak) -> Result<u8> {
    let Ok(length) = Duration::try_from_secs_f64(args.hours * 3600.0) else {
        bail!("{} is not a number of hours", args.hours);
    };
    let fuse = args.via == "fuse";
    let course = Course {
        program: "campaign",
        test: if fuse { "soak::a_soak_over_fuse_finds_nothing" } else { "soak::a_soak_finds_nothing" },
        via: &args.via,
        kernel: Series::V7,
        variables: vec![
            ("BECKET_SOAK", length.as_secs().to_string()),
            ("BECKET_SOAK_SEED", args.seed.to_string()),
        ],
        // Beside the time itself a start, and an end that waits for each load.
        patience: length + Duration::from_secs(3600),
        reports: true,
    };
    course.run("soak")
}

/// Arguments of `cargo xtask powercut`.
#[derive(clap::Args)]
pub(crate) struct Powercut {
    /// At how many places of each file system's log it is mounted and checked
    #[arg(long, default_value_t = 40)]
    points: u32,
    /// Which kernel to boot
    #[arg(long, default_value = "7.x")]
    kernel: Series,
}

/// Makes the logs, replays them, and shows a line for each file system; the exit code.
pub(crate) fn powercut(args: &Powercut) -> Result<u8> {
    let course = Course {
        program: "powercut",
        test: "dm_log_a_file_system_is_whole_wherever_the_power_goes",
        via: "ublk",
        kernel: args.kernel,
        variables: vec![("BECKET_POWERCUT", args.points.to_string())],
        patience: Duration::from_secs(600 + u64::from(args.points) * 60),
        reports: false,
    };
    course.run("powercut")
}

/// One test that runs for a given time, wherever its transport is available.
struct Course<'a> {
    /// The file of tests, and which of them.
    program: &'static str,
    test: &'static str,
    /// ublk runs in a guest of that kernel.
    via: &'a str,
    kernel: Series,
    /// Its environment variables.
    variables: Vec<(&'static str, String)>,
    /// How long a guest may take.
    patience: Duration,
    /// It leaves a report.
    reports: bool,
}

impl Course<'_> {
    /// Runs it and shows its output; returns its exit code. Its report is kept below the target directory, in
    /// a folder of that name.
    fn run(&self, name: &str) -> Result<u8> {
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
        // The test knows the command by the path that cargo gave it. A skip is a failure.
        let tested = quoted(&becket.display().to_string());
        let script = format!(
            "set -u; modprobe ublk_drv; modprobe -q loop; modprobe -q dm_mod; export TMPDIR=/scratch/tmp; mkdir $TMPDIR\n\
             mkdir -p $(dirname {tested}); ln -sf /usr/local/bin/becket {tested}\n\
             export BECKET_TEST_GUEST=1 BECKET_TEST_VIA=ublk BECKET_TEST_SLOW=4 {environment}\n\
             export BECKET_SKIP_LOG=/root/skipped\n\
             the-test --exact {} --nocapture && [[ ! -e $BECKET_SKIP_LOG ]]\n",
            self.test
        );
        let mut machine = Machine::new(self.kernel, script);
        let place =
            |host: &Path, name| Place { host: host.to_owned(), guest: format!("/usr/local/bin/{name}") };
        machine.files = vec![place(becket, "becket"), place(binary, "the-test")];
        machine.timeout = self.patience;
        if self.reports {
            machine.outs = vec![Place { host: report.to_owned(), guest: REPORT.to_owned() }];
        }
        machine.boot(&mut show)
    }
}

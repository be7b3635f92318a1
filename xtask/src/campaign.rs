//! `cargo xtask campaign`: a device under a verifying load whose server is killed, or replaced, again and again.
//! Runs in a virtual machine; the test is that of CI (`crates/becket/tests/survival.rs`), only longer.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::ci::Binaries;
use crate::vm::{Machine, Place, Series, quoted};

/// Arguments of `cargo xtask campaign`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What is done to the server
    #[arg(value_enum)]
    what: What,
    /// How often
    #[arg(long, default_value_t = 50)]
    count: u32,
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

/// Boots a guest and shows what it says; its exit code.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let test = match args.what {
        What::Kill => "killed_workers_are_not_noticed",
        What::Succession => "killed_supervisors_and_their_workers_are_not_noticed",
        What::Takeover => "upgrades_are_not_noticed",
    };
    let binaries = Binaries::all()?;
    let is_survival = |path: &&std::path::PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("survival-"))
    };
    let program = binaries.tests.iter().find(is_survival).context("cargo built no survival test")?;
    let tested = binaries.tested.context("cargo built no becket")?;
    let tested = quoted(&tested.display().to_string());
    let script = format!(
        "set -u; modprobe ublk_drv; export TMPDIR=/scratch/tmp; mkdir $TMPDIR\n\
         mkdir -p $(dirname {tested}); ln -sf /usr/local/bin/becket {tested}\n\
         export BECKET_TEST_VIA=ublk BECKET_CAMPAIGN={}\n\
         survival --exact {test} --nocapture\n",
        args.count
    );
    let mut machine = Machine::new(args.kernel, script);
    machine.timeout = Duration::from_secs(120 + u64::from(args.count) * 30);
    let place = |host: &std::path::Path, name| Place {
        host: host.to_owned(),
        guest: format!("/usr/local/bin/{name}"),
    };
    machine.files = vec![place(&binaries.becket, "becket"), place(program, "survival")];
    machine.boot(&mut |bytes| {
        use std::io::Write as _;
        // A closed pipe on our side is no reason to lose the test's exit code.
        let _ = std::io::stdout().write_all(bytes);
    })
}

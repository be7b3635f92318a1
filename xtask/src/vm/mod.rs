//! The virtual machine for tests: a stock Debian kernel under QEMU's software emulation, with a Debian
//! userland. Never changes the host beyond the checkout's target directory.

pub(crate) mod apt;
mod channel;
mod console;
mod kernel;
mod lock;
mod machine;
mod qemu;
mod rootfs;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};

pub(crate) use apt::Apt;
pub(crate) use kernel::Series;
pub(crate) use machine::{Machine, Place, quoted};

/// Arguments of `cargo xtask vm`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which kernel to boot: 7.x (ublk with zero copy), 6.12 (ublk by copying) or 6.1 (no ublk)
    #[arg(long, default_value = "7.x")]
    kernel: Series,
    /// Seconds until the guest is given up, boot included
    #[arg(long, default_value_t = 300)]
    timeout: u64,
    /// Emulated CPUs
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Memory in MiB
    #[arg(long, default_value_t = 2048)]
    memory: u32,
    /// Let the guest's clock advance with executed instructions (one host thread): for counting, not for
    /// testing
    #[arg(long)]
    icount: bool,
    /// Run the udev daemon in the guest
    #[arg(long)]
    udev: bool,
    /// Start systemd as process 1, and the script when it has reached multi-user.target
    #[arg(long)]
    systemd: bool,
    /// Put a file or directory of the host into the guest
    #[arg(long = "file", value_name = "HOSTPATH:GUESTPATH")]
    files: Vec<String>,
    /// Fetch a file from the guest when the script has ended
    #[arg(long = "out", value_name = "GUESTFILE:HOSTPATH")]
    outs: Vec<String>,
    /// Show the kernel's console (on standard error) as it comes
    #[arg(long, short)]
    verbose: bool,
    /// Ask the archive again which kernel and packages are current
    #[arg(long)]
    refresh: bool,
    /// A script file of the host, or a shell command line
    #[arg(required = true, trailing_var_arg = true)]
    script: Vec<String>,
}

/// Boots the guest and runs the script; the script's exit code.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let mut machine = Machine::new(args.kernel, script(&args.script)?);
    machine.timeout = Duration::from_secs(args.timeout);
    machine.cpus = args.cpus;
    machine.memory_mib = args.memory;
    machine.icount = args.icount;
    machine.udev = args.udev;
    machine.systemd = args.systemd;
    machine.verbose = args.verbose;
    machine.files = args.files.iter().map(|text| Place::host_to_guest(text)).collect::<Result<_>>()?;
    machine.outs = args.outs.iter().map(|text| Place::guest_to_host(text)).collect::<Result<_>>()?;
    if args.refresh {
        kernel::forget(args.kernel)?;
        rootfs::forget()?;
    }
    machine.boot(&mut show)
}

/// Shows what a guest prints, as it comes.
pub(crate) fn show(bytes: &[u8]) {
    let mut stdout = std::io::stdout().lock();
    // A closed pipe on our side is no reason to lose the script's exit code.
    let _ = stdout.write_all(bytes).and_then(|()| stdout.flush());
}

/// Makes the guests' root file system, where it is missing.
pub(crate) fn prepare() -> Result<()> {
    let _lock = lock::lock_cache()?;
    rootfs::prepare().map(drop)
}

/// What `uname -r` says in a guest of this series; fetches the kernel when it is not there.
pub(crate) fn release(series: Series) -> Result<String> {
    let _lock = lock::lock_cache()?;
    Ok(kernel::prepare(series)?.release)
}

/// One argument that names a file is a script; anything else is a command line for the shell.
fn script(words: &[String]) -> Result<String> {
    if let [only] = words {
        let path = PathBuf::from(only);
        if path.is_file() {
            return std::fs::read_to_string(&path).with_context(|| format!("cannot read the script {only}"));
        }
    }
    let line = words.join(" ");
    if line.trim().is_empty() {
        bail!("the script is empty");
    }
    Ok(line)
}

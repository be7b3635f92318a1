//! What people and CI run beside cargo: `cargo xtask vm`, `cargo xtask ci`, `cargo xtask bench`.
//! Nothing here is part of becket itself, and nothing here is installed.
#![forbid(unsafe_code)]

mod audit;
mod bench;
mod boot;
mod campaign;
mod ci;
#[cfg(test)]
mod circles;
#[cfg(test)]
mod columns;
#[cfg(test)]
mod dependencies;
mod disks;
mod exec;
mod fuzz;
#[cfg(test)]
mod kinds;
#[cfg(test)]
mod rooms;
mod sanitize;
mod suite;
mod varlinkctl;
mod versions;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks of the becket workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run a script as root in a virtual machine with a stock Debian kernel
    Vm(vm::Args),
    /// Everything that must hold before a change is taken: lints, tests, and the virtual machines
    Ci(ci::Args),
    /// Kill or replace the server of a device under load, again and again
    Campaign(campaign::Args),
    /// Cut the power under file systems on a device, and look at each
    Powercut(campaign::Powercut),
    /// Everything at once for hours: loads, faults, deaths, changes, devices that come and go
    Soak(campaign::Soak),
    /// Move live devices between this build and those of other commits, both ways
    Versions(versions::Args),
    /// Start a machine with systemd whose file systems lie on becket's devices
    Boot(boot::Args),
    /// Start a machine whose disks becket serves over vhost-user, and kill their workers
    Disks(disks::Args),
    /// util-linux's own tests of losetup, with the system's and with becket's
    LosetupSuite(suite::Args),
    /// Feed becket's readers with what libFuzzer thinks of
    Fuzz(fuzz::Args),
    /// Tests under Miri and AddressSanitizer
    Sanitize(sanitize::Args),
    /// List all code of others that becket is built from, in docs/dependencies.md
    Audit,
    /// Measure becket beside the kernel's loop driver and other servers
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().task {
        Task::Vm(args) => vm::run(&args),
        Task::Ci(args) => ci::run(&args),
        Task::Campaign(args) => campaign::run(&args),
        Task::Powercut(args) => campaign::powercut(&args),
        Task::Soak(args) => campaign::soak(&args),
        Task::Versions(args) => versions::run(&args),
        Task::Boot(args) => boot::run(&args),
        Task::Disks(args) => disks::run(&args),
        Task::LosetupSuite(args) => suite::run(&args),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Sanitize(args) => sanitize::run(&args),
        Task::Audit => audit::run(),
        Task::Bench(args) => bench::run(&args),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}

//! `cargo xtask sanitize`: tests under tools that see what a test does not. Miri runs pure computation and
//! checks each memory access against Rust's rules; AddressSanitizer watches real rings, decoders (those in C
//! too) and whole devices.
//! It never counts a tool that found nothing to run as one that found nothing.

use std::process::Command;

use anyhow::{Result, bail};

use crate::ci::{self, Case, count};
use crate::exec;

/// Arguments of `cargo xtask sanitize`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only one of them
    #[arg(value_enum)]
    tool: Option<Tool>,
}

#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
enum Tool {
    /// Needs a nightly Rust with Miri: rustup toolchain install nightly --component miri,rust-src
    Miri,
    /// Needs a C compiler with AddressSanitizer, and root for devices; any Rust will do
    Address,
}

/// Some tests of a package: its name, additional arguments of cargo, which tests (all where there are none),
/// and whether to report memory that is not freed at the end. A confined process cannot look for it.
type Run = (&'static str, &'static [&'static str], &'static [&'static str], bool);

/// What has no system call in it: Miri knows few.
const MIRI: [Run; 4] = [
    (
        "becket-engine",
        &["--lib"],
        &["syncs::", "file::", "memory::", "slot::", "growing::", "mailbox::"],
        true,
    ),
    ("becket-image", &["--test", "it"], &["map::"], true),
    ("becket-image", &["--lib"], &["map::", "bytes::", "varint::", "text::", "encoded::", "resolve::"], true),
    (
        "becket-engine",
        &["--lib"],
        &["slab::", "user_data::", "ranges::", "stats::", "law::", "geometry::", "cache::", "frames::"],
        true,
    ),
];

const DEVICES: [&str; 10] =
    ["--test", "fuse", "--test", "faults", "--test", "nested", "--test", "qcow2", "--test", "survival"];
const ADDRESS: [Run; 7] = [
    ("becket-uapi", &[], &[], true),
    ("becket-image", &[], &[], true),
    ("becket-engine", &[], &[], true),
    ("becket-fuzz", &[], &[], true),
    ("becket-transport", &[], &[], true),
    ("becket-device", &["--lib"], &[], false),
    ("becket", &DEVICES, &[], false),
];

/// Runs them; 0 when nothing was found.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let mut found = false;
    for tool in [Tool::Miri, Tool::Address] {
        if args.tool.is_some_and(|only| only != tool) {
            continue;
        }
        if tool == Tool::Miri && exec::output(nightly().arg("--version")).is_err() {
            bail!(
                "no nightly Rust with Miri is installed\n  \
                 to install it: rustup toolchain install nightly --component miri,rust-src\n  \
                 without it: cargo xtask sanitize address"
            );
        }
        let runs: &[Run] = if tool == Tool::Miri { &MIRI } else { &ADDRESS };
        for run in runs {
            let (passed, failed, skipped) = count(&cases(tool, run)?);
            println!("{tool:?}, {}: {passed} tests passed, {failed} failed, {skipped} skipped", run.0);
            if passed == 0 {
                bail!("{tool:?} has run no test of {}", run.0);
            }
            found |= failed > 0;
        }
    }
    Ok(u8::from(found))
}

/// Miri's own cargo, whichever Rust we were built with.
fn nightly() -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "miri"]).current_dir(exec::workspace());
    command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").env_remove("RUSTC");
    command
}

/// Runs tests under a tool.
fn cases(tool: Tool, &(package, words, filters, leaks): &Run) -> Result<Vec<Case>> {
    let mut command = match tool {
        Tool::Miri => {
            let mut command = nightly();
            // Clocks and temporary files are the host's.
            command.arg("test").env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-ignore-leaks");
            command
        }
        Tool::Address => {
            let mut command = exec::cargo();
            let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
            // With a target, so that build scripts and macros are built without the flags.
            command.args(["test", "--target", &target]);
            // The option is an unstable one; the runtime comes with every Rust.
            command.env("RUSTC_BOOTSTRAP", "1");
            command.env("RUSTFLAGS", "-Zsanitizer=address --cfg sanitized");
            command.env("CFLAGS", "-fsanitize=address -fno-omit-frame-pointer");
            let leaks = u8::from(leaks);
            command.env("ASAN_OPTIONS", format!("detect_leaks={leaks}:detect_stack_use_after_return=1"));
            command
        }
    };
    command.args(["-p", package]).args(words);
    command.arg("--target-dir").arg(exec::target_dir().join("sanitize"));
    ci::tested(&mut command, filters)
}

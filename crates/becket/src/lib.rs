//! The command line of becket: attaches disk images as block devices.
//! Nothing is decided here about images, transports or devices: those are the rooms below.
#![forbid(unsafe_code)]

mod args;
mod cgroup;
mod commands;
mod descendants;
mod failure;
mod faults;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod losetup;
mod mounts;
mod progress;
mod tab;
mod top;
mod ui;
mod units;
mod words;

use clap::{
    CommandFactory as _,
    error::{ContextKind, ContextValue, ErrorKind},
};
use failure::Failure;
use std::{ffi::OsString, io::Write as _, path::Path, process::ExitCode};

/// The name of the link in systemd's directory of generators.
const GENERATOR: &str = "becket-generator";

/// Does what the command line of this process says.
pub fn main() -> ExitCode {
    becket_device::log_to_stderr();
    // Before anything else: that dialect has nothing in common with ours, and is called in loops.
    if let Some(words) = losetup::meant(std::env::args_os()) {
        return ExitCode::from(losetup::run(&words));
    }
    let cli = match args::Cli::read(&words()) {
        Ok(cli) => cli,
        Err(error) => return refused(&of_users(error)),
    };
    if cli.command.restarted() {
        // Else they would all be called `exe`, after /proc/self/exe. Without it nothing works worse.
        let _ = rustix::thread::set_name(c"becket");
    }
    let ui = ui::Ui::new(cli.global);
    match commands::dispatch(&ui, &cli.command) {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            ui.fatal(&failure);
            ExitCode::from(failure.status)
        }
    }
}

/// The command line. systemd starts its generators without arguments of ours: there the name says what to do.
fn words() -> Vec<OsString> {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    if words.first().is_some_and(|name| Path::new(name).ends_with(GENERATOR)) {
        words.insert(1, "generator".into());
    }
    words
}

/// An error that proposes none of the commands that are processes of becket's own.
fn of_users(mut error: clap::Error) -> clap::Error {
    let all = args::Cli::command();
    let is_hidden = |name: &String| all.find_subcommand(name).is_none_or(clap::Command::is_hide_set);
    for kind in [ContextKind::SuggestedSubcommand, ContextKind::ValidSubcommand] {
        if let Some(ContextValue::Strings(names)) = error.remove(kind) {
            let names: Vec<String> = names.into_iter().filter(|name| !is_hidden(name)).collect();
            if !names.is_empty() {
                error.insert(kind, ContextValue::Strings(names));
            }
        }
    }
    error
}

/// Help and version go to standard output, usage errors to standard error; programs get theirs as JSON, too.
fn refused(error: &clap::Error) -> ExitCode {
    // If it cannot be printed, there is nowhere to report it.
    let _ = error.print();
    let wrong = !matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if wrong && std::env::args_os().take_while(|word| word != "--").any(|word| word == "--json") {
        let text = error.to_string();
        // What is missing or possible is on lines of its own, up to the first empty one.
        let said: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
        let failure =
            Failure::usage(said.join(" ").trim_start_matches("error: ")).hint("see `becket --help`");
        let _ = writeln!(std::io::stdout(), "{:#}", serde_json::json!({ "error": failure.to_json() }));
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

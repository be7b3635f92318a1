//! Other programs that do a part of a command: they are run, and what they say becomes ours.
//! Nothing is asked of their standard input.

use crate::failure::Failure;
use std::process::{Command, Output, Stdio};

/// Runs a tool whose error messages we report as ours.
pub(super) fn said(command: &mut Command) -> std::io::Result<Output> {
    command.stdin(Stdio::null()).env("LC_ALL", "C.UTF-8").output()
}

pub(super) fn tool_missing(what: &str, tool: &str, error: &std::io::Error) -> Failure {
    Failure::io(format!("{what}: {tool}(8)"), error).hint("install util-linux")
}

/// What a tool said, without its name and without its advice on the following lines.
pub(super) fn last_words(output: &Output, tool: &str) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let first = first.trim().trim_start_matches(tool).trim_start_matches(": ");
    if first.is_empty() { format!("{tool} ended with {}", output.status) } else { first.to_owned() }
}

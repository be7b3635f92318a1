//! Warnings for people: standard error of a command, the log file of a server.
//! It never fails and never carries a result; what a caller must act on is returned instead.

use std::fmt::Arguments;
use std::io::Write as _;

/// One line on standard error.
pub(crate) fn warn(message: Arguments<'_>) {
    // At once: supervisor and worker write to one log. A closed standard error is no reason to fail.
    let _ = std::io::stderr().write_all(format!("becket: {message}\n").as_bytes());
}

//! Warnings for people: standard error of a command, the log file of a server.
//! It never fails and never carries a result; what a caller must act on is returned instead.

use std::fmt::Arguments;
use std::io::Write as _;

/// One line on standard error.
pub(crate) fn warn(message: Arguments<'_>) {
    // A closed standard error is no reason to fail.
    let _ = writeln!(std::io::stderr(), "becket: {message}");
}

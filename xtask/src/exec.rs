//! Running other programs, and finding the places of this checkout.
//! Never hides a program's failure: its command line and what it said become the error.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};

/// The checkout's root directory.
pub(crate) fn workspace() -> &'static Path {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest)
}

/// Cargo's target directory, absolute: `CARGO_TARGET_DIR` when that is set.
pub(crate) fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => workspace().join(dir),
        None => workspace().join("target"),
    }
}

/// Cargo, the one that started us.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace());
    command
}

/// A target of the Makefile, quiet about its own commands; `words` are its variables.
pub(crate) fn make(target: &str, words: &[&str]) -> Command {
    let mut command = Command::new("make");
    command.args(["--no-print-directory", "--silent", "-C"]).arg(workspace()).arg(target).args(words);
    command
}

/// Builds the command as `make build` does, once, and returns where it is.
pub(crate) fn shipped() -> Result<PathBuf> {
    static BUILT: Mutex<bool> = Mutex::new(false);
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if *built {
        return Ok(target_dir().join("release/becket"));
    }
    let mut make = make("build", &[]);
    let status = make.stdin(Stdio::null()).status().context("cannot start make")?;
    if !status.success() {
        bail!("`{}` failed ({status})", shown(&make));
    }
    *built = true;
    Ok(target_dir().join("release/becket"))
}

/// A command as a person would type it, for messages.
pub(crate) fn shown(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.to_string_lossy());
    }
    line
}

/// Runs a command to its end; its output appears only in the error when it fails.
pub(crate) fn quietly(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Runs a command to its end and returns what it wrote to its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let done = command.stdin(Stdio::null()).output().with_context(|| {
        format!("cannot start `{}`; `scripts/setup.sh` installs what is needed", shown(command))
    })?;
    if !done.status.success() {
        let said = [done.stdout, done.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        let tail: Vec<&str> = said.lines().rev().take(20).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        bail!("`{}` failed ({})\n{}", shown(command), done.status, tail.join("\n"));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// A Markdown table; the first row is its head, and what follows so many columns stands at the right.
pub(crate) fn aligned<R: AsRef<[String]>>(rows: &[R], left: usize) -> String {
    let count = rows.first().map_or(0, |row| row.as_ref().len());
    let width =
        |column: usize| rows.iter().map(|row| row.as_ref()[column].chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let cells = row.as_ref().iter().enumerate().map(|(column, cell)| match column < left {
            true => format!("{cell:<width$}", width = width(column)),
            false => format!("{cell:>width$}", width = width(column)),
        });
        text += &format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "));
        if index == 0 {
            let lines = (0..count).map(|column| if column < left { "---" } else { "---:" });
            text += &format!("| {} |\n", lines.collect::<Vec<_>>().join(" | "));
        }
    }
    text
}

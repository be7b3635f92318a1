//! The becket that is measured: a copy of the program, and what is known of how it was made.
//! Never looks at the program again once it runs: another one may have been built meanwhile.

use std::path::PathBuf;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::guest::Options;
use super::record;
use crate::exec;

/// A program, and which one it is.
pub(crate) struct Build {
    /// Of the copy.
    pub(crate) path: PathBuf,
    /// The checkout's commit when it was built.
    pub(crate) commit: String,
    /// The beginning of its SHA-256.
    pub(crate) hash: String,
    /// How busy the host was with other things before anything was measured, in words.
    pub(crate) host: String,
    _copy: TempDir,
}

impl Build {
    /// becket, optimised, of this checkout unless another was asked for.
    pub(crate) fn new(options: &Options) -> Result<Build> {
        let (program, commit) = match &options.becket {
            // It was built elsewhere; the checkout's commit would be a guess.
            Some(path) => (path.clone(), "unknown (a build given by --becket)".to_owned()),
            None => (exec::shipped()?, record::commit()?),
        };
        let copy = tempfile::tempdir_in(record::dir()?)?;
        let path = copy.path().join("becket");
        std::fs::copy(&program, &path).with_context(|| format!("cannot copy {}", program.display()))?;
        Ok(Build { hash: record::build_of(&path)?, path, commit, host: load()?, _copy: copy })
    }
}

/// A build of our own has ended just now and is part of it.
fn load() -> Result<String> {
    let load = std::fs::read_to_string("/proc/loadavg").context("the host does not tell its load")?;
    let load = load.split(' ').next().unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Ok(format!("before it began, the host's load average was {load} on {cpus} CPUs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_replaced_is_still_the_one_that_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("other");
        std::fs::write(&program, "one").unwrap();
        let options = Options { cpus: None, timeout: 1, becket: Some(program.clone()) };
        let build = Build::new(&options).unwrap();
        std::fs::write(&program, "two").unwrap();
        assert_eq!(std::fs::read(&build.path).unwrap(), b"one");
        assert_eq!(build.hash, "7692c3ad3540");
        assert!(build.commit.starts_with("unknown"));
    }
}

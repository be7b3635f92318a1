//! Builds what goes into the guests, and asks cargo where it put it.
//! Never guesses a path below the target directory: profiles, targets and configuration may move them.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::exec;

/// The packages whose tests need ublk, or partition tables that the kernel reads: a host may have neither.
const GUEST_PACKAGES: [&str; 6] =
    ["becket", "becket-device", "becket-transport", "becket-engine", "becket-image", "becket-uapi"];

/// What the guests and the host's conformance run need.
pub(crate) struct Binaries {
    /// The optimised command.
    pub(crate) becket: PathBuf,
    /// The optimised conformance suite.
    pub(crate) conformance: PathBuf,
    /// The test binaries of [`GUEST_PACKAGES`].
    pub(crate) tests: Vec<PathBuf>,
    /// Where those tests look for the command they test.
    pub(crate) tested: Option<PathBuf>,
}

/// One line of cargo's `--message-format=json`.
#[derive(Default, Deserialize)]
struct Message {
    #[serde(default)]
    package_id: String,
    #[serde(default)]
    executable: Option<PathBuf>,
    #[serde(default)]
    target: Target,
    #[serde(default)]
    profile: Profile,
}

#[derive(Default, Deserialize)]
struct Target {
    #[serde(default)]
    name: String,
}

#[derive(Default, Deserialize)]
struct Profile {
    #[serde(default)]
    test: bool,
}

/// Where a program is among what was built, or the test of that name.
fn find(built: &[Message], name: &str, test: bool) -> Result<PathBuf> {
    let is_it = |message: &&Message| message.target.name == name && message.profile.test == test;
    let found = built.iter().find(is_it).and_then(|message| message.executable.clone());
    found.with_context(|| format!("cargo built no {name}"))
}

impl Binaries {
    /// The command and the conformance suite.
    pub(crate) fn conformance() -> Result<Binaries> {
        let built = cargo(&["build", "--release", "-p", "becket-conformance", FORMAT])?;
        Ok(Binaries {
            becket: exec::shipped()?,
            conformance: find(&built, "becket-conformance", false)?,
            tests: Vec::new(),
            tested: None,
        })
    }

    /// The same, and the tests. The whole workspace is built, as `cargo test` did: nothing is compiled twice.
    pub(crate) fn all() -> Result<Binaries> {
        let built = cargo(&["test", "--no-run", "--workspace", FORMAT])?;
        let wanted = |message: &&Message| message.profile.test && message.is_of(&GUEST_PACKAGES);
        Ok(Binaries {
            tests: built.iter().filter(wanted).filter_map(|message| message.executable.clone()).collect(),
            tested: Some(find(&built, "becket", false)?),
            ..Binaries::conformance()?
        })
    }
}

/// One test of becket's, and the command that it tests: as `cargo test` builds them, and nothing else.
pub(crate) fn test_of_becket(name: &str) -> Result<(PathBuf, PathBuf)> {
    let built = cargo(&["test", "--no-run", "-p", "becket", "--test", name, FORMAT])?;
    Ok((find(&built, name, true)?, find(&built, "becket", false)?))
}

impl Message {
    /// Whether this was built from one of these packages. Cargo names a package by its folder when that has
    /// its name (`path+file:///checkout/crates/becket#0.1.0`), else after the `#` (`#becket@0.1.0`).
    fn is_of(&self, packages: &[&str]) -> bool {
        let (folder, rest) = self.package_id.rsplit_once('#').unwrap_or((&self.package_id, ""));
        let name = rest
            .split_once('@')
            .map_or_else(|| folder.rsplit('/').next().unwrap_or(folder), |(name, _)| name);
        packages.contains(&name)
    }
}

/// What [`parse`] understands.
const FORMAT: &str = "--message-format=json-render-diagnostics";

/// Runs cargo with its progress shown, and returns the messages about executables.
fn cargo(args: &[&str]) -> Result<Vec<Message>> {
    let mut command = exec::cargo();
    command.args(args);
    let done =
        command.stderr(Stdio::inherit()).stdin(Stdio::null()).output().context("cannot start cargo")?;
    if !done.status.success() {
        bail!("`{}` failed ({})", exec::shown(&command), done.status);
    }
    Ok(parse(&String::from_utf8_lossy(&done.stdout)))
}

fn parse(text: &str) -> Vec<Message> {
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok());
    messages.filter(|message| message.executable.as_deref().is_some_and(Path::is_absolute)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_found_among_cargos_messages() {
        let text = r#"{"reason":"compiler-artifact","target":{"name":"libc","kind":["lib"]},"executable":null}
{"reason":"compiler-artifact","package_id":"path+file:///w/crates/becket#0.1.0","target":{"name":"attach","kind":["test"]},"profile":{"test":true},"executable":"/t/attach-1"}
{"reason":"build-finished","success":true}
not json"#;
        let messages = parse(text);
        assert_eq!(messages.len(), 1);
        assert_eq!(messages[0].target.name, "attach");
        assert!(messages[0].profile.test && messages[0].is_of(&GUEST_PACKAGES));
    }

    #[test]
    fn packages_are_recognised_by_folder_or_name() {
        let of = |id: &str| Message { package_id: id.to_owned(), ..Message::default() }.is_of(&["becket"]);
        assert!(of("path+file:///w/crates/becket#0.1.0"));
        assert!(of("path+file:///w/crates/cli#becket@0.1.0"));
        assert!(!of("path+file:///w/crates/becket#becket-uapi@0.1.0"));
        assert!(!of("path+file:///w/tests/testkit#becket-testkit@0.1.0"));
        assert!(!of(""));
    }
}

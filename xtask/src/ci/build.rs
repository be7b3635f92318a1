//! Builds what goes into the guests, and asks cargo where it put it.
//! Never guesses a path below the target directory: profiles, targets and configuration may move them.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::exec;

/// The packages whose tests need ublk, or partition tables that the kernel reads: a host may have neither.
const GUEST_PACKAGES: [&str; 6] =
    ["becket", "becket-device", "becket-transport", "becket-engine", "becket-image", "becket-uapi"];

/// Test programs of these that are the host's alone, since a guest computes twenty times as slowly: unit
/// tests that ask nothing of a kernel, and what has no disk of the kernel (exports over NBD and vhost-user).
const HOSTS_ALONE: [&str; 8] = [
    "becket",
    "becket_device",
    "becket_engine",
    "becket_image",
    "export",
    "export_doors",
    "nbd",
    "vhost_user",
];

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

/// Where a program is among what was built, or the test of that name.
fn find(built: &[Value], name: &str, test: bool) -> Result<PathBuf> {
    let is_it = |message: &&Value| message["target"]["name"] == name && message["profile"]["test"] == test;
    let found = built.iter().find(is_it).and_then(executable);
    found.with_context(|| format!("cargo built no {name}"))
}

/// The program that a line of cargo's `--message-format=json` is about.
fn executable(message: &Value) -> Option<PathBuf> {
    message["executable"].as_str().map(PathBuf::from).filter(|path| path.is_absolute())
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
        let wanted = |message: &&Value| message["profile"]["test"] == true && is_for_guests(message);
        Ok(Binaries {
            tests: built.iter().filter(wanted).filter_map(executable).collect(),
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

/// Whether guests run this test program.
fn is_for_guests(message: &Value) -> bool {
    let name = message["target"]["name"].as_str().unwrap_or_default();
    is_of(message, &GUEST_PACKAGES) && !HOSTS_ALONE.contains(&name)
}

/// Whether this was built from one of these packages. Cargo names a package by its folder when that has its
/// name (`path+file:///checkout/crates/becket#0.1.0`), else after the `#` (`#becket@0.1.0`).
fn is_of(message: &Value, packages: &[&str]) -> bool {
    let id = message["package_id"].as_str().unwrap_or_default();
    let (folder, rest) = id.rsplit_once('#').unwrap_or((id, ""));
    let name =
        rest.split_once('@').map_or_else(|| folder.rsplit('/').next().unwrap_or(folder), |(name, _)| name);
    packages.contains(&name)
}

/// What [`parse`] understands.
const FORMAT: &str = "--message-format=json-render-diagnostics";

/// Runs cargo with its progress shown, and returns the messages about executables.
fn cargo(args: &[&str]) -> Result<Vec<Value>> {
    let mut command = exec::cargo();
    command.args(args);
    let done =
        command.stderr(Stdio::inherit()).stdin(Stdio::null()).output().context("cannot start cargo")?;
    if !done.status.success() {
        bail!("`{}` failed ({})", exec::shown(&command), done.status);
    }
    Ok(parse(&String::from_utf8_lossy(&done.stdout)))
}

fn parse(text: &str) -> Vec<Value> {
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages.filter(|message| executable(message).is_some()).collect()
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
        assert_eq!(find(&messages, "attach", true).unwrap(), PathBuf::from("/t/attach-1"));
        assert!(is_for_guests(&messages[0]) && find(&messages, "attach", false).is_err());
        let of = |package: &str, name: &str| {
            let id = format!("path+file:///w/crates/{package}#0.1.0");
            is_for_guests(&serde_json::json!({ "package_id": id, "target": { "name": name } }))
        };
        assert!(of("becket", "attach") && of("becket-engine", "engine"));
        assert!(!of("becket-engine", "becket_engine") && !of("becket", "export_doors"));
        assert!(!of("becket-fetch", "origins"), "it needs no ublk");
    }

    #[test]
    fn packages_are_recognised_by_folder_or_name() {
        let of = |id: &str| is_of(&serde_json::json!({ "package_id": id }), &["becket"]);
        assert!(of("path+file:///w/crates/becket#0.1.0"));
        assert!(of("path+file:///w/crates/cli#becket@0.1.0"));
        assert!(!of("path+file:///w/crates/becket#becket-uapi@0.1.0"));
        assert!(!of("path+file:///w/tests/testkit#becket-testkit@0.1.0"));
        assert!(!of(""));
    }
}

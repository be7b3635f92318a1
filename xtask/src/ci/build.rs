//! Builds what goes into the guests, and asks cargo where it put it.
//! Never guesses a path below the target directory: profiles, targets and configuration may move them.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::exec;

/// What the guests and the host's conformance run need.
pub(crate) struct Binaries {
    /// The optimised command.
    pub(crate) becket: PathBuf,
    /// The optimised conformance suite.
    pub(crate) conformance: PathBuf,
    /// The command line's own tests.
    pub(crate) end_to_end: Vec<PathBuf>,
    /// Where those tests look for the command they test.
    pub(crate) tested: Option<PathBuf>,
}

/// One line of cargo's `--message-format=json`.
#[derive(Deserialize)]
struct Message {
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
    #[serde(default)]
    kind: Vec<String>,
}

#[derive(Default, Deserialize)]
struct Profile {
    #[serde(default)]
    test: bool,
}

impl Binaries {
    /// The command and the conformance suite.
    pub(crate) fn conformance() -> Result<Binaries> {
        let built = cargo(&["build", "--release", "-p", "becket", "-p", "becket-conformance"])?;
        let find = |name: &str| {
            let found = built.iter().find(|message| message.target.name == name && !message.profile.test);
            found
                .and_then(|message| message.executable.clone())
                .with_context(|| format!("cargo built no {name}"))
        };
        Ok(Binaries {
            becket: find("becket")?,
            conformance: find("becket-conformance")?,
            end_to_end: Vec::new(),
            tested: None,
        })
    }

    /// The same, and the end-to-end tests.
    pub(crate) fn all() -> Result<Binaries> {
        let tests = cargo(&["test", "--no-run", "-p", "becket"])?;
        let is = |message: &&Message, kind: &str| message.target.kind.iter().any(|one| one == kind);
        let end_to_end = tests.iter().filter(|message| is(message, "test"));
        let tested = tests.iter().find(|message| is(message, "bin") && !message.profile.test);
        Ok(Binaries {
            end_to_end: end_to_end.filter_map(|message| message.executable.clone()).collect(),
            tested: tested.and_then(|message| message.executable.clone()),
            ..Binaries::conformance()?
        })
    }
}

/// Runs cargo with its progress shown, and returns the messages about executables.
fn cargo(args: &[&str]) -> Result<Vec<Message>> {
    let mut command = exec::cargo();
    command.args(args).arg("--message-format=json-render-diagnostics");
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
{"reason":"compiler-artifact","target":{"name":"attach","kind":["test"]},"profile":{"test":true},"executable":"/t/attach-1"}
{"reason":"build-finished","success":true}
not json"#;
        let messages = parse(text);
        assert_eq!(messages.len(), 1);
        assert_eq!(messages[0].target.name, "attach");
        assert!(messages[0].profile.test);
    }
}

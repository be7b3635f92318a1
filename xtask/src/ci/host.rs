//! The steps that run on this machine.
//! Never needs more rights than it has: a test that cannot run here is skipped, and the list of allowed skips
//! decides.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::build::Binaries;
use super::case::{Case, Outcome};
use super::libtest;
use crate::{exec, varlinkctl};

/// The capability that a container's root often lacks.
const CAP_SYS_RESOURCE: u64 = 1 << 24;

/// Runs a command of cargo's that is one check: it passes or fails as a whole.
pub(crate) fn check(words: &[&str]) -> Result<Vec<Case>> {
    let mut command = exec::cargo();
    command.args(words).env("RUSTDOCFLAGS", "-D warnings").stdin(Stdio::null());
    let status = command.status().context("cannot start cargo")?;
    let outcome = if status.success() { Outcome::Passed } else { Outcome::Failed };
    let name = format!("cargo {}", words[0]);
    Ok(vec![Case::of_step(&name, outcome, format!("`{}`: {status}", exec::shown(&command)))])
}

/// The workspace's own tests that these arguments of cargo choose.
pub(crate) fn tests(which: &[&str]) -> Result<Vec<Case>> {
    // Many tests wait: for a device to go, or for a limit to pass.
    let threads = 2 * std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut command = exec::cargo();
    command.args(["test", "--workspace"]).args(which).env("RUST_TEST_THREADS", threads.to_string());
    tested(&mut command, &[])
}

/// So many failed tests are run again; when more fail, something is broken.
const AGAIN: usize = 3;

/// All of the workspace's own tests. The few that fail beside two emulated machines are run once more, alone
/// ([0171](../../../docs/decisions/0171-a-second-run-of-a-failed-test.md)).
pub(crate) fn all_tests() -> Result<Vec<Case>> {
    let path = varlinkctl::path()?;
    let all = |words: &[&str]| {
        let mut command = exec::cargo();
        command.args(["test", "--workspace"]).env("PATH", &path);
        if !words.is_empty() {
            command.env("RUST_TEST_THREADS", "1");
        }
        tested(&mut command, words)
    };
    let mut cases = all(&[])?;
    let failed: Vec<_> = cases.iter().filter(|case| case.outcome == Outcome::Failed).collect();
    // What does not compile has no test that could be run.
    if (1..=AGAIN).contains(&failed.len()) && failed.iter().all(|case| case.place == "host") {
        let names: Vec<_> = failed.iter().map(|case| case.test.as_str()).collect();
        println!("\n== {} failed, and run again, alone", names.join(", "));
        let second = all(&[&["--exact"], names.as_slice()].concat())?;
        libtest::apply_second_run(&mut cases, &second);
    }
    Ok(cases)
}

/// Runs tests by a command that is some `cargo test`, whose runners get these words; shows what they say.
pub(crate) fn tested(command: &mut Command, words: &[&str]) -> Result<Vec<Case>> {
    let dir = exec::target_dir().join("ci");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let skips = dir.join("skips");
    let _ = std::fs::remove_file(&skips);

    command.arg("--no-fail-fast").arg("--").args(words).env("BECKET_SKIP_LOG", &skips);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", exec::shown(command)))?;
    let mut output = String::new();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            output.push_str(&line);
            output.push('\n');
        }
    }
    let status = child.wait()?;

    let facts = facts();
    let mut cases = libtest::cases(&output, "host", &facts);
    libtest::apply_skips(&mut cases, &std::fs::read_to_string(&skips).unwrap_or_default(), "host", &facts);
    // A binary that crashes or does not compile prints no failed test.
    if !status.success() && !cases.iter().any(|case| case.outcome == Outcome::Failed) {
        cases.push(Case::of_step("cargo test", Outcome::Failed, format!("{status}, and no test says why")));
    }
    Ok(cases)
}

/// `make install` installs a command without debug information, and `make uninstall` removes exactly what was
/// installed.
pub(crate) fn install() -> Result<Vec<Case>> {
    let becket = exec::shipped()?;
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
    let (command, debug) = (size(&becket), size(&becket.with_extension("debug")));
    let split = debug > command
        && exec::output(Command::new("readelf").arg("-SW").arg(&becket))?.contains(".gnu_debuglink");
    let dir = tempfile::tempdir()?;
    let place = format!("DESTDIR={}", dir.path().display());
    let built = format!("BECKET={}", becket.display());
    let files = || -> Result<BTreeSet<String>> {
        let found =
            exec::output(Command::new("find").arg(dir.path()).args(["!", "-type", "d", "-printf", "%P\n"]))?;
        Ok(found.lines().map(str::to_owned).collect())
    };
    exec::quietly(&mut exec::make("install", &[&place, &built]))?;
    let installed = files()?;
    let other = "usr/local/share/man/man1/other.1";
    std::fs::write(dir.path().join(other), "")?;
    exec::quietly(&mut exec::make("uninstall", &[&place]))?;
    let left = files()?;
    let gone = installed.len() > 20 && left.iter().eq([other]);
    let case = |name: &str, good: bool, note: String| {
        Case::of_step(name, if good { Outcome::Passed } else { Outcome::Failed }, note)
    };
    Ok(vec![
        case("make build", split, format!("becket has {command} bytes, becket.debug {debug}")),
        case("make uninstall", gone, format!("{} files were installed; left are {left:?}", installed.len())),
    ])
}

/// Debian packages on clean root file systems: `scripts/try-packages.sh`.
pub(crate) fn packages() -> Result<Vec<Case>> {
    let becket = exec::shipped()?;
    let script = exec::workspace().join("scripts/try-packages.sh");
    print!("{}", exec::output(Command::new(script).arg(&becket))?);
    Ok(vec![Case::of_step("scripts/try-packages.sh", Outcome::Passed, String::new())])
}

/// The conformance suite over a transport that this machine's kernel has. Over NBD with fewer random
/// operations: each of them passes through two servers.
pub(crate) fn conformance(binaries: &Binaries, via: &str, over_nbd: bool) -> Result<Vec<Case>> {
    let scratch = tempfile::Builder::new().prefix("conformance-").tempdir_in(exec::target_dir())?;
    let report = scratch.path().join("report.json");
    let mut command = Command::new(&binaries.conformance);
    command.args(["--via", via, "--becket"]).arg(&binaries.becket);
    command.arg("--scratch").arg(scratch.path().join("images")).arg("--json").arg(&report);
    let (mut place, mut facts) = (format!("host {via}"), facts());
    if over_nbd {
        command.args(["--over-nbd", "--ops", "2000"]);
        place.push_str(" over nbd");
        facts.insert("over-nbd".to_owned());
    }
    let status = command.stdin(Stdio::null()).status().context("cannot start the conformance suite")?;
    let json = std::fs::read_to_string(&report)
        .with_context(|| format!("the conformance suite ({status}) left no report"))?;
    judged(libtest::conformance(&json, &place, &facts)?, status.success())
}

/// Holds the suite's exit code against its report: it also fails on skips, which are judged by our own list.
pub(crate) fn judged(cases: Vec<Case>, success: bool) -> Result<Vec<Case>> {
    if cases.is_empty() {
        bail!("the conformance suite ran no test");
    }
    if !success && cases.iter().all(|case| case.outcome == Outcome::Passed) {
        bail!("the conformance suite failed, and none of its tests says why");
    }
    Ok(cases)
}

/// What is true of this machine, in the words of allowed-skips.txt.
fn facts() -> BTreeSet<String> {
    let mut facts = BTreeSet::from(["host".to_owned()]);
    let mut lacks = |fact: &str, lacking: bool| {
        if lacking {
            facts.insert(fact.to_owned());
        }
    };
    let capabilities =
        std::fs::read_to_string("/proc/self/status").ok().and_then(|status| capabilities(&status));
    lacks("no-root", !rustix::process::geteuid().is_root());
    lacks("no-sys-resource", capabilities.unwrap_or(0) & CAP_SYS_RESOURCE == 0);
    lacks("no-fuse", !Path::new("/dev/fuse").exists());
    lacks("no-loop", !Path::new("/dev/loop-control").exists());
    lacks("no-ublk", !Path::new("/dev/ublk-control").exists() && !Path::new("/sys/module/ublk_drv").exists());
    lacks("no-dm", !Path::new("/sys/class/misc/device-mapper").exists());
    lacks("no-udev", !Path::new("/run/udev/control").exists());
    facts
}

/// The effective capabilities that a /proc/PID/status tells.
fn capabilities(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read() {
        let status = "Name:\tx\nCapInh:\t0000000000000000\nCapEff:\t000001fffeffffff\n";
        assert_eq!(capabilities(status).unwrap() & CAP_SYS_RESOURCE, 0);
        assert_eq!(capabilities("Name: x\n"), None);
    }

    #[test]
    fn a_failing_suite_must_say_why() {
        let passed = Case::of_step("a", Outcome::Passed, String::new());
        let skipped = Case::of_step("b", Outcome::Skipped, String::new());
        assert!(judged(vec![], true).is_err());
        assert!(judged(vec![passed.clone()], false).is_err());
        assert!(judged(vec![passed, skipped], false).is_ok());
    }
}

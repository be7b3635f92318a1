//! The steps that run in a virtual machine: the conformance suite, and the tests that ask for ublk.
//! Never counts a guest that died: without its report there is one failure, with its console.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::build::Binaries;
use super::case::{Case, Outcome};
use super::{Load, Step, host, libtest};
use crate::vm::{Machine, Place, Series, quoted};
use crate::{boot, exec};

/// Where the binaries go in the guest.
const BIN: &str = "/usr/local/bin";

/// Boots a guest for one step and reads its report.
pub(crate) fn run(
    name: &str,
    step: Step,
    binaries: &Binaries,
    output: &mut dyn FnMut(&[u8]),
) -> Result<Vec<Case>> {
    let Step::Guest { series, load } = step else { bail!("{name} is not a guest's step") };
    let work = tempfile::tempdir()?;
    let report = work.path().join("report");
    let place = match load {
        Load::Conformance { via, mode } => [&series.to_string(), via, mode.unwrap_or_default()].join(" "),
        Load::Tests => format!("{series} ublk"),
        Load::Users => format!("{series} users"),
        Load::Boot { .. } => format!("{series} systemd"),
    };
    let place = place.trim_end().to_owned();
    let facts = facts(series, load);
    if let Load::Boot { images } = load {
        let machine = boot::machine(series, images, &binaries.becket, work.path())?;
        let (code, text) = listen(|both| boot::boot(&machine, both), output)?;
        return told(libtest::cases(&text, &place, &facts), code);
    }

    if load == Load::Users {
        let machine = boot::users(series, &binaries.becket, work.path())?;
        let (code, text) = listen(|both| machine.boot(both), output)?;
        return told(libtest::cases(&text, &place, &facts), code);
    }

    let mut machine = Machine::new(series, script(series, load, binaries));
    // Three times what it takes: only a guest that hangs is to be given up, and not one on a busy machine.
    machine.timeout = Duration::from_secs(45 * 60);
    machine.files.push(Place { host: binaries.becket.clone(), guest: format!("{BIN}/becket") });
    machine.outs.push(Place { host: report.clone(), guest: "/root/report".to_owned() });
    match load {
        Load::Conformance { .. } => {
            machine.files.push(Place {
                host: binaries.conformance.clone(),
                guest: format!("{BIN}/becket-conformance"),
            });
            let code = machine.boot(output)?;
            let json = std::fs::read_to_string(&report)
                .with_context(|| format!("the conformance suite (exit code {code}) left no report"))?;
            host::judged(libtest::conformance(&json, &place, &facts)?, code == 0)
        }
        Load::Tests => {
            // Fixtures and documents that tests read by the path that was theirs when they were compiled.
            for folder in ["crates", "docs"].map(|name| exec::workspace().join(name)) {
                machine.files.push(Place { guest: folder.display().to_string(), host: folder });
            }
            for test in &binaries.tests {
                machine.files.push(Place { host: test.clone(), guest: format!("{BIN}/{}", file_name(test)) });
            }
            let (code, text) = listen(|both| machine.boot(both), output)?;
            let mut cases = libtest::cases(&text, &place, &facts);
            let skips = std::fs::read_to_string(&report).context("the guest sent no skip log")?;
            libtest::apply_skips(&mut cases, &skips, &place, &facts);
            told(cases, code)
        }
        Load::Boot { .. } | Load::Users => bail!("{name} has a machine of its own"),
    }
}

/// Runs a machine by `boot`; its exit code and what it printed, which is handed on as it comes.
fn listen(
    boot: impl FnOnce(&mut dyn FnMut(&[u8])) -> Result<u8>,
    output: &mut dyn FnMut(&[u8]),
) -> Result<(u8, String)> {
    let mut text = Vec::new();
    let code = boot(&mut |bytes| {
        text.extend_from_slice(bytes);
        output(bytes);
    })?;
    Ok((code, String::from_utf8_lossy(&text).into_owned()))
}

/// Holds a guest's exit code against what its tests said.
fn told(cases: Vec<Case>, code: u8) -> Result<Vec<Case>> {
    if cases.is_empty() {
        bail!("the guest ran no test");
    }
    if code != 0 && !cases.iter().any(|case| case.outcome == Outcome::Failed) {
        bail!("the tests ended with {code}, and none of them says why");
    }
    Ok(cases)
}

/// What the guest does.
fn script(series: Series, load: Load, binaries: &Binaries) -> String {
    let mut script = String::from(
        "set -u\nmodprobe -q loop; modprobe -q ublk_drv; modprobe -q dm_mod\nexport TMPDIR=/scratch/tmp; mkdir $TMPDIR\n",
    );
    // Writing to a string cannot fail.
    let _ = match load {
        Load::Conformance { via, mode } => {
            // No byte passes through becket on device-mapper: file systems on it would test the kernel alone, slowly. On ublk
            // each way of bytes and each way of commands has them once: batches with zero copy, single ones copying.
            let brief =
                via == "dm" || (series == Series::V7 && matches!(mode, Some("zero-copy" | "batch-copy")));
            let brief = if brief { " --ops 2000 --except filesystem" } else { "" };
            let mode = mode.map(|mode| format!(" --mode {mode}")).unwrap_or_default();
            writeln!(
                script,
                "becket-conformance --becket {BIN}/becket --via {via}{mode}{brief} --scratch /scratch/c --json /root/report"
            )
        }
        Load::Tests => {
            // The tests know the command by the path that cargo gave it; the guest has the optimised one there.
            let tested =
                binaries.tested.as_deref().map(|path| path.display().to_string()).unwrap_or_default();
            let tested = quoted(&tested);
            script.push_str(
                "export BECKET_TEST_GUEST=1 BECKET_TEST_VIA=ublk BECKET_TEST_SLOW=4 BECKET_SKIP_LOG=/root/report; : >$BECKET_SKIP_LOG\n",
            );
            let _ = writeln!(script, "mkdir -p $(dirname {tested}); ln -sf {BIN}/becket {tested}; code=0");
            for test in &binaries.tests {
                let _ = writeln!(script, "{BIN}/{} --test-threads 2 || code=1", quoted(&file_name(test)));
            }
            writeln!(script, "exit $code")
        }
        // Their machines bring their own.
        Load::Boot { .. } | Load::Users => Ok(()),
    };
    script
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What is true of a guest, in the words of allowed-skips.txt.
fn facts(series: Series, load: Load) -> BTreeSet<String> {
    let mut facts = BTreeSet::from(["guest".to_owned(), format!("kernel-{series}"), "no-udev".to_owned()]);
    if series == Series::V6_1 {
        facts.insert("no-ublk".to_owned());
    }
    if series != Series::V7 {
        facts.insert("no-zero-copy".to_owned());
    }
    if let Load::Conformance { via, mode } = load {
        facts.insert(format!("via-{via}"));
        facts.extend(mode.map(|mode| format!("mode-{mode}")));
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_runs_every_test_binary() {
        let binaries = Binaries {
            becket: "/t/release/becket".into(),
            conformance: "/t/release/becket-conformance".into(),
            tests: vec!["/t/debug/deps/attach-1".into(), "/t/debug/deps/run-2".into()],
            tested: Some("/t/debug/becket".into()),
        };
        let script = script(Series::V7, Load::Tests, &binaries);
        assert!(script.contains("'attach-1' --test-threads"));
        assert!(script.contains("'run-2' --test-threads"));
        assert!(script.contains("ln -sf /usr/local/bin/becket '/t/debug/becket'"));
    }

    #[test]
    fn conditions_tell_kernels_apart() {
        let load = Load::Conformance { via: "loop", mode: None };
        assert!(facts(Series::V6_1, load).contains("no-ublk"));
        assert!(!facts(Series::V7, load).contains("no-zero-copy"));
    }
}

//! `cargo xtask losetup-suite`: util-linux's own tests of losetup, first with the system's, then with
//! becket's; here over the kernel's loop driver, or in a guest over ublk.
//! Never counts a skipped test as passed, and never binds a device to anything but its own files.
//!
//! The suite is in Debian's source package, of the version that this machine has installed; it is fetched
//! once, and runs with the machine's own commands, so nothing is compiled.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::ci::{Case, Outcome};
use crate::exec;
use crate::vm::{Apt, Machine, Place, Series, quoted, show};

/// Arguments of `cargo xtask losetup-suite`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The becket to test, instead of building one
    #[arg(long, value_name = "PATH")]
    becket: Option<PathBuf>,
    /// In a guest, where becket's losetup attaches over ublk
    #[arg(long)]
    ublk: bool,
}

/// All tests of losetup, and those of others that stand on it.
const TESTS: [&str; 7] = [
    "losetup",
    "fdisk/gpt-resize",
    "blkid/topology",
    "blkdiscard/offsets",
    "swapon/devname",
    "mount/devname",
    "libmount/loop",
];
/// util-linux 2.38 does not have this one.
const LATER: &str = "blkid/topology";
/// Where Debian has the system's losetup.
const SYSTEM: &str = "/usr/sbin/losetup";
/// Bytes of the block device that stands in for one of scsi_debug.
const IDLE: u64 = 11 << 20;
/// Tests that ask the kernel's loop driver for a file's device without losetup, as mount(8) does. Over ublk
/// they find none.
const PAST_LOSETUP: [&str; 4] = [
    "libmount: losetup-loop: reuse",
    "libmount: losetup-loop: conflict",
    "libmount: losetup-loop: o-loop-val-conflict",
    "libmount: losetup-loop",
];

/// Put behind the suite's own functions: an idle block device instead of a SCSI disk that a module makes.
const OVERRIDE: &str = "
function ts_scsi_debug_init {
\tTS_DEVICE=$BECKET_SUITE_DEVICE
\ttest -b \"$TS_DEVICE\" || ts_skip \"there is no idle block device\"
}
";

/// Kernels before Linux 7 keep partitions that were added by hand when a device is detached, and the suite's
/// next device shows them. Binding the device once with a scan drops them. Another process may take it
/// meanwhile: then it is left alone.
const CLEAN: &str = "truncate -s 1M zero
for partition in /sys/block/loop*/loop*p1; do
\tdevice=${partition%/*}; [ -e $partition ] && [ ! -e $device/loop ] || continue
\t/usr/sbin/losetup -P /dev/${device##*/} zero 2>/dev/null && /usr/sbin/losetup -d /dev/${device##*/}
done";

/// Runs both and prints them side by side; 0 when becket's passes what the system's passes.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let path = match &args.becket {
        Some(path) => {
            std::fs::canonicalize(path).with_context(|| format!("no becket at {}", path.display()))?
        }
        None => exec::shipped()?,
    };
    let cases = if args.ublk { over_ublk(&path)? } else { cases(&path)? };
    let failed = cases.iter().filter(|case| case.outcome != Outcome::Passed).count();
    println!("losetup-suite: {} of {} passed", cases.len() - failed, cases.len());
    Ok(u8::from(failed > 0))
}

/// One case for each test and subtest, over the kernel's loop driver of this machine.
pub(crate) fn cases(becket: &Path) -> Result<Vec<Case>> {
    let suite = fetched()?;
    let work = tempfile::Builder::new().prefix("losetup-suite-").tempdir()?;
    let script = script(&suite, &suite, work.path(), becket)?;
    let mut command = Command::new("bash");
    command.arg("-c").arg(script).current_dir(&suite).env_remove("BECKET_LOSETUP_VIA");
    let done = command.stdin(Stdio::null()).output().context("cannot start util-linux's suite")?;
    // Its exit code shows only failures, which the lines show, too.
    let said = String::from_utf8_lossy(&done.stdout);
    println!("{}", said.trim_end());
    let (system, becket) = both(&said)?;
    judged(&system, &becket)
}

/// What bash runs, with the suite at `place` and its files below `work`; `suite` is where it can be read.
/// Each losetup has its name in front. Without udev there is nothing to wait for.
fn script(suite: &Path, place: &Path, work: &Path, becket: &Path) -> Result<String> {
    let top = place.parent().unwrap_or(place).display();
    let mut tests = String::new();
    for test in TESTS {
        if suite.join("ts").join(test).exists() {
            tests = tests + " " + test;
        } else if test != LATER {
            bail!("util-linux's suite has no {test} any more");
        }
    }
    Ok(format!(
        "set -u; cd {work} && mkdir link stub || exit
ln -s {becket} link/losetup; ln -s /bin/true stub/udevadm
{CLEAN}
truncate -s {IDLE} idle; export BECKET_SUITE_DEVICE=$({SYSTEM} -f --show idle)
trap '{SYSTEM} -d $BECKET_SUITE_DEVICE' EXIT
cd {place}
for losetup in {SYSTEM} {work}/link/losetup; do
\techo \"-- with $losetup\"
\tTS_CMD_LOSETUP=$losetup PATH=$(dirname $losetup):$PATH:/usr/sbin:/sbin:{work}/stub bash run.sh \\
\t\t--use-system-commands --parsable --show-diff --parallel=1 --srcdir={top} --builddir={top}{tests}
done
exit 0",
        work = word(work),
        becket = word(becket),
        place = word(place),
    ))
}

/// How the tests ended with the system's losetup, and with becket's.
fn both(said: &str) -> Result<(BTreeMap<String, String>, BTreeMap<String, String>)> {
    match said.split("-- with ").collect::<Vec<_>>()[..] {
        [_, system, becket] => Ok((parse(system), parse(becket))),
        _ => bail!("two tools were run"),
    }
}

fn word(path: &Path) -> String {
    quoted(&path.display().to_string())
}

/// The unpacked suite; fetched where it is not there yet.
fn fetched() -> Result<PathBuf> {
    let release =
        std::fs::read_to_string("/etc/os-release").context("this machine does not say what it is")?;
    let field = |name: &str| release.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let codename = field("VERSION_CODENAME").context("this machine's Debian has no name")?.trim_matches('"');
    let dir = exec::target_dir().join("losetup-suite").join(codename);
    let suite = dir.join("tests");
    if suite.join("run.sh").exists() {
        return Ok(suite);
    }
    let fresh = dir.with_extension("new");
    let _ = std::fs::remove_dir_all(&fresh);
    let apt = Apt::sources(&exec::target_dir().join("losetup-suite/apt"), codename)?;
    let archive = apt.source("util-linux", &fresh)?;
    exec::quietly(Command::new("tar").arg("-xJf").arg(archive).arg("-C").arg(&fresh).args([
        "--strip-components=1",
        "--wildcards",
        "*/tests",
        "*/meson.build",
    ]))?;
    let functions = fresh.join("tests/functions.sh");
    let text = std::fs::read_to_string(&functions).context("the source package has no test suite")?;
    std::fs::write(&functions, text + OVERRIDE)?;
    // The suite asks here what was compiled in: nothing that matters to these tests.
    std::fs::write(fresh.join("config.h"), "")?;
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::rename(&fresh, &dir)?;
    Ok(suite)
}

/// The same in a guest: with its system's losetup over loop, with becket's over ublk.
fn over_ublk(becket: &Path) -> Result<Vec<Case>> {
    let suite = fetched()?;
    let [place, work, becket_there] = ["/scratch/suite/tests", "/scratch/work", "/usr/local/bin/becket"];
    let script = format!(
        "modprobe -q loop; modprobe -q ublk_drv; mkdir /scratch/work; cp -a /suite /scratch/suite
export BECKET_LOSETUP_VIA=ublk\n{}",
        script(&suite, Path::new(place), Path::new(work), Path::new(becket_there))?
    );
    let mut machine = Machine::new(Series::V7, script);
    machine.timeout = Duration::from_secs(15 * 60);
    let top = suite.parent().unwrap_or(&suite);
    for (host, guest) in [(becket, becket_there), (top, "/suite")] {
        machine.files.push(Place { host: host.to_owned(), guest: guest.to_owned() });
    }
    let mut text = Vec::new();
    machine.boot(&mut |bytes| {
        text.extend_from_slice(bytes);
        show(bytes);
    })?;
    let (mut system, ublk) = both(&String::from_utf8_lossy(&text))?;
    system.retain(|name, _| !PAST_LOSETUP.contains(&name.as_str()));
    judged(&system, &ublk)
}

/// How each test and subtest ended, in the suite's own words.
fn parse(said: &str) -> BTreeMap<String, String> {
    let ended = said.lines().filter_map(|line| {
        let (name, how) = line.split_once("...")?;
        let words: Vec<&str> = name.split_whitespace().filter(|word| !word.starts_with('[')).collect();
        (words.len() > 1).then(|| (words.join(" "), how.trim().to_owned()))
    });
    ended.collect()
}

fn judged(system: &BTreeMap<String, String>, becket: &BTreeMap<String, String>) -> Result<Vec<Case>> {
    if system.is_empty() {
        bail!("util-linux's suite ran no test");
    }
    let passed = |how: &String| how.starts_with("OK");
    let case = |(name, how): (&String, &String)| {
        let ours = becket.get(name).map_or("not run", String::as_str);
        // A test that the system's own losetup fails here counts as skipped, not as passed: the list of
        // allowed skips decides.
        let outcome = match (passed(how), ours.starts_with("OK")) {
            (true, true) => Outcome::Passed,
            _ if how.contains("FAILED") => Outcome::Skipped,
            _ => Outcome::Failed,
        };
        let note = format!("with the system's losetup: {how}; with becket's: {ours}");
        Case::of_step(&format!("util-linux {name}"), outcome, note)
    };
    Ok(system.iter().map(case).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYSTEM: &str = "       kernel: 6.18                   \n      options: --parsable \\\n\
        \x20 blkdiscard: offsets                       ... OK\n\
        \x20    losetup: losetup: [01] file-show       ... OK\n\
        \x20    losetup: losetup                       ... OK (all 4 sub-tests PASSED)\n\
        \x20      mount: by devname                    ... FAILED (mount/devname)\n\
        \x20     swapon: by devname                    ... SKIPPED (no loop-device support)\n";

    #[test]
    fn a_pass_must_be_a_pass_and_a_skip_is_none() {
        let system = parse(SYSTEM);
        assert_eq!(system.len(), 5, "{system:?}");
        let failures = |said: &str| -> Vec<String> {
            let cases = judged(&system, &parse(said)).unwrap();
            cases.into_iter().filter(|case| case.outcome == Outcome::Failed).map(|case| case.test).collect()
        };
        assert_eq!(failures(SYSTEM), ["util-linux swapon: by devname"], "a skip with both is still one");
        let cases = judged(&system, &system).unwrap();
        let unanswered = cases.iter().filter(|case| case.outcome == Outcome::Skipped).count();
        assert_eq!(unanswered, 1, "what fails with the system's is asked of nobody, and counts for nobody");
        let worse = SYSTEM.replace("file-show       ... OK", "file-show       ... FAILED");
        assert!(failures(&worse).contains(&"util-linux losetup: losetup: file-show".to_owned()));
        let skipped = SYSTEM.replace("offsets                       ... OK", "offsets ... SKIPPED (why)");
        assert!(failures(&skipped).contains(&"util-linux blkdiscard: offsets".to_owned()));
        assert_eq!(failures("").len(), 4, "what was not run has not passed");
        assert!(judged(&parse(""), &parse(SYSTEM)).is_err());
    }
}

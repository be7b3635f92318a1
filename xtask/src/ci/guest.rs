//! The steps that run in a virtual machine. Steps that need the same machine share a boot.
//! Never counts a guest that died: a step whose report is missing fails, with the guest's console.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use super::build::Binaries;
use super::case::{Case, Finished, Outcome};
use super::steps::{Load, Step};
use super::{host, libtest};
use crate::vm::{Machine, Place, Series, quoted};
use crate::{boot, disks, exec};

/// Where the binaries go in the guest.
const BIN: &str = "/usr/local/bin";
/// Makes arguments of a list of tests: those that only need FUSE are left out, and so are two that compute
/// for long: a simulation, and thousands of calls of losetup.
const SKIPS: &str =
    r"sed -nE 's/^(fuse_[^ ]*|governor::law::.*::noise_[^ ]*|differential::[^ ]*): test$/--skip \1/p'";
/// Begins the lines by which the script reports about its steps: `## NAME CODE REPORT` ends a step.
const MARK: &str = "## ";

/// A step that runs in a guest.
#[derive(Clone, Copy)]
pub(crate) struct InGuest {
    name: &'static str,
    series: Series,
    load: Load,
}

/// The guest steps among these, by boot: conformance suites and users of one kernel share one.
pub(crate) fn boots(steps: &[(&'static str, Step)]) -> Vec<Vec<InGuest>> {
    let shares = |load: Load| matches!(load, Load::Conformance { .. } | Load::Users);
    let mut boots: Vec<Vec<InGuest>> = Vec::new();
    for &(name, step) in steps {
        let Step::Guest { series, load } = step else { continue };
        let one = InGuest { name, series, load };
        let same = |boot: &&mut Vec<InGuest>| {
            shares(load) && boot.iter().all(|other| other.series == series && shares(other.load))
        };
        match boots.iter_mut().find(same) {
            Some(boot) => boot.push(one),
            None => boots.push(vec![one]),
        }
    }
    boots
}

/// Their names, for a heading.
pub(crate) fn names(steps: &[InGuest]) -> String {
    steps.iter().map(|step| step.name).collect::<Vec<_>>().join(", ")
}

/// Boots one guest for these steps; how each ended.
pub(crate) fn run(
    steps: &[InGuest],
    whole: bool,
    binaries: &Binaries,
    output: &mut dyn FnMut(&[u8]),
) -> Vec<Finished> {
    let mut transcript = Transcript::new(output);
    let outcome = (|| {
        let work = tempfile::tempdir()?;
        match steps {
            [InGuest { series, load: Load::Boot { images }, name }] => {
                let machine = boot::machine(*series, *images, &binaries.becket, work.path())?;
                let code = boot::boot(&machine, &mut |bytes| transcript.feed(bytes))?;
                transcript.end(name, code, "");
                Ok(0)
            }
            [InGuest { series, load: Load::Disks, name }] => {
                let code = disks::boot(*series, &binaries.becket, &mut |bytes| transcript.feed(bytes))?;
                transcript.end(name, code, "");
                Ok(0)
            }
            _ => machine(steps, whole, binaries, work.path())?.boot(&mut |bytes| transcript.feed(bytes)),
        }
    })();
    judge(steps, &transcript, outcome)
}

/// How each step ended, by what the guest printed and how it ended itself.
fn judge(steps: &[InGuest], transcript: &Transcript<'_>, outcome: Result<u8>) -> Vec<Finished> {
    let mut why = match outcome {
        Ok(0) => None,
        Ok(code) => Some(anyhow!("the guest ended with {code}")),
        Err(error) => Some(error),
    };
    let mut finished = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let ended = transcript.ended.iter().find(|ended| ended.name == step.name);
        let cases = match ended {
            Some(ended) => step.cases(ended),
            None => Err(match &why {
                Some(error) => anyhow!("{error:#}"),
                None => anyhow!("the guest did not run it"),
            }),
        };
        let mut cases = cases
            .unwrap_or_else(|error| vec![Case::of_step(step.name, Outcome::Failed, format!("{error:#}"))]);
        // A guest that broke after its last report is a failure too.
        if index + 1 == steps.len()
            && ended.is_some()
            && let Some(error) = why.take()
        {
            cases.push(Case::of_step(step.name, Outcome::Failed, format!("{error:#}")));
        }
        let took = ended.map_or(transcript.since.elapsed(), |ended| ended.took);
        finished.push(Finished { name: step.name, cases, took });
    }
    finished
}

/// What a guest prints, by step. Passes on all lines but those that begin with [`MARK`].
struct Transcript<'a> {
    output: &'a mut dyn FnMut(&[u8]),
    line: Vec<u8>,
    text: String,
    since: Instant,
    ended: Vec<Ended>,
}

/// A step that came to its end.
struct Ended {
    name: String,
    code: u8,
    /// What it printed, and what it left as its report.
    text: String,
    report: String,
    took: Duration,
}

impl<'a> Transcript<'a> {
    fn new(output: &'a mut dyn FnMut(&[u8])) -> Self {
        Transcript { output, line: Vec::new(), text: String::new(), since: Instant::now(), ended: Vec::new() }
    }

    fn feed(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            self.line.extend_from_slice(piece);
            if piece.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                self.take(&line);
            }
        }
    }

    fn take(&mut self, line: &[u8]) {
        let text = String::from_utf8_lossy(line);
        let words = text.strip_prefix(MARK).and_then(|mark| {
            let mut words = mark.trim_end().splitn(3, ' ');
            Some((
                words.next()?.to_owned(),
                words.next()?.parse().ok()?,
                words.next().unwrap_or("").to_owned(),
            ))
        });
        match words {
            Some((name, code, report)) => self.end(&name, code, &report),
            None => {
                self.text.push_str(&text);
                (self.output)(line);
            }
        }
    }

    fn end(&mut self, name: &str, code: u8, report: &str) {
        let took = self.since.elapsed();
        self.since = Instant::now();
        self.ended.push(Ended {
            name: name.to_owned(),
            code,
            text: std::mem::take(&mut self.text),
            report: report.to_owned(),
            took,
        });
    }
}

impl InGuest {
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Whether it runs the binaries of `cargo test`.
    pub(crate) fn needs_tests(&self) -> bool {
        self.load == Load::Tests
    }

    /// Where its cases ran, for people.
    fn place(self) -> String {
        let words = match self.load {
            Load::Conformance { via, mode: Some(mode) } => format!("{via} {mode}"),
            Load::Conformance { via, mode: None } => via.to_owned(),
            Load::Tests => "ublk".to_owned(),
            Load::Users => "users".to_owned(),
            Load::Boot { .. } => "systemd".to_owned(),
            Load::Disks => "vhost-user".to_owned(),
        };
        format!("{} {words}", self.series)
    }

    fn cases(self, ended: &Ended) -> Result<Vec<Case>> {
        let (place, facts) = (self.place(), facts(self.series, self.load));
        if let Load::Conformance { .. } = self.load {
            let cases = libtest::conformance(&ended.report, &place, &facts)
                .with_context(|| format!("its exit code is {}", ended.code))?;
            return host::judged(cases, ended.code == 0);
        }
        let mut cases = libtest::cases(&ended.text, &place, &facts);
        if self.load == Load::Tests {
            libtest::apply_skips(&mut cases, &ended.report.replace('\x1f', "\n"), &place, &facts);
        }
        checked(cases, ended.code)
    }

    /// What the guest does for it; `index` is its place among the steps of one boot.
    fn script(self, index: usize, whole: bool, binaries: &Binaries) -> String {
        let (name, report) = (self.name, "/root/report");
        match self.load {
            Load::Conformance { via, mode } => {
                // Most of the time goes into random operations. Without ublk, none of them passes through
                // becket. On it, each data path has all of them once: zero copy on 7.x, copying on 6.12.
                let few = via != "ublk" || (self.series == Series::V7 && mode != Some("zero-copy"));
                let brief = match (whole, few) {
                    (true, _) => "",
                    (false, true) => " --ops 2000",
                    (false, false) => " --ops 5000",
                };
                let mode = mode.map(|mode| format!(" --mode {mode}")).unwrap_or_default();
                format!(
                    "rm -f {report}; becket-conformance --becket {BIN}/becket --via {via}{mode}{brief} \
                     --scratch /scratch/c{index} --json {report}\n\
                     echo \"{MARK}{name} $? $(tr -d '\\n' <{report})\"\n"
                )
            }
            Load::Tests => {
                // The tests know the command by cargo's path; the guest has the optimised one there.
                let tested = binaries.tested.as_deref().map(|path| path.display().to_string());
                let tested = quoted(&tested.unwrap_or_default());
                let mut script = format!(
                    "export BECKET_TEST_GUEST=1 BECKET_TEST_VIA=ublk BECKET_TEST_SLOW=4 BECKET_SKIP_LOG={report}\n\
                     : >$BECKET_SKIP_LOG; mkdir -p $(dirname {tested}); ln -sf {BIN}/becket {tested}; code=0\n"
                );
                for test in &binaries.tests {
                    let test = format!("{BIN}/{}", quoted(&file_name(test)));
                    // The host runs them.
                    let but =
                        if whole { String::new() } else { format!(" --exact $({test} --list | {SKIPS})") };
                    // Writing to a string cannot fail.
                    let _ = writeln!(script, "{test} --test-threads 2{but} || code=1");
                }
                script + &format!("echo \"{MARK}{name} $code $(tr '\\n' '\\037' <{report})\"\n")
            }
            Load::Users => {
                format!("({})\necho \"{MARK}{name} $?\"\n", boot::users())
            }
            // Its machine brings its own.
            Load::Boot { .. } | Load::Disks => String::new(),
        }
    }
}

/// The machine that runs these steps one after another.
fn machine(steps: &[InGuest], whole: bool, binaries: &Binaries, work: &Path) -> Result<Machine> {
    let Some(first) = steps.first() else { bail!("a guest needs a step") };
    let mut script = String::from(
        "set -u\nmodprobe -q loop; modprobe -q ublk_drv; modprobe -q dm_mod\nexport TMPDIR=/scratch/tmp; mkdir $TMPDIR\n",
    );
    // Users come last: they start udev, which the other steps go without.
    let (users, others): (Vec<_>, Vec<_>) =
        steps.iter().enumerate().partition(|(_, step)| step.load == Load::Users);
    script.extend(others.iter().chain(&users).map(|(index, step)| step.script(*index, whole, binaries)));
    let mut machine = Machine::new(first.series, script + "exit 0\n");
    // Three times the usual time: the limit is for a guest that hangs, not for one on a busy machine.
    machine.timeout = Duration::from_secs(30 * 60) + Duration::from_secs(15 * 60) * steps.len() as u32;
    let mut add = |host: &Path, guest: String| machine.files.push(Place { host: host.to_owned(), guest });
    add(&binaries.becket, format!("{BIN}/becket"));
    let any = |wanted: fn(&Load) -> bool| steps.iter().any(|step| wanted(&step.load));
    if any(|load| matches!(load, Load::Conformance { .. })) {
        add(&binaries.conformance, format!("{BIN}/becket-conformance"));
    }
    if any(|load| *load == Load::Users) {
        add(&boot::install(&binaries.becket, work)?.join("usr"), "/usr".to_owned());
    }
    if any(|load| *load == Load::Tests) {
        // Fixtures and documents that tests read by the path that was theirs when they were compiled.
        for folder in ["crates", "docs"].map(|name| exec::workspace().join(name)) {
            add(&folder, folder.display().to_string());
        }
        for test in &binaries.tests {
            add(test, format!("{BIN}/{}", file_name(test)));
        }
    }
    Ok(machine)
}

/// Holds a guest's exit code against what its tests said.
fn checked(cases: Vec<Case>, code: u8) -> Result<Vec<Case>> {
    if cases.is_empty() {
        bail!("the guest ran no test");
    }
    if code != 0 && !cases.iter().any(|case| case.outcome == Outcome::Failed) {
        bail!("the tests ended with {code}, and none of them says why");
    }
    Ok(cases)
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

    fn step(name: &'static str, load: Load) -> InGuest {
        InGuest { name, series: Series::V7, load }
    }

    const COPY: Load = Load::Conformance { via: "ublk", mode: Some("copy") };
    const DM: Load = Load::Conformance { via: "dm", mode: None };

    #[test]
    fn the_script_runs_every_test_binary() {
        let binaries = Binaries {
            becket: "/t/release/becket".into(),
            conformance: "/t/release/becket-conformance".into(),
            tests: vec!["/t/debug/deps/attach-1".into(), "/t/debug/deps/run-2".into()],
            tested: Some("/t/debug/becket".into()),
        };
        let script = step("a", Load::Tests).script(0, false, &binaries);
        assert!(script.contains("'attach-1' --test-threads"));
        assert!(script.contains("'run-2' --test-threads"));
        assert!(script.contains("ln -sf /usr/local/bin/becket '/t/debug/becket'"));
        assert!(script.contains("--exact $(/usr/local/bin/'run-2' --list | sed"));
        let whole = step("a", Load::Tests).script(0, true, &binaries);
        assert!(!whole.contains("--skip"), "{whole}");
        for script in [
            script,
            whole,
            step("b", DM).script(1, false, &binaries),
            step("c", Load::Users).script(2, false, &binaries),
        ] {
            exec::quietly(std::process::Command::new("bash").args(["-n", "-c", &script])).unwrap();
        }
    }

    #[test]
    fn steps_of_one_kernel_share_a_boot() {
        let guest = |series, load| Step::Guest { series, load };
        let steps = [
            ("fmt", Step::Cargo(&["fmt"])),
            ("a", guest(Series::V7, COPY)),
            ("b", guest(Series::V7, Load::Tests)),
            ("c", guest(Series::V7, DM)),
            ("d", guest(Series::V6_12, COPY)),
            ("e", guest(Series::V6_12, Load::Users)),
            ("f", guest(Series::V7, Load::Boot { images: 8 })),
        ];
        let names: Vec<Vec<&str>> =
            boots(&steps).iter().map(|boot| boot.iter().map(|step| step.name).collect()).collect();
        assert_eq!(names, [vec!["a", "c"], vec!["b"], vec!["d", "e"], vec!["f"]]);
    }

    #[test]
    fn a_step_has_the_lines_before_its_mark() {
        let mut shown = Vec::new();
        let mut output = |bytes: &[u8]| shown.extend_from_slice(bytes);
        let mut transcript = Transcript::new(&mut output);
        let text = "test x ... ok\n## a 0 [{\"test\": 1}]\ntest y ... FAILED\n## b 1\nrest";
        text.bytes().for_each(|byte| transcript.feed(&[byte]));
        let [a, b] = &transcript.ended[..] else { panic!("{}", transcript.ended.len()) };
        assert_eq!((a.code, a.text.as_str(), a.report.as_str()), (0, "test x ... ok\n", "[{\"test\": 1}]"));
        assert_eq!((b.code, b.text.as_str(), b.report.as_str()), (1, "test y ... FAILED\n", ""));
        assert_eq!(shown, b"test x ... ok\ntest y ... FAILED\n");
    }

    /// As a guest that dies would leave it.
    #[test]
    fn a_step_without_a_report_fails_and_one_with_a_report_stands() {
        let steps = [step("a", COPY), step("b", DM), step("c", DM)];
        let report = r#"## a 0 [{"test": "t", "outcome": "passed", "note": ""}]"#;
        let outcomes = |text: String, outcome: Result<u8>| -> Vec<Vec<Outcome>> {
            let mut output = |_: &[u8]| {};
            let mut transcript = Transcript::new(&mut output);
            transcript.feed(text.as_bytes());
            let finished = judge(&steps, &transcript, outcome);
            finished.iter().map(|step| step.cases.iter().map(|case| case.outcome).collect()).collect()
        };
        use Outcome::{Failed, Passed};
        let died = outcomes(format!("{report}\n"), Err(anyhow!("dead")));
        assert_eq!(died, [[Passed], [Failed], [Failed]]);
        let silent = outcomes(format!("{report}\n"), Ok(0));
        assert_eq!(silent, [[Passed], [Failed], [Failed]]);
        let all = format!("{report}\n{}\n{}\n", report.replace(" a ", " b "), report.replace(" a ", " c "));
        assert_eq!(outcomes(all.clone(), Ok(0)), [[Passed], [Passed], [Passed]]);
        let broke_later = outcomes(all, Err(anyhow!("the kernel broke")));
        assert_eq!(broke_later, [vec![Passed], vec![Passed], vec![Passed, Failed]]);
    }

    #[test]
    fn conditions_tell_kernels_apart() {
        let load = Load::Conformance { via: "loop", mode: None };
        assert!(facts(Series::V6_1, load).contains("no-ublk"));
        assert!(!facts(Series::V7, load).contains("no-zero-copy"));
    }
}

//! Runs one place's script, in a guest or on this machine, and returns its report and its setting.
//! Never leaves a file outside of target/bench, and never looks at a program again once it runs: another one
//! may have been built meanwhile.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::args::Args;
use super::contestant::Field;
use super::peers;
use super::record::{self, Setting};
use super::scenario::{Ground, Place};
use crate::exec;
use crate::vm::{self, Machine, Series, quoted};

const LIBRARY: &str = include_str!("guest/lib.sh");

/// The becket that is measured: a copy of the program, and what is known of how it was made.
pub(crate) struct Build {
    path: PathBuf,
    commit: String,
    /// The beginning of its SHA-256.
    pub(crate) hash: String,
    _copy: TempDir,
}

impl Build {
    /// becket, optimised, of this checkout unless another was asked for.
    pub(crate) fn new(args: &Args) -> Result<Build> {
        let (program, commit) = match &args.becket {
            // It was built elsewhere; the checkout's commit would be a guess.
            Some(path) => (path.clone(), "unknown (a build given by --becket)".to_owned()),
            None => (exec::shipped()?, commit()?),
        };
        let copy = tempfile::tempdir_in(record::dir()?)?;
        let path = copy.path().join("becket");
        std::fs::copy(&program, &path).with_context(|| format!("cannot copy {}", program.display()))?;
        // The program for images of Ceph, which is looked for beside becket.
        let helper = program.with_file_name("becket-rbd");
        if helper.exists() {
            std::fs::copy(&helper, copy.path().join("becket-rbd"))?;
        }
        let sum = exec::output(Command::new("sha256sum").arg("--").arg(&path))?;
        let hash = sum.trim_start_matches('\\').chars().take(12).collect();
        Ok(Build { hash, path, commit, _copy: copy })
    }
}

fn commit() -> Result<String> {
    let git = |args: &[&str]| exec::output(Command::new("git").current_dir(exec::workspace()).args(args));
    let mut commit = git(&["rev-parse", "--short=12", "HEAD"])?.trim().to_owned();
    if !git(&["status", "--porcelain", "--untracked-files=no", "--", "crates"])?.is_empty() {
        commit.push('+');
    }
    Ok(commit)
}

/// What bash runs for a place, after the variables that say where it is.
pub(crate) fn script(place: &Place, field: &Field, variables: &str) -> String {
    let entrants = field.names.join(" ");
    let parts = place.script.join("\n");
    format!("{LIBRARY}\n{}\nENTRANTS=({entrants})\n{variables}\n{parts}", field.functions)
}

/// Measures there.
pub(crate) fn measure(place: &Place, args: &Args, build: &Build) -> Result<(String, Setting)> {
    let mut variables = vec![place.variables.to_owned()];
    variables.extend(args.short.then(|| place.short.to_owned()));
    variables.extend(args.rounds.map(|rounds| format!("ROUNDS={rounds}")));
    variables.extend(args.set.iter().cloned());
    let variables = variables.join("\n");
    let only: Vec<&str> = args.only.iter().map(String::as_str).collect();
    let all: Vec<&str> = place.entrants.split_whitespace().collect();
    let entrants = if only.is_empty() || all.is_empty() { all } else { only };
    let work = tempfile::tempdir_in(record::dir()?)?;
    let host = matches!(place.ground, Ground::Host { .. });
    let becket = if host { word(&build.path) } else { "becket".to_owned() };
    let mut field = Field::new(&entrants, &becket, &args.beside, peers::program)?;
    let load = std::fs::read_to_string("/proc/loadavg").context("the host does not show its load")?;
    let load = load.split(' ').next().unwrap_or_default();
    let (report, cpus, emulator) = match place.ground {
        Ground::Host { memory } => {
            let shared =
                if memory { tempfile::tempdir_in("/dev/shm")? } else { tempfile::tempdir_in(&work)? };
            let text = format!("BECKET={becket}\n{}", script(place, &field, &variables));
            (here(&text, work.path(), shared.path())?, host_cpus(), "no emulator".to_owned())
        }
        Ground::Counted | Ground::Timed(..) => {
            let (mut cpus, memory) = match place.ground {
                Ground::Timed(cpus, memory) => (cpus, memory),
                _ => (1, 2048),
            };
            cpus = args.cpus.unwrap_or(cpus);
            let counted = place.ground == Ground::Counted;
            let clock = if counted { "instructions" } else { "time" };
            let head = format!(
                "CPUS={cpus} CLOCK={clock} GIVEN=/given BECKET=becket WORK=/scratch/bench SAID=/root/said REPORT=/root/report"
            );
            let text = format!("{head}\n{}", script(place, &field, &variables));
            let mut machine = Machine::new(Series::V7, text);
            if let Some(before) = place.before {
                // The guest has no tools to make them with.
                let text = format!("{LIBRARY}\n{variables}\n{before}\necho \"$IMAGES/given\" >given");
                here(&text, work.path(), work.path())?;
                let given = std::fs::read_to_string(work.path().join("given"))?;
                machine.files.push(vm::Place { host: given.trim().into(), guest: "/given".to_owned() });
            }
            (machine.icount, machine.cpus, machine.memory_mib) = (counted, cpus, memory);
            machine.timeout = Duration::from_secs(args.timeout);
            machine.files.append(&mut field.programs);
            machine
                .files
                .push(vm::Place { host: build.path.clone(), guest: "/usr/local/bin/becket".to_owned() });
            let report = work.path().join("report");
            machine.outs.push(vm::Place { host: report.clone(), guest: "/root/report".to_owned() });
            let code = machine.boot(&mut |bytes| eprint!("{}", String::from_utf8_lossy(bytes)))?;
            if code != 0 {
                bail!("the guest's script ended with {code}");
            }
            let bytes = std::fs::read(&report).context("the guest sent no report")?;
            let version = exec::output(Command::new("qemu-system-x86_64").arg("--version"))?;
            let version = version.lines().next().unwrap_or_default();
            let mode = if counted { "thread=single, icount shift=0, sleep=off" } else { "thread=multi" };
            (String::from_utf8_lossy(&bytes).into_owned(), cpus, format!("{version}, tcg, {mode}"))
        }
    };
    field
        .notes
        .extend([place.note.to_owned(), format!("the host's load before: {load} on {} CPUs", host_cpus())]);
    field.notes.retain(|note| !note.is_empty());
    let setting = Setting {
        place: place.name.to_owned(),
        date: exec::output(Command::new("date").args(["-u", "+%F %H:%M"]))?.trim().to_owned(),
        commit: build.commit.clone(),
        build: build.hash.clone(),
        kernel: String::new(),
        cpus,
        emulator,
        command: command(std::env::args().skip(1)),
        notes: field.notes,
    };
    Ok((report, setting))
}

/// Runs the script on this machine; becket uses its default plan, and has its records below `records`.
fn here(script: &str, work: &Path, records: &Path) -> Result<String> {
    let at = |name: &str| word(&work.join(name));
    let kept = word(&record::dir()?);
    let head =
        format!("CLOCK=time REPORT={} SAID={} WORK={} KEPT={kept}", at("report"), at("said"), at("work"));
    let mut command = Command::new("bash");
    command.arg("-c").arg(format!("{head}\n{script}")).current_dir(work);
    command.env("BECKET_RUNTIME_DIR", records.join("run")).env("BECKET_LINK_DIR", records.join("links"));
    command.env_remove("BECKET_TEST_VIA").stdin(Stdio::null()).stdout(io::stderr());
    let status = command.status().context("cannot start `bash`")?;
    if !status.success() {
        bail!("the benchmark's script failed on this machine ({status}); why is in its last line");
    }
    Ok(std::fs::read_to_string(work.join("report"))?)
}

fn host_cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| count.get() as u32)
}

/// A path as a word for the shell.
fn word(path: &Path) -> String {
    quoted(&path.display().to_string())
}

/// This run's command line, to be typed again; a path of this machine is shown by its last part only.
fn command(arguments: impl Iterator<Item = String>) -> String {
    let mut line = "cargo xtask".to_owned();
    for argument in arguments {
        let (head, path) = argument.split_at(argument.find('/').unwrap_or(argument.len()));
        line.push(' ');
        line.push_str(head);
        line.push_str(path.rsplit('/').next().unwrap_or_default());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_name_no_place_of_this_machine() {
        let words = ["bench", "cost", "--beside", "before=/home/me/becket", "--becket", "/x/y", "--short"];
        let line = command(words.into_iter().map(str::to_owned));
        assert_eq!(line, "cargo xtask bench cost --beside before=becket --becket y --short");
    }
}

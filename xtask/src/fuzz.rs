//! `cargo xtask fuzz`: each reader of bytes from outside under libFuzzer, one after another, for some
//! minutes.
//! Never changes the corpora of the checkout: new findings are below `target/fuzz`, for a person to look at.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::exec;

/// Arguments of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long each reader is fed
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// The readers [default: all, which are the folders of tests/fuzz/corpus]
    #[arg(value_name = "READER")]
    readers: Vec<String>,
}

/// Shows where a program came, as cargo-fuzz asks for it: libFuzzer lives on that.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";
/// Seconds that one input may take, and MiB that all of it may.
const PATIENCE: u32 = 10;
const MEMORY: u32 = 1024;

/// Feeds them and prints what came of it; 0 when nothing was found.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let corpora = exec::workspace().join("tests/fuzz/corpus");
    let readers = if args.readers.is_empty() { names(&corpora)? } else { args.readers.clone() };
    if let Some(unknown) = readers.iter().find(|name| !corpora.join(name).is_dir()) {
        bail!("{unknown} is none of {}", names(&corpora)?.join(", "));
    }
    let dir = exec::target_dir().join("fuzz");
    let program = build(&dir)?;
    let mut found = false;
    println!("{:<12} {:>14} {:>10}  found", "reader", "executions", "coverage");
    for name in readers {
        let (own, artifacts) = (dir.join("corpus").join(&name), dir.join("found").join(&name));
        for path in [&own, &artifacts] {
            std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
        }
        let done = Command::new(&program)
            .env("BECKET_FUZZ", &name)
            .arg(format!("-max_total_time={}", args.minutes * 60))
            .arg(format!("-timeout={PATIENCE}"))
            .arg(format!("-rss_limit_mb={MEMORY}"))
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            .arg("-print_final_stats=1")
            .args([&own, &corpora.join(&name)])
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let said = String::from_utf8_lossy(&done.stderr);
        let (executions, coverage) = (executions(&said), coverage(&said));
        let what = if done.status.success() { "nothing".to_owned() } else { artifacts.display().to_string() };
        println!("{name:<12} {executions:>14} {coverage:>10}  {what}");
        if !done.status.success() {
            found = true;
            let tail: Vec<&str> = said.lines().filter(|line| !line.starts_with('#')).collect();
            println!("{}", tail.join("\n"));
        }
    }
    Ok(u8::from(found))
}

/// The readers that have a corpus.
fn names(corpora: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(corpora).context("cannot list tests/fuzz/corpus")? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Builds the program; where it is.
fn build(dir: &Path) -> Result<PathBuf> {
    let host = exec::output(Command::new("rustc").arg("-vV"))?;
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?;
    // With a target, so that build scripts and macros are built without the flags.
    let status = exec::cargo()
        .args(["build", "--release", "--quiet", "--manifest-path", "fuzz/Cargo.toml", "--target", host])
        .arg("--target-dir")
        .arg(dir.join("build"))
        .env("RUSTFLAGS", COVERAGE)
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("cargo could not build fuzz/; it needs a C++ compiler (apt-get install g++)");
    }
    Ok(dir.join("build").join(host).join("release/becket-libfuzzer"))
}

/// How often the reader was fed, as libFuzzer says at its end.
fn executions(said: &str) -> String {
    let line = said.lines().rev().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    line.map_or("?", str::trim).to_owned()
}

/// How many places of the program were come to, as libFuzzer's last report says.
fn coverage(said: &str) -> String {
    let line = said.lines().rev().find_map(|line| line.split_once(" cov: "));
    line.and_then(|(_, rest)| rest.split_whitespace().next()).unwrap_or("?").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libfuzzer_says_is_understood() {
        let said = "INFO: Seed: 1\n#2\tINITED cov: 120 ft: 130 corp: 2/9b\n#65536\tpulse  cov: 140 ft: 150 corp: 3/12b lim: 4 \
                    exec/s: 1\nDone 70000 runs in 2 second(s)\nstat::number_of_executed_units: 70000\n";
        assert_eq!((executions(said).as_str(), coverage(said).as_str()), ("70000", "140"));
        assert_eq!((executions("").as_str(), coverage("").as_str()), ("?", "?"));
    }
}

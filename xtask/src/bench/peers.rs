//! Gets the servers that becket is compared with: the kernel's selftest server and rublk, built below
//! target/bench.
//! Never puts anything of theirs into this project's sources; if a peer is not available, that is a reason,
//! not an error.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::record;
use crate::exec;
use crate::vm::{self, Apt, Series};

/// The executable of a peer, or why there is none; nothing for a program that every machine has. The kernel's
/// selftest server for ublk is of the same version as the guest's kernel.
pub(crate) fn program(name: &str) -> Result<Option<PathBuf>, String> {
    match name {
        "kublk" => kublk().map(Some),
        "rublk" => rublk().map(Some),
        _ => Ok(None),
    }
    .map_err(|error| format!("{error:#}"))
}

fn kublk() -> Result<PathBuf> {
    let release = vm::release(Series::V7)?;
    let (series, version) = source_of(&release)?;
    let dir = record::dir()?.join(format!("kublk-{version}"));
    let program = dir.join("kublk");
    if program.is_file() {
        return Ok(program);
    }
    eprintln!(
        "xtask: building the kernel's selftest server {version} (once; Debian's source package is large)"
    );
    let apt = Apt::update(&record::dir()?.join("apt"), &["trixie", "trixie-backports"])?;
    let source = format!("linux-source-{series}");
    let mut wanted = vec!["liburing-dev".to_owned()];
    for package in [source.as_str(), "linux-libc-dev"] {
        let all = apt.show(package)?;
        let found = all.into_iter().find(|one| one.version.starts_with(&format!("{version}-")));
        let found = found.with_context(|| format!("the archive has no {package} {version}"))?;
        wanted.push(format!("{package}={}", found.version));
    }
    let work = tempfile::tempdir_in(record::dir()?)?;
    apt.unpack(&wanted, work.path())?;
    exec::quietly(
        Command::new("tar")
            .arg("-xJf")
            .arg(work.path().join(format!("usr/src/{source}.tar.xz")))
            .args(["-C".as_ref(), work.path().as_os_str()])
            .args(["--wildcards", "*/tools/testing/selftests/ublk/*"]),
    )?;
    let tests = work.path().join(&source).join("tools/testing/selftests/ublk");
    let built = work.path().join("kublk");
    compile(&tests, &work.path().join("usr"), &built)?;
    std::fs::create_dir_all(&dir)?;
    // A rename at the end: an interrupted build leaves nothing that looks finished.
    std::fs::rename(&built, &program).with_context(|| format!("cannot keep {}", program.display()))?;
    Ok(program)
}

/// As the selftest's Makefile does it, with liburing and the kernel's headers from `usr`.
fn compile(sources: &Path, usr: &Path, program: &Path) -> Result<()> {
    let mut command = Command::new("cc");
    command.args(["-O3", "-w", "-D_GNU_SOURCE"]);
    for include in ["include", "include/x86_64-linux-gnu"] {
        command.arg("-I").arg(usr.join(include));
    }
    command.arg("-o").arg(program);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(sources)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    // metadata_size.c is a program of its own.
    files.retain(|path| {
        path.extension().is_some_and(|kind| kind == "c") && !path.ends_with("metadata_size.c")
    });
    files.sort();
    exec::quietly(
        command.args(files).arg(usr.join("lib/x86_64-linux-gnu/liburing.a")).args(["-lpthread", "-lm"]),
    )
}

/// `7.3` and `7.3.4` of `7.3.4+deb13-cloud-amd64`.
fn source_of(release: &str) -> Result<(String, String)> {
    let version = release.split(['+', '-']).next().unwrap_or_default();
    let mut numbers = version.split('.');
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if !major.is_empty() => {
            Ok((format!("{major}.{minor}"), version.to_owned()))
        }
        _ => bail!("the guest's kernel has the strange release `{release}`"),
    }
}

fn rublk() -> Result<PathBuf> {
    let root = record::dir()?.join("rublk");
    let program = root.join("bin/rublk");
    if program.is_file() {
        return Ok(program);
    }
    if !has_libclang()? {
        bail!("building it needs libclang: `apt-get install libclang-dev`");
    }
    eprintln!("xtask: building rublk (once)");
    exec::quietly(
        exec::cargo()
            .args(["install", "--quiet", "--locked", "rublk", "--root"])
            .arg(&root)
            .env("CARGO_TARGET_DIR", root.join("build")),
    )?;
    Ok(program)
}

fn has_libclang() -> Result<bool> {
    if std::env::var_os("LIBCLANG_PATH").is_some() {
        return Ok(true);
    }
    let known = exec::output(Command::new("ldconfig").arg("-p"))?;
    Ok(known.contains("libclang.so") || known.contains("libclang-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_is_that_of_the_guests_kernel() {
        let of = |release| source_of(release).ok();
        assert_eq!(of("7.3.4+deb13-cloud-amd64"), Some(("7.3".into(), "7.3.4".into())));
        assert_eq!(of("6.12.95-cloud-amd64"), Some(("6.12".into(), "6.12.95".into())));
        assert_eq!(of("unknown"), None);
        assert_eq!(of(""), None);
    }
}

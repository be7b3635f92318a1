//! systemd's `varlinkctl`, for the tests of the control socket: Debian 12's systemd is older than it. It runs
//! with the libraries of its own release, below the target directory.
//! It installs nothing on the machine.

use std::env::split_paths;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::exec;
use crate::vm::apt::{self, Apt};

/// The first release of Debian that has it.
const SUITE: &str = "trixie";
/// The program and the libraries that it loads.
const PACKAGES: [&str; 17] = [
    "systemd",
    "libsystemd-shared",
    "libacl1",
    "libaudit1",
    "libblkid1",
    "libc6",
    "libcap-ng0",
    "libcap2",
    "libcrypt1",
    "libmount1",
    "libpam0g",
    "libpcre2-8-0",
    "libseccomp2",
    "libselinux1",
    "libssl3t64",
    "libzstd1",
    "zlib1g",
];

/// A `PATH` on which programs find it: this machine's own, or one with the directory that has it.
pub(crate) fn path() -> Result<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if split_paths(&path).any(|dir| dir.join("varlinkctl").exists()) {
        return Ok(path);
    }
    let dir = prepare()?;
    Ok(std::env::join_paths(std::iter::once(dir).chain(split_paths(&path)))?)
}

/// The directory that has it; its packages are fetched once.
fn prepare() -> Result<PathBuf> {
    let dir = exec::target_dir().join("varlinkctl");
    let script = dir.join("varlinkctl");
    if script.exists() {
        return Ok(dir);
    }
    eprintln!("xtask: fetching varlinkctl");
    apt::check_keyring()?;
    let root = dir.join("root");
    let packages = PACKAGES.map(str::to_owned);
    Apt::update(&dir.join("apt"), &[SUITE])?.unpack(&packages, &root)?;
    let libraries = root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
    let loader = loader(&libraries)?;
    let (loader, libraries, root) = (loader.display(), libraries.display(), root.display());
    let text = format!(
        "#!/bin/sh\nexec \"{loader}\" --library-path \"{libraries}:{libraries}/systemd\" \
         \"{root}/usr/bin/varlinkctl\" \"$@\"\n"
    );
    // Under its name only when it is complete.
    let new = dir.join("new");
    fs::write(&new, text)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
    exec::quietly(std::process::Command::new(&new).arg("--version"))?;
    fs::rename(&new, &script)?;
    Ok(dir)
}

fn loader(libraries: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(libraries).with_context(|| format!("cannot read {}", libraries.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    let found = paths
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ld-linux")));
    found.context("libc6 has no loader")
}

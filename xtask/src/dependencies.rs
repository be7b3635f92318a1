//! What becket is built from: every package has a licence that allows ours, comes from the one registry, and has a reason.
//! It asks cargo about the lock file, and changes nothing.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::exec::workspace;

/// Licences that let becket be `MIT OR Apache-2.0`.
const ALLOWED: [&str; 8] = [
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "Unicode-3.0",
    "Unlicense",
];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    license: Option<String>,
    /// Ours have none.
    source: Option<String>,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    source: Option<String>,
}

/// The packages of the workspace there, with all that they are built from; `alone` leaves those out, which have to be fetched.
fn packages(workspace: &Path, alone: bool) -> Result<Vec<Package>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = std::process::Command::new(cargo);
    // What other systems would need has not been fetched.
    let ours = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    command.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", &ours]);
    command.args(alone.then_some("--no-deps")).current_dir(workspace);
    let output = command.output().context("cargo cannot be run")?;
    let metadata: Metadata = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("cargo metadata says {}", String::from_utf8_lossy(&output.stderr)))?;
    Ok(metadata.packages)
}

/// Whether one of the choices that a licence expression leaves is allowed. `AND` binds closer than `OR`; what is in
/// parentheses counts first.
fn allowed(expression: &str) -> bool {
    if let Some((before, rest)) = expression.rsplit_once('(')
        && let Some((inside, after)) = rest.split_once(')')
    {
        let inside = if allowed(inside) { ALLOWED[0] } else { "none" };
        return allowed(&format!("{before}{inside}{after}"));
    }
    let choices = expression.split('/').flat_map(|part| part.split(" OR "));
    choices.into_iter().any(|choice| choice.split(" AND ").all(|one| ALLOWED.contains(&one.trim())))
}

#[test]
fn expressions_are_understood() {
    for good in ["MIT", "MIT/Apache-2.0", "GPL-3.0 OR MIT", "(MIT OR Apache-2.0) AND Unicode-3.0"] {
        assert!(allowed(good), "{good}");
    }
    for bad in ["", "GPL-2.0-only", "MIT AND GPL-3.0", "(GPL-2.0 OR GPL-3.0) AND MIT", "LGPL-2.1/MPL-2.0"] {
        assert!(!allowed(bad), "{bad}");
    }
}

#[test]
fn every_package_may_be_used_and_is_where_the_lock_file_says() {
    let packages = packages(workspace(), false).unwrap();
    assert!(packages.len() > 50, "{} packages", packages.len());
    for package in packages {
        let license = package.license.unwrap_or_default();
        assert!(allowed(&license), "{}: its licence is {license:?}", package.name);
        let registry = package.source.as_deref().is_none_or(|source| source.starts_with("registry+"));
        assert!(registry, "{} comes from {:?}", package.name, package.source);
    }
}

#[test]
fn every_dependency_has_its_reason() {
    let document = std::fs::read_to_string(workspace().join("docs/ARCHITECTURE.md")).unwrap();
    let (_, section) = document.split_once("## Dependencies and why each is there").unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let named: BTreeSet<&str> = rows.flat_map(|names| names.split(", ")).collect();
    let fuzz = packages(&workspace().join("fuzz"), true).unwrap();
    let ours = packages(workspace(), false).unwrap().into_iter().filter(|package| package.source.is_none());
    let used: BTreeSet<String> = ours
        .chain(fuzz)
        .flat_map(|package| package.dependencies)
        .filter_map(|dependency| dependency.source.map(|_| dependency.name))
        .collect();
    let missing: Vec<_> = used.iter().filter(|name| !named.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "docs/ARCHITECTURE.md does not say what {missing:?} are for");
    let gone: Vec<_> =
        named.iter().filter(|name| **name != "crate" && **name != "---" && !used.contains(**name)).collect();
    assert!(gone.is_empty(), "docs/ARCHITECTURE.md speaks of {gone:?}, which nobody uses");
}

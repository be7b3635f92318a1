//! `cargo xtask audit`: writes docs/dependencies.md, the list of all third-party code that becket is built
//! from or tested with. It judges nothing: tests (`dependencies`) hold the list against deny.toml, and each
//! direct dependency against its reason.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::exec::{self, workspace};
use crate::metadata::{Dependency, Metadata, Package, metadata};

/// What is in front of the tables.
const PREFACE: &str = "\
# Third-party code

This page lists every package that becket is built from or tested with, as in the lock file. `cargo
xtask audit` writes it from cargo's metadata and the packages' sources, and a test compares it with
the lock file. [ARCHITECTURE.md](ARCHITECTURE.md#dependencies-and-why-each-is-there) says why each
direct dependency is there; here they are **bold**. For the others, the last column names the
packages that need them. A test also checks licences and origins (`xtask/src/dependencies.rs`) against
`deny.toml`, which cargo-deny reads, too (`cargo deny check licenses bans sources`).

*unsafe* counts the lines in a package's `src` that contain the word outside of comments, for any
system. *at building* says what runs on the machine that builds: a build script, a macro, or a
script that compiles C.

This page does not say whether a package has a known vulnerability, and no test here asks, because
that needs the RustSec database from the network. After `cargo install --locked cargo-deny`, the
command `cargo deny check advisories` downloads it and checks each package. The packages that only
`cargo xtask fuzz` needs have a lock file of their own (`fuzz/Cargo.lock`).
";

/// Writes the page.
pub(crate) fn run() -> Result<u8> {
    std::fs::write(path(), page(workspace())?).context("cannot write docs/dependencies.md")?;
    Ok(0)
}

fn path() -> PathBuf {
    workspace().join("docs/dependencies.md")
}

/// The page for the workspace there.
fn page(workspace: &Path) -> Result<String> {
    let metadata = metadata(workspace, false)?;
    let inside = built(workspace, &["-p", "becket", "--edges", "normal,build"])?;
    let all = built(workspace, &["--workspace", "--edges", "normal,build,dev"])?;
    let mut page = PREFACE.to_owned();
    let (built, tested): (Vec<_>, Vec<_>) = metadata
        .packages
        .iter()
        .filter(|package| package.source.is_some() && all.contains(&called(package)))
        .partition(|package| inside.contains(&called(package)));
    for (title, packages) in [("In becket", built), ("In tests and tasks only", tested)] {
        // Writing to a string cannot fail.
        let _ = writeln!(page, "\n## {title}: {}\n", packages.len());
        page.push_str("| package | licence | unsafe | at building | from | needed by |\n");
        page.push_str("| --- | --- | ---: | --- | --- | --- |\n");
        for package in packages {
            page.push_str(&row(&metadata, &all, package)?);
        }
    }
    Ok(page)
}

fn called(package: &Package) -> String {
    format!("{} v{}", package.name, package.version)
}

/// Names and versions of what is really built: cargo's metadata also have what no feature asks for.
fn built(workspace: &Path, what: &[&str]) -> Result<BTreeSet<String>> {
    let mut command = exec::cargo();
    command
        .args(["tree", "--locked", "--prefix", "none", "--format", "{p}"])
        .args(what)
        .current_dir(workspace);
    let lines = exec::output(&mut command)?;
    let called = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    Ok(lines.lines().filter(|line| !line.is_empty()).map(called).collect())
}

fn row(metadata: &Metadata, all: &BTreeSet<String>, package: &Package) -> Result<String> {
    let by_id: BTreeMap<_, _> = metadata.packages.iter().map(|other| (other.id.as_str(), other)).collect();
    let users: Vec<&Package> = metadata
        .nodes()
        .filter(|node| node.deps.iter().any(|dep| dep.pkg == package.id))
        .filter_map(|node| by_id.get(node.id.as_str()).copied())
        .filter(|user| all.contains(&called(user)))
        .collect();
    let direct = users.iter().any(|user| user.source.is_none());
    let mut needed: Vec<&str> =
        users.iter().filter(|user| user.source.is_some()).map(|user| user.name.as_str()).collect();
    if direct {
        needed.insert(0, "becket");
    }
    let bold = if direct { "**" } else { "" };
    let origin = package.repository.as_deref().unwrap_or("");
    let origin =
        origin.trim_start_matches("https://").trim_start_matches("github.com/").trim_end_matches(".git");
    // The path to a part of a repository does not name its maintainer.
    let origin: Vec<&str> = origin.split('/').take_while(|part| *part != "tree" && *part != "blob").collect();
    Ok(format!(
        "| {bold}{}{bold} {} | {} | {} | {} | {} | {} |\n",
        package.name,
        package.version,
        package.license.as_deref().unwrap_or("none"),
        unsafe_lines(package)?,
        at_building(package),
        origin.join("/"),
        needed.join(", ")
    ))
}

/// What of a package runs where becket is built.
fn at_building(package: &Package) -> &'static str {
    let has = |kind: &str| package.targets.iter().any(|target| target.kind.iter().any(|word| word == kind));
    let compiler =
        |dep: &Dependency| dep.name == "cc" && dep.source.is_some() && dep.kind.as_deref() == Some("build");
    let compiles = package.dependencies.iter().any(compiler);
    match (has("custom-build"), has("proc-macro"), compiles) {
        (true, _, true) => "script, C",
        (true, true, false) => "script, macro",
        (true, false, false) => "script",
        (false, true, _) => "macro",
        (false, false, _) => "",
    }
}

/// How many lines of a package's source say `unsafe`.
fn unsafe_lines(package: &Package) -> Result<usize> {
    let mut count = 0;
    let mut open = vec![package.folder().join("src")];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            for entry in
                std::fs::read_dir(&path).with_context(|| format!("cannot list {}", path.display()))?
            {
                open.push(entry?.path());
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text =
                std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            count += text.lines().filter(|line| says_unsafe(line)).count();
        }
    }
    Ok(count)
}

fn says_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    code.split(|letter| !is_part(letter)).any(|word| word == "unsafe")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_is_a_word_of_the_code() {
        for yes in ["unsafe {", "    pub unsafe fn a()", "#[unsafe(no_mangle)] // as it must be"] {
            assert!(says_unsafe(yes), "{yes}");
        }
        for no in ["// unsafe", "#![forbid(unsafe_code)]", "let x = 1; // unsafe here?", ""] {
            assert!(!says_unsafe(no), "{no}");
        }
    }

    #[test]
    fn the_list_is_that_of_the_lock_file() {
        let page = page(workspace()).unwrap();
        assert!(page.contains("| **rustix** ") && page.contains("## In tests and tasks only"), "{page}");
        let written = std::fs::read_to_string(path()).unwrap();
        let (new, old): (Vec<_>, Vec<_>) = (page.lines().collect(), written.lines().collect());
        let missing: Vec<_> = new.iter().filter(|line| !old.contains(line)).collect();
        let gone: Vec<_> = old.iter().filter(|line| !new.contains(line)).collect();
        assert!(page == written, "run `cargo xtask audit`: {missing:#?} instead of {gone:#?}");
    }
}

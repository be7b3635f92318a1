//! `cargo xtask audit`: writes docs/dependencies.md, the list of all third-party code that becket is built
//! from or tested with. It judges nothing: tests (`dependencies`) hold the list against deny.toml, and each
//! direct dependency against its reason.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::exec::{self, workspace};

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

Some code is becket's own because a package would bring more than it replaces: Landlock (100 lines in
`becket-uapi`; the crate `landlock` brings 4 packages), SHA-256 for blocks of xz (70 lines; `sha2`
brings 7), varlink ([0099](decisions/0099-varlink-by-hand.md)) and what writes events
([0100](decisions/0100-tracing-with-a-small-subscriber.md)).
";

/// Writes the page.
pub(crate) fn run() -> Result<u8> {
    std::fs::write(path(), page(workspace())?).context("cannot write docs/dependencies.md")?;
    Ok(0)
}

fn path() -> PathBuf {
    workspace().join("docs/dependencies.md")
}

/// What cargo knows of the workspace there and of all that it is built from; `alone` leaves those packages
/// out, which have to be fetched. It asks cargo about the lock file, and changes nothing.
pub(crate) fn metadata(workspace: &Path, alone: bool) -> Result<Value> {
    let mut command = exec::cargo();
    // What other systems would need has not been fetched.
    let ours = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    command.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", &ours]);
    command.args(alone.then_some("--no-deps")).current_dir(workspace);
    serde_json::from_str(&exec::output(&mut command)?).context("cargo's metadata are not as expected")
}

/// The elements of a list; none if it is not there.
pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A text; empty if it is not there.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The page for the workspace there.
fn page(workspace: &Path) -> Result<String> {
    let metadata = metadata(workspace, false)?;
    let inside = built(workspace, &["-p", "becket", "--edges", "normal,build"])?;
    let all = built(workspace, &["--workspace", "--edges", "normal,build,dev"])?;
    let mut page = PREFACE.to_owned();
    let foreign = list(&metadata["packages"]).iter().filter(|package| package["source"].is_string());
    let (built, tested): (Vec<_>, Vec<_>) = foreign
        .filter(|package| all.contains(&called(package)))
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

fn called(package: &Value) -> String {
    format!("{} v{}", text(&package["name"]), text(&package["version"]))
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

fn row(metadata: &Value, all: &BTreeSet<String>, package: &Value) -> Result<String> {
    let needs = |node: &&Value| list(&node["deps"]).iter().any(|dep| dep["pkg"] == package["id"]);
    let of = |node: &Value| list(&metadata["packages"]).iter().find(|other| other["id"] == node["id"]);
    let nodes = list(&metadata["resolve"]["nodes"]).iter().filter(needs);
    let users: Vec<&Value> = nodes.filter_map(of).filter(|user| all.contains(&called(user))).collect();
    let direct = users.iter().any(|user| user["source"].is_null());
    let mut needed: Vec<&str> =
        users.iter().filter(|user| user["source"].is_string()).map(|user| text(&user["name"])).collect();
    if direct {
        needed.insert(0, "becket");
    }
    let bold = if direct { "**" } else { "" };
    let origin = text(&package["repository"]);
    let origin =
        origin.trim_start_matches("https://").trim_start_matches("github.com/").trim_end_matches(".git");
    // The path to a part of a repository does not name its maintainer.
    let origin: Vec<&str> = origin.split('/').take_while(|part| *part != "tree" && *part != "blob").collect();
    Ok(format!(
        "| {bold}{}{bold} {} | {} | {} | {} | {} | {} |\n",
        text(&package["name"]),
        text(&package["version"]),
        package["license"].as_str().unwrap_or("none"),
        unsafe_lines(package)?,
        at_building(package),
        origin.join("/"),
        needed.join(", ")
    ))
}

/// What of a package runs where becket is built.
fn at_building(package: &Value) -> &'static str {
    let has = |kind: &str| {
        list(&package["targets"]).iter().any(|target| list(&target["kind"]).iter().any(|word| word == kind))
    };
    let compiler = |dep: &Value| dep["name"] == "cc" && dep["source"].is_string() && dep["kind"] == "build";
    let compiles = list(&package["dependencies"]).iter().any(compiler);
    match (has("custom-build"), has("proc-macro"), compiles) {
        (true, _, true) => "script, C",
        (true, true, false) => "script, macro",
        (true, false, false) => "script",
        (false, true, _) => "macro",
        (false, false, _) => "",
    }
}

/// How many lines of a package's source say `unsafe`.
fn unsafe_lines(package: &Value) -> Result<usize> {
    let mut count = 0;
    let mut open = vec![Path::new(text(&package["manifest_path"])).with_file_name("src")];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            for entry in
                std::fs::read_dir(&path).with_context(|| format!("cannot list {}", path.display()))?
            {
                open.push(entry?.path());
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source =
                std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            count += source.lines().filter(|line| says_unsafe(line)).count();
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

//! What cargo knows of a workspace and of the packages that it is built from.
//! It asks cargo about the lock file, and changes nothing.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::Deserialize;

/// What cargo says of a workspace.
#[derive(Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    /// None where only our own packages were asked for.
    resolve: Option<Resolve>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

/// A package with those that it was built with.
#[derive(Deserialize)]
pub(crate) struct Node {
    pub(crate) id: String,
    pub(crate) deps: Vec<Edge>,
}

#[derive(Deserialize)]
pub(crate) struct Edge {
    pub(crate) pkg: String,
}

#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    pub(crate) repository: Option<String>,
    manifest_path: PathBuf,
    /// Ours have none.
    pub(crate) source: Option<String>,
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) targets: Vec<Target>,
}

#[derive(Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// Ours have none.
    pub(crate) source: Option<String>,
    pub(crate) kind: Option<String>,
}

#[derive(Deserialize)]
pub(crate) struct Target {
    pub(crate) kind: Vec<String>,
}

impl Metadata {
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.resolve.iter().flat_map(|resolve| &resolve.nodes)
    }
}

impl Package {
    /// Where its source is.
    pub(crate) fn folder(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(Path::new("/"))
    }
}

/// The workspace there, with all that it is built from; `alone` leaves those out, which have to be fetched.
pub(crate) fn metadata(workspace: &Path, alone: bool) -> Result<Metadata> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = std::process::Command::new(cargo);
    // What other systems would need has not been fetched.
    let ours = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    command.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", &ours]);
    command.args(alone.then_some("--no-deps")).current_dir(workspace);
    let output = command.output().context("cargo cannot be run")?;
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("cargo metadata says {}", String::from_utf8_lossy(&output.stderr)))
}

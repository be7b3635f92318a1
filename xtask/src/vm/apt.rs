//! Debian packages without touching the host's apt: own sources, own lists, own cache, the host's mirror and
//! keys.
//! Never installs anything; packages are only downloaded (verified by apt) and unpacked.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::exec;

/// The keys of Debian's archive, of the package debian-archive-keyring.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A private apt below one directory.
pub(crate) struct Apt {
    dir: PathBuf,
}

/// One stanza of `apt-cache show`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Names of the first alternative of each dependency, without versions.
    pub(crate) depends: Vec<String>,
}

impl Apt {
    /// Writes the configuration for these suites and downloads their package lists.
    pub(crate) fn update(dir: &Path, suites: &[&str]) -> Result<Apt> {
        Apt::with(dir, "deb", suites)
    }

    /// The same for the source packages of a suite.
    pub(crate) fn sources(dir: &Path, suite: &str) -> Result<Apt> {
        Apt::with(dir, "deb-src", &[suite])
    }

    fn with(dir: &Path, kind: &str, suites: &[&str]) -> Result<Apt> {
        let mirror = mirror()?;
        for sub in ["lists/partial", "cache/archives/partial", "empty"] {
            std::fs::create_dir_all(dir.join(sub))
                .with_context(|| format!("cannot make {}", dir.display()))?;
        }
        let sources: String = suites
            .iter()
            .map(|suite| format!("{kind} [signed-by={KEYRING}] {mirror} {suite} main\n"))
            .collect();
        std::fs::write(dir.join("sources.list"), sources)?;
        std::fs::write(dir.join("status"), "")?;
        let apt = Apt { dir: dir.to_owned() };
        exec::quietly(apt.command("apt-get").args(["update", "--error-on=any"]))
            .with_context(|| format!("cannot fetch the package lists of {mirror}"))?;
        Ok(apt)
    }

    /// All versions of a package that the suites have.
    pub(crate) fn show(&self, package: &str) -> Result<Vec<Package>> {
        Ok(parse_show(&exec::output(self.command("apt-cache").args(["show", "--", package]))?))
    }

    /// Downloads packages (`name` or `name=version`) and unpacks them into `into`.
    pub(crate) fn unpack(&self, packages: &[String], into: &Path) -> Result<()> {
        let debs = tempfile::tempdir_in(&self.dir)?;
        exec::quietly(self.command("apt-get").arg("download").args(packages).current_dir(debs.path()))?;
        std::fs::create_dir_all(into)?;
        for deb in std::fs::read_dir(debs.path())? {
            exec::quietly(Command::new("dpkg").arg("-x").arg(deb?.path()).arg(into))?;
        }
        Ok(())
    }

    /// Downloads a source package into `into` and returns its upstream archive.
    pub(crate) fn source(&self, package: &str, into: &Path) -> Result<PathBuf> {
        std::fs::create_dir_all(into)?;
        exec::quietly(
            self.command("apt-get").args(["source", "--download-only", package]).current_dir(into),
        )?;
        let files = std::fs::read_dir(into)?.flatten().map(|entry| entry.path());
        let mut upstream = files.filter(|path| path.to_string_lossy().ends_with(".orig.tar.xz"));
        upstream.next().with_context(|| format!("{package} has no upstream archive"))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let dir = self.dir.display();
        // Given on the command line because that is read last: the host's apt.conf.d (a proxy, say) stays in
        // force and still cannot redirect us into the host's own lists.
        for option in [
            format!("Dir::Etc::sourcelist={dir}/sources.list"),
            format!("Dir::Etc::sourceparts={dir}/empty"),
            format!("Dir::Etc::preferencesparts={dir}/empty"),
            format!("Dir::State::lists={dir}/lists"),
            format!("Dir::State::status={dir}/status"),
            format!("Dir::Cache={dir}/cache"),
            "Dir::Cache::pkgcache=pkgcache.bin".to_owned(),
            "Dir::Cache::srcpkgcache=srcpkgcache.bin".to_owned(),
            "APT::Sandbox::User=root".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::Retries=3".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
        ] {
            command.arg("-o").arg(option);
        }
        command
    }
}

/// The mirror that this host's own apt uses for Debian's main archive.
pub(crate) fn mirror() -> Result<String> {
    let targets = exec::output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(REPO_URI) $(RELEASE)",
        "Created-By: Packages",
    ]))?;
    pick_mirror(&targets).context("the apt sources of this machine name no Debian archive")
}

/// Takes the first repository whose release is a plain suite: a Debian one, no `-security` and no vendor's.
fn pick_mirror(targets: &str) -> Option<String> {
    const SUITES: [&str; 8] =
        ["bookworm", "trixie", "forky", "sid", "stable", "testing", "unstable", "oldstable"];
    let mut plain = targets.lines().filter_map(|line| {
        let (uri, release) = line.trim().split_once(' ')?;
        SUITES.contains(&release.trim()).then(|| uri.trim_end_matches('/').to_owned())
    });
    plain.next()
}

fn parse_show(text: &str) -> Vec<Package> {
    text.split("\n\n").filter_map(parse_stanza).collect()
}

fn parse_stanza(stanza: &str) -> Option<Package> {
    let field = |name: &str| {
        stanza.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let depends = field("Depends").unwrap_or_default();
    let first = |dependency: &str| {
        let end = dependency.find(['(', '|', ':', ' ']).unwrap_or(dependency.len());
        dependency[..end].to_owned()
    };
    Some(Package {
        name: field("Package")?.to_owned(),
        version: field("Version")?.to_owned(),
        depends: depends.split(',').map(|one| first(one.trim())).filter(|name| !name.is_empty()).collect(),
    })
}

/// Orders Debian versions of one series by their numbers; enough for kernels, where only digits change.
pub(crate) fn version_key(version: &str) -> Vec<u64> {
    version.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

/// Fails early, and with the way out, when the archive's keys are not there.
pub(crate) fn check_keyring() -> Result<()> {
    if !Path::new(KEYRING).exists() {
        bail!("{KEYRING} is missing: `apt-get install debian-archive-keyring` brings the archive's keys");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stanzas_are_split_and_dependencies_reduced_to_names() {
        let text = "Package: linux-image-cloud-amd64\nVersion: 7.3.4-1~bpo13+1\nDepends: linux-image-7.3.4+deb13-cloud-amd64 (= 7.3.4-1~bpo13+1), kmod:any, a | b\nDescription: x\n more\n\nPackage: p\nVersion: 1\n";
        let packages = parse_show(text);
        assert_eq!(packages.len(), 2);
        assert_eq!(packages[0].depends, ["linux-image-7.3.4+deb13-cloud-amd64", "kmod", "a"]);
        assert_eq!(packages[1], Package { name: "p".into(), version: "1".into(), depends: vec![] });
    }

    #[test]
    fn broken_stanzas_are_left_out() {
        assert!(parse_show("Package: only-a-name\n\n\n\nVersion: 3\n").is_empty());
    }

    #[test]
    fn versions_order_by_number() {
        assert!(version_key("6.12.107-1") > version_key("6.12.95-1~bpo12+1"));
        assert!(version_key("7.10.1-1") > version_key("7.3.4-1"));
    }

    #[test]
    fn the_mirror_is_the_hosts_main_archive() {
        let targets = "http://vendor.example/apt nodistro\nhttp://mirror.example/debian-security/ bookworm-security\n\
                       http://mirror.example/debian/ bookworm\n";
        assert_eq!(pick_mirror(targets).as_deref(), Some("http://mirror.example/debian"));
        assert_eq!(pick_mirror("http://vendor.example/apt nodistro\n"), None);
    }
}

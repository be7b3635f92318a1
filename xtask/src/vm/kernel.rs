//! Debian's own kernels: found by asking the metapackage, unpacked, their modules made ready for the guest.
//! Never writes a version down: what the archive has today is taken, and kept until it is asked for again.

use std::fmt;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::apt::{self, Apt};
use super::lock;
use crate::exec;

/// The metapackage of the kernels for virtual machines.
const METAPACKAGE: &str = "linux-image-cloud-amd64";

/// Where kernels of all series are available.
const SUITES: [&str; 3] = ["trixie-backports", "bookworm-backports", "bookworm"];

/// What must be loaded before the root file system can be mounted, where it is a module.
const EARLY_MODULES: [&str; 5] = ["virtio_pci", "virtio_blk", "virtio_console", "ext4", "overlay"];

/// The guest's first program.
const INIT: &str = include_str!("guest/initramfs.sh");

/// The kernels that becket must work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Series {
    /// The current one: ublk with zero copy.
    #[value(name = "7.x")]
    V7,
    /// Debian 13's: ublk by copying.
    #[value(name = "6.12")]
    V6_12,
    /// Debian 12's: no ublk.
    #[value(name = "6.1")]
    V6_1,
}

impl Series {
    fn version_prefix(self) -> &'static str {
        match self {
            Series::V7 => "7.",
            Series::V6_12 => "6.12.",
            Series::V6_1 => "6.1.",
        }
    }
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Series::V7 => "7.x",
            Series::V6_12 => "6.12",
            Series::V6_1 => "6.1",
        })
    }
}

/// A kernel that is ready to boot.
pub(crate) struct Kernel {
    dir: PathBuf,
    /// What `uname -r` says in the guest.
    pub(crate) release: String,
}

impl Kernel {
    /// The compressed kernel.
    pub(crate) fn vmlinuz(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// An ext4 image of `/lib/modules/RELEASE`.
    pub(crate) fn modules(&self) -> PathBuf {
        self.dir.join("modules.ext4")
    }

    /// Writes the initial file system: a shell, the early modules and the script that mounts the root.
    pub(crate) fn write_initramfs(&self, to: &Path) -> Result<()> {
        let tree = to.with_extension("tree");
        for name in ["bin", "modules", "proc", "sys", "dev", "disks", "new"] {
            std::fs::create_dir_all(tree.join(name))?;
        }
        let early = self.dir.join("early");
        std::fs::copy(early.join("busybox"), tree.join("bin/busybox"))?;
        std::os::unix::fs::symlink("busybox", tree.join("bin/sh"))?;
        let mut script = std::fs::OpenOptions::new();
        script.write(true).create(true).mode(0o755).open(tree.join("init"))?.write_all(INIT.as_bytes())?;
        let order = std::fs::read_to_string(early.join("order"))?;
        for name in order.lines().chain(["order"]) {
            std::fs::copy(early.join(name), tree.join("modules").join(name))?;
        }
        let pack = "find . | LC_ALL=C sort | cpio --quiet --create --format=newc --owner=0:0 >\"$0\"";
        exec::quietly(Command::new("bash").args(["-o", "pipefail", "-c", pack]).arg(to).current_dir(tree))
    }
}

fn dir_of(series: Series) -> Result<PathBuf> {
    Ok(lock::cache_dir()?.join(format!("kernel-{series}")))
}

/// Drops what is cached, so that the archive is asked again.
pub(crate) fn forget(series: Series) -> Result<()> {
    let dir = dir_of(series)?;
    if dir.exists() {
        std::fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    Ok(())
}

/// Makes the kernel ready, from the cache when it is there. The cache's lock must be held.
pub(crate) fn prepare(series: Series) -> Result<Kernel> {
    let dir = dir_of(series)?;
    if let Ok(release) = std::fs::read_to_string(dir.join("release")) {
        return Ok(Kernel { dir, release });
    }
    eprintln!("xtask: fetching Debian's kernel {series}");
    apt::check_keyring()?;
    let apt = Apt::update(&lock::cache_dir()?.join("apt"), &SUITES)?;
    let packages = choose(&apt, series)?;

    let work = tempfile::tempdir_in(lock::cache_dir()?)?;
    let unpacked = work.path().join("unpacked");
    apt.unpack(&packages, &unpacked)?;
    let kernel = assemble(&unpacked, &work.path().join("kernel"))
        .with_context(|| format!("the packages {} are not laid out as expected", packages.join(" ")))?;
    let busybox = work.path().join("busybox");
    apt.unpack(&["busybox-static".to_owned()], &busybox)?;
    let busybox = ["usr/bin/busybox", "bin/busybox"].map(|name| busybox.join(name));
    let busybox = busybox.iter().find(|path| path.is_file()).context("busybox-static holds no busybox")?;
    std::fs::copy(busybox, kernel.dir.join("early/busybox"))?;

    forget(series)?;
    std::fs::rename(&kernel.dir, &dir).with_context(|| format!("cannot keep {}", dir.display()))?;
    Ok(Kernel { dir, release: kernel.release })
}

/// The packages (`name=version`) that make up the newest kernel of a series.
fn choose(apt: &Apt, series: Series) -> Result<Vec<String>> {
    let all = apt.show(METAPACKAGE)?;
    let newest = all
        .iter()
        .filter(|package| package.version.starts_with(series.version_prefix()))
        .max_by_key(|package| apt::version_key(&package.version));
    let Some(newest) = newest else {
        let found: Vec<&str> = all.iter().map(|package| package.version.as_str()).collect();
        bail!("the archive has no {METAPACKAGE} {series} (only {})", found.join(", "));
    };
    // From 7.x on a kernel is split into binary, modules and base; the image's own dependencies name them.
    let mut wanted = Vec::new();
    let mut queue: Vec<String> = newest.depends.iter().filter(|name| is_part(name)).cloned().collect();
    while let Some(name) = queue.pop() {
        let of_series = apt.show(&name)?.into_iter().find(|package| package.version == newest.version);
        let part = of_series.with_context(|| format!("the archive has no {name} {}", newest.version))?;
        let item = format!("{name}={}", part.version);
        if !wanted.contains(&item) {
            wanted.push(item);
            queue.extend(part.depends.into_iter().filter(|name| is_part(name)));
        }
    }
    Ok(wanted)
}

/// Whether a package is a part of one kernel (`linux-modules-7.3.4+deb13-cloud-amd64`), not a tool or
/// metapackage.
fn is_part(name: &str) -> bool {
    ["linux-image-", "linux-binary-", "linux-modules-", "linux-base-"]
        .iter()
        .filter_map(|prefix| name.strip_prefix(prefix))
        .any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

fn assemble(unpacked: &Path, dir: &Path) -> Result<Kernel> {
    let roots = ["usr/lib/modules", "lib/modules"].map(|name| unpacked.join(name));
    let root = roots.iter().find(|path| path.is_dir()).context("there are no modules")?;
    let release = std::fs::read_dir(root)?.next().context("there are no modules")??.file_name();
    let release = release.into_string().ok().context("the release's name is not text")?;
    let modules = root.join(&release);

    std::fs::create_dir_all(dir.join("early"))?;
    let kernels = [modules.join("vmlinuz"), unpacked.join("boot").join(format!("vmlinuz-{release}"))];
    let vmlinuz = kernels.iter().find(|path| path.is_file()).context("there is no vmlinuz")?;
    std::fs::rename(vmlinuz, dir.join("vmlinuz"))?;

    // Decompressed once here instead of at every boot by an emulated CPU.
    let compressed =
        Command::new("find").arg(&modules).args(["-name", "*.ko.xz", "-print0"]).output()?.stdout;
    decompress(&compressed)?;
    let base = root.parent().and_then(Path::parent).context("the modules have no parent")?;
    let base = if base.ends_with("usr") { base } else { unpacked };
    exec::quietly(Command::new("depmod").arg("-b").arg(base).arg(&release))?;

    let dependencies = std::fs::read_to_string(modules.join("modules.dep"))?;
    let mut order = String::new();
    for path in load_order(&dependencies, &EARLY_MODULES) {
        let name =
            Path::new(&path).file_name().and_then(|name| name.to_str()).context("a module without name")?;
        std::fs::copy(modules.join(&path), dir.join("early").join(name))?;
        order.push_str(&format!("{name}\n"));
    }
    std::fs::write(dir.join("early/order"), order)?;
    lock::ext4_of(&modules, &dir.join("modules.ext4"))?;
    std::fs::write(dir.join("release"), &release)?;
    Ok(Kernel { dir: dir.to_owned(), release })
}

/// Runs xz on a list of names that end in NUL bytes, one process per CPU.
fn decompress(names: &[u8]) -> Result<()> {
    let list = tempfile::NamedTempFile::new()?;
    std::fs::write(list.path(), names)?;
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    exec::quietly(
        Command::new("xargs")
            .args(["-0", "-r", "-n", "50", "-P", &cpus.to_string(), "-a"])
            .arg(list.path())
            .args(["xz", "--decompress", "--"]),
    )
}

/// The paths (of modules.dep) of these modules and all that they need, in the order of loading.
/// Names that modules.dep does not have are built in.
fn load_order(dependencies: &str, wanted: &[&str]) -> Vec<String> {
    let mut order: Vec<String> = Vec::new();
    for name in wanted {
        let line = dependencies.lines().filter_map(|line| line.split_once(':')).find(|(path, _)| {
            let file = path.rsplit('/').next().unwrap_or_default();
            file.strip_suffix(".ko").is_some_and(|module| module.replace('-', "_") == *name)
        });
        let Some((path, needs)) = line else { continue };
        for one in needs.split_whitespace().rev().chain([path]) {
            if !order.iter().any(|known| known == one) {
                order.push(one.to_owned());
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_loaded_after_what_they_need() {
        let dependencies = "kernel/fs/ext4/ext4.ko: kernel/lib/crc16.ko kernel/fs/mbcache.ko kernel/fs/jbd2/jbd2.ko\n\
                            kernel/fs/jbd2/jbd2.ko:\nkernel/drivers/virtio-blk.ko:\n";
        let order = load_order(dependencies, &["virtio_blk", "built_in", "ext4"]);
        assert_eq!(
            order,
            [
                "kernel/drivers/virtio-blk.ko",
                "kernel/fs/jbd2/jbd2.ko",
                "kernel/fs/mbcache.ko",
                "kernel/lib/crc16.ko",
                "kernel/fs/ext4/ext4.ko"
            ]
        );
    }

    #[test]
    fn parts_of_a_kernel_are_no_tools() {
        assert!(is_part("linux-modules-7.3.4+deb13-cloud-amd64"));
        assert!(is_part("linux-image-6.1.0-50-cloud-amd64"));
        assert!(!is_part("linux-base"));
        assert!(!is_part("linux-modules-cloud-amd64"));
        assert!(!is_part("initramfs-tools"));
    }

    #[test]
    fn series_do_not_match_each_other() {
        assert!(!"6.12.107-1".starts_with(Series::V6_1.version_prefix()));
    }
}

//! The guest's userland: a small Debian 12 made by mmdebstrap once, kept as a read-only image.
//! Never holds anything of becket: binaries and scripts of a run come on a disk of their own.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{apt, lock};
use crate::exec;

/// The release of the userland; binaries built on it, or on something older, run in the guest.
const SUITE: &str = "bookworm";

/// What the tests use, beside Debian's essential packages.
const PACKAGES: &str = "util-linux util-linux-extra mount fdisk gdisk qemu-utils qemu-system-common e2fsprogs xfsprogs \
    btrfs-progs dosfstools squashfs-tools cryptsetup-bin dmsetup fio nbd-client git iproute2 kmod procps sqlite3 \
    strace systemd udev libblkid1 libcap2-bin udisks2";

fn image() -> Result<PathBuf> {
    Ok(lock::cache_dir()?.join("rootfs.ext4"))
}

/// Drops the cached image.
pub(crate) fn forget() -> Result<()> {
    let image = image()?;
    if image.exists() {
        std::fs::remove_file(&image).with_context(|| format!("cannot remove {}", image.display()))?;
    }
    Ok(())
}

/// The image, made if it is missing or if this file asks for other packages. The caller must hold the cache's
/// lock.
pub(crate) fn prepare() -> Result<PathBuf> {
    let image = image()?;
    let recipe = format!("{SUITE} {PACKAGES}\n");
    let made_by = image.with_extension("recipe");
    if image.exists() && std::fs::read_to_string(&made_by).is_ok_and(|text| text == recipe) {
        return Ok(image);
    }
    if !rustix::process::geteuid().is_root() {
        bail!(
            "the guest's root file system is made once, by root: run `sudo scripts/setup.sh` and this as root"
        );
    }
    eprintln!("xtask: making the guest's root file system");
    apt::check_keyring()?;
    let work = tempfile::tempdir_in(lock::cache_dir()?)?;
    let root = work.path().join("root");
    let options = work.path().join("apt.conf");
    std::fs::write(&options, transport_options()?)?;
    // Its mounts go with it, even if it is killed: so a later removal of the folder meets no /proc and no
    // /sys.
    exec::quietly(
        Command::new("unshare")
            .args(["--mount", "mmdebstrap"])
            .args(["--mode=root", "--variant=essential", "--format=directory"])
            .arg(format!("--include={}", PACKAGES.replace(' ', ",")))
            .arg(format!("--aptopt={}", options.display()))
            .args(["--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*"])
            .args(["--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-exclude=/usr/share/info/*"])
            .arg(SUITE)
            .arg(&root)
            .arg(apt::mirror()?),
    )?;
    for dir in ["scratch", "becket-vm"] {
        std::fs::create_dir_all(root.join(dir))?;
    }
    let _ = std::fs::remove_file(&made_by);
    lock::ext4_of(&root, &image)?;
    std::fs::write(&made_by, recipe)?;
    Ok(image)
}

/// How this machine's apt reaches its mirror (a proxy, clocks it must not trust), for mmdebstrap's own apt.
fn transport_options() -> Result<String> {
    let all = exec::output(Command::new("apt-config").args(["dump", "Acquire"]))?;
    let kept = all.lines().filter(|line| {
        ["Acquire::http", "Acquire::https", "Acquire::Check-", "Acquire::Retries"]
            .iter()
            .any(|prefix| line.starts_with(prefix))
    });
    Ok(kept.map(|line| format!("{line}\n")).collect())
}

//! One builder of the machine's cached parts at a time, and a small file-system image maker.
//! Never leaves a half-made part under its final name.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::exec;

/// Where the machine's parts are kept: in the checkout, whatever `CARGO_TARGET_DIR` says, so that they are
/// made once.
pub(crate) fn cache_dir() -> Result<PathBuf> {
    let dir = exec::workspace().join("target/vm");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// Held while parts are made; two guests that start together then make each part once.
pub(crate) fn lock_cache() -> Result<File> {
    let path = cache_dir()?.join("lock");
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
        .with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}

/// Packs a directory's contents into a new ext4 image that is just large enough.
pub(crate) fn ext4_of(dir: &Path, image: &Path) -> Result<()> {
    let (entries, bytes) = measure(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let unfinished = image.with_extension("unfinished");
    let _ = std::fs::remove_file(&unfinished);
    exec::quietly(
        Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-m", "0", "-b", "4096", "-O", "^has_journal"])
            .args(["-E", "root_owner=0:0", "-N", &(entries + 64).to_string(), "-d"])
            .arg(dir)
            .arg(&unfinished)
            .arg(format!("{}K", (bytes + bytes / 10) / 1024 + 16 * 1024)),
    )?;
    std::fs::rename(&unfinished, image)?;
    Ok(())
}

/// The number of entries below a directory, and the bytes that they take in blocks of 4 KiB.
fn measure(dir: &Path) -> std::io::Result<(u64, u64)> {
    let (mut entries, mut bytes) = (1, 4096);
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.metadata()?;
        if kind.is_dir() {
            let (inner_entries, inner_bytes) = measure(&entry.path())?;
            entries += inner_entries;
            bytes += inner_bytes;
        } else {
            entries += 1;
            bytes += kind.len().next_multiple_of(4096) + 512;
        }
    }
    Ok((entries, bytes))
}

//! What the kernel says of a disk in sysfs.
//! Must never cache: every question reads the file again.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A disk's folder in sysfs.
#[derive(Debug, Clone)]
pub(crate) struct Sysfs(PathBuf);

impl Sysfs {
    /// The folder of a device node, found by its number: names differ if nothing makes links.
    pub(crate) fn of(node: &Path) -> Result<Self> {
        let number = fs::metadata(node).with_context(|| format!("{}", node.display()))?.rdev();
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let link = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        Ok(Self(link.canonicalize().with_context(|| format!("{} ({})", link.display(), node.display()))?))
    }

    /// Whether the disk exists.
    pub(crate) fn exists(&self) -> bool {
        self.0.exists()
    }

    /// An attribute's text.
    pub(crate) fn text(&self, attribute: &str) -> Result<String> {
        let path = self.0.join(attribute);
        Ok(fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?.trim().to_owned())
    }

    /// An attribute that is a number.
    pub(crate) fn number(&self, attribute: &str) -> Result<u64> {
        let text = self.text(attribute)?;
        text.parse().with_context(|| format!("{}/{attribute} is {text:?}", self.0.display()))
    }

    /// The size in bytes; sysfs counts in units of 512, whatever the block size.
    pub(crate) fn size(&self) -> Result<u64> {
        Ok(self.number("size")? * 512)
    }

    /// The partitions: number, first byte, bytes.
    pub(crate) fn partitions(&self) -> Result<Vec<(u32, u64, u64)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.0).with_context(|| format!("{}", self.0.display()))? {
            let part = Self(entry?.path());
            if let Ok(number) = part.number("partition") {
                let number = u32::try_from(number).context("partition number")?;
                found.push((number, part.number("start")? * 512, part.size()?));
            }
        }
        found.sort_unstable();
        Ok(found)
    }
}

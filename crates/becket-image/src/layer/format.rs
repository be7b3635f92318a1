//! The names of formats, and what an image of one says of itself.
//! It never looks at an image.

use std::fmt;
use std::str::FromStr;

/// How to interpret an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// By its magic numbers.
    #[default]
    Auto,
    /// As bytes without meaning: nothing in it is looked at, a path cannot go through it.
    Raw,
    /// A GUID or MBR partition table.
    Disk,
    /// ISO 9660, with Rock Ridge or Joliet.
    Iso9660,
    /// ext2, ext3 or ext4.
    Ext,
    /// XFS, version 4 or 5.
    Xfs,
    /// btrfs, where one device has all of it.
    Btrfs,
    /// FAT12, FAT16 or FAT32.
    Fat,
    /// NTFS.
    Ntfs,
    /// exFAT.
    ExFat,
    /// SquashFS 4.
    Squashfs,
    /// EROFS.
    Erofs,
    /// An LVM2 physical volume: a directory of logical volumes.
    Lvm2,
    /// Another image, compressed by xz in blocks.
    Xz,
    /// Another image, compressed by zstd in frames.
    Zstd,
    /// Another image, compressed by bgzip.
    Gzip,
    /// A disk in a qcow2, whatever that holds.
    Qcow2,
    /// A disk in a VMDK, or in the files that it names.
    Vmdk,
    /// A disk in a VDI.
    Vdi,
    /// A disk in a VHD.
    Vhd,
    /// A disk in a VHDX.
    Vhdx,
}

impl Format {
    /// The names of each format, the usual one first.
    pub fn names() -> impl Iterator<Item = &'static [&'static str]> {
        NAMES.iter().map(|(_, names)| *names)
    }

    /// The name of the format, unless it is detected.
    pub fn chosen(self) -> Option<String> {
        (self != Format::Auto).then(|| self.to_string())
    }

    /// Its usual name.
    pub(crate) fn name(self) -> &'static str {
        let names = NAMES.iter().find(|(format, _)| *format == self).and_then(|(_, names)| names.first());
        names.copied().unwrap_or("auto")
    }

    /// Whether it holds a disk, whatever that holds.
    pub(crate) fn is_disk(self) -> bool {
        matches!(self, Format::Qcow2 | Format::Vmdk | Format::Vdi | Format::Vhd | Format::Vhdx)
    }

    /// What is said of the disk when this was said of the file: what a container's disk holds is found out.
    pub(crate) fn of_contents(self) -> Format {
        if self.is_disk() { Format::Auto } else { self }
    }
}

/// Each format with its names, the first of which is shown.
const NAMES: [(Format, &[&str]); 21] = [
    (Format::Auto, &["auto"]),
    (Format::Raw, &["raw"]),
    (Format::Disk, &["disk", "gpt", "mbr"]),
    (Format::Iso9660, &["iso9660", "iso"]),
    (Format::Ext, &["ext4", "ext3", "ext2"]),
    (Format::Xfs, &["xfs"]),
    (Format::Btrfs, &["btrfs"]),
    (Format::Fat, &["fat", "vfat"]),
    (Format::Ntfs, &["ntfs"]),
    (Format::ExFat, &["exfat"]),
    (Format::Squashfs, &["squashfs"]),
    (Format::Erofs, &["erofs"]),
    (Format::Lvm2, &["lvm2"]),
    (Format::Xz, &["xz"]),
    (Format::Zstd, &["zstd"]),
    (Format::Gzip, &["gzip"]),
    (Format::Qcow2, &["qcow2"]),
    (Format::Vmdk, &["vmdk"]),
    (Format::Vdi, &["vdi"]),
    (Format::Vhd, &["vhd", "vpc"]),
    (Format::Vhdx, &["vhdx"]),
];

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Format, String> {
        let known = NAMES.iter().find(|(_, names)| names.contains(&text)).map(|(format, _)| *format);
        known.ok_or_else(|| {
            let all: Vec<&str> = NAMES.iter().filter_map(|(_, names)| names.first().copied()).collect();
            format!("{text:?} is not one of {}", all.join(", "))
        })
    }
}

/// What a layer says of itself, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct About {
    /// Name of the format: `ext4`, `squashfs`.
    pub format: &'static str,
    /// The label, where it has one.
    pub label: Option<String>,
    /// The UUID or serial number, as blkid(8) writes it.
    pub uuid: Option<String>,
    /// How its contents are compressed, where they are.
    pub compression: Option<&'static str>,
    /// What else is worth a word: `blocks of 4096`, `was not unmounted`.
    pub notes: Vec<String>,
}

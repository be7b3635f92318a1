//! What an image holds: recognised by magic numbers, or as the user says.
//! It never takes an image for something on the strength of its name.

use std::sync::Arc;

use super::counted::counted;
use super::known;
use super::packed::{self, Packed};
use super::{
    About, FileSystem, Format, LayerError, btrfs, erofs, ext, fat, iso9660, lvm2, ntfs, squashfs, xfs,
};
use crate::image::{Image, Role};
use crate::partition::{self, Table};

/// What an image holds. A bootable ISO holds both: files and a partition table.
#[derive(Debug, Default)]
pub struct Contents {
    /// The file system, when there is one.
    pub fs: Option<Arc<dyn FileSystem>>,
    /// The partition table, when there is one with partitions.
    pub table: Option<Table>,
    /// The image that is packed in it, when there is one; then there is nothing else.
    pub packed: Option<Packed>,
    /// What is recognised and not read, when there is nothing else; see [`recognise`].
    pub known: Option<About>,
    /// What is wrong with a partition table without partitions, where there is nothing else: as the
    /// attachment warns.
    pub warnings: Vec<String>,
}

impl Contents {
    /// Whether a path can go on in it.
    pub fn is_container(&self) -> bool {
        self.fs.is_some() || self.table.is_some() || self.packed.is_some()
    }

    /// What it says of itself: of the file system first.
    pub fn about(&self) -> About {
        if let Some(fs) = &self.fs {
            return fs.about().clone();
        }
        if let Some(packed) = &self.packed {
            return packed.about().clone();
        }
        if let Some(about) = &self.known {
            return about.clone();
        }
        let format = match &self.table {
            Some(table) if table.sector.is_some() => "gpt",
            Some(_) => "mbr",
            None => "raw",
        };
        About { format, ..About::default() }
    }
}

/// Finds out what `image` holds, and names what is only recognised ([`Contents::known`]), which takes a read
/// for each mark.
///
/// # Errors
/// As [`detect`].
pub fn recognise(image: &Image, format: Format) -> Result<Contents, LayerError> {
    let contents = detect(image, format)?;
    if format != Format::Auto || contents.is_container() {
        return Ok(contents);
    }
    let known = known::look(image)?.map(|known| known.about(image)).transpose()?;
    Ok(Contents { known, ..contents })
}

/// Finds out what `image` holds that can be read.
///
/// # Errors
/// It has the magic number of a layer and is damaged, or is not what `format` says.
pub fn detect(image: &Image, format: Format) -> Result<Contents, LayerError> {
    if format == Format::Raw || image.role() == Role::Extended {
        return Ok(Contents::default());
    }
    let format = format.of_contents();
    let wanted = |kind| format == Format::Auto || format == kind;
    let mut contents = Contents::default();
    // The remains of an older file system must not hide the current contents.
    let mut damage = None;
    match packed::open(image, format) {
        Ok(Some(packed)) => return Ok(Contents { packed: Some(packed), ..contents }),
        Ok(None) => {}
        Err(error) => damage = Some(error),
    }
    for (kind, open) in OPENERS {
        if contents.fs.is_none() && wanted(kind) {
            match open(image) {
                Ok(fs) => contents.fs = fs.map(|fs| counted(fs, image.budget())),
                Err(error) => damage = damage.or(Some(error)),
            }
        }
    }
    if wanted(Format::Disk) {
        let table = partition::read(image, image.len(), image.block_size())?;
        // A boot sector of FAT also ends like an MBR; what would be its partitions is not.
        if !table.partitions.is_empty() {
            contents.table = Some(table);
        } else if contents.fs.is_none() {
            contents.warnings = table.warnings;
        }
    }
    // What was cut short by the budget would be taken for something else.
    image.budget().check()?;
    match damage {
        Some(damage) if !contents.is_container() => Err(damage),
        _ if format != Format::Auto && !contents.is_container() => Err(LayerError::IsNot(format.to_string())),
        _ => Ok(contents),
    }
}

type Opener = fn(&Image) -> Result<Option<Arc<dyn FileSystem>>, LayerError>;

/// The file systems, those with the most telling magic first. FAT has none of its own and comes last.
const OPENERS: [(Format, Opener); 10] = [
    (Format::Lvm2, lvm2::open),
    (Format::Squashfs, squashfs::open),
    (Format::Erofs, erofs::open),
    (Format::Ext, ext::open),
    (Format::Xfs, xfs::open),
    (Format::Btrfs, btrfs::open),
    (Format::Iso9660, iso9660::open),
    (Format::Ntfs, ntfs::open),
    (Format::ExFat, fat::exfat::open),
    (Format::Fat, fat::open),
];

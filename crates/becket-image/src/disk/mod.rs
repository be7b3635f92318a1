//! Containers that hold a disk: recognised by their first and last bytes, and unpacked into a map.
//! It never follows a reference to another file, except where [`vmdk::unpack`] applies the rule for that.
//!
//! A container is a file here and a line in [`KINDS`]. What it makes of an image is a map like any other, so
//! nothing else knows the format. All but qcow2 are only read; `--cow` takes writes.

mod blocks;
pub(crate) mod ends;
mod vdi;
mod vhd;
mod vhdx;
pub(crate) mod vmdk;

use crate::image::Image;
use crate::layer::{Format, LayerError};
use crate::qcow2;
use ends::Ends;

/// A container of a disk.
struct DiskFormat {
    format: Format,
    /// Its name, for people.
    name: &'static str,
    /// Whether an image begins or ends like one.
    magic: fn(&Ends) -> bool,
    /// The disk in an image; `None` if it is none after all.
    unpack: fn(&Image) -> Result<Option<Image>, LayerError>,
}

/// All of them, in the order in which they are tried: a magic number at the end of an image comes last.
#[rustfmt::skip]
static KINDS: [DiskFormat; 5] = [
    DiskFormat { format: Format::Qcow2, name: "qcow2", magic: qcow2, unpack: qcow2::unpack_alone },
    DiskFormat { format: Format::Vmdk, name: "VMDK", magic: |e| e.begins(b"KDMV"), unpack: vmdk::sparse::unpack },
    DiskFormat { format: Format::Vdi, name: "VDI", magic: |e| e.le32(0x40) == 0xbeda_107f, unpack: vdi::unpack },
    DiskFormat { format: Format::Vhdx, name: "VHDX", magic: |e| e.begins(b"vhdxfile"), unpack: vhdx::unpack },
    DiskFormat { format: Format::Vhd, name: "VHD", magic: vhd::is, unpack: vhd::unpack },
];

/// Version 1 is another format.
fn qcow2(ends: &Ends) -> bool {
    ends.begins(b"QFI\xfb") && !ends.begins(b"QFI\xfb\0\0\0\x01")
}

impl DiskFormat {
    fn of(ends: &Ends, format: Format) -> Option<&'static DiskFormat> {
        let wanted = |kind: &&DiskFormat| format == Format::Auto || format == kind.format;
        KINDS.iter().filter(wanted).find(|kind| (kind.magic)(ends))
    }

    /// Why it is not written, for people; `None` if it is.
    fn only_read(&self) -> Option<String> {
        (self.format != Format::Qcow2).then(|| format!("becket only reads {} images", self.name))
    }
}

/// The disk in `image`, if that is a container that needs no other file.
///
/// # Errors
/// It is damaged, uses what is not known here, or lies over another file.
pub fn unpack_disk(image: &Image) -> Result<Option<Image>, LayerError> {
    Ok(unpack(image, Format::Auto)?.map(|(disk, _)| disk))
}

/// The same for one format, or for any; and why the disk is only read.
pub(crate) fn unpack(image: &Image, format: Format) -> Result<Option<(Image, Option<String>)>, LayerError> {
    let Some(ends) = Ends::of(image)? else { return Ok(None) };
    let Some(kind) = DiskFormat::of(&ends, format) else { return Ok(None) };
    Ok((kind.unpack)(image)?.map(|disk| (disk, kind.only_read())))
}

/// The name of the container that `image` begins or ends like.
pub(crate) fn name_of(image: &Image) -> Option<&'static str> {
    let ends = Ends::of(image).ok()??;
    DiskFormat::of(&ends, Format::Auto).map(|kind| kind.format.name())
}

/// Why the disk in an image with these ends is only read, for people; `None` if it may be written.
pub(crate) fn only_read(ends: &Ends, format: Format) -> Option<String> {
    DiskFormat::of(ends, format)?.only_read()
}

/// What QEMU calls a format that an image is stored as.
pub(crate) fn name_to_qemu(format: &'static str) -> &'static str {
    if format == "vhd" { "vpc" } else { format }
}

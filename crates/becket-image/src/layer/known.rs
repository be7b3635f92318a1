//! File systems, encrypted disks and members of arrays that becket recognises and does not read. They are raw
//! disks all the same: each is attached as it is, for the program that opens it.
//!
//! A new one is one entry of [`KNOWN`]. Its marks are those by which blkid(8) recognises it.

use super::About;
use crate::budget::Spent;
use crate::bytes::{ReadAt as _, padded_text, part, uuid};
use crate::image::Image;

/// What becket recognises and does not read.
#[derive(Debug)]
pub(crate) struct Known {
    /// Its name, as blkid(8) writes it.
    name: &'static str,
    /// What it is, with an article.
    pub(crate) what: &'static str,
    /// What opens it once it is attached as `DEVICE`.
    pub(crate) command: &'static str,
    /// It has one of these, at a place in bytes; from the end of the image where that is negative.
    marks: &'static [(i64, &'static [u8])],
}

const fn known(
    name: &'static str,
    what: &'static str,
    command: &'static str,
    marks: &'static [(i64, &'static [u8])],
) -> Known {
    Known { name, what, command, marks }
}

const LUKS: &str = "crypto_LUKS";
const SWAP: &str = "swap";
/// Most marks are in this first part of an image, which is read at once.
const HEAD: u64 = 66 << 10;

/// All of them, in the order in which they are tried.
#[rustfmt::skip]
static KNOWN: [Known; 24] = [
    known(LUKS, "an encrypted disk (LUKS)", "cryptsetup open DEVICE NAME, or attach it with --key-file FILE",
        &[(0, b"LUKS\xba\xbe\0\x01"), (0, b"LUKS\xba\xbe\0\x02")]),
    known("BitLocker", "an encrypted disk (BitLocker)", "cryptsetup open --type bitlk DEVICE NAME",
        &[(3, b"-FVE-FS-")]),
    known("ReFS", "a file system of Windows (ReFS)", "give DEVICE to a virtual machine with Windows", &[(3, b"ReFS\0\0\0\0")]),
    known("f2fs", "an F2FS file system", "mount -t f2fs DEVICE DIR", &[(1024, b"\x10\x20\xf5\xf2\x01\0")]),
    known(SWAP, "swap space", "swapon DEVICE",
        // At the end of a page, which some machines have longer ones of.
        &[(4086, b"SWAPSPACE2"), (8182, b"SWAPSPACE2"), (16374, b"SWAPSPACE2"), (65526, b"SWAPSPACE2")]),
    // The first pair of the label's list: its name has seven letters.
    known("zfs_member", "a member of a ZFS pool", "zpool import -d DEVICE", &[(16404, b"\0\0\0\x07version")]),
    known("bcache", "a member of a bcache", "echo DEVICE >/sys/fs/bcache/register",
        &[(4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81")]),
    known("bcachefs", "a bcachefs file system", "mount -t bcachefs DEVICE DIR",
        &[(4120, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef")]),
    known("linux_raid_member", "a member of a RAID of Linux (MD)", "mdadm --assemble --run MD DEVICE",
        &[(4096, b"\xfc\x4e\x2b\xa9\x01\0\0\0"), (0, b"\xfc\x4e\x2b\xa9\x01\0\0\0"),
          (-8192, b"\xfc\x4e\x2b\xa9\x01\0\0\0"), (-65536, b"\xfc\x4e\x2b\xa9\0\0\0\0\x5a\0\0\0")]),
    known("apfs", "a file system of Apple (APFS)", "fsapfsmount DEVICE DIR", &[(32, b"NXSB\0\x10\0\0")]),
    known("hfsplus", "a file system of Apple (HFS+)", "mount -t hfsplus DEVICE DIR",
        &[(1024, b"H+\0\x04"), (1024, b"HX\0\x05")]),
    known("udf", "a UDF file system", "mount -t udf DEVICE DIR",
        &[(32769, b"BEA01\x01"), (34817, b"NSR02\x01"), (34817, b"NSR03\x01")]),
    known("reiserfs", "a ReiserFS file system", "mount -t reiserfs DEVICE DIR",
        &[(65588, b"ReIsErFs\0"), (65588, b"ReIsEr2Fs\0"), (65588, b"ReIsEr3Fs\0")]),
    known("jfs", "a JFS file system", "mount -t jfs DEVICE DIR",
        &[(32768, b"JFS1\x01\0\0\0"), (32768, b"JFS1\x02\0\0\0")]),
    known("gfs2", "a GFS2 file system", "mount -t gfs2 DEVICE DIR", &[(65536, b"\x01\x16\x19\x70\0\0\0\x01")]),
    known("ocfs2", "an OCFS2 file system", "mount -t ocfs2 DEVICE DIR",
        &[(1024, b"OCFSV2"), (2048, b"OCFSV2"), (4096, b"OCFSV2"), (8192, b"OCFSV2")]),
    known("VMFS_volume_member", "a member of a VMFS volume", "vmfs6-fuse DEVICE DIR",
        &[(1 << 20, b"\x0d\xd0\x01\xc0")]),
    known("cramfs", "a cramfs file system", "mount -t cramfs DEVICE DIR", &[(16, b"Compressed ROMFS")]),
    known("romfs", "a romfs file system", "mount -t romfs DEVICE DIR", &[(0, b"-rom1fs-")]),
    known("DM_verity_hash", "the hashes of a verified disk (dm-verity)",
        "veritysetup open DATA NAME DEVICE ROOT-HASH", &[(0, b"verity\0\0\x01\0\0\0")]),
    known("DM_integrity", "a disk with checksums (dm-integrity)", "integritysetup open DEVICE NAME",
        &[(0, b"integrt\0")]),
    known("vdo", "a compressed disk (VDO)", "vdoprepareforlvm DEVICE; lvchange -ay", &[(0, b"dmvdo001")]),
    known("stratis", "a member of a Stratis pool", "stratis pool start POOL",
        &[(516, b"!Stra0tis\x86\xff\x02^\x41rh")]),
    known("ceph_bluestore", "the disk of a Ceph OSD (BlueStore)", "ceph-bluestore-tool show-label --dev DEVICE",
        &[(0, b"bluestore block device")]),
];

/// What an image holds of these.
///
/// # Errors
/// The image's budget is spent. What cannot be read is not recognised.
pub(crate) fn look(image: &Image) -> Result<Option<&'static Known>, Spent> {
    let head = read(image, Some(0), HEAD.min(image.len()) as usize)?;
    for known in &KNOWN {
        for (place, mark) in known.marks {
            let place = place_of(*place, image.len());
            let at = place.and_then(|place| usize::try_from(place).ok()).unwrap_or(usize::MAX);
            let has = match part(&head, at, mark.len()) {
                [] => read(image, place, mark.len())? == *mark,
                found => found == *mark,
            };
            if has {
                return Ok(Some(known));
            }
        }
    }
    Ok(None)
}

/// Where a mark is in an image. What is counted from the end is aligned as MD does it: a superblock of
/// version 0.90 to 64 KiB, others to 4 KiB.
fn place_of(place: i64, len: u64) -> Option<u64> {
    let unit = if place <= -(64 << 10) { 64 << 10 } else { 4 << 10 };
    match u64::try_from(place) {
        Ok(place) => Some(place),
        Err(_) => len.checked_add_signed(place).map(|place| place / unit * unit),
    }
}

/// Bytes of an image; none if they do not lie in it, or cannot be read.
fn read(image: &Image, place: Option<u64>, len: usize) -> Result<Vec<u8>, Spent> {
    let end = |place: &u64| place.checked_add(len as u64).is_some_and(|end| end <= image.len());
    let Some(place) = place.filter(end) else { return Ok(Vec::new()) };
    let mut bytes = vec![0; len];
    match image.read_at(&mut bytes, place) {
        Ok(()) => Ok(bytes),
        Err(error) => Spent::of(&error).map_or(Ok(Vec::new()), Err),
    }
}

impl Known {
    /// What it says of itself.
    ///
    /// # Errors
    /// The image's budget is spent.
    pub(super) fn about(&self, image: &Image) -> Result<About, Spent> {
        let mut about = About { format: self.name, ..About::default() };
        let text = |place, len| Ok::<_, Spent>(padded_text(&read(image, Some(place), len)?));
        match self.name {
            // LUKS2 has a label where LUKS1 has the name of its cipher.
            LUKS => {
                about.uuid = text(168, 40)?;
                match read(image, Some(7), 1)?.first() {
                    Some(2) => (about.label, about.notes) = (text(24, 48)?, vec!["LUKS2".to_owned()]),
                    _ => about.notes.push("LUKS1".to_owned()),
                }
            }
            SWAP => {
                about.uuid = uuid(&read(image, Some(1036), 16)?);
                about.label = text(1052, 16)?;
            }
            _ => {}
        }
        about.notes.push(format!("attach it, then: {}", self.command));
        Ok(about)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn image(bytes: Vec<u8>) -> Image {
        let len = bytes.len() as u64;
        Image::raw(Arc::new(bytes), len, 512)
    }

    #[test]
    fn each_mark_is_enough_and_no_other_is_needed() {
        const LEN: usize = (2 << 20) + 5000;
        assert!(KNOWN.iter().flat_map(|known| known.marks).filter(|(at, _)| *at >= HEAD as i64).count() < 2);
        for known in &KNOWN {
            for (place, mark) in known.marks {
                let mut bytes = vec![0; LEN];
                let at = place_of(*place, LEN as u64).unwrap() as usize;
                bytes[at..at + mark.len()].copy_from_slice(mark);
                let image = image(bytes);
                let found = look(&image).unwrap().unwrap();
                assert_eq!(found.name, known.name, "{place}");
                let about = found.about(&image).unwrap();
                assert_eq!(about.format, known.name);
                assert!(about.notes.last().unwrap().ends_with(known.command));
                assert!(known.what.starts_with(['a', 't', 's']) && mark.len() >= 4, "{}", known.name);
            }
        }
    }

    #[test]
    fn most_images_have_none() {
        for len in [0, 1, 511, 4096, 1 << 20] {
            assert!(look(&image(vec![0; len])).unwrap().is_none(), "{len}");
            assert!(look(&image(vec![0xa5; len])).unwrap().is_none(), "{len}");
        }
    }

    #[test]
    fn superblocks_at_the_end_are_where_md_has_them() {
        assert_eq!(place_of(-8192, 1_000_000), Some(991_232));
        assert_eq!(place_of(-65536, 1_000_000), Some(917_504));
        assert_eq!(place_of(-65536, 1000), None);
    }
}

//! ISO 9660 with Rock Ridge or Joliet: volume descriptors, directories, files of several extents.
//! It never reads a path table, and takes nothing but a directory's own records for what is in it.
//!
//! A file is known by where its first directory record is, in bytes: records of the same file follow each
//! other.
//!
//! Followed: ECMA-119 (4th edition), the System Use Sharing Protocol 1.12 and the Rock Ridge Interchange
//! Protocol 1.12.

mod susp;

use std::ops::ControlFlow;
use std::sync::Arc;

use super::{
    About, Attributes, Entry, FileSystem, LayerError, NodeKind, Stat, corrupt, directory_len, unsupported,
};
use crate::bytes::{be16_at, padded_text, part, u8_at, u16_at, u32_at, utf16};
use crate::image::{Image, Layout};
use susp::SystemUse;

const SECTOR: u64 = 2048;
const SECTOR_LEN: usize = 2048;
const FIRST_DESCRIPTOR: u64 = 16;
/// Volume descriptors that are looked at.
const DESCRIPTORS_MAX: u64 = 64;
/// Length of a directory record without its name.
const RECORD_LEN: usize = 33;
/// Where the root directory's record is in a volume descriptor.
const ROOT_RECORD: usize = 156;

const DIRECTORY: u8 = 0x02;
const ASSOCIATED: u8 = 0x04;
const GOES_ON: u8 = 0x80;

/// How names are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    /// As ISO 9660 has them: `NAME.EXT;1`.
    Plain,
    /// In UTF-16.
    Joliet,
    /// In the system use fields, of which so many bytes are another's.
    RockRidge(usize),
}

/// An open ISO 9660 volume.
#[derive(Debug)]
struct Iso {
    image: Image,
    about: About,
    names: Names,
    /// Where the root directory's record is.
    root: u64,
    /// Bytes of a logical block.
    block: u64,
}

/// One directory record.
#[derive(Debug)]
struct Record {
    /// Where it is, in bytes.
    at: u64,
    bytes: Vec<u8>,
}

/// Opens the volume in `image`, when there is one.
pub(super) fn open(image: &Image) -> Result<Option<Arc<dyn FileSystem>>, LayerError> {
    let (mut primary, mut joliet) = (None, None);
    for number in FIRST_DESCRIPTOR..FIRST_DESCRIPTOR + DESCRIPTORS_MAX {
        let at = number * SECTOR;
        let bytes = image.read_some(at, SECTOR_LEN)?;
        if bytes.len() < SECTOR_LEN || part(&bytes, 1, 5) != b"CD001" {
            break;
        }
        match u8_at(&bytes, 0) {
            1 if primary.is_none() => primary = Some((at, bytes)),
            2 if joliet.is_none() && [b"%/@", b"%/C", b"%/E"].contains(&field3(&bytes)) => {
                joliet = Some((at, bytes));
            }
            255 => break,
            _ => {}
        }
    }
    let Some((at, bytes)) = primary else { return Ok(None) };
    Ok(Some(Arc::new(Iso::parse(image, at, &bytes, joliet.as_ref())?)))
}

/// The escape sequence that says which characters a descriptor's names are of.
fn field3(descriptor: &[u8]) -> &[u8; 3] {
    descriptor.get(88..).and_then(|rest| rest.first_chunk()).unwrap_or(&[0; 3])
}

impl Iso {
    fn parse(
        image: &Image,
        at: u64,
        bytes: &[u8],
        joliet: Option<&(u64, Vec<u8>)>,
    ) -> Result<Iso, LayerError> {
        let block = u64::from(u16_at(bytes, 128));
        if !block.is_power_of_two() || !(512..=SECTOR).contains(&block) {
            return corrupt(format!("logical blocks of {block} bytes in an ISO 9660 volume"));
        }
        let mut iso = Iso {
            image: image.clone(),
            about: About::default(),
            names: Names::Plain,
            root: at + ROOT_RECORD as u64,
            block,
        };
        let root = iso.record(iso.root)?;
        let own = iso.image.read_vec(iso.first_byte(&root)?, SECTOR_LEN)?;
        match (susp::rock_ridge(&own), joliet) {
            (Some(skip), _) => iso.names = Names::RockRidge(skip),
            (None, Some((at, _))) => {
                iso.names = Names::Joliet;
                iso.root = at + ROOT_RECORD as u64;
            }
            (None, None) => {}
        }
        let names = match iso.names {
            Names::Plain => "plain names",
            Names::Joliet => "Joliet names",
            Names::RockRidge(_) => "Rock Ridge",
        };
        iso.about = About {
            format: "iso9660",
            label: match joliet {
                Some((_, joliet)) => joliet_label(part(joliet, 40, 32), part(bytes, 40, 32)),
                None => padded_text(part(bytes, 40, 32)),
            },
            uuid: date(part(bytes, 830, 16)).or_else(|| date(part(bytes, 813, 16))),
            compression: None,
            notes: vec![names.to_owned()],
        };
        Ok(iso)
    }

    /// The record at `at`, whole.
    fn record(&self, at: u64) -> Result<Record, LayerError> {
        let len = usize::from(u8_at(&self.image.read_vec(at, 1)?, 0));
        if len <= RECORD_LEN {
            return corrupt(format!("the directory record at byte {at} has {len} bytes"));
        }
        Ok(Record { at, bytes: self.image.read_vec(at, len)? })
    }

    /// Where the bytes of a record's extent start.
    fn first_byte(&self, record: &Record) -> Result<u64, LayerError> {
        let bytes = &record.bytes;
        if u8_at(bytes, 26) != 0 || u8_at(bytes, 27) != 0 {
            return unsupported("interleaved files in an ISO 9660 volume");
        }
        Ok((u64::from(u32_at(bytes, 2)) + u64::from(u8_at(bytes, 1))) * self.block)
    }

    /// The record that comes after one in its directory; records do not cross sectors.
    fn next(&self, record: &Record) -> Result<Record, LayerError> {
        let end = record.at + record.bytes.len() as u64;
        let in_sector = !end.is_multiple_of(SECTOR) && self.image.read_vec(end, 1)? != [0];
        self.record(if in_sector { end } else { end.next_multiple_of(SECTOR) })
    }

    /// Reports all records of the file whose first one is at `node`.
    fn each_record(
        &self,
        node: u64,
        mut tell: impl FnMut(&Record) -> Result<(), LayerError>,
    ) -> Result<(), LayerError> {
        let mut record = self.record(node)?;
        tell(&record)?;
        while record.flags() & GOES_ON != 0 {
            record = self.next(&record)?;
            tell(&record)?;
        }
        Ok(())
    }

    fn system_use(&self, record: &Record) -> Result<SystemUse, LayerError> {
        match self.names {
            Names::RockRidge(skip) => {
                let name = usize::from(u8_at(&record.bytes, 32));
                let from = RECORD_LEN + name + usize::from(name.is_multiple_of(2)) + skip;
                susp::read(record.bytes.get(from..).unwrap_or_default(), &self.image, self.block)
            }
            _ => Ok(SystemUse::default()),
        }
    }

    /// The name that a record is known by.
    fn name(&self, record: &Record, system_use: &SystemUse) -> Vec<u8> {
        let raw = part(&record.bytes, RECORD_LEN, u8_at(&record.bytes, 32).into());
        match self.names {
            Names::RockRidge(_) if !system_use.name.is_empty() => system_use.name.clone(),
            Names::Joliet => without_version(utf16(be_units(raw)).as_bytes()).to_vec(),
            _ => {
                let name = without_version(raw);
                name.strip_suffix(b".").unwrap_or(name).to_vec()
            }
        }
    }
}

impl Record {
    fn flags(&self) -> u8 {
        u8_at(&self.bytes, 25)
    }

    fn size(&self) -> u64 {
        u32_at(&self.bytes, 10).into()
    }

    fn kind(&self, system_use: &SystemUse) -> NodeKind {
        match &system_use.posix {
            Some(posix) => NodeKind::of_mode(posix.mode),
            None if self.flags() & DIRECTORY != 0 => NodeKind::Directory,
            None => NodeKind::File,
        }
    }

    /// Whether it is a directory's record of itself or of its parent.
    fn is_dot(&self) -> bool {
        u8_at(&self.bytes, 32) == 1 && u8_at(&self.bytes, RECORD_LEN) <= 1
    }
}

impl FileSystem for Iso {
    fn about(&self) -> &About {
        &self.about
    }

    fn root(&self) -> u64 {
        self.root
    }

    fn stat(&self, node: u64) -> Result<Stat, LayerError> {
        let first = self.record(node)?;
        let kind = first.kind(&self.system_use(&first)?);
        let mut size = 0_u64;
        self.each_record(node, |record| {
            size = size.saturating_add(record.size());
            Ok(())
        })?;
        Ok(Stat { kind, size })
    }

    fn attributes(&self, node: u64) -> Result<Attributes, LayerError> {
        let Stat { kind, size } = self.stat(node)?;
        let record = self.record(node)?;
        let SystemUse { posix, device, modified, .. } = self.system_use(&record)?;
        let many = posix.as_ref().filter(|posix| posix.links > 1 && kind != NodeKind::Directory);
        Ok(Attributes {
            mode: posix.as_ref().map(|posix| posix.mode),
            owner: posix.as_ref().map(|posix| posix.owner),
            links: posix.as_ref().map(|posix| posix.links),
            // Files of several disks can have one serial number on a volume.
            identity: many
                .filter(|posix| posix.serial != 0)
                .map(|posix| u64::from(u32_at(&record.bytes, 2)) << 32 | u64::from(posix.serial)),
            modified: modified.or_else(|| susp::short_time(part(&record.bytes, 18, 7))),
            device: device.filter(|_| kind == NodeKind::Other),
            ..Attributes::of(kind, size)
        })
    }

    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
        let own = self.record(dir)?;
        if own.flags() & DIRECTORY == 0 {
            return corrupt("this is not a directory");
        }
        let start = self.first_byte(&own)?;
        let len = directory_len(own.size())?;
        let mut goes_on = false;
        for sector in (0..len).step_by(SECTOR_LEN) {
            let base = start + sector as u64;
            let bytes = self.image.read_vec(base, SECTOR_LEN.min(len - sector))?;
            let mut at = 0;
            while u8_at(&bytes, at) != 0 {
                let size = usize::from(u8_at(&bytes, at));
                if size <= RECORD_LEN || at + size > bytes.len() {
                    return corrupt("a directory record does not fit its sector");
                }
                let record = Record { at: base + at as u64, bytes: part(&bytes, at, size).to_vec() };
                at += size;
                let continues = std::mem::replace(&mut goes_on, record.flags() & GOES_ON != 0);
                if continues || record.is_dot() || record.flags() & ASSOCIATED != 0 {
                    continue;
                }
                let system_use = self.system_use(&record)?;
                if system_use.relocated {
                    continue;
                }
                // A directory that was moved away, to keep the depth of the tree at eight.
                let node = system_use.child.map_or(record.at, |block| u64::from(block) * self.block);
                if entry(&self.name(&record, &system_use), node) == ControlFlow::Break(()) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn same_name(&self, one: &[u8], other: &[u8]) -> bool {
        one == other || !matches!(self.names, Names::RockRidge(_)) && super::same_but_for_case(one, other)
    }

    fn read_link(&self, node: u64) -> Result<Vec<u8>, LayerError> {
        let link = self.system_use(&self.record(node)?)?.link;
        link.ok_or_else(|| LayerError::Corrupt("this is not a symbolic link".to_owned()))
    }

    fn lay_out(&self, node: u64) -> Result<Layout, LayerError> {
        let mut layout = Layout::of(&self.image)?;
        self.each_record(node, |record| {
            if record.flags() & DIRECTORY != 0 {
                return corrupt("this is not a regular file");
            }
            if self.system_use(record)?.compressed {
                return unsupported("files compressed with zisofs");
            }
            layout.data(self.first_byte(record)?, record.size())
        })?;
        Ok(layout)
    }

    fn writable(&self, _: u64) -> Result<(), String> {
        Err("ISO 9660 volumes are read-only".to_owned())
    }
}

/// A name without `;1`.
fn without_version(name: &[u8]) -> &[u8] {
    match name.iter().rposition(|byte| *byte == b';') {
        Some(at) if name.get(at + 1..).is_some_and(|rest| rest.iter().all(u8::is_ascii_digit)) => {
            part(name, 0, at)
        }
        _ => name,
    }
}

/// The label of a Joliet volume, as blkid has it: 16 letters in UTF-16, and then what the primary volume's
/// goes on with where that begins alike.
fn joliet_label(wide: &[u8], primary: &[u8]) -> Option<String> {
    let text = utf16(be_units(wide).take_while(|unit| *unit != 0));
    let begins_alike = text.chars().count() == wide.len() / 2
        && text.bytes().zip(primary).all(|(one, other)| one.eq_ignore_ascii_case(other));
    let rest = if begins_alike { primary.get(text.len()..).unwrap_or_default() } else { &[] };
    padded_text(&[text.as_bytes(), rest].concat())
}

/// Units of UTF-16, the more significant byte first.
fn be_units(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks_exact(2).map(|unit| be16_at(unit, 0))
}

/// A date and time of 16 digits as blkid writes it for a UUID; `None` when none was set.
fn date(digits: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(digits).ok().filter(|text| text.len() == 16)?;
    if !text.bytes().all(|byte| byte.is_ascii_digit()) || text.bytes().all(|byte| byte == b'0') {
        return None;
    }
    let part = |from: usize, len: usize| text.get(from..from + len).unwrap_or_default();
    let parts = [(0, 4), (4, 2), (6, 2), (8, 2), (10, 2), (12, 2), (14, 2)];
    Some(parts.map(|(from, len)| part(from, len)).join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lose_their_version_only() {
        for (name, without) in
            [("A.TXT;1", "A.TXT"), ("A;B", "A;B"), ("A;", "A"), ("", ""), ("A;1;12", "A;1")]
        {
            assert_eq!(without_version(name.as_bytes()), without.as_bytes(), "{name}");
        }
    }

    #[test]
    fn dates_are_written_as_blkid_does() {
        assert_eq!(date(b"2024031209083300").as_deref(), Some("2024-03-12-09-08-33-00"));
        assert_eq!(date(b"0000000000000000"), None);
        assert_eq!(date(b"2024"), None);
        assert_eq!(date(&[0xff; 16]), None);
    }
}

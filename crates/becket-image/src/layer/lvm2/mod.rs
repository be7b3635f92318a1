//! LVM2 physical volumes: the group as a directory, in which each logical volume is a file.
//! It never reads a volume that lies elsewhere in part, or in another way than extent by extent.
//!
//! Our own, because no crate says where the extents lie.
//! A volume's number is its place in the metadata, from [`FIRST`] on.
//!
//! Followed: LVM2's lib/format_text (layout.h, import_vsn1.c) and lib/label; lvm(8) for the names.

mod group;
mod text;

use std::ops::ControlFlow;
use std::sync::Arc;

use self::group::{Group, Segment, Volume};
use super::{
    About, Attributes, Entry, FileSystem, LayerError, NodeKind, Stat, corrupt, directory_len, unsupported,
};
use crate::budget::Held;
use crate::bytes::{part, u32_at, u64_at};
use crate::image::{Image, Layout, Role};

const ROOT: u64 = 0;
const GROUP: u64 = 1;
/// The number of the first volume.
const FIRST: u64 = 2;
const SECTOR: usize = 512;
/// The label is in one of the first so many sectors.
const LABEL_SECTORS: u64 = 4;
/// Entries of the lists of areas; pvcreate(8) makes at most one and two.
const AREAS_MAX: usize = 16;
const AREA_MAGIC: &[u8; 16] = b" LVM2 x[5A%r0N*>";
/// LVM's own have 1 MiB for two of them, unless they were asked for more.
const TEXT_MAX: u64 = 4 << 20;
/// What volumes take, for people.
const VOLUMES: &str = "the volumes of LVM";

/// An open physical volume.
#[derive(Debug)]
struct Lvm2 {
    image: Image,
    about: About,
    group: Group,
    _held: Held,
}

/// Opens the physical volume in `image`, when there is one.
pub(super) fn open(image: &Image) -> Result<Option<Arc<dyn FileSystem>>, LayerError> {
    let Some(header) = label(image)? else { return Ok(None) };
    let id = part(&header, 0, 32);
    let mut about = About { format: "lvm2", uuid: Some(with_dashes(id)), ..About::default() };
    let newest = newest(image, &areas(&header))?;
    let Some((text, _)) = newest else {
        about.notes.push("in no volume group that it knows of".to_owned());
        let _held = image.budget().hold(0, VOLUMES)?;
        return Ok(Some(Arc::new(Lvm2 { image: image.clone(), about, group: Group::default(), _held })));
    };
    let (top, _parsed) = text::parse(&text, image.budget())?;
    let group = group::read(&top, id)?;
    let _held = image.budget().hold(group.volumes.iter().map(memory).sum(), VOLUMES)?;
    about.label = Some(group.name.clone());
    about.notes.push(format!("extents of {} KiB", group.extent >> 10));
    if group.physical > 1 {
        about.notes.push(format!("one of {} physical volumes", group.physical));
    }
    Ok(Some(Arc::new(Lvm2 { image: image.clone(), about, group, _held })))
}

fn memory(volume: &Volume) -> u64 {
    let places = |segment: &Segment| size_of::<Segment>() + segment.places.len() * size_of::<u64>();
    let segments = volume.segments.as_ref().map_or(0, |segments| segments.iter().map(places).sum());
    (size_of::<Volume>() + volume.name.len() + segments) as u64
}

/// LVM's checksum: CRC-32 from a start of its own, and not inverted at the end.
fn checksum(bytes: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new_with_initial(!0xf597_a6cf);
    crc.update(bytes);
    !crc.finalize()
}

/// The header of the physical volume behind its label, up to the end of the sector.
fn label(image: &Image) -> Result<Option<Vec<u8>>, LayerError> {
    let bytes = image.read_some(0, LABEL_SECTORS as usize * SECTOR)?;
    let labelled = |index: u64, sector: &[u8]| {
        part(sector, 0, 8) == b"LABELONE"
            && part(sector, 24, 8) == b"LVM2 001"
            && u64_at(sector, 8) == index
            && sector.len() == SECTOR
    };
    let sectors = || (0..).zip(bytes.chunks(SECTOR));
    let Some((_, sector)) = sectors().find(|(index, sector)| labelled(*index, sector)) else {
        return Ok(None);
    };
    if checksum(part(sector, 20, SECTOR)) != u32_at(sector, 16) {
        return corrupt("the label of the LVM physical volume has a wrong checksum");
    }
    match sector.get(u32_at(sector, 20) as usize..) {
        Some(header) if header.len() >= 40 => Ok(Some(header.to_vec())),
        _ => corrupt("the label of the LVM physical volume has no header behind it"),
    }
}

/// Where the metadata areas are, in bytes: the second list behind the header.
fn areas(header: &[u8]) -> Vec<(u64, u64)> {
    let pairs = (40..).step_by(16).map(|at| (u64_at(header, at), u64_at(header, at + 8)));
    let data = pairs.clone().take(AREAS_MAX).take_while(|(offset, _)| *offset != 0).count();
    pairs.skip(data + 1).take(AREAS_MAX).take_while(|(offset, _)| *offset != 0).collect()
}

/// The newest text of all areas, with its number. Several hold the same, so one may be damaged.
fn newest(image: &Image, areas: &[(u64, u64)]) -> Result<Option<(Vec<u8>, u64)>, LayerError> {
    let mut newest: Option<(Vec<u8>, u64)> = None;
    let mut damage = None;
    for (start, len) in areas {
        match area(image, *start, *len) {
            Ok(Some((text, number))) if newest.as_ref().is_none_or(|(_, other)| number > *other) => {
                newest = Some((text, number));
            }
            Ok(_) => {}
            Err(error @ LayerError::Corrupt(_)) => damage = Some(error),
            Err(error) => return Err(error),
        }
    }
    match damage {
        Some(error) if newest.is_none() => Err(error),
        _ => Ok(newest),
    }
}

/// The text in an area, with its number; none before the physical volume is in a group.
fn area(image: &Image, start: u64, len: u64) -> Result<Option<(Vec<u8>, u64)>, LayerError> {
    let header = image.read_vec(start, SECTOR)?;
    if part(&header, 4, 16) != AREA_MAGIC || checksum(part(&header, 4, SECTOR)) != u32_at(&header, 0) {
        return corrupt("a metadata area of LVM has no sound header");
    }
    let (text_at, text_len) = (u64_at(&header, 40), u64_at(&header, 48));
    let (sum, ignored) = (u32_at(&header, 56), u32_at(&header, 60) & 1 != 0);
    if text_at == 0 || ignored {
        return Ok(None);
    }
    if text_len > TEXT_MAX {
        return Err(LayerError::Limit(format!("the metadata of LVM have {text_len} bytes")));
    }
    // What does not fit before the end of the area goes on behind its header.
    let before = len.saturating_sub(text_at).min(text_len);
    let (Some(at), Some(again)) = (start.checked_add(text_at), start.checked_add(SECTOR as u64)) else {
        return corrupt("a metadata area of LVM lies behind 2^64 bytes");
    };
    let size = |len: u64| usize::try_from(len).unwrap_or(usize::MAX);
    let mut text = image.read_vec(at, size(before))?;
    text.extend(image.read_vec(again, size(text_len - before))?);
    if checksum(&text) != sum {
        return corrupt("the metadata of LVM have a wrong checksum");
    }
    // Written in C, it ends with a NUL.
    text.truncate(text.iter().position(|byte| *byte == 0).unwrap_or(text.len()));
    let (top, _parsed) = text::parse(&text, image.budget())?;
    let number = top.sections().next().map_or(Ok(0), |(_, group)| group.number("seqno"))?;
    Ok(Some((text, number)))
}

/// An identity as LVM shows it: six characters, five times four, six.
fn with_dashes(id: &[u8]) -> String {
    let text: String = id.iter().map(|byte| char::from(*byte)).filter(char::is_ascii_graphic).collect();
    let ends = [6, 10, 14, 18, 22, 26];
    text.char_indices()
        .flat_map(|(at, letter)| ends.contains(&at).then_some('-').into_iter().chain([letter]))
        .collect()
}

impl Lvm2 {
    fn volume(&self, node: u64) -> Result<&Volume, LayerError> {
        let index = node.checked_sub(FIRST).and_then(|index| usize::try_from(index).ok());
        let volume = index.and_then(|index| self.group.volumes.get(index));
        volume.map_or_else(|| corrupt("there is no such volume"), Ok)
    }
}

impl FileSystem for Lvm2 {
    fn about(&self) -> &About {
        &self.about
    }

    fn root(&self) -> u64 {
        ROOT
    }

    fn stat(&self, node: u64) -> Result<Stat, LayerError> {
        if node < FIRST {
            return Ok(Stat { kind: NodeKind::Directory, size: 0 });
        }
        Ok(Stat { kind: NodeKind::File, size: self.volume(node)?.len })
    }

    fn attributes(&self, node: u64) -> Result<Attributes, LayerError> {
        let Stat { kind, size } = self.stat(node)?;
        let modified = if node < FIRST { None } else { self.volume(node)?.created };
        Ok(Attributes { modified, ..Attributes::of(kind, size) })
    }

    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
        let Group { name, volumes, .. } = &self.group;
        match dir {
            ROOT if name.is_empty() => {}
            ROOT => {
                let _ = entry(name.as_bytes(), GROUP);
            }
            GROUP => {
                directory_len(volumes.iter().map(|volume| volume.name.len() as u64).sum())?;
                for (volume, node) in volumes.iter().zip(FIRST..) {
                    if entry(volume.name.as_bytes(), node) == ControlFlow::Break(()) {
                        break;
                    }
                }
            }
            _ => return corrupt("this is not a directory"),
        }
        Ok(())
    }

    fn read_link(&self, _: u64) -> Result<Vec<u8>, LayerError> {
        corrupt("LVM has no symbolic links")
    }

    fn lay_out(&self, node: u64) -> Result<Layout, LayerError> {
        let Volume { name, segments, .. } = self.volume(node)?;
        let segments = match segments {
            Ok(segments) => segments,
            Err(reason) => return unsupported(format!("the volume {name}: {reason}")),
        };
        let mut layout = Layout::of(&self.image)?;
        layout.role = Role::Disk;
        for Segment { len, turn, places } in segments {
            let mut done = 0;
            'segment: for round in 0.. {
                for place in places {
                    if done >= *len {
                        break 'segment;
                    }
                    let piece = (*turn).min(len - done);
                    layout.data(place + round * turn, piece)?;
                    done += piece;
                }
            }
        }
        Ok(layout)
    }

    fn writable(&self, node: u64) -> Result<(), String> {
        let volume = self.volume(node).map_err(|error| error.to_string())?;
        volume.read_only.clone().map_or(Ok(()), Err)
    }
}

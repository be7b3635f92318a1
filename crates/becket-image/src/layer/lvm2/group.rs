//! A volume group: which volumes there are, and where their extents lie on this physical volume.
//! It never gives an extent a place behind the end that the metadata state for its physical volume.

use std::collections::{HashMap, HashSet};

use super::text::{Section, Value};
use crate::layer::{LayerError, Time, corrupt};

/// Bytes of a sector, in which LVM counts.
const SECTOR: u64 = 512;

/// What the metadata of a group say.
#[derive(Debug, Default)]
pub(super) struct Group {
    pub(super) name: String,
    /// Bytes of an extent.
    pub(super) extent: u64,
    /// How many physical volumes it has.
    pub(super) physical: usize,
    pub(super) volumes: Vec<Volume>,
}

/// A logical volume that is to be seen.
#[derive(Debug)]
pub(super) struct Volume {
    pub(super) name: String,
    /// Length in bytes.
    pub(super) len: u64,
    pub(super) created: Option<Time>,
    /// Where it lies, or why that cannot be said.
    pub(super) segments: Result<Vec<Segment>, String>,
    /// Why it must not be written, where it must not.
    pub(super) read_only: Option<String>,
}

/// A part of a volume that is spread in the same way.
#[derive(Debug)]
pub(super) struct Segment {
    /// Length in bytes.
    pub(super) len: u64,
    /// Bytes that lie on one place before the next has its turn.
    pub(super) turn: u64,
    /// Where each place begins, in bytes of this physical volume.
    pub(super) places: Vec<u64>,
}

/// The physical volumes of a group by their names.
type PhysicalVolumes<'a> = HashMap<&'a [u8], Physical>;

/// A physical volume, as the group knows it.
struct Physical {
    /// First byte of its extents, where it is the one that is looked at.
    start: Option<u64>,
    extents: u64,
}

/// What the text says of the group that the physical volume `id` belongs to.
pub(super) fn read(top: &Section<'_>, id: &[u8]) -> Result<Group, LayerError> {
    let Some((name, group)) = top.sections().next() else {
        return corrupt("the metadata of LVM describe no volume group");
    };
    let extent = group.number("extent_size")?.saturating_mul(SECTOR);
    if extent == 0 || extent > 1 << 50 {
        return corrupt("the extents of the volume group have no sensible size");
    }
    let physical = group
        .sections_of("physical_volumes")
        .map(|(name, section)| {
            let ours = section.text("id").is_some_and(|text| without_dashes(text) == id);
            let (start, extents) = (section.number("pe_start")?, section.number("pe_count")?);
            let start = start.saturating_mul(SECTOR);
            if extents.checked_mul(extent).and_then(|len| len.checked_add(start)).is_none() {
                return corrupt(format!("the physical volume {} ends behind 2^64 bytes", lossy(name)));
            }
            Ok((name, Physical { start: ours.then_some(start), extents }))
        })
        .collect::<Result<PhysicalVolumes<'_>, LayerError>>()?;
    // LVM hides the store of a snapshot, and shows the snapshot under its name.
    let (origins, stores): (Vec<&[u8]>, Vec<&[u8]>) = snapshots(group).unzip();
    let (origins, stores) = (HashSet::<_>::from_iter(origins), HashSet::<_>::from_iter(stores));
    let group_is_read_only = !group.has("status", "WRITE");
    let mut volumes = Vec::new();
    for (key, section) in group.sections_of("logical_volumes") {
        if !section.has("status", "VISIBLE") && !stores.contains(key) {
            continue;
        }
        let mut volume = volume(key, section, extent, &physical)?;
        if stores.contains(key) {
            volume.segments = Err("it is a snapshot".to_owned());
        }
        volume.read_only = if group_is_read_only {
            Some(format!("LVM has made the volume group {} read-only", lossy(name)))
        } else if !section.has("status", "WRITE") {
            Some(format!("LVM has made the volume {} read-only", volume.name))
        } else if origins.contains(key) {
            Some(format!("the volume {} has a snapshot, which writing would change", volume.name))
        } else {
            None
        };
        volumes.push(volume);
    }
    Ok(Group { name: lossy(name), extent, physical: physical.len(), volumes })
}

/// The origin and the store of each snapshot.
fn snapshots<'a>(group: &'a Section<'_>) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
    group.sections_of("logical_volumes").flat_map(|(_, volume)| {
        volume
            .sections()
            .filter_map(|(_, segment)| Some((segment.text("origin")?, segment.text("cow_store")?)))
    })
}

/// Whether it may be written is left open.
fn volume(
    name: &[u8],
    section: &Section<'_>,
    extent: u64,
    physical: &PhysicalVolumes<'_>,
) -> Result<Volume, LayerError> {
    let mut segments = Ok(Vec::new());
    let mut extents = 0_u64;
    for (_, part) in section.sections() {
        let (start, count) = (part.number("start_extent")?, part.number("extent_count")?);
        if start != extents {
            return corrupt(format!("the segments of the volume {} are not in order", lossy(name)));
        }
        extents = match extents.checked_add(count) {
            Some(sum) if sum.checked_mul(extent).is_some() => sum,
            _ => return corrupt(format!("the volume {} has too many extents", lossy(name))),
        };
        if let Ok(known) = &mut segments {
            match segment(part, count, extent, physical)? {
                Ok(segment) => known.push(segment),
                Err(reason) => segments = Err(reason),
            }
        }
    }
    let created = section.number("creation_time").ok().and_then(|time| i64::try_from(time).ok());
    Ok(Volume {
        name: lossy(name),
        len: extents * extent,
        created: created.map(Time::at),
        segments,
        read_only: None,
    })
}

/// Where a segment lies; the inner error is why this is not on this physical volume alone.
fn segment(
    part: &Section<'_>,
    count: u64,
    extent: u64,
    physical: &PhysicalVolumes<'_>,
) -> Result<Result<Segment, String>, LayerError> {
    match part.text("type") {
        // Named "striped" also when there is one stripe, which LVM shows as "linear".
        Some(b"striped" | b"linear") => {}
        Some(kind) => return Ok(Err(format!("it is of the type {:?}", lossy(kind)))),
        None => return corrupt("a segment in the metadata of LVM has no type"),
    }
    let list = part.list("stripes");
    let stripes = list.len() as u64 / 2;
    if stripes == 0 || !count.is_multiple_of(stripes) {
        return corrupt("a segment in the metadata of LVM does not divide by its stripes");
    }
    let each = count / stripes;
    let turn = match stripes {
        1 => count * extent,
        _ => part.number("stripe_size")?.saturating_mul(SECTOR),
    };
    if turn == 0 && count > 0 || stripes > 1 && !(each * extent).is_multiple_of(turn) {
        return corrupt("the stripes of a segment in the metadata of LVM have no sensible size");
    }
    let mut places = Vec::new();
    for pair in list.chunks_exact(2) {
        let [Value::Text(name), Value::Number(first)] = pair else {
            return corrupt("a stripe in the metadata of LVM is not a name with a number");
        };
        let Some(volume) = physical.get(name) else {
            return corrupt(format!("a stripe lies on {:?}, which is not in the volume group", lossy(name)));
        };
        if first.checked_add(each).is_none_or(|end| end > volume.extents) {
            return corrupt(format!("a stripe ends behind the end of {:?}", lossy(name)));
        }
        let Some(start) = volume.start else {
            return Ok(Err(format!("a part of it lies on the physical volume {}", lossy(name))));
        };
        places.push(start + first * extent);
    }
    Ok(Ok(Segment { len: count * extent, turn, places }))
}

fn without_dashes(id: &[u8]) -> Vec<u8> {
    id.iter().copied().filter(|byte| *byte != b'-').collect()
}

fn lossy(text: &[u8]) -> String {
    String::from_utf8_lossy(text).into_owned()
}

//! The map: which range of an image lives where.
//! It never holds a gap, an overlap or a range that overflows, wherever the extents come from.

use serde::{Deserialize, Serialize};

/// A range of an image and where it lives. All numbers are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// First byte, counted from the start of the image.
    pub start: u64,
    /// Length, never 0 inside a [`Map`].
    pub len: u64,
    /// Where these bytes are found.
    pub place: Place,
}

/// Where the bytes of an extent are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// As they are, in a source.
    Data {
        /// Index into [`crate::Opened::sources`]. Records and messages say `file`.
        #[serde(rename = "file")]
        source: u32,
        /// First byte in that source.
        offset: u64,
    },
    /// Nowhere: they read as zeroes.
    Zero,
    /// They must be computed by a layer of encoded blocks.
    Encoded {
        /// Index into [`crate::Opened::encoded`].
        layer: u32,
        /// First byte, in the layer's own count of the bytes that it yields.
        offset: u64,
    },
}

impl Place {
    /// The same place `by` bytes further on; `None` when the offset overflows.
    fn advanced(self, by: u64) -> Option<Place> {
        match self {
            Place::Data { source, offset } => Some(Place::Data { source, offset: offset.checked_add(by)? }),
            Place::Encoded { layer, offset } => {
                Some(Place::Encoded { layer, offset: offset.checked_add(by)? })
            }
            Place::Zero => Some(Place::Zero),
        }
    }
}

impl Extent {
    /// First byte behind the extent. Cannot overflow for an extent of a [`Map`].
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    /// Whether the sum of start and length, and of offset and length, stay within 64 bits.
    pub(crate) fn is_bounded(&self) -> bool {
        self.start.checked_add(self.len).is_some() && self.place.advanced(self.len).is_some()
    }

    /// The part of `self` in `from..to`, which must overlap it.
    fn cut(&self, from: u64, to: u64) -> Option<Extent> {
        let start = self.start.max(from);
        let len = self.end().min(to).checked_sub(start)?;
        Some(Extent { start, len, place: self.place.advanced(start - self.start)? })
    }

    /// Whether `next` goes on exactly where `self` ends, in the image and in its place.
    pub(crate) fn continues_in(&self, next: &Extent) -> bool {
        self.end() == next.start && self.place.advanced(self.len) == Some(next.place)
    }
}

/// The extents of an image: sorted, without gap or overlap, covering `0..len()`.
///
/// Neighbours that continue each other are merged, so equal contents mean equal maps. Deserialising
/// checks the same rules as [`Map::from_extents`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<Extent>", into = "Vec<Extent>")]
pub struct Map {
    extents: Vec<Extent>,
}

/// Why extents are not a map, or a map cannot be sliced as asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// An extent of length 0.
    #[error("extent {index} is empty")]
    Empty {
        /// Which extent, from 0.
        index: usize,
    },
    /// An extent does not start where the one before it ends.
    #[error("extent {index} starts at byte {start}, but the one before it ends at {expected}")]
    NotContiguous {
        /// Which extent, from 0.
        index: usize,
        /// Where it starts.
        start: u64,
        /// Where it should start.
        expected: u64,
    },
    /// An extent ends beyond what 64 bits can count, in the image or in its source.
    #[error("extent {index} ends beyond 2^64 bytes")]
    Overflow {
        /// Which extent, from 0.
        index: usize,
    },
    /// A slice reaches beyond the end of the map.
    #[error("{len} bytes from byte {offset} on reach beyond the end of the image at byte {end}")]
    OutOfRange {
        /// First byte of the slice.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// Length of the map in bytes.
        end: u64,
    },
}

impl Map {
    /// One range of one source: byte 0 of the image is byte `offset` of it.
    ///
    /// `len` is cut so that the range ends within 64 bits; 0 gives the empty map.
    pub fn contiguous(source: u32, offset: u64, len: u64) -> Map {
        let len = len.min(u64::MAX - offset);
        let extent = Extent { start: 0, len, place: Place::Data { source, offset } };
        Map { extents: if len == 0 { Vec::new() } else { vec![extent] } }
    }

    /// A map of `extents`, which must be sorted, gapless from byte 0 on, not empty each, and bounded.
    pub fn from_extents(mut extents: Vec<Extent>) -> Result<Map, MapError> {
        let mut expected = 0;
        for (index, extent) in extents.iter().enumerate() {
            if extent.len == 0 {
                return Err(MapError::Empty { index });
            }
            if extent.start != expected {
                return Err(MapError::NotContiguous { index, start: extent.start, expected });
            }
            if !extent.is_bounded() {
                return Err(MapError::Overflow { index });
            }
            expected = extent.end();
        }
        extents.dedup_by(|next, last| {
            let merges = last.continues_in(next);
            if merges {
                last.len += next.len;
            }
            merges
        });
        Ok(Map { extents })
    }

    /// Length of the image in bytes.
    pub fn len(&self) -> u64 {
        self.extents.last().map_or(0, Extent::end)
    }

    /// Whether the image has no bytes at all.
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// The extents, in order.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The whole extent that holds byte `pos`; `None` behind the end.
    pub fn extent_at(&self, pos: u64) -> Option<&Extent> {
        self.extents.get(self.index_of(pos))
    }

    /// The rest of the extent that holds byte `pos`, cut so that it starts there; `None` behind the end.
    pub fn lookup(&self, pos: u64) -> Option<Extent> {
        self.extent_at(pos)?.cut(pos, u64::MAX)
    }

    /// The map of `len` bytes from byte `offset` on, as an image of its own that starts at 0.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Map, MapError> {
        Ok(Map { extents: self.parts(offset, len)?.collect() })
    }

    /// The extents of such a map, one after another.
    pub(crate) fn parts(&self, offset: u64, len: u64) -> Result<impl Iterator<Item = Extent>, MapError> {
        let out_of_range = MapError::OutOfRange { offset, len, end: self.len() };
        let end = offset.checked_add(len).filter(|end| *end <= self.len()).ok_or(out_of_range)?;
        let rest = self.extents.get(self.index_of(offset)..).unwrap_or_default();
        let inside = rest.iter().take_while(move |extent| extent.start < end);
        let cut = move |extent: &Extent| extent.cut(offset, end).filter(|cut| cut.len > 0);
        Ok(inside.filter_map(cut).map(move |cut| Extent { start: cut.start - offset, ..cut }))
    }

    /// The same map with this many sources and layers counted before its own; `None` if there are too many.
    pub(crate) fn behind(&self, sources: u32, layers: u32) -> Option<Map> {
        let moved = |extent: &Extent| {
            let place = match extent.place {
                Place::Data { source, offset } => {
                    Place::Data { source: source.checked_add(sources)?, offset }
                }
                Place::Encoded { layer, offset } => {
                    Place::Encoded { layer: layer.checked_add(layers)?, offset }
                }
                Place::Zero => Place::Zero,
            };
            Some(Extent { place, ..*extent })
        };
        Some(Map { extents: self.extents.iter().map(moved).collect::<Option<_>>()? })
    }

    /// Source, offset and length when the whole image is one range of one source.
    pub fn single_range(&self) -> Option<(u32, u64, u64)> {
        match self.extents.as_slice() {
            [Extent { len, place: Place::Data { source, offset }, .. }] => Some((*source, *offset, *len)),
            _ => None,
        }
    }

    /// Index of the extent that holds `pos`; the number of extents when there is none.
    fn index_of(&self, pos: u64) -> usize {
        self.extents.partition_point(|extent| extent.end() <= pos)
    }
}

impl TryFrom<Vec<Extent>> for Map {
    type Error = MapError;

    fn try_from(extents: Vec<Extent>) -> Result<Map, MapError> {
        Map::from_extents(extents)
    }
}

impl From<Map> for Vec<Extent> {
    fn from(map: Map) -> Vec<Extent> {
        map.extents
    }
}

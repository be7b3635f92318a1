//! A file: its records, and the streams of bytes that its attributes are.
//! It never goes on in a record that another file has.

use std::ops::Range;

use super::record::{Attribute, DOS, Form, NAMESPACE, NUMBER, Record, kind};
use super::runs::{self, Run};
use crate::budget::{Budget, Held};
use crate::bytes::{ReadAt as _, u8_at, u16_at, u32_at, u64_at};
use crate::image::{Image, Layout, PIECES_MAX};
use crate::layer::{LayerError, corrupt, unsupported};

/// The longest list of a file's attributes, in bytes: what Windows takes.
const LIST_MAX: usize = 256 << 10;
/// Length of an entry of it without its name.
const LISTED: usize = 26;
/// Memory of an attribute's name, in bytes: about.
const ATTRIBUTE: usize = 16;
/// What takes steps and memory, for people.
const RECORDS: &str = "the records of files";
/// The most records that a file may have.
const RECORDS_MAX: usize = 8192;
/// The most runs of clusters that a value may lie in: two for each piece, where it is compressed.
const RUNS_MAX: usize = 2 * PIECES_MAX;
/// Flags of an attribute.
const COMPRESSED: u16 = 0xff;
const ENCRYPTED: u16 = 0x4000;

/// An open volume: where its records are.
#[derive(Debug)]
pub(super) struct Volume {
    pub(super) image: Image,
    /// Bytes of a cluster.
    pub(super) cluster: u64,
    /// Bytes of a record.
    pub(super) record: usize,
    /// Where the records are.
    table: Layout,
}

/// A file of which all records were read.
#[derive(Debug)]
pub(super) struct File {
    /// Each with its number; the file's own is the first.
    records: Vec<(u64, Record)>,
    /// Each with the place of its record among those.
    attributes: Vec<(usize, Attribute)>,
    budget: Budget,
    /// The memory of all that.
    held: Held,
}

/// A value of a file, in all its parts.
pub(super) struct Stream<'a> {
    file: &'a File,
    /// Those that begin further on in the value come later. There is one at least.
    parts: Vec<&'a (usize, Attribute)>,
}

impl Volume {
    /// Opens the volume whose records begin at a byte of the image.
    pub(super) fn open(image: &Image, cluster: u64, record: usize, first: u64) -> Result<Volume, LayerError> {
        let mut table = Layout::of(image)?;
        table.data(first, record as u64)?;
        let mut volume = Volume { image: image.clone(), cluster, record, table };
        let first = File::of(image.budget(), 0, volume.record(0)?)?;
        let list = first.value(&volume, kind::LIST, LIST_MAX)?.unwrap_or_default();
        let size = first.stream(kind::DATA, &[])?.map_or(0, |stream| stream.size());
        volume.table = Layout::of(image)?;
        let mut clusters = volume.table_goes_on(&first, 0, size)?;
        // The table's own records lie in what those before them speak of, so it becomes known part by part.
        let mut more = listed(&list, Some(kind::DATA))?;
        more.dedup();
        for number in more.into_iter().filter(|number| *number != 0) {
            let part = File::of(image.budget(), number, volume.record(number)?)?;
            clusters = volume.table_goes_on(&part, clusters, size)?;
        }
        Ok(volume)
    }

    /// Adds what a record says of the table's clusters from that one on to the table of `size` bytes; the
    /// first that it does not speak of.
    fn table_goes_on(&mut self, record: &File, clusters: u64, size: u64) -> Result<u64, LayerError> {
        let Some(stream) = record.stream(kind::DATA, &[])? else {
            return corrupt("a record of the table of files says nothing of it");
        };
        let runs = stream.runs(clusters)?;
        let there = runs.iter().fold(clusters, |sum, run| sum.saturating_add(run.len));
        runs::lay_out(&mut self.table, &runs, self.cluster, size.min(there.saturating_mul(self.cluster)))?;
        Ok(there)
    }

    /// The record of that number.
    fn record(&self, number: u64) -> Result<Record, LayerError> {
        let at = number.saturating_mul(self.record as u64);
        let mut bytes = Vec::with_capacity(self.record);
        for (at, len) in self.places(at, self.record as u64)? {
            bytes.extend(self.image.read_vec(at, usize::try_from(len).unwrap_or(0))?);
        }
        Record::parse(b"FILE", bytes)
    }

    /// Where `len` bytes of the table from byte `from` on are in the image.
    fn places(&self, from: u64, len: u64) -> Result<Vec<(u64, u64)>, LayerError> {
        let extents = self.table.extents();
        let end = from.saturating_add(len);
        let mut places = Vec::new();
        let first = extents.partition_point(|extent| extent.end() <= from);
        for extent in extents.iter().skip(first).take_while(|extent| extent.start < end) {
            let crate::Place::Data { offset, .. } = extent.place else { continue };
            let (start, stop) = (extent.start.max(from), extent.end().min(end));
            places.push((offset + (start - extent.start), stop - start));
        }
        let there: u64 = places.iter().map(|(_, len)| len).sum();
        if there < len { corrupt("a file's record is outside of the table") } else { Ok(places) }
    }

    /// The file that a reference means; without a count it is that of this number.
    pub(super) fn file(&self, reference: u64) -> Result<File, LayerError> {
        let (number, count) = (reference & NUMBER, reference >> 48);
        let record = self.record(number)?;
        if !record.is_used() || record.base().is_some() || count != 0 && count != record.sequence() {
            return corrupt(format!("file {number} is no longer there"));
        }
        let mut file = File::of(self.image.budget(), number, record)?;
        let Some(list) = file.value(self, kind::LIST, LIST_MAX)? else { return Ok(file) };
        let mut more = listed(&list, None)?;
        more.sort_unstable();
        more.dedup();
        for other in more.into_iter().filter(|other| *other != number) {
            file.add(other, self.record(other)?)?;
        }
        Ok(file)
    }
}

/// The records that a list of attributes speaks of: for one kind, or for all.
fn listed(list: &[u8], kind: Option<u32>) -> Result<Vec<u64>, LayerError> {
    let mut numbers = Vec::new();
    let mut rest = list;
    while rest.len() >= LISTED {
        if kind.is_none_or(|kind| u32_at(rest, 0) == kind) {
            numbers.push(u64_at(rest, 16) & NUMBER);
        }
        let len = usize::from(u16_at(rest, 4));
        if len < LISTED {
            return corrupt("an impossible entry in the list of a file's attributes");
        }
        rest = rest.get(len..).unwrap_or_default();
    }
    Ok(numbers)
}

impl File {
    fn of(budget: &Budget, number: u64, record: Record) -> Result<File, LayerError> {
        let held = budget.hold(0, RECORDS)?;
        let mut file = File { records: Vec::new(), attributes: Vec::new(), budget: budget.clone(), held };
        file.push(number, record)?;
        Ok(file)
    }

    /// Takes another of its records.
    fn add(&mut self, number: u64, record: Record) -> Result<(), LayerError> {
        let own = self.records.first().map(|(number, _)| *number);
        if !record.is_used() || record.base() != own {
            return corrupt(format!("a file goes on in record {number}, which is not its own"));
        }
        if self.records.len() >= RECORDS_MAX {
            return Err(LayerError::Limit(format!("a file with more than {RECORDS_MAX} records")));
        }
        self.push(number, record)
    }

    fn push(&mut self, number: u64, record: Record) -> Result<(), LayerError> {
        let place = self.records.len();
        let attributes = record.attributes()?;
        let memory = record.bytes.len() + attributes.len() * (ATTRIBUTE + size_of::<(usize, Attribute)>());
        self.held.grow(memory as u64, RECORDS)?;
        self.attributes.extend(attributes.into_iter().map(|attribute| (place, attribute)));
        self.records.push((number, record));
        Ok(())
    }

    pub(super) fn is_directory(&self) -> bool {
        self.records.first().is_some_and(|(_, record)| record.is_directory())
    }

    /// How many names it has. One that was made up for DOS is none of its own.
    pub(super) fn names(&self) -> u32 {
        let own = |(place, attribute): &&(usize, Attribute)| match &attribute.form {
            Form::Resident(value) if attribute.kind == kind::FILE_NAME => {
                let value = self.resident(*place, value);
                u8_at(value, NAMESPACE) != DOS
            }
            _ => false,
        };
        u32::try_from(self.attributes.iter().filter(own).count()).unwrap_or(u32::MAX)
    }

    /// The names, in UTF-16, of its streams but the nameless one.
    pub(super) fn stream_names(&self) -> Vec<&[u8]> {
        let begins = |form: &Form| matches!(form, Form::Resident(_) | Form::Runs { first: 0, .. });
        let named = self.attributes.iter().map(|(_, attribute)| attribute).filter(|attribute| {
            attribute.kind == kind::DATA && !attribute.name.is_empty() && begins(&attribute.form)
        });
        named.map(|attribute| attribute.name.as_slice()).collect()
    }

    /// The value of this kind and name. All attributes are looked at, which takes steps.
    pub(super) fn stream(&self, kind: u32, name: &[u8]) -> Result<Option<Stream<'_>>, LayerError> {
        self.budget.steps(self.attributes.len() as u64 / 8, RECORDS)?;
        let wanted = |(_, attribute): &&(usize, Attribute)| attribute.kind == kind && attribute.name == name;
        let mut parts: Vec<&(usize, Attribute)> = self.attributes.iter().filter(wanted).collect();
        parts.sort_by_key(|(_, attribute)| match attribute.form {
            Form::Resident(_) => 0,
            Form::Runs { first, .. } => first,
        });
        Ok((!parts.is_empty()).then_some(Stream { file: self, parts }))
    }

    /// The bytes of the nameless value of this kind, which may be so long.
    pub(super) fn value(
        &self,
        volume: &Volume,
        kind: u32,
        most: usize,
    ) -> Result<Option<Vec<u8>>, LayerError> {
        self.stream(kind, &[])?.map(|stream| stream.read(volume, most)).transpose()
    }

    /// Its times and flags.
    pub(super) fn standard(&self, volume: &Volume) -> Result<Vec<u8>, LayerError> {
        Ok(self.value(volume, kind::STANDARD_INFORMATION, volume.record)?.unwrap_or_default())
    }

    fn resident(&self, place: usize, value: &Range<usize>) -> &[u8] {
        let record = self.records.get(place).map_or(&[][..], |(_, record)| &record.bytes);
        record.get(value.clone()).unwrap_or_default()
    }
}

impl Stream<'_> {
    /// The form of the first part, and the flags of all.
    fn first(&self) -> Option<(usize, &Attribute)> {
        self.parts.first().map(|(place, attribute)| (*place, attribute))
    }

    /// Length in bytes.
    pub(super) fn size(&self) -> u64 {
        match self.first().map(|(_, attribute)| &attribute.form) {
            Some(Form::Resident(value)) => value.len() as u64,
            Some(Form::Runs { size, .. }) => *size,
            None => 0,
        }
    }

    /// The clusters of all parts, the first of which begins at cluster `next` of the value.
    fn runs(&self, mut next: u64) -> Result<Vec<Run>, LayerError> {
        let mut runs = Vec::new();
        for (place, attribute) in self.parts.iter().copied() {
            let Form::Runs { first, runs: range, .. } = &attribute.form else {
                return corrupt("a value is in its record and in clusters");
            };
            if *first != next {
                return corrupt("a part of a value is missing");
            }
            if runs.len() > RUNS_MAX {
                return Err(LayerError::Limit(format!("a file in more than {RUNS_MAX} runs of clusters")));
            }
            let before = runs.len();
            runs::decode(self.file.resident(*place, range), &mut runs)?;
            next = runs.iter().skip(before).fold(next, |sum, run| sum.saturating_add(run.len));
        }
        Ok(runs)
    }

    /// Where its bytes are.
    pub(super) fn lay_out(&self, volume: &Volume) -> Result<Layout, LayerError> {
        let mut layout = Layout::of(&volume.image)?;
        let Some((place, attribute)) = self.first() else { return Ok(layout) };
        match attribute.form {
            _ if attribute.flags & ENCRYPTED != 0 => return unsupported("files that Windows has encrypted"),
            Form::Resident(ref value) => {
                let Some((number, record)) = self.file.records.get(place) else { return Ok(layout) };
                let start = number * volume.record as u64;
                for (at, len) in record.stored(value.clone()) {
                    for (at, len) in volume.places(start + at as u64, len as u64)? {
                        layout.data(at, len)?;
                    }
                }
            }
            Form::Runs { unit, size, valid, .. } => {
                let (runs, written) = (self.runs(0)?, valid.min(size));
                match attribute.flags & COMPRESSED {
                    1 if unit > 0 => {
                        let unit = 1_u64.checked_shl(unit.into()).unwrap_or(u64::MAX);
                        runs::lay_out_units(&mut layout, &runs, (volume.cluster, unit), written)?;
                    }
                    0 | 1 => runs::lay_out(&mut layout, &runs, volume.cluster, written)?,
                    other => return unsupported(format!("files of NTFS compressed by method {other}")),
                }
                layout.zero(size - written)?;
            }
        }
        Ok(layout)
    }

    /// All its bytes, of which there may be so many.
    pub(super) fn read(&self, volume: &Volume, most: usize) -> Result<Vec<u8>, LayerError> {
        if let Some((place, Attribute { form: Form::Resident(value), .. })) = self.first() {
            return Ok(self.file.resident(place, value).to_vec());
        }
        let size = usize::try_from(self.size()).ok().filter(|size| *size <= most);
        let size = size.ok_or_else(|| LayerError::Limit(format!("a value of {} bytes", self.size())))?;
        let mut bytes = vec![0; size];
        volume.image.compose(self.lay_out(volume)?)?.read_at(&mut bytes, 0)?;
        Ok(bytes)
    }
}

//! What comes of opening an image, wherever it is.
//! Opens nothing.

use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::path::PathBuf;

use crate::cow::Overlay;
use crate::source::file::outer::OuterDisk;
use crate::source::filled::FilledSource;
use crate::through::Reached;
use crate::{DirectIo, Encoded, Extent, Fillers, Identity, Map, Partition, Place, Source};

/// An image that is open.
#[derive(Debug)]
pub struct Opened {
    /// Where the file is: absolute, without symbolic links.
    pub path: PathBuf,
    /// Which byte of the image lives where.
    pub map: Map,
    /// The sources that the map speaks of.
    pub sources: Vec<Source>,
    /// The disks around partitions among them, for their locks.
    pub outer: Vec<OuterDisk>,
    /// The layers of encoded blocks that the map speaks of; each speaks of those before it only.
    pub encoded: Vec<Encoded>,
    /// Whether it is an image inside another, whose length is not that of the file.
    pub nested: bool,
    /// Whether it gets room for what is written while it is written: its writer is [`crate::Grower`].
    pub grows: bool,
    /// Whether writes must be refused.
    pub read_only: bool,
    /// Why, for people, when that was not asked for.
    pub read_only_reason: Option<String>,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Which file it is, whatever its path: that of the overlay, where there is one.
    pub identity: Identity,
    /// What the partition table names; empty when none was asked for or found.
    pub partitions: Vec<Partition>,
    /// Which bytes of the first file are locked, where not all.
    pub range: Option<Range<u64>>,
    /// The URI of the server below it, where that is not its path: [`crate::is_remote`].
    pub below: Option<PathBuf>,
    /// The overlay that takes what is written. One that was made for this goes again, unless it is kept.
    pub overlay: Option<Overlay>,
    /// What the user should know although it went well.
    pub warnings: Vec<String>,
}

impl Opened {
    /// Asks what the files can do, and in which units, for the process that will serve them; `wanted` as when
    /// it was opened. Nothing is read from them.
    pub fn complete(&mut self, wanted: DirectIo) {
        let encoded = !self.encoded.is_empty();
        for source in &mut self.sources {
            if let Err(error) = source.complete(wanted, encoded) {
                self.warnings.push(format!(
                    "{}: a failed flush will be forgotten with the process that serves it, for the file cannot be \
                     opened once more: {error}",
                    crate::shown(self.path.as_os_str().as_encoded_bytes())
                ));
            }
        }
    }

    /// Counts the disks around partitions among the sources, for another process that keeps the locks: the
    /// map speaks of none of them.
    pub fn keep_outer(&mut self) {
        self.sources.extend(self.outer.drain(..).map(|outer| Source::from(outer.source)));
    }

    /// Makes sources of the files that are filled while they are read, for a process that has no filler.
    /// `all` has the bytes that the image consists of fetched, also those that nobody reads.
    ///
    /// # Errors
    /// A descriptor cannot be made.
    pub fn fill(&mut self, fillers: &Fillers, all: bool) -> io::Result<()> {
        let mut sources = Vec::with_capacity(self.sources.len());
        for source in self.sources.drain(..) {
            let filler = source.identity().and_then(|identity| fillers.of(identity));
            sources.push(match (source, filler) {
                (Source::File(file), Some(filler)) => FilledSource::new(file, filler.lend()?)?.into(),
                (source, _) => source,
            });
        }
        self.sources = sources;
        for (index, filled) in self.sources.iter().enumerate().filter(|_| all) {
            let Some(filled) = filled.filled() else { continue };
            for range in self.ranges_of(index) {
                filled.presence().ask_later(range.start, range.end - range.start);
            }
        }
        Ok(())
    }

    /// The ranges of a source that the image consists of, sorted by their starts.
    fn ranges_of(&self, index: usize) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        let mut push = |place: &Extent| match place.place {
            Place::Data { source, offset } if source as usize == index => {
                ranges.push(offset..offset.saturating_add(place.len));
            }
            _ => {}
        };
        self.map.extents().iter().for_each(&mut push);
        for layer in &self.encoded {
            for block in layer.blocks() {
                let stored = layer.below().slice(block.input, block.input_len.into());
                stored.iter().flat_map(|map| map.extents()).for_each(&mut push);
            }
        }
        ranges.sort_by_key(|range| range.start);
        ranges
    }
}

/// What a path names, whatever its words: the file or device on the host, and the way to the image inside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The file or device.
    pub host: Identity,
    /// The snapshot of it.
    pub snapshot: Option<OsString>,
    /// Empty when that is the image.
    pub inside: Vec<Reached>,
}

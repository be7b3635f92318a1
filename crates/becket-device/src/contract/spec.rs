//! What is offered, in the two parts that travel as values: what people are shown of it and the record keeps,
//! and what its bytes come from, for the worker. Records and messages have their fields among their own.
//! The worker never gets the first part, which has paths; no record has the second one.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use becket_engine::Faults;
use becket_image::{DirectIo, Source, SourceFacts};
use becket_transport::Kind;
use becket_transport::ublk::DataMode;
use serde::{Deserialize, Serialize};

use crate::contract::export::Export;
use crate::contract::shape;
use crate::contract::table::Encoding;
use crate::contract::versions;
use crate::contract::wrong;

/// What is offered, and how. A user's choices are in it from the beginning; the client completes it once the
/// image is open, and the supervisor with what was granted. Sizes are bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The file that holds the image.
    #[serde(with = "crate::contract::path_text::one")]
    pub image: PathBuf,
    /// The URL that its bytes were fetched from, as the user named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The URL that the image or one below it names, where bytes come from there. That of an NBD server or of
    /// Ceph is in the form that is connected to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_url: Option<String>,
    /// The qcow2 over it that takes what is written.
    #[serde(default, with = "crate::contract::path_text::maybe")]
    pub cow: Option<PathBuf>,
    /// Where the image starts in that file.
    pub offset: u64,
    /// The limit that was asked for.
    pub size_limit: Option<u64>,
    /// Writes are refused.
    pub read_only: bool,
    /// Logical block size.
    pub block_size: u32,
    /// Number of queues, where becket serves them; the supervisor chooses when not given.
    pub queues: Option<u16>,
    /// Requests in flight of one queue, as `queues`.
    pub depth: Option<u16>,
    /// How bytes travel, where becket moves them; the best that the kernel has when not given.
    pub mode: Option<DataMode>,
    /// What goes wrong with its backing on purpose, for testing what is above it.
    #[serde(default)]
    pub faults: Option<Faults>,
    /// How it is reached, where it is an export and no device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<Export>,
    /// How long the server of a remote image may be away until requests fail, in seconds; for ever, when not
    /// given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin_timeout: Option<u64>,
    /// It goes when its last user closes it.
    pub autoclear: bool,
    /// Why this transport was taken.
    pub reason: String,
}

impl Spec {
    /// What the image is called, for people: the URL that it was fetched from, or else its path.
    pub fn title(&self) -> String {
        self.url.clone().unwrap_or_else(|| self.image.display().to_string())
    }
}

/// What the bytes of a device come from, and which descriptors come along; what may be long, its map, is
/// beside it (docs/decisions/0096).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Backing {
    /// What is said of its sources; the word is that of builds that knew files only.
    pub(crate) files: Vec<SourceFacts>,
    /// A table of encoded blocks comes along.
    #[serde(default)]
    pub(crate) encoded: Option<Encoding>,
    /// The image is a qcow2 that gets room while it is written.
    #[serde(default)]
    pub(crate) grows: bool,
    /// What goes past the page cache: nothing where a file cannot.
    #[serde(with = "crate::contract::switch")]
    pub(crate) direct_io: DirectIo,
    /// Always false: builds that had `--merge` refuse a message without it.
    #[serde(default)]
    pub(crate) merge: bool,
    /// A lease's pipe comes along.
    pub(crate) lease: bool,
    /// The `cgroup.procs` of an isolated worker comes along.
    pub(crate) cgroup: bool,
}

impl Backing {
    /// As servers understand it that know only on and off: that encoded blocks go past the page cache, too,
    /// is said of them.
    pub(crate) fn said(mut self) -> Backing {
        if let Some(encoding) = &mut self.encoded {
            encoding.direct_io = self.direct_io == DirectIo::On;
        }
        if self.direct_io == DirectIo::On {
            self.direct_io = DirectIo::Auto;
        }
        self
    }

    /// What [`Backing::said`] was made of.
    pub(crate) fn understood(mut self) -> Backing {
        let too = self.encoded.as_mut().is_some_and(|encoding| std::mem::take(&mut encoding.direct_io));
        if too && self.direct_io == DirectIo::Auto {
            self.direct_io = DirectIo::On;
        }
        self.merge = false;
        self
    }
}

/// What is said of sources whose descriptors come along.
pub(crate) fn facts_of(sources: &[Source]) -> Vec<SourceFacts> {
    sources.iter().map(Source::described).collect()
}

/// The features without which a device that is made now cannot be handled: those of its sources, too.
pub(crate) fn needs_of_new_device(kind: Kind, backing: &Backing) -> Vec<String> {
    let mut needs = versions::needs_of_new_devices(shape::of(kind).feature);
    needs.extend(backing.files.iter().filter_map(SourceFacts::feature).map(str::to_owned));
    needs.sort_unstable();
    needs.dedup();
    needs
}

/// Joins what is said of sources with their descriptors, which must be as many as announced.
pub(crate) fn all_sources(
    files: Vec<SourceFacts>,
    mut fds: impl Iterator<Item = OwnedFd>,
) -> io::Result<Vec<Source>> {
    let joined = take_sources(files, &mut fds)?;
    nothing_left(fds)?;
    Ok(joined)
}

/// The same, of the first descriptors among others.
pub(crate) fn take_sources(
    files: Vec<SourceFacts>,
    fds: &mut impl Iterator<Item = OwnedFd>,
) -> io::Result<Vec<Source>> {
    let missing = || wrong("a file's descriptor is missing");
    files.into_iter().map(|facts| facts.join(fds).ok_or_else(missing)).collect()
}

/// Refuses descriptors that were not announced.
pub(crate) fn nothing_left(mut fds: impl Iterator<Item = OwnedFd>) -> io::Result<()> {
    fds.next().map_or(Ok(()), |_| Err(wrong("there are more descriptors than files")))
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;

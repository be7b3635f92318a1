//! What takes copies: a directory of the host, or an archive. And what it is given.
//! Never hears of a name that could lead out of the directory that it is in.

use super::{
    ahead::{Ahead, Contents},
    bytes::Trouble,
    cp_new::New,
};
use crate::failure::Failure;
use becket_image::{
    Identity, Image,
    budget::Held,
    layer::{Attributes, Xattrs},
};
use std::{io, sync::Arc};

/// What a file is and has, beside its bytes.
#[derive(Debug)]
pub(super) struct Meta {
    pub(super) attributes: Attributes,
    pub(super) xattrs: Xattrs,
    /// The memory of the extended attributes, for as long as they are kept.
    pub(super) held: Held,
}

/// What is copied, if it is not a file.
pub(super) enum Item<'a> {
    Directory,
    /// A symbolic link, with its target.
    Symlink(Vec<u8>),
    /// Another name of the file that has this path already.
    Hard(&'a [u8]),
    /// A device or FIFO, by the type in its mode.
    Special,
}

/// The bytes of a file.
pub(super) struct File<'a> {
    pub(super) contents: &'a Contents,
    pub(super) ahead: &'a mut Ahead,
    /// What the sink has begun.
    pub(super) new: Option<New>,
}

impl File<'_> {
    pub(super) fn image(&self) -> &Image {
        &self.contents.image
    }

    /// Where it has bytes: see [`super::bytes::pieces`].
    pub(super) fn pieces(&self) -> &[(u64, u64)] {
        &self.contents.pieces
    }

    /// Waits until the bytes are written to the file that was begun; where the last of them ends.
    pub(super) fn written(self) -> Result<u64, Trouble> {
        let mut end = 0;
        self.each(|at, bytes| {
            end = at + bytes.len() as u64;
            Ok(())
        })?;
        Ok(end)
    }

    /// Hands over the pieces, in parts, each with its offset.
    pub(super) fn each(self, take: impl FnMut(u64, &[u8]) -> io::Result<()>) -> Result<(), Trouble> {
        self.ahead.each(self.contents, take)
    }
}

/// Hands the whole of an image to a sink, as a file.
pub(super) fn whole(sink: &mut dyn Sink, path: &[u8], meta: Meta, image: Image) -> Result<(), Refusal> {
    let mut ahead = Ahead::default();
    let new = sink.begin(path, &meta.attributes)?;
    let contents = &ahead.plan(Arc::new(image), new.as_ref().and_then(New::file));
    sink.file(path, meta, File { contents, ahead: &mut ahead, new })
}

/// Why an entry was not copied.
#[derive(Debug)]
pub(super) enum Refusal {
    /// Only this one: the others go on.
    Entry(Failure),
    /// No other can be copied, either.
    All(Failure),
}

/// What takes the copies. Paths have no `.`, `..` or empty name, and are relative.
pub(super) trait Sink {
    /// Names files of the host that are copied from: no copy replaces them.
    fn spare(&mut self, files: &[Identity]);

    /// Whether the entries must come in the order in which they are found.
    fn in_order(&self) -> bool {
        true
    }

    /// Begins a file, whose bytes then come in any order; nothing where they must come in order.
    fn begin(&mut self, _path: &[u8], _attributes: &Attributes) -> Result<Option<New>, Refusal> {
        Ok(None)
    }

    /// Takes a file, after it was begun.
    fn file(&mut self, path: &[u8], meta: Meta, file: File<'_>) -> Result<(), Refusal>;

    /// Takes anything else; directories come before what is in them.
    fn take(&mut self, path: &[u8], meta: Meta, item: Item<'_>) -> Result<(), Refusal>;
}

/// How much was copied.
#[derive(Debug, Default, serde::Serialize)]
pub(super) struct Count {
    pub(super) files: u64,
    pub(super) directories: u64,
    pub(super) links: u64,
    pub(super) others: u64,
    /// Lengths of the files.
    pub(super) bytes: u64,
    /// Devices and sockets that were left out.
    pub(super) skipped: u64,
}

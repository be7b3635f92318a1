//! The lines that a queue has to sources that are exports of NBD servers.
//! Sends nothing: `linked` drives them.

use crate::{Error, Serving, target::link::Line};

/// The line to one source.
pub(crate) struct Linked {
    pub(super) source: u32,
    pub(super) line: Line,
}

/// One for each source that is an export.
pub(super) fn lines_of(serving: &Serving, requests: u16) -> Result<Box<[Linked]>, Error> {
    let sources = (0..).zip(serving.targets()).filter(|(_, target)| target.link().is_some());
    sources.map(|(source, _)| Ok(Linked { source, line: Line::new(requests)? })).collect()
}

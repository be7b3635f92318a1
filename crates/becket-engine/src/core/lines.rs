//! The lines that a queue has to sources that are exports of NBD servers.
//! Sends nothing: `linked` drives them.

use crate::{
    Error, Serving,
    target::link::{Line, Questions},
};

/// The line to one source.
pub(crate) struct Linked {
    pub(super) source: u32,
    pub(super) line: Line,
    /// What the queue has seen of the other queues' connections (`target::link::group`).
    pub(super) seen: Seen,
    /// Reads that began before this moment fail once the connection has ended: nobody waits for them.
    pub(super) given_up: Option<u64>,
    /// Once something was asked.
    pub(super) questions: Option<Box<Questions>>,
}

/// See [`Linked::seen`].
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Seen {
    pub(super) events: u32,
    /// How often connections had broken when the line's was asked for.
    pub(super) breaks: u32,
    /// The doubt that a probe on its way will settle.
    pub(super) probed: Option<u32>,
    /// Others are in doubt: flushes wait.
    pub(super) holds: bool,
}

/// One for each source that is an export.
pub(super) fn lines_of(serving: &Serving, requests: u16) -> Result<Box<[Linked]>, Error> {
    let sources = (0..).zip(serving.targets()).filter(|(_, target)| target.link().is_some());
    sources
        .map(|(source, _)| {
            let (line, seen) = (Line::new(requests)?, Seen::default());
            Ok(Linked { source, line, seen, given_up: None, questions: None })
        })
        .collect()
}

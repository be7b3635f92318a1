//! Where the bytes of an image come from. A map says which byte is in which source ([`crate::Place::Data`]).
//! A source is open before a map speaks of it; nothing here looks at what the bytes mean.
//!
//! What every kind of source must say is in `kind`; what only one has (facts, locks, direct I/O) is in the
//! folder of that kind. A kind is a folder with a `SourceKind`, a variant of [`Source`] and a line of its
//! `kind`; the engine has a target for each kind.

mod any;
pub(crate) mod file;
pub mod filled;
mod kind;
pub mod link;
pub mod syncs;

pub use any::{Source, SourceFacts};
pub use filled::{Filler, Fillers};
pub use kind::Identity;

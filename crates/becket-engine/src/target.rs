//! Targets: what carries the pieces of requests to the sources of an image ([`becket_image::Source`]).
//! A target knows neither maps nor queues: the core finds the piece by the map, the target builds the
//! operation and says what its completion means.
//!
//! A kind of source is a folder here, a line of the table in `any` and one in `AnyTarget::of`. What only one
//! kind has (facts, direct I/O, `fallocate`, `fdatasync`) is in its folder. Arrows go down this list only:
//!
//! | file | what it has |
//! | --- | --- |
//! | `any` | the kinds that there are; calls go to one of them without a table of methods |
//! | `file` | regular files and block devices |
//! | `filled` | store files that are filled while they are read |
//! | `link` | exports of NBD servers |
//! | `double` | bytes in memory, for tests of the core |
//! | `contract` | what a target does: the trait |
//! | `straight`, `syncs` | an extent that needs no plan; what must still be synced |

mod any;
mod contract;
#[cfg(test)]
pub(crate) mod double;
mod file;
mod filled;
pub(crate) mod link;
mod straight;
mod syncs;

pub(crate) use any::AnyTarget;
pub(crate) use contract::{Completed, Piece, SLOTS, Target};
pub(crate) use file::FileState;
pub use link::FAREWELL;
pub(crate) use straight::Straight;
pub(crate) use syncs::Syncs;

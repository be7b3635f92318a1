//! What a queue is without its port: requests on their way through the map to the targets of sources.
//! Allocates everything when it is made and nothing afterwards; takes no lock; makes no system call.
//!
//! Arrows go down this list only:
//!
//! | file | what it has |
//! | --- | --- |
//! | `notes` | what others say to the queue |
//! | `linked` | lines to NBD servers are driven, and their answers taken in |
//! | `guest` | requests whose bytes are in a virtual machine's memory |
//! | `hold` | a queue is held, changed and released |
//! | `flow` | requests begin, go on and finish |
//! | `plan` | what a request needs next: a piece by the map, which its target (`crate::target`) carries |
//! | `intercept` | operations are seen, and perhaps spoiled, on their way (`crate::fault`) |
//! | `fill` | bytes that come later: requests wait for blocks, and blocks are loaded |
//! | `questions` | what an NBD server is asked about ranges |
//! | `asked` | what it is asked for requests |
//! | `frames` | messages that a port reads and writes itself |
//! | `streamed` | the same over a stream socket |
//! | `status` | what a range holds |
//! | `state` | the queue: its slab, its buffers, its places in the ring's tables |
//! | `lines`, `loads`, `memory_files`, `intercepted`, `change`, `stream` | what of it belongs to one of these |

mod asked;
#[cfg(test)]
mod bench;
mod change;
mod fill;
#[cfg(test)]
mod filled_tests;
mod flow;
mod frames;
mod guest;
mod hold;
mod intercept;
mod intercepted;
#[cfg(test)]
mod kinds_tests;
mod lines;
mod linked;
mod loads;
mod memory_files;
mod notes;
mod plan;
mod questions;
mod state;
mod status;
mod stream;
mod streamed;

pub use state::{Batch, Memory};
pub(crate) use state::{Core, Parts};

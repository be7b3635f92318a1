//! The image as a virtio block device of a virtual machine, by the vhost-user protocol: the machine's
//! memory is shared with the worker, which serves its rings without the hypervisor. Knows nothing of image
//! formats, and trusts neither the front-end (the hypervisor) nor the driver in the machine: both can harm
//! only the image that they are given, and the connection that they have.
//!
//! | file | what it has |
//! | --- | --- |
//! | `front` | the thread that hears front-ends |
//! | `session` | what a front-end has agreed on |
//! | `again` | the same, as messages for the next back-end |
//! | `message` | the protocol's messages |
//! | `port` | a queue's front: from a ring to the engine and back |
//! | `request` | what a chain of descriptors asks of a block device |
//! | `ring` | a ring of either layout |
//! | `split`, `packed` | the two layouts |
//! | `chain`, `place` | what a driver's descriptors say, and places in a packed ring |
//! | `inflight` | where requests under way are noted, for the next back-end |
//! | `split_notes`, `packed_notes` | what is noted |
//! | `config` | features and configuration space |
//!
//! **Recovery.** The front-end keeps a region in which each ring notes its requests. After the end of a
//! worker the next one begins with the requests that were under way, over the same connection: while
//! nothing is being said on it, others keep it together with what was agreed on ([`Hooks::keep`]). Where it
//! was lost, the front-end connects anew. A worker begins only when nothing of the last one can reach the
//! image or the machine's memory any more: the tether says so.

mod again;
mod chain;
mod config;
mod front;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod inflight;
mod message;
mod packed;
mod packed_notes;
mod place;
mod port;
mod request;
mod ring;
mod session;
mod split;
mod split_notes;

pub use front::{Departure, Hooks, VhostUser};

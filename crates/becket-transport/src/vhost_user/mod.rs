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
//! | `split` | a split ring |
//! | `inflight` | which requests are under way, for the next back-end |
//! | `config` | features and configuration space |
//!
//! **Recovery.** The front-end keeps a region in which each ring notes its requests. After the end of a
//! worker the next one begins with the requests that were under way, over the same connection: while
//! nothing is being said on it, others keep it together with what was agreed on ([`Hooks::keep`]). Where it
//! was lost, the front-end connects anew. A worker begins only when nothing of the last one can reach the
//! image or the machine's memory any more: the tether says so.

mod again;
mod config;
mod front;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod inflight;
mod message;
mod port;
mod request;
mod session;
mod split;

pub use front::{Departure, Hooks, VhostUser};

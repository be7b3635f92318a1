//! Decodes blocks for all queues of a process: threads that do nothing else, I/O threads where that is
//! quicker, and one cache. It never reads an image, and never makes an I/O thread wait for another.
//!
//! # The way of a block
//!
//! A queue that needs a byte of an [encoded](becket_image::Place::Encoded) extent looks for its block in the
//! [cache]. If it is there, it is copied from and the request goes on. If it is being loaded, the request
//! waits for a note. Otherwise the queue itself loads it: it reads the stored bytes as a request of its own
//! (`core::loads`), at any depth, and hands them to the [pool]. What comes out goes to the cache and, with
//! one ring of the bell for all that has gathered, to each I/O thread with requests that wait for it. No
//! block is decoded twice at once.
//!
//! A quick block is decoded by the I/O thread that has loaded it ([`hand`]), which saves waking another and
//! being woken. It is one of each turn in which the thread had to do with a single queue, and none that would
//! keep those who come meanwhile waiting for long.
//!
//! # What is bounded
//!
//! Threads: one for each CPU, at normal priority. Memory for decoded blocks: [`frames`], never more than was
//! allowed, whether cached, in use or being decoded into. Loads under way: a few for each queue and layer,
//! with memory that was taken when the queue was made; this is the governor's window for decoding, in which
//! more than the CPUs can take at once brings nothing. Blocks: what [`becket_image::Encoded`] checked, at
//! most 2 MiB before and after.
//!
//! # No deadlock
//!
//! An I/O thread waits for nothing. A decoding thread waits for memory only, which comes from blocks that are
//! cached (evicted at once) or in the hands of requests that are about to copy from them. A load waits for
//! loads of lower layers only ([`Layers::new`] sees to that), and each layer has places of its own for loads.
//! No memory that it takes needs block I/O to be had: the process is an I/O flusher.

mod block;
mod cache;
mod decoding;
mod frames;
mod hand;
mod layers;
mod mailbox;
mod pace;
mod pool;

pub use decoding::{Decoding, LEAST_CACHE};
pub use layers::MOST_LAYERS;

pub(crate) use block::{Key, Staging};
pub(crate) use cache::{Lookup, Waiter};
pub(crate) use decoding::Quick;
pub(crate) use frames::Decoded;
#[cfg(test)]
pub(crate) use frames::Frames;
pub(crate) use hand::{Hand, Job};
pub(crate) use layers::Layers;
#[cfg(test)]
pub(crate) use mailbox::tests::unheard;
pub(crate) use mailbox::{Addressee, Mailbox, Note};

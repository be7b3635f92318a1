//! Moves bytes: I/O threads, rings, queues, request slabs and buffers.
//! It never knows a format nor how a device is offered: it reads a [`becket_image::Map`] and serves a
//! [`Port`].
#![deny(unsafe_op_in_unsafe_fn)]

pub mod aside;

mod core;
mod decode;
mod ending;
mod error;
pub mod fault;
mod geometry;
mod governor;
mod growing;
mod memory;
mod places;
mod port;
mod provided;
mod queue;
mod ranges;
mod request;
mod ring;
mod serving;
mod slot;
mod stats;
mod target;
mod thread;
mod token;
mod user_data;

pub use crate::core::{Batch, Memory};
pub use decode::{Decoding, LEAST_CACHE, MOST_LAYERS};
pub use ending::Ending;
pub use error::Error;
pub use fault::{Faults, Interceptor};
pub use geometry::Geometry;
pub use memory::{Area, GuestMemory, GuestPart, GuestRange, SharedWords};
pub use port::{Io, Port};
pub use provided::PICK_SIZE;
pub use queue::NewQueue;
pub use request::{Data, InGuest, Op, Request};
pub use ring::{LITTLE, try_ring};
pub use serving::Serving;
pub use stats::{Activity, BOUNDS, Decodings, Fetched, QueueStats, Summary};
pub use target::FAREWELL;
pub use thread::{IoThreads, QueueId};
pub use token::{Answer, Token};

//! Moves bytes: I/O threads, rings, queues, request slabs and buffers.
//! It never knows a format nor how a device is offered; it reads a [`becket_image::Map`] and serves a [`Port`].
#![deny(unsafe_op_in_unsafe_fn)]

mod geometry;

pub use geometry::Geometry;

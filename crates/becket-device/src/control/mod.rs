//! A call from a command to the supervisor, by both of its ends: connection, calling, answering, and what is
//! done when the other end does not respond. The messages themselves are in the contract.

mod answers;
pub(crate) mod client;
mod connection;
pub(crate) mod frames;
pub(crate) mod health;
pub(crate) mod listen;
pub(crate) mod server;
mod socket;
pub(crate) mod volumes;

//! What is kept of each device between commands: the runtime directory, its records, names and links.
//! Commands and the supervisor use it alike; a worker never does.

pub(crate) mod device;
pub(crate) mod judge;
pub(crate) mod links;
pub(crate) mod mark;
pub(crate) mod nodes;
pub(crate) mod register;
pub(crate) mod runtime;
pub(crate) mod store;
mod udev;
pub(crate) mod unknown;

//! What the kernel and `/proc` show, and what every process of becket needs from them.
//! It knows processes, block devices, files and limits; it knows no record and no message.

pub(crate) mod confine;
pub(crate) mod control_group;
pub(crate) mod describe;
pub(crate) mod events;
pub(crate) mod harden;
pub(crate) mod helper;
pub(crate) mod inode;
pub(crate) mod isolate;
mod journal;
pub(crate) mod kernel;
pub(crate) mod log;
pub(crate) mod many;
pub(crate) mod moment;
pub(crate) mod origin;
pub(crate) mod process;
pub(crate) mod role;
pub(crate) mod space;
pub(crate) mod sync;
pub(crate) mod users;

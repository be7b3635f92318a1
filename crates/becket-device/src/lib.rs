//! A device's life: planned, attached, listed, detached; the supervisor and its worker; the control protocol.
//! It parses no image and moves no byte: those are the rooms below.
//!
//! A `loop` device is made by the calling process and needs no server; a `ublk` device is made by the
//! supervisor (`becket serve`), which the first attach starts, and served by its worker.
#![forbid(unsafe_code)]

mod attach;
mod control;
mod control_group;
mod describe;
mod detach;
mod dm;
mod error;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod health;
mod inode;
mod isolate;
mod judge;
mod kernel;
mod kernel_made;
mod lease;
mod links;
mod list;
mod log;
mod loop_;
mod manager;
mod mark;
mod nodes;
mod origin;
mod partitions;
mod path_text;
mod planner;
mod process;
mod register;
mod room;
mod runtime;
mod sealed;
mod set;
mod stat;
mod state;
mod supervisor;
mod switch;
mod sync;
mod table;
mod types;
mod udev;
mod unknown;
mod unrecorded;
mod user_devices;
mod users;
mod versions;
mod worker;

pub use attach::{attach, attach_leased};
pub use becket_engine::fault;
pub use becket_engine::{Activity, Decodings, Summary};
pub use becket_uapi::handover::inherited_fd;
pub use control::ServerStatus;
pub use detach::{detach, refresh, server_status};
pub use error::{Error, ErrorKind, User};
pub use lease::Lease;
pub use list::{ailing, find, list, tidy};
pub use path_text::{path_text, text_path};
pub use planner::{doctor, plan};
pub use set::{Changed, ChangedDevice, Changes, How, Progress, set};
pub use stat::{DeviceStats, stat};
pub use state::check_name;
pub use supervisor::{ServeOptions, serve};
pub use types::{
    AttachOptions, DataMode, DetachOptions, DeviceInfo, DeviceState, PartitionInfo, Partitions, Plan,
    TransportReport, Via,
};
pub use user_devices::give_to_owner;
pub use users::of as users;
pub use worker::worker_main;

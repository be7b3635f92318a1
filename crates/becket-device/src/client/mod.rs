//! Code that runs in the process of a command: it opens images, makes devices of the kernel's own drivers,
//! and asks the supervisor for all others.

mod attach;
mod detach;
mod dm;
mod doorway;
mod events;
mod facilities;
mod foresee;
mod holder;
mod kernel_drivers;
mod kernel_made;
mod lease;
mod list;
mod loop_;
mod partitions;
mod planner;
mod provide;
mod publish;
mod set;
mod stat;
mod unfinished;
mod unrecorded;
mod user_devices;

pub use attach::{attach, attach_leased, export, export_leased};
pub use detach::{detach, refresh, server_status};
pub use doorway::{DoorOptions, Doorway, spelled};
pub use events::{Heard, Listening, events};
pub use facilities::{dm_crypt, facilities};
pub use foresee::{Advice, Foreseen, Leaving, Outcome, Rehearsal, Why, foresee_detach, why};
pub use holder::blamed;
pub use lease::Lease;
pub use list::{ailing, find, last_change, list, tidy};
pub use planner::{doctor, may_be_served, plan};
pub use provide::provide;
pub use publish::publish;
pub use set::{Changed, ChangedDevice, Changes, How, Progress, set};
pub use stat::{DeviceStats, counters, stat};
pub use user_devices::give_to_owner;

//! A device's life: planned, attached, listed, detached; the supervisor and its worker; the control protocol.
//! It parses no image and moves no byte: those are the rooms below.
//!
//! A `loop` device is made by the calling process and needs no server; a `ublk` device is made by the
//! supervisor (`becket serve`), which the first attach starts, and served by its worker.
#![forbid(unsafe_code)]

mod client;
mod connector;
mod contract;
mod control;
mod doorman;
mod fetcher;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod record;
mod reporter;
mod supervisor;
mod system;
mod worker;

pub use becket_engine::fault;
pub use becket_engine::{Activity, BOUNDS, Decodings, Fetched, Summary};
pub use becket_uapi::handover::inherited_fd;
pub use client::{
    Advice, Changed, ChangedDevice, Changes, DeviceStats, DoorOptions, Doorway, Foreseen, Heard, How, Lease,
    Leaving, Listening, Outcome, Progress, Rehearsal, Why, ailing, attach, attach_leased, blamed, counters,
    detach, dm_crypt, doctor, events, export, export_leased, facilities, find, foresee_detach, give_to_owner,
    last_change, list, may_be_served, plan, provide, publish, refresh, server_status, set, spelled, stat,
    tidy, why,
};
pub use connector::{connector_main, helper};
pub use contract::{
    AttachOptions, Choice, DataMode, DetachOptions, DeviceInfo, DeviceState, Error, ErrorKind, Export,
    Happened, Part, PartitionInfo, Partitions, Plan, ServerStatus, SocketFile, Spec, TransportReport, User,
    Via, path_text, text_path,
};
pub use control::volumes::{Unavailable, Volume, Volumes};
pub use doorman::doorman_main;
pub use fetcher::{Fetch, fetcher_main};
pub use record::store::check_name;
pub use reporter::reporter_main;
pub use supervisor::{ServeOptions, serve};
pub use system::log::log_to_stderr;
pub use system::users::of as users;
pub use tracing::Level as LogLevel;
pub use worker::worker_main;

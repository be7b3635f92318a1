//! What crosses a boundary between processes: an image's description, messages, answers, errors.
//! Plain values and how they are written. Nothing here looks at the system, and no other room is used.

mod anew;
mod device_id;
mod error;
pub(crate) mod event;
pub(crate) mod export;
#[cfg(test)]
pub(crate) mod idl;
pub(crate) mod kept;
pub(crate) mod link;
pub(crate) mod messages;
pub(crate) mod path_text;
pub(crate) mod portion;
pub(crate) mod protocol;
pub(crate) mod rendezvous;
pub(crate) mod report;
pub(crate) mod sealed;
pub(crate) mod shape;
pub(crate) mod spec;
pub(crate) mod switch;
pub(crate) mod table;
mod types;
pub(crate) mod varlink;
pub(crate) mod versions;
pub(crate) mod volume;

pub(crate) use device_id::DeviceId;
pub(crate) use error::{
    CLIENTS, IMAGE_OF, MOUNTED, RUNS_ALREADY, RUNTIME_DIR, SWAP, WRITE_BACK, ending, wrong,
};
pub use error::{Error, ErrorKind, User};
pub use event::Happened;
pub use export::{Export, SocketFile};
pub use messages::ServerStatus;
pub use path_text::{path_text, text_path};
pub use spec::Spec;
pub use types::{
    AttachOptions, Choice, DataMode, DetachOptions, DeviceInfo, DeviceState, Part, PartitionInfo, Partitions,
    Plan, TransportReport, Via,
};

/// Directory of records, locks and the control socket, instead of the usual one.
pub(crate) const DIR_VARIABLE: &str = "BECKET_RUNTIME_DIR";
/// Directory of the links to device nodes, instead of `/dev/becket`.
pub(crate) const LINKS_VARIABLE: &str = "BECKET_LINK_DIR";

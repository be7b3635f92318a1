//! `becket serve` and the hidden `becket worker`: the long-lived processes, which live in the device room.
//! Nothing is decided here.

use crate::{args, failure::Failure};
use becket_device::ServeOptions;

pub(crate) fn run(args: &args::Serve) -> Result<u8, Failure> {
    let ready_fd = args
        .ready_fd
        .map(becket_device::inherited_fd)
        .transpose()
        .map_err(|error| Failure::io("cannot use the descriptor of --ready-fd", &error))?;
    // One that a client started is there for its devices only.
    let stay = ready_fd.is_none() && !args.until_idle;
    becket_device::serve(ServeOptions { stay, ready_fd })
        .map_err(|error| Failure::device("serve", "devices", &error))?;
    Ok(0)
}

pub(crate) fn worker() -> Result<u8, Failure> {
    becket_device::worker_main().map_err(|error| Failure::device("move", "bytes", &error))?;
    Ok(0)
}

//! Live changes of a device that becket serves.
//! The record says what is, so nothing is written there before the worker has done it.

use becket_image::{Backing, DirectIo};

use super::make::direct_io;
use super::workers::Server;
use crate::{DeviceInfo, Error, ErrorKind};

/// Has the worker go past the page cache or through it, and notes in `info` what came of it.
pub(crate) fn switch(
    server: &dyn Server,
    info: &mut DeviceInfo,
    files: &[Backing],
    wanted: DirectIo,
) -> Result<(), Error> {
    let (on, reason) = direct_io(files, wanted != DirectIo::Off);
    if wanted == DirectIo::On && !on {
        return Err(Error::Remote {
            kind: ErrorKind::Unsupported,
            message: format!("{} cannot do direct I/O: {reason}", info.name),
            hint: Some("--direct-io auto takes it where it can be had".to_owned()),
        });
    }
    if on != info.direct_io {
        server.direct_io(info.number, on)?;
    }
    (info.direct_io, info.direct_io_reason) = (on, reason);
    Ok(())
}

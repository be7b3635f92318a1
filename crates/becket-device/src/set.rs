//! Live changes of a device, whatever its transport.
//! What a transport cannot change live is refused with the way to do it; nothing is half done.

use std::path::Path;

use becket_image::DirectIo;
use becket_transport::{Kind, loop_};

use crate::control::{OneDevice, Set, client};
use crate::list::resolve;
use crate::runtime::Runtime;
use crate::state::Store;
use crate::{DeviceInfo, Error, ErrorKind};

/// What is to change; what is `None` stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Whether to go past the page cache.
    pub direct_io: Option<DirectIo>,
}

/// Changes the device that goes by `target` (node, name or image) between two of its requests.
///
/// # Errors
/// There is no such device, or it cannot be changed so.
pub fn set(target: impl AsRef<Path>, changes: &Changes) -> Result<DeviceInfo, Error> {
    let store = Store::open(Runtime::open()?)?;
    let device = resolve(&store, target.as_ref())?;
    if device.info.transport == Kind::Ublk {
        let request = Set { name: device.info.name, direct_io: changes.direct_io };
        let reply: OneDevice = client::call(store.runtime(), "Set", &request, &[])?;
        return Ok(reply.device);
    }
    if device.info.transport == Kind::Dm {
        return of_mapped(device.info, changes);
    }
    let mut new = device.clone();
    if let Some(wanted) = changes.direct_io {
        let (on, reason) = loop_::set_direct_io(device.info.number, wanted).map_err(Error::Device)?;
        (new.info.direct_io, new.info.direct_io_reason) = (on, reason);
    }
    store.update(&device, new.clone())?;
    Ok(new.info)
}

/// A device-mapper table has no page cache between device and image, so there is nothing to switch.
fn of_mapped(info: DeviceInfo, changes: &Changes) -> Result<DeviceInfo, Error> {
    if changes.direct_io == Some(DirectIo::Off) {
        return Err(Error::Remote {
            kind: ErrorKind::Unsupported,
            message: format!(
                "{} has no page cache to go through: device-mapper passes requests on",
                info.name
            ),
            hint: Some("attach it with --via ublk or --via loop".to_owned()),
        });
    }
    Ok(info)
}

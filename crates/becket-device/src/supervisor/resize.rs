//! A live device takes over a changed length of its image.
//! It never lets the kernel see bytes that the worker does not know yet, nor the other way round.

use std::os::fd::AsFd;

use becket_image::{Backing, BackingKind, Map};
use becket_uapi::ublk::UBLK_F_UPDATE_SIZE;

use super::driver::Driver;
use super::workers::Server;
use crate::{DeviceInfo, Error, ErrorKind};

/// Measures the image anew and has driver and worker follow; answers with the map, if it is another one.
///
/// A device that grows gets its map before the kernel hears of the size; one that shrinks afterwards.
pub(crate) fn resize(
    driver: &dyn Driver,
    server: &dyn Server,
    info: &DeviceInfo,
    map: &Map,
    files: &[Backing],
) -> Result<Option<Map>, Error> {
    let new = remeasured(info, map, files)?;
    if new.len() == map.len() {
        return Ok(None);
    }
    let id = info.number;
    let can = driver.info(id)?.is_some_and(|found| found.flags & UBLK_F_UPDATE_SIZE != 0);
    if !can {
        let message = format!("this kernel's ublk driver cannot resize {} while it lives", info.name);
        let hint = "Linux 6.16 can; until then detach it and attach it again, or use --via loop".to_owned();
        return Err(Error::Remote { kind: ErrorKind::Unsupported, message, hint: Some(hint) });
    }
    if new.len() > map.len() {
        server.remap(id, new.clone())?;
        if let Err(error) = driver.update_size(id, new.len()) {
            server.remap(id, map.clone())?;
            return Err(error);
        }
    } else {
        driver.update_size(id, new.len())?;
        server.remap(id, new.clone())?;
    }
    Ok(Some(new))
}

/// The map that the image's present length gives.
fn remeasured(info: &DeviceInfo, map: &Map, files: &[Backing]) -> Result<Map, Error> {
    let refuse = |message: String, hint: &str| Error::Remote {
        kind: ErrorKind::Unsupported,
        message,
        hint: Some(hint.to_owned()),
    };
    let (Some((0, offset, _)), [file]) = (map.single_range(), files) else {
        let message = format!("the size of {} is not that of one file", info.name);
        return Err(refuse(message, "detach it and attach it again"));
    };
    let size = match file.facts.kind {
        BackingKind::Regular => {
            let stat = rustix::fs::fstat(&file.buffered).map_err(Error::io("look at", &info.image))?;
            u64::try_from(stat.st_size).unwrap_or(0)
        }
        BackingKind::Block => becket_uapi::block::size64(file.buffered.as_fd())
            .map_err(Error::io("ask for the size of", &info.image))?,
    };
    let block = u64::from(info.block_size.max(1));
    let len = size.saturating_sub(offset).min(info.size_limit.unwrap_or(u64::MAX)) / block * block;
    if len == 0 {
        let message = format!("{} would have no block left", info.name);
        return Err(refuse(message, "make the image longer, or detach the device"));
    }
    Ok(Map::contiguous(0, offset, len))
}

#[cfg(test)]
#[path = "resize_tests.rs"]
mod tests;

//! Which device of becket's keeps an image from being opened, for the message. It is asked only after that
//! has failed: it may read images again, and locks none.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use becket_image::{Budget, Format, Identity, OpenOptions, locate, look, split};

use crate::client::list;
use crate::contract::{DeviceInfo, Error};
use crate::record::device::Device;
use crate::record::runtime::Runtime;
use crate::record::store::Store;

/// An error of becket-image, which names the device where one of becket's has the image at `image`.
pub fn blamed(image: &Path, error: becket_image::Error) -> Error {
    match Runtime::existing().map(|runtime| runtime.map(Store::open)) {
        Ok(Some(Ok(store))) => blame(&store, image, &OpenOptions::default(), error),
        _ => Error::Image(error),
    }
}

/// The same for an image that was to be opened so.
pub(crate) fn blame(store: &Store, image: &Path, how: &OpenOptions, error: becket_image::Error) -> Error {
    use becket_image::Error::{Claimed, InUse, UsedByKernel};
    // It may be the overlay, or a file below it.
    let held = match &error {
        InUse { path, .. } | UsedByKernel { path, .. } | Claimed { path } => path.clone(),
        _ => return Error::Image(error),
    };
    // What cannot be looked up leaves the message as it is.
    let Some((info, shares)) = holder_of(store, &held) else { return Error::Image(error) };
    let same = match shares {
        Shares::File if split(image).host == held => is_same(&info, image, how),
        Shares::File => info.spec.cow.is_some(),
        Shares::Disk | Shares::Below => false,
    };
    let title = info.spec.title();
    let part = (!same).then(|| match shares {
        Shares::Below => format!("{title}, which consists of it,"),
        _ if info.spec.offset == 0 => title,
        _ => format!("{title} from byte {}", info.spec.offset),
    });
    Error::Attached { image: held, part, name: info.name, device: info.device, source: Box::new(error) }
}

/// What a device has in common with a file that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shares {
    /// The file is its image, or its image is in the file.
    File,
    /// Its image is on the same disk.
    Disk,
    /// The file is below its image.
    Below,
}

/// The device of becket's that has the file. If several have it, the first of them; none if they have
/// different parts of it, because only the locks know which one is meant.
fn holder_of(store: &Store, held: &Path) -> Option<(DeviceInfo, Shares)> {
    let devices = list::devices(store).ok()?;
    let stat = fs::metadata(held).ok()?;
    let id = Identity { dev: stat.dev(), ino: stat.ino() };
    let disk = disk_of(held);
    let is_file = |device: &Device| (device.image.dev, device.image.ino) == (id.dev, id.ino);
    let is_disk = |device: &Device| disk.is_some() && disk_of(&split(&device.info.spec.image).host) == disk;
    let is_below = |device: &Device| {
        let format = device.format.as_deref().and_then(|format| format.parse().ok());
        consists_of(&device.info, format.unwrap_or_default(), id)
    };
    let first = |has: &dyn Fn(&Device) -> bool, shares| {
        let found: Vec<&DeviceInfo> =
            devices.iter().filter(|device| has(device)).map(|device| &device.info).collect();
        let part = |info: &DeviceInfo| (info.spec.image.clone(), info.spec.offset, info.size);
        let alike = found.windows(2).all(|pair| part(pair[0]) == part(pair[1]));
        found.first().filter(|_| alike).map(|info| ((*info).clone(), shares))
    };
    first(&is_file, Shares::File)
        .or_else(|| first(&is_disk, Shares::Disk))
        .or_else(|| first(&is_below, Shares::Below))
}

/// The number of the disk that a block device is, or is a partition of.
fn disk_of(path: &Path) -> Option<u64> {
    let stat = fs::metadata(path).ok().filter(|stat| stat.file_type().is_block_device())?;
    Some(becket_image::disk_of(stat.rdev()))
}

/// Whether the image of a device, or what lies below its overlay, consists of that file, too.
fn consists_of(info: &DeviceInfo, format: Format, id: Identity) -> bool {
    let budget = Budget::default();
    [Some(&info.spec.image), info.spec.cow.as_ref()]
        .into_iter()
        .flatten()
        .any(|image| look(image, format, &[], &budget).is_ok_and(|walk| walk.files.contains(&id)))
}

/// Whether an image that is opened so would be what the device shows.
fn is_same(info: &DeviceInfo, image: &Path, how: &OpenOptions) -> bool {
    let same_place = || locate(image).ok() == locate(&info.spec.image).ok();
    let len = || {
        let walk = look(image, how.format, &how.backing_dirs, &Budget::default()).ok()?;
        let len = walk.last().ok()?.image.len().saturating_sub(how.offset);
        Some(len.min(how.size_limit.unwrap_or(u64::MAX)))
    };
    let block = u64::from(info.spec.block_size.max(1));
    let same_len = || len().is_none_or(|len| len / block == info.size / block);
    how.offset == info.spec.offset && same_place() && same_len()
}

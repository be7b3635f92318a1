//! What a device is to become, and the image that it takes: opened as that device needs it.
//! It changes nothing.

use std::path::{Path, PathBuf};

use becket_image::{DirectIo, Extent, Format, OpenOptions, Opened, Place};

use crate::client::attach;
use crate::contract::{DeviceInfo, Error, ErrorKind};
use crate::record::device::Device;
use crate::record::store::Store;

/// What is to change; what is `None` stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Whether to go past the page cache.
    pub direct_io: Option<DirectIo>,
    /// Whether to refuse writes.
    pub read_only: Option<bool>,
    /// Most bytes of the device; `Some(None)` is as long as its image is.
    pub size_limit: Option<Option<u64>>,
    /// Another image in the place of the one that it has.
    pub image: Option<PathBuf>,
    /// The format of a new image, or of the device's own. For its own, `Auto` means the format of the attach.
    pub format: Format,
    /// Logical block size, which no device can change.
    pub block_size: Option<u32>,
    /// Proceed even if a mounted file system or a partition would be lost, or a program has the device open.
    pub force: bool,
    /// Take no locks that would exclude other programs from a new image.
    pub shared: bool,
    /// Parse the image whatever that costs.
    pub no_limits: bool,
}

impl Changes {
    /// The format of the image that is opened for the change: that of a new image, or else the format with
    /// which the device's own image was attached.
    pub(super) fn format_for(&self, device: &Device) -> Format {
        match (&self.image, self.format, &device.format) {
            // A newer becket may know formats that this one does not.
            (None, Format::Auto, Some(format)) => format.parse().unwrap_or_default(),
            (_, format, _) => format,
        }
    }
}

/// Opens the image that a device shall have, as that device needs it.
pub(super) fn open(store: &Store, device: &Device, path: &Path, changes: &Changes) -> Result<Opened, Error> {
    let info = &device.info;
    let how = OpenOptions {
        read_only: changes.read_only.unwrap_or(info.spec.read_only),
        partitions: true,
        direct_io: changes.direct_io.unwrap_or_default(),
        offset: info.spec.offset,
        size_limit: changes.size_limit.unwrap_or(info.spec.size_limit),
        block_size: Some(info.spec.block_size),
        shared: changes.shared,
        format: changes.format_for(device),
        no_limits: changes.no_limits,
        ..OpenOptions::default()
    };
    let opened = attach::open(store, path, &how)?;
    let writable = || match &opened.read_only_reason {
        Some(reason) => Err(Error::Failed {
            kind: ErrorKind::ReadOnly,
            message: format!("{} would have to be read-only: {reason}", path.display()),
            hint: Some("say so with --read-only on, or have the image made writable".to_owned()),
        }),
        None => Ok(()),
    };
    if changes.image.is_none() {
        writable()?;
    }
    // Memory and threads for either are given to a device's queues when they are made.
    let encoded = |extent: &Extent| matches!(extent.place, Place::Encoded { .. });
    if opened.map.extents().iter().any(encoded) {
        return Err(never_changed(info, path, "is encoded", "is decoded"));
    }
    if opened.grows {
        return Err(never_changed(info, path, "grows while it is written", "grows"));
    }
    writable()?;
    Ok(opened)
}

/// The other way round it is the supervisor who refuses.
fn never_changed(info: &DeviceInfo, path: &Path, what: &str, made: &str) -> Error {
    let shown = path.display();
    unsupported(
        format!(
            "{shown} {what}, and no device gets such an image while it lives: one that {made} is made so"
        ),
        info.anew("", path),
    )
}

pub(super) fn unsupported(message: String, hint: impl Into<String>) -> Error {
    Error::Failed { kind: ErrorKind::Unsupported, message, hint: Some(hint.into()) }
}

//! ublk for users without privileges: what of a device they do without, and whose its nodes are.
//! It gives no right that the kernel has not named the owner of.

use becket_transport::Kind;
use becket_transport::ublk::control::Control;
use becket_transport::ublk::privileged;

use crate::contract::shape;
use crate::contract::{AttachOptions, Error, ErrorKind, Partitions};

/// Gives the nodes of a ublk device to the unprivileged user who has added it. Other devices are left alone.
///
/// # Errors
/// There is no such device, or this process is not root's.
pub fn give_to_owner(number: u32) -> Result<(), Error> {
    Control::open().and_then(|control| control.give_to_owner(number)).map(drop).map_err(Error::Device)
}

/// Whether the partitions of an image become devices too, and if not the note about it.
///
/// # Errors
/// The user insists on partitions that cannot be had.
pub(crate) fn partitions(
    kind: Kind,
    options: &AttachOptions,
    there: bool,
) -> Result<(bool, Option<String>), Error> {
    const WHY: &str = "the kernel takes partitions from root only";
    match options.partitions {
        Partitions::Off => Ok((false, None)),
        _ if !shape::of(kind).partitions_need_root || privileged() || !there => Ok((true, None)),
        Partitions::On => Err(Error::Failed {
            kind: ErrorKind::Unsupported,
            message: format!("this user's ublk device cannot have partitions: {WHY}"),
            hint: Some(
                "attach one of them by its path, IMAGE/p1; or use --via fuse, where they are files"
                    .to_owned(),
            ),
        }),
        Partitions::Auto => Ok((
            false,
            Some(format!("its partitions are not devices: {WHY}; attach one by its path, IMAGE/p1")),
        )),
    }
}

//! Whether this process may use ublk, and why not, in words that a person can act on.
//! Never opens a device.

use std::path::Path;

use crate::{Error, Kind, module, sysfs};

/// Whether the kernel lets this process have devices with all that ublk can do. Other processes have devices
/// of their own, where udev gives them the nodes (`dist/91-becket-users.rules`): copied, without recovery,
/// and without partitions.
pub fn privileged() -> bool {
    let ours = rustix::thread::capabilities(None);
    ours.is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::SYS_ADMIN))
}

/// The device number of a miscellaneous device that the kernel has, whether its node is there or not.
pub(super) fn misc_dev(name: &str) -> Option<u64> {
    sysfs::dev_at(&Path::new("/sys/class/misc").join(name).join("dev"))
}

/// Why there is no ublk.
pub(super) fn unavailable() -> Error {
    module::missing(Kind::Ublk, "ublk_drv", "Linux 6.0 or newer with CONFIG_BLK_DEV_UBLK")
}

/// The rules by which udev gives users what is theirs, where they are installed on request only.
const RULES: &str = "91-becket-users.rules";

/// Why this user has no ublk although it is there.
pub(super) fn not_allowed() -> Error {
    Error::Unavailable {
        kind: Kind::Ublk,
        reason: "only root may open /dev/ublk-control here".to_owned(),
        fix: Some(format!(
            "sudo install -m 644 /usr/share/becket/{RULES} /etc/udev/rules.d && sudo udevadm control --reload && \
             sudo udevadm trigger /dev/ublk-control, which gives all users of this machine block devices of their own"
        )),
    }
}

/// Why a device that was added cannot be had.
pub(super) fn not_given(id: u32) -> Error {
    Error::Unavailable {
        kind: Kind::Ublk,
        reason: format!(
            "the kernel has added ublk device {id} for this user, but nobody gave it /dev/ublkc{id}: does udev run, and has \
             it all of {RULES}? The device cannot even be removed without"
        ),
        fix: None,
    }
}

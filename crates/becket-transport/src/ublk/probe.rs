//! Whether ublk works here, and if not why, in words that a person can act on.
//! It never loads a module and never adds a device.

use becket_image::Opened;
use becket_uapi::ublk as uapi;

use super::control::Control;
use crate::{Error, Kind, Probe, Transport};

/// The kernel's ublk driver with becket as its server.
#[derive(Debug, Clone, Copy)]
pub struct UblkTransport;

impl Transport for UblkTransport {
    fn kind(&self) -> Kind {
        Kind::Ublk
    }

    fn probe(&self) -> Probe {
        match Control::open().and_then(|control| control.features()) {
            Ok(0) => Probe {
                works: false,
                reason:
                    "this kernel's ublk driver is too old: it cannot say what it can do, as Linux 6.5 does"
                        .to_owned(),
                fix: None,
                details: Vec::new(),
            },
            Ok(features) => Probe {
                works: true,
                reason: match super::access::privileged() {
                    true => "the kernel's ublk driver is there".to_owned(),
                    false => {
                        "the kernel's ublk driver is there, and gives devices to users without privileges"
                            .to_owned()
                    }
                },
                fix: None,
                details: vec![("features".to_owned(), words(features))],
            },
            Err(error) => {
                let (reason, fix) = match error {
                    Error::Unavailable { reason, fix, .. } => (reason, fix),
                    other => (other.to_string(), other.hint()),
                };
                Probe { works: false, reason, fix, details: Vec::new() }
            }
        }
    }

    fn fits(&self, opened: &Opened) -> Result<(), String> {
        crate::serve::fits(opened)
    }
}

/// Feature flags by their names.
const NAMES: [(u64, &str); 21] = [
    (uapi::UBLK_F_SUPPORT_ZERO_COPY, "zero-copy"),
    (uapi::UBLK_F_URING_CMD_COMP_IN_TASK, "complete-in-task"),
    (uapi::UBLK_F_NEED_GET_DATA, "get-data"),
    (uapi::UBLK_F_USER_RECOVERY, "recovery"),
    (uapi::UBLK_F_USER_RECOVERY_REISSUE, "recovery-reissue"),
    (uapi::UBLK_F_UNPRIVILEGED_DEV, "unprivileged"),
    (uapi::UBLK_F_CMD_IOCTL_ENCODE, "ioctl-encoding"),
    (uapi::UBLK_F_USER_COPY, "user-copy"),
    (uapi::UBLK_F_ZONED, "zoned"),
    (uapi::UBLK_F_USER_RECOVERY_FAIL_IO, "recovery-fail-io"),
    (uapi::UBLK_F_UPDATE_SIZE, "update-size"),
    (uapi::UBLK_F_AUTO_BUF_REG, "auto-buffers"),
    (uapi::UBLK_F_QUIESCE, "quiesce"),
    (uapi::UBLK_F_PER_IO_DAEMON, "per-io-daemon"),
    (uapi::UBLK_F_BUF_REG_OFF_DAEMON, "off-daemon-buffers"),
    (uapi::UBLK_F_BATCH_IO, "batch"),
    (uapi::UBLK_F_INTEGRITY, "integrity"),
    (uapi::UBLK_F_SAFE_STOP_DEV, "safe-stop"),
    (uapi::UBLK_F_NO_AUTO_PART_SCAN, "no-partition-scan"),
    (uapi::UBLK_F_SHMEM_ZC, "shared-memory"),
    (uapi::UBLK_F_IO_DESC_SIZE, "descriptor-size"),
];

fn words(features: u64) -> String {
    let mut words: Vec<_> =
        NAMES.iter().filter(|(flag, _)| features & flag != 0).map(|(_, name)| (*name).to_owned()).collect();
    let unknown = NAMES.iter().fold(features, |rest, (flag, _)| rest & !flag);
    if unknown != 0 {
        words.push(format!("{unknown:#x}"));
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_named_and_unknown_ones_shown() {
        assert_eq!(words(uapi::UBLK_F_SUPPORT_ZERO_COPY | uapi::UBLK_F_USER_COPY), "zero-copy user-copy");
        assert_eq!(words(1 << 50), "0x4000000000000");
        assert_eq!(words(0), "");
    }

    #[test]
    fn a_probe_that_fails_says_what_to_do_or_names_the_kernel() {
        let probe = UblkTransport.probe();
        if probe.works {
            assert!(probe.details[0].1.contains("ioctl-encoding"), "{probe:?}");
        } else {
            assert!(probe.fix.is_some() || probe.reason.contains("kernel"), "{probe:?}");
        }
    }
}

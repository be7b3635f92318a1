//! Whether ublk works here, and if not why, in words that a person can act on.
//! It never loads a module and never adds a device.

use std::fs;
use std::path::Path;

use becket_image::Opened;
use becket_uapi::ublk as uapi;

use super::control::Control;
use crate::{Error, Kind, Probe, Transport, sysfs};

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
                mend: None,
                details: Vec::new(),
            },
            Ok(features) => Probe {
                works: true,
                reason: "the kernel's ublk driver is there".to_owned(),
                mend: None,
                details: vec![("features".to_owned(), words(features))],
            },
            Err(error) => {
                let (reason, mend) = match error {
                    Error::Unavailable { reason, mend, .. } => (reason, mend),
                    other => (other.to_string(), other.hint()),
                };
                Probe { works: false, reason, mend, details: Vec::new() }
            }
        }
    }

    fn fits(&self, _: &Opened) -> Result<(), String> {
        Ok(())
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

/// The device number of a miscellaneous device that the kernel has, whether its node is there or not.
pub(super) fn misc_dev(name: &str) -> Option<u64> {
    sysfs::dev_at(&Path::new("/sys/class/misc").join(name).join("dev"))
}

/// Why there is no ublk: the kernel has it as a module that is not loaded, or does not have it.
pub(super) fn unavailable() -> Error {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let (reason, mend) = judge(&release, Path::new("/lib/modules"));
    Error::Unavailable { kind: Kind::Ublk, reason, mend }
}

/// The judgement for one kernel, by what its modules' directory lists.
fn judge(release: &str, modules: &Path) -> (String, Option<String>) {
    let listed = |list: &str| {
        let list = fs::read_to_string(modules.join(release).join(list)).unwrap_or_default();
        // A line is a path, in modules.dep followed by a colon and what it needs.
        list.lines().any(|line| {
            let path = line.split(':').next().unwrap_or_default();
            path.rsplit('/')
                .next()
                .is_some_and(|file| file == "ublk_drv.ko" || file.starts_with("ublk_drv.ko."))
        })
    };
    if listed("modules.dep") {
        ("the ublk driver is not loaded".to_owned(), Some("modprobe ublk_drv".to_owned()))
    } else if listed("modules.builtin") {
        let reason = format!("this kernel ({release}) has ublk, but its control device is not visible here");
        (reason, None)
    } else {
        let reason = format!(
            "this kernel ({release}) has no ublk driver: it needs Linux 6.0 or newer with CONFIG_BLK_DEV_UBLK"
        );
        (reason, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_judgement_follows_the_lists_of_modules() {
        let directory = tempfile::tempdir().unwrap();
        let modules = directory.path();
        fs::create_dir(modules.join("6.12.1")).unwrap();
        let (reason, mend) = judge("6.12.1", modules);
        assert!(reason.contains("6.12.1") && reason.contains("CONFIG_BLK_DEV_UBLK"), "{reason}");
        assert_eq!(mend, None);

        let dep = modules.join("6.12.1/modules.dep");
        fs::write(&dep, "kernel/drivers/block/loop.ko.xz: kernel/x/ublk_drv.ko.xz\n").unwrap();
        assert_eq!(judge("6.12.1", modules).1, None, "what others need is not what is there");
        fs::write(&dep, "kernel/drivers/block/loop.ko.xz:\nkernel/drivers/block/ublk_drv.ko.xz:\n").unwrap();
        assert_eq!(judge("6.12.1", modules).1.as_deref(), Some("modprobe ublk_drv"));

        fs::remove_file(dep).unwrap();
        fs::write(modules.join("6.12.1/modules.builtin"), "kernel/drivers/block/ublk_drv.ko\n").unwrap();
        assert!(judge("6.12.1", modules).0.contains("not visible"));
    }

    #[test]
    fn features_are_named_and_unknown_ones_shown() {
        assert_eq!(words(uapi::UBLK_F_SUPPORT_ZERO_COPY | uapi::UBLK_F_USER_COPY), "zero-copy user-copy");
        assert_eq!(words(1 << 50), "0x4000000000000");
        assert_eq!(words(0), "");
    }

    #[test]
    fn a_probe_that_fails_says_what_to_do_or_names_the_kernel() {
        let probe = UblkTransport.probe();
        if !probe.works {
            assert!(probe.mend.is_some() || probe.reason.contains("kernel"), "{probe:?}");
        }
    }
}

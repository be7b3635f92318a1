//! What to do next when mount(8) refuses: by what it said, and by what blkid(8) finds on the device.
//! Nothing is mounted or written here.

use std::{
    path::Path,
    process::{Command, Stdio},
};

/// A mount that failed.
pub(super) struct Refused<'a> {
    /// What mount(8) said.
    pub(super) said: &'a str,
    /// What blkid(8) finds on the device, where it finds something.
    pub(super) found: Option<&'a str>,
    /// The image, and the directory, as they were given.
    pub(super) image: &'a str,
    pub(super) dir: &'a str,
    /// The type that was asked for, or `auto`.
    pub(super) fs_type: &'a str,
    /// Whether mount options were given.
    pub(super) options: bool,
}

/// The type of what is on a device, by blkid(8).
pub(super) fn found_on(node: &Path) -> Option<String> {
    let mut blkid = Command::new("blkid");
    blkid.args(["-p", "-o", "value", "-s", "TYPE", "--"]).arg(node);
    let output = blkid.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

impl Refused<'_> {
    /// Why, in a few words.
    pub(super) fn reason(&self) -> String {
        let said = self.said.trim_end_matches('.');
        match (said.starts_with("wrong fs type"), self.found) {
            (true, None) => "no file system is recognised in it".to_owned(),
            (true, Some(found)) if self.fs_type != "auto" && self.fs_type != found => {
                format!("it holds {found}, not {}", self.fs_type)
            }
            (true, Some(found)) => format!("the kernel refuses this {found} or its mount options"),
            _ => said.to_owned(),
        }
    }

    /// What to type next.
    pub(super) fn hint(&self) -> String {
        let Self { image, dir, .. } = self;
        let unknown =
            self.said.split("unknown filesystem type '").nth(1).and_then(|rest| rest.split('\'').next());
        let attach = format!("becket attach {image}, then");
        match unknown {
            Some("crypto_LUKS") => {
                return format!("it is encrypted: becket mount --key-file FILE {image} {dir}");
            }
            Some("LVM2_member") => {
                return format!(
                    "it is an LVM physical volume: becket ls {image} lists its volume group, and becket mount {image}/GROUP/VOLUME {dir} mounts one of its volumes"
                );
            }
            Some("linux_raid_member") => {
                return format!("it is part of a RAID: {attach} mdadm --assemble, and mount the array");
            }
            Some("swap" | "swsuspend") => return "it is swap space, which has no files".to_owned(),
            Some(name) if self.fs_type == "auto" || self.found == Some(name) => {
                return format!(
                    "this kernel has no driver for {name}: modprobe {name}, or a kernel that has it; to list \
                     files without it: becket ls {image}"
                );
            }
            Some(_) => return "omit --type: the file system is then detected".to_owned(),
            None => {}
        }
        if self.said.contains("read-only") {
            return format!(
                "a file system that was not unmounted cleanly replays its journal first, which writes: omit -r; or \
                 keep the image as it is: becket mount --cow FILE {image} {dir}; or skip the journal: -o noload \
                 (ext3, ext4), -o norecovery (xfs)"
            );
        }
        match self.found {
            None => format!("see what is in it: becket inspect {image}"),
            Some(found) if self.fs_type != "auto" && self.fs_type != found => {
                "omit --type: the file system is then detected".to_owned()
            }
            Some(_) if self.options => {
                "check --options; the kernel's log has the reason: dmesg | tail".to_owned()
            }
            Some(found) => {
                format!(
                    "the kernel's log has the reason: dmesg | tail; a damaged one: becket run {image} -- fsck.{found} {{}}"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRONG: &str = "wrong fs type, bad option, bad superblock on /dev/loop2, missing codepage.";

    #[test]
    fn each_refusal_has_a_reason_and_a_next_step_of_its_own() {
        let vfat = "unknown filesystem type 'vfat'.";
        let luks = "unknown filesystem type 'crypto_LUKS'.";
        for (said, found, fs_type, options, reason, hint) in [
            (vfat, Some("vfat"), "auto", false, "unknown filesystem type 'vfat'", "modprobe vfat"),
            ("unknown filesystem type 'ext9'.", Some("ext4"), "ext9", false, "unknown", "omit --type"),
            (luks, Some("crypto_LUKS"), "auto", false, "crypto_LUKS", "mount --key-file FILE"),
            (
                "unknown filesystem type 'LVM2_member'.",
                None,
                "auto",
                false,
                "LVM2_member",
                "a.img/GROUP/VOLUME",
            ),
            ("unknown filesystem type 'swap'.", None, "auto", false, "swap", "no files"),
            ("cannot mount /dev/loop2 read-only.", Some("ext4"), "auto", false, "read-only", "-o noload"),
            (WRONG, None, "auto", false, "no file system is recognised in it", "becket inspect a.img"),
            (WRONG, Some("vfat"), "ext4", false, "it holds vfat, not ext4", "omit --type"),
            (WRONG, Some("ext4"), "auto", true, "refuses this ext4", "check --options"),
            (WRONG, Some("ext4"), "ext4", false, "refuses this ext4", "fsck.ext4"),
        ] {
            let refused = Refused { said, found, image: "a.img", dir: "/mnt", fs_type, options };
            assert!(refused.reason().contains(reason), "{said}: {}", refused.reason());
            assert!(refused.hint().contains(hint), "{said}: {}", refused.hint());
        }
    }
}

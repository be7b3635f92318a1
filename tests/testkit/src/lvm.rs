//! Physical volumes on loop devices of the kernel, and LVM with eyes for these alone.
//! It never activates a volume, needs no device-mapper, and detaches its devices when dropped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image::random_bytes;
use crate::{require_root, require_tools, skip, tool};

/// Bytes of each physical volume.
pub const PHYSICAL: u64 = 64 << 20;

/// Files with physical volumes, attached.
#[derive(Debug)]
pub struct Lab {
    dir: PathBuf,
    devices: Vec<String>,
}

impl Lab {
    /// As many files in `dir`, full of random bytes. Nothing, and test `name` is skipped, when this machine
    /// cannot.
    #[must_use]
    pub fn new(name: &str, dir: &Path, count: usize) -> Option<Lab> {
        if !require_root(name) || !require_tools(name, &["lvm"]) {
            return None;
        }
        let mut lab = Lab { dir: dir.to_owned(), devices: Vec::new() };
        for number in 0..count {
            let path = lab.file(number);
            fs::write(&path, random_bytes(PHYSICAL as usize, 7 + number as u64)).unwrap();
            let output = Command::new("losetup").args(["--find", "--show"]).arg(&path).output().unwrap();
            if !output.status.success() {
                skip(
                    name,
                    &format!("needs loop devices: {}", String::from_utf8_lossy(&output.stderr).trim()),
                );
                return None;
            }
            lab.devices.push(String::from_utf8_lossy(&output.stdout).trim().to_owned());
        }
        let seen: String = lab.devices.iter().map(|device| format!("\"a|^{device}$|\", ")).collect();
        let config = format!(
            "devices {{ use_devicesfile = 0\n filter = [ {seen}\"r|.*|\" ]\n sysfs_scan = 0\n hints = \"none\" }}\n\
             global {{ use_lvmpolld = 0\n event_activation = 0\n locking_dir = \"{}\" }}\n\
             activation {{ udev_sync = 0\n udev_rules = 0\n monitoring = 0 }}\n\
             backup {{ backup = 0\n archive = 0 }}\n",
            dir.display()
        );
        fs::write(dir.join("lvm.conf"), config).unwrap();
        Some(lab)
    }

    /// The file of a physical volume.
    #[must_use]
    pub fn file(&self, number: usize) -> PathBuf {
        self.dir.join(format!("pv{number}.img"))
    }

    /// Its device.
    #[must_use]
    pub fn device(&self, number: usize) -> &str {
        &self.devices[number]
    }

    /// Runs a command of LVM; what it printed.
    pub fn lvm(&self, line: &str) -> String {
        let mut words = line.split_whitespace();
        let mut program = Command::new("/usr/sbin/lvm");
        program.env("LVM_SYSTEM_DIR", &self.dir).env("LVM_SUPPRESS_FD_WARNINGS", "1").args(words.next());
        tool(program.args(["--driverloaded", "n"]).args(words))
    }

    /// Makes a volume that is never active, and whose first bytes stay as they are.
    pub fn create(&self, line: &str) {
        self.lvm(&format!("lvcreate -q -an -Zn -Wn -y {line}"));
    }

    /// The bytes of a physical volume.
    #[must_use]
    pub fn bytes(&self, number: usize) -> Vec<u8> {
        // What LVM wrote is in the device's cache.
        tool(Command::new("blockdev").args(["--flushbufs", self.device(number)]));
        fs::read(self.file(number)).unwrap()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for device in &self.devices {
            let _ = Command::new("losetup").args(["--detach", device]).status();
        }
    }
}

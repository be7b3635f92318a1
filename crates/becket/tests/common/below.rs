//! What tests stand devices on: loop devices, and tables of device-mapper's.
//! Each goes at its end, so it must be dropped after what stands on it.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use becket_testkit::tool;

/// A loop device.
#[derive(Debug)]
pub(crate) struct Below(pub(crate) PathBuf);

impl Below {
    pub(crate) fn new(image: &Path, more: &[&str]) -> Below {
        let node = tool(Command::new("losetup").args(["--find", "--show"]).args(more).arg(image));
        Below(node.trim().into())
    }

    pub(crate) fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        undo(Command::new("losetup").arg("--detach").arg(&self.0));
    }
}

/// A block device of device-mapper's.
#[derive(Debug)]
pub(crate) struct Mapped(String);

impl Mapped {
    /// `word` is for people who look at what a test has left.
    pub(crate) fn new(word: &str, table: &str) -> Mapped {
        let mapped = Mapped(format!("becket-test-{word}-{}", std::process::id()));
        mapped.dmsetup("create", &["--noudevsync", "--table", table]);
        mapped
    }

    pub(crate) fn device(&self) -> PathBuf {
        let named = self.dmsetup("info", &["-c", "--noheadings", "-o", "blkdevname"]);
        Path::new("/dev").join(named.trim())
    }

    /// Has dmsetup do something to it; what that says.
    pub(crate) fn dmsetup(&self, what: &str, how: &[&str]) -> String {
        tool(Command::new("dmsetup").args([what, &self.0]).args(how))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        undo(Command::new("dmsetup").args(["remove", &self.0, "--noudevsync", "--retry"]));
    }
}

/// Takes back what a test has set up. One that has failed may have left something on it.
pub(crate) fn undo(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success() || std::thread::panicking(), "{command:?}: {output:?}");
}

//! How devices are attached: by becket as a user calls it, or by the kernel's own `losetup`, against which
//! the suite proves itself.
//! Must never use becket's crates: the command and its output are under test.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use clap::ValueEnum;
use serde::Deserialize;

use crate::command;
use crate::sysfs::Sysfs;

/// The transports that the suite knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Via {
    /// A user-space block device.
    Ublk,
    /// The kernel's loop driver.
    Loop,
    /// The kernel's device-mapper.
    Dm,
    /// A file of a user-space file system, with a loop device over it.
    Fuse,
}

impl Via {
    /// As the command line spells it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ublk => "ublk",
            Self::Loop => "loop",
            Self::Dm => "dm",
            Self::Fuse => "fuse",
        }
    }
}

/// What to attach with; everything else is becket's default.
#[derive(Debug, Clone, Default)]
pub(crate) struct Attach {
    /// Refuse writes.
    pub(crate) read_only: bool,
    /// First byte of the image that the device shows.
    pub(crate) offset: u64,
    /// How many bytes of the image the device shows at most.
    pub(crate) size_limit: Option<u64>,
    /// Logical block size in bytes.
    pub(crate) block_size: Option<u32>,
    /// `on` or `off`; becket's default is `auto`.
    pub(crate) direct_io: Option<&'static str>,
}

/// A device as `attach --json` and `list --json` describe it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Info {
    /// Its name, if it has one.
    #[serde(default)]
    pub(crate) name: Option<String>,
    /// The kernel's node.
    pub(crate) device: PathBuf,
    /// Its size in bytes.
    pub(crate) size: u64,
    /// Whether it refuses writes.
    pub(crate) read_only: bool,
    /// Whether it bypasses the page cache.
    #[serde(default)]
    pub(crate) direct_io: bool,
    /// Logical block size in bytes.
    pub(crate) block_size: u32,
    /// Physical block size in bytes.
    pub(crate) physical_block_size: u32,
    /// The image, absolute.
    pub(crate) image: PathBuf,
    /// The partitions whose nodes exist.
    #[serde(default)]
    pub(crate) partitions: Vec<PartitionInfo>,
    /// The supervisor's process, where the transport needs one.
    #[serde(default)]
    pub(crate) server_pid: Option<u32>,
    /// The worker's process, where the transport needs one.
    #[serde(default)]
    pub(crate) worker_pid: Option<u32>,
}

/// A partition of a device.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PartitionInfo {
    /// Its number in the table.
    pub(crate) number: u32,
    /// Its node.
    pub(crate) device: PathBuf,
    /// First byte on the disk.
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) size: u64,
}

/// A program that attaches images.
pub(crate) trait Driver: Send + Sync {
    /// Whether this is becket, which promises more than the kernel's tool.
    fn is_becket(&self) -> bool;
    /// Attaches `image`.
    fn attach(&self, image: &Path, options: &Attach) -> Result<Info>;
    /// Detaches what `target` (a node) names.
    fn detach(&self, target: &Path) -> Result<()>;
    /// Detaches as soon as its last user lets go: for cleaning up after a test that failed.
    fn abandon(&self, target: &Path) -> Result<()>;
    /// All devices.
    fn list(&self) -> Result<Vec<Info>>;
    /// Takes over a changed size of the image.
    fn refresh(&self, target: &Path) -> Result<()>;
    /// Switches direct I/O `on`, `off`, or lets the program choose (`auto`), while the device lives.
    fn set_direct_io(&self, target: &Path, mode: &str) -> Result<()>;
    /// Changes a device while it lives, in becket's words.
    fn set(&self, target: &Path, words: &[&str]) -> Result<()>;
    /// Where the program keeps one record a device, if it does.
    fn records(&self) -> Option<PathBuf>;
}

/// The `becket` command.
pub(crate) struct Becket {
    /// The binary.
    pub(crate) program: PathBuf,
    /// The transport to ask for.
    pub(crate) via: Via,
    /// `copy` or `zero-copy`; becket chooses when it is not given.
    pub(crate) mode: Option<String>,
    /// Where it keeps its state, so that other users' devices are not touched.
    pub(crate) runtime: PathBuf,
}

impl Becket {
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(words).env("BECKET_RUNTIME_DIR", &self.runtime);
        command
    }
}

impl Becket {
    /// Exports `image` over NBD at a socket; its URI.
    pub(crate) fn export(&self, image: &Path, options: &Attach, name: &str, socket: &Path) -> Result<String> {
        let address = format!("unix:{}", socket.display());
        let mut command = self.command(&["export", "--nbd", &address, "--name", name]);
        if let Some(mode) = options.direct_io {
            command.args(["--direct-io", mode]);
        }
        shared_flags(&mut command, options, "--size-limit", "--block-size");
        Ok(command::succeed(with(command, image))?.stdout.trim().to_owned())
    }
}

impl Driver for Becket {
    fn is_becket(&self) -> bool {
        true
    }

    fn attach(&self, image: &Path, options: &Attach) -> Result<Info> {
        let mut command = self.command(&["attach", "--json", "--via", self.via.name()]);
        if let Some(mode) = &self.mode {
            command.args(["--mode", mode]);
        }
        if let Some(mode) = options.direct_io {
            command.args(["--direct-io", mode]);
        }
        shared_flags(&mut command, options, "--size-limit", "--block-size");
        let output = command::succeed(with(command, image))?;
        let devices = devices_in(&output.stdout)?;
        devices.into_iter().next().with_context(|| format!("attach --json said: {:?}", output.stdout))
    }

    fn detach(&self, target: &Path) -> Result<()> {
        command::succeed(with(self.command(&["detach"]), target)).map(drop)
    }

    fn abandon(&self, target: &Path) -> Result<()> {
        command::succeed(with(self.command(&["detach", "--lazy"]), target)).map(drop)
    }

    fn list(&self) -> Result<Vec<Info>> {
        devices_in(&command::succeed(self.command(&["list", "--json"]))?.stdout)
    }

    fn refresh(&self, target: &Path) -> Result<()> {
        command::succeed(with(self.command(&["refresh"]), target)).map(drop)
    }

    fn set_direct_io(&self, target: &Path, mode: &str) -> Result<()> {
        command::succeed(with(self.command(&["set", "--direct-io", mode]), target)).map(drop)
    }

    fn set(&self, target: &Path, words: &[&str]) -> Result<()> {
        let mut command = self.command(&["set"]);
        command.args(words);
        command::succeed(with(command, target)).map(drop)
    }

    fn records(&self) -> Option<PathBuf> {
        Some(self.runtime.join("devices"))
    }
}

/// The devices in what a command printed.
fn devices_in(text: &str) -> Result<Vec<Info>> {
    #[derive(Deserialize)]
    struct Answer {
        devices: Vec<Info>,
    }
    let answer: Answer =
        serde_json::from_str(text).with_context(|| format!("not a list of devices: {text:?}"))?;
    Ok(answer.devices)
}

/// util-linux's `losetup`, from which the suite learns whether its own expectations are right.
pub(crate) struct Losetup;

impl Driver for Losetup {
    fn is_becket(&self) -> bool {
        false
    }

    fn attach(&self, image: &Path, options: &Attach) -> Result<Info> {
        let mut command = command::command(&["losetup", "--find", "--show", "--partscan"]);
        if options.direct_io == Some("on") {
            command.arg("--direct-io=on");
        }
        shared_flags(&mut command, options, "--sizelimit", "--sector-size");
        let output = command::succeed(with(command, image))?;
        let node = Path::new(output.stdout.trim());
        // For kernels that read no partition tables themselves; it fails if there is no table or nothing to
        // add.
        let _ = command::run(with(command::command(&["partx", "--add"]), node));
        describe(node, image)
    }

    fn detach(&self, target: &Path) -> Result<()> {
        command::succeed(with(command::command(&["losetup", "--detach"]), target)).map(drop)
    }

    fn abandon(&self, target: &Path) -> Result<()> {
        // The kernel's tool never refuses a device in use.
        self.detach(target)
    }

    fn list(&self) -> Result<Vec<Info>> {
        let output = command::sh(&["losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE"])?;
        let lines = output.stdout.lines().filter_map(|line| line.trim().split_once(char::is_whitespace));
        // A device of another process may vanish between the listing and this check.
        Ok(lines
            .filter_map(|(node, image)| describe(Path::new(node), Path::new(image.trim())).ok())
            .collect())
    }

    fn refresh(&self, target: &Path) -> Result<()> {
        command::succeed(with(command::command(&["losetup", "--set-capacity"]), target)).map(drop)
    }

    fn set_direct_io(&self, target: &Path, mode: &str) -> Result<()> {
        let flag = if mode == "off" { "--direct-io=off" } else { "--direct-io=on" };
        command::succeed(with(command::command(&["losetup", flag]), target)).map(drop)
    }

    fn set(&self, _: &Path, words: &[&str]) -> Result<()> {
        Err(anyhow!("losetup knows no {words:?}"))
    }

    fn records(&self) -> Option<PathBuf> {
        None
    }
}

/// The flags that both programs spell alike, and two that they do not.
fn shared_flags(command: &mut Command, options: &Attach, size_limit: &str, block_size: &str) {
    if options.read_only {
        command.arg("--read-only");
    }
    if options.offset != 0 {
        command.arg("--offset").arg(options.offset.to_string());
    }
    if let Some(bytes) = options.size_limit {
        command.arg(size_limit).arg(bytes.to_string());
    }
    if let Some(bytes) = options.block_size {
        command.arg(block_size).arg(bytes.to_string());
    }
}

fn with(mut command: Command, path: &Path) -> Command {
    command.arg(OsString::from(path));
    command
}

/// What sysfs says of a loop device, in becket's words.
fn describe(node: &Path, image: &Path) -> Result<Info> {
    let disk = Sysfs::of(node)?;
    let mut partitions: Vec<PartitionInfo> = disk
        .partitions()?
        .into_iter()
        .map(|(number, start, size)| PartitionInfo {
            number,
            device: PathBuf::from(format!("{}p{number}", node.display())),
            start,
            size,
        })
        .collect();
    partitions.sort_by_key(|partition| partition.number);
    let block = |name: &str| -> Result<u32> {
        u32::try_from(disk.number(name)?).map_err(|_| anyhow!("{name} is out of range"))
    };
    Ok(Info {
        name: None,
        device: node.to_owned(),
        size: disk.size()?,
        read_only: disk.number("ro")? != 0,
        direct_io: disk.number("loop/dio")? != 0,
        block_size: block("queue/logical_block_size")?,
        physical_block_size: block("queue/physical_block_size")?,
        image: image.to_owned(),
        partitions,
        server_pid: None,
        worker_pid: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: &str = r#"{"device": "/dev/loop3", "size": 512, "read_only": false, "block_size": 512,
        "physical_block_size": 4096, "image": "/a", "transport": "loop", "server_pid": null}"#;

    #[test]
    fn devices_are_read_and_nothing_is_guessed() {
        let devices = devices_in(&format!("{{\"devices\": [{DEVICE}], \"errors\": []}}")).unwrap();
        assert_eq!(devices.len(), 1);
        assert_eq!(devices[0].device, Path::new("/dev/loop3"));
        assert_eq!(devices_in(r#"{"devices": []}"#).unwrap().len(), 0);
        for text in ["", "{}", "/dev/loop3", DEVICE, r#"{"devices": [{"device": "/dev/loop3"}]}"#] {
            assert!(devices_in(text).is_err(), "{text}");
        }
    }
}

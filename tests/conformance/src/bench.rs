//! What one test works on: a folder of its own, a seed, a driver, and guards that put everything back.
//! Must never leave a device, a mount or a file behind, however the test ends.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::bytes;
use crate::command;
use crate::driver::{Attach, Driver, Info, Via};
use crate::sysfs::Sysfs;

/// The reason why a test could not run here.
#[derive(Debug)]
pub(crate) struct Skip(pub(crate) String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// Ends a test as ignored.
pub(crate) fn skip<T>(why: impl Into<String>) -> Result<T> {
    Err(Skip(why.into()).into())
}

/// What a test is given.
pub(crate) struct Bench {
    /// Who attaches.
    pub(crate) driver: Arc<dyn Driver>,
    /// By which transport.
    pub(crate) via: Via,
    /// A folder of this test's own.
    pub(crate) dir: PathBuf,
    /// Decides everything random.
    pub(crate) seed: u64,
    /// How many operations the random tests do.
    pub(crate) ops: u64,
}

impl Bench {
    /// A sparse image of `len` bytes.
    pub(crate) fn image(&self, name: &str, len: u64) -> Result<PathBuf> {
        let path = self.dir.join(name);
        let file = File::create(&path).with_context(|| format!("{}", path.display()))?;
        file.set_len(len)?;
        Ok(path)
    }

    /// An image that holds exactly these bytes.
    pub(crate) fn image_of(&self, name: &str, content: &[u8]) -> Result<PathBuf> {
        let path = self.dir.join(name);
        fs::write(&path, content).with_context(|| format!("{}", path.display()))?;
        Ok(path)
    }

    /// Attaches an image until the guard goes.
    pub(crate) fn attach(&self, image: &Path, options: &Attach) -> Result<Device> {
        let info = self.driver.attach(image, options)?;
        let device = Device { driver: Arc::clone(&self.driver), attached: true, info };
        let kind = fs::metadata(device.path()).with_context(|| format!("{}", device.path().display()))?;
        ensure!(kind.file_type().is_block_device(), "{} is not a block device", device.path().display());
        Ok(device)
    }

    /// Whether the scratch file system can punch holes; a device can free space only where it does.
    pub(crate) fn can_punch(&self) -> Result<bool> {
        use rustix::fs::FallocateFlags;
        let path = self.image_of("punch", &[1; 8192])?;
        let file = open(&path, Access::Buffered)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let answer = rustix::fs::fallocate(&file, flags, 0, 4096).is_ok();
        fs::remove_file(path)?;
        Ok(answer)
    }
}

/// An attached image; detached when dropped.
pub(crate) struct Device {
    driver: Arc<dyn Driver>,
    attached: bool,
    /// What attach said.
    pub(crate) info: Info,
}

impl Device {
    /// The kernel's node.
    pub(crate) fn path(&self) -> &Path {
        &self.info.device
    }

    /// The node as text, for commands.
    pub(crate) fn name(&self) -> String {
        self.info.device.display().to_string()
    }

    /// Opens the device.
    pub(crate) fn open(&self, access: Access) -> Result<File> {
        open(self.path(), access)
    }

    /// Its folder in sysfs.
    pub(crate) fn sysfs(&self) -> Result<Sysfs> {
        Sysfs::of(self.path())
    }

    /// Detaches, and fails if that fails: because the test still has it open, for example.
    pub(crate) fn detach(mut self) -> Result<()> {
        self.driver.detach(self.path())?;
        self.attached = false;
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.attached
            && let Err(error) = self.driver.abandon(self.path())
        {
            eprintln!("warning: {} stays attached: {error:#}", self.path().display());
        }
    }
}

/// How to open a file or device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Reading and writing through the page cache.
    Buffered,
    /// Reading and writing without the page cache.
    Direct,
    /// As `Direct`, and every write is durable when it returns (FUA).
    Durable,
    /// Only reading, through the page cache.
    Read,
    /// Only reading, without the page cache.
    ReadDirect,
}

/// Opens with one of the ways above.
pub(crate) fn open(path: &Path, access: Access) -> Result<File> {
    let (write, flags) = match access {
        Access::Buffered => (true, 0),
        Access::Direct => (true, libc::O_DIRECT),
        Access::Durable => (true, libc::O_DIRECT | libc::O_DSYNC),
        Access::Read => (false, 0),
        Access::ReadDirect => (false, libc::O_DIRECT),
    };
    let mut options = OpenOptions::new();
    options.read(true).write(write).custom_flags(flags);
    options.open(path).with_context(|| format!("{}: open {access:?}", path.display()))
}

/// Bytes of the file system that a file occupies.
pub(crate) fn allocated(path: &Path) -> Result<u64> {
    // Delayed allocation shows only after write-back.
    File::open(path)?.sync_all()?;
    Ok(fs::metadata(path)?.blocks() * 512)
}

/// Compares a range of a file or device with what it should be.
pub(crate) fn verify(file: &File, at: u64, expected: &[u8]) -> Result<()> {
    let mut buffer = bytes::Buffer::new(1 << 20);
    let mut position = at;
    for part in expected.chunks(1 << 20) {
        let found = &mut buffer.as_mut()[..part.len()];
        file.read_exact_at(found, position).with_context(|| format!("read {} at {position}", part.len()))?;
        bytes::compare(found, part, position)?;
        position += part.len() as u64;
    }
    Ok(())
}

/// Waits until something is so; the kernel takes some things away a moment after it said so.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) -> Result<()> {
    let started = Instant::now();
    while !condition() {
        if started.elapsed() > Duration::from_secs(10) {
            bail!("waited 10 s in vain until {what}");
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// A mounted file system; unmounted when dropped.
pub(crate) struct Mount {
    /// Where it is mounted.
    pub(crate) dir: PathBuf,
    mounted: bool,
}

impl Mount {
    /// Mounts `source` on a new folder `dir`.
    pub(crate) fn new(source: &Path, dir: PathBuf, kind: &str, data: Option<&str>) -> Result<Self> {
        fs::create_dir_all(&dir)?;
        let data = data.map(std::ffi::CString::new).transpose()?;
        rustix::mount::mount(source, &dir, kind, MountFlags::empty(), data.as_deref())
            .with_context(|| format!("mount -t {kind} {} {}", source.display(), dir.display()))?;
        Ok(Self { dir, mounted: true })
    }

    /// Unmounts, and fails when that fails.
    pub(crate) fn unmount(mut self) -> Result<()> {
        self.mounted = false;
        rustix::mount::unmount(&self.dir, UnmountFlags::empty())
            .with_context(|| format!("umount {}", self.dir.display()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.mounted && rustix::mount::unmount(&self.dir, UnmountFlags::empty()).is_err() {
            // Something still works in there; the mount goes with its last user.
            let _ = rustix::mount::unmount(&self.dir, UnmountFlags::DETACH);
        }
    }
}

/// A loop device of the kernel, made without the driver under test: a block device to stand on.
pub(crate) struct PlainLoop(pub(crate) PathBuf);

impl PlainLoop {
    /// Attaches `image` with `losetup`.
    pub(crate) fn new(image: &Path) -> Result<Self> {
        Self::with_blocks(image, None)
    }

    /// The same with logical blocks of that many bytes.
    pub(crate) fn with_blocks(image: &Path, block_size: Option<u32>) -> Result<Self> {
        let mut losetup = command::command(&["losetup", "--find", "--show"]);
        losetup.args(block_size.map(|bytes| format!("--sector-size={bytes}")));
        losetup.arg(image);
        Ok(Self(PathBuf::from(command::succeed(losetup)?.stdout.trim())))
    }
}

impl Drop for PlainLoop {
    fn drop(&mut self) {
        let mut losetup = command::command(&["losetup", "--detach"]);
        losetup.arg(&self.0);
        if let Err(error) = command::succeed(losetup) {
            eprintln!("warning: {} stays attached: {error:#}", self.0.display());
        }
    }
}

/// Whether this kernel has (or can load) a driver, and `present` then says yes.
pub(crate) fn load(module: &str, present: impl Fn() -> bool) -> bool {
    // Built-in drivers need no modprobe, and some machines have none: only the outcome counts.
    present() || {
        let _ = command::sh(&["modprobe", module]);
        present()
    }
}

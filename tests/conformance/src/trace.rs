//! Watches a backing file in the kernel: which fsyncs reached it, from any process.
//! Must never disturb other people's tracing: everything happens in an instance of its own.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::bench::{Bench, Mount, skip};

/// f_type of ext2, ext3 and ext4.
const EXT4: i64 = 0xef53;

/// A running observation; it ends when dropped.
pub(crate) struct Trace {
    instance: PathBuf,
    /// Held, not read: tracefs is unmounted again after the instance went.
    _mount: Option<Mount>,
}

impl Trace {
    /// Watches `file`, which must lie on ext4: its trace points see fsyncs of system calls, of io_uring
    /// and of the kernel's loop workers alike.
    pub(crate) fn of(bench: &Bench, file: &Path) -> Result<Self> {
        // Its type differs between architectures.
        #[allow(clippy::unnecessary_cast)]
        let kind = rustix::fs::statfs(file)?.f_type as i64;
        if kind != EXT4 {
            return skip("the scratch folder is not on ext4, whose trace points show fsyncs");
        }
        let usual = PathBuf::from("/sys/kernel/tracing");
        let (root, mount) = if usual.join("instances").exists() {
            (usual, None)
        } else {
            match Mount::new(Path::new("tracefs"), bench.dir.join("tracing"), "tracefs", None) {
                Ok(mount) => (mount.dir.clone(), Some(mount)),
                Err(error) => return skip(format!("no tracefs here: {error:#}")),
            }
        };
        let instance = root.join("instances").join(format!("becket-conformance-{}", std::process::id()));
        if let Err(error) = fs::create_dir(&instance) {
            return skip(format!("cannot trace here: {}: {error}", instance.display()));
        }
        let trace = Self { instance, _mount: mount };
        let meta = fs::metadata(file)?;
        // The kernel's own dev_t: 12 bits of major above 20 bits of minor.
        let dev = u64::from(rustix::fs::major(meta.dev())) << 20 | u64::from(rustix::fs::minor(meta.dev()));
        let event = trace.instance.join("events/ext4/ext4_sync_file_exit");
        if !event.exists() {
            return skip("this kernel's ext4 has no trace point for fsync");
        }
        trace.write(
            "events/ext4/ext4_sync_file_exit/filter",
            &format!("ino == {} && dev == {dev}", meta.ino()),
        )?;
        trace.write("events/ext4/ext4_sync_file_exit/enable", "1")?;
        trace.write("tracing_on", "1")?;
        Ok(trace)
    }

    /// How many fsyncs and fdatasyncs of the file have succeeded so far.
    pub(crate) fn syncs(&self) -> Result<usize> {
        let path = self.instance.join("trace");
        let text = fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        Ok(text
            .lines()
            .filter(|line| line.contains("ext4_sync_file_exit:") && line.ends_with("ret 0"))
            .count())
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.instance.join(file);
        fs::write(&path, value).with_context(|| format!("{}", path.display()))
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.instance) {
            eprintln!("warning: {} stays: {error}", self.instance.display());
        }
    }
}

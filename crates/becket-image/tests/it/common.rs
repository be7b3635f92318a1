//! What the tests of opening share: images, loop devices, other users.
//! It never leaves a device, mount or file behind.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use becket_image::{Budget, Error, FileSource, Format, OpenOptions, Opened, Source, Walk};
pub(crate) use becket_testkit::skip;
use tempfile::TempDir;

/// A directory of the test's own, and its turn: while it is held no other test of this kind runs.
///
/// A lock belongs to a description, and a process that is just being spawned holds copies of all of them
/// until it executes its program. Tests that spawn and tests that close and open again would meet by
/// accident.
pub(crate) struct Dir {
    dir: TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// Waits for this test's turn.
pub(crate) fn dir() -> Dir {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Dir { dir: tempfile::tempdir().unwrap(), _turn: turn }
}

impl Dir {
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// A file of `len` zero bytes.
pub(crate) fn file(dir: &Path, name: &str, len: u64) -> PathBuf {
    let path = dir.join(name);
    File::create(&path).unwrap().set_len(len).unwrap();
    path
}

/// Opens with the defaults.
pub(crate) fn open(path: &Path) -> Result<Opened, Error> {
    becket_image::open(path, &OpenOptions::default())
}

/// Opens for reading.
pub(crate) fn open_read_only(path: &Path) -> Result<Opened, Error> {
    becket_image::open(path, &OpenOptions { read_only: true, ..OpenOptions::default() })
}

/// Whether `program` can be started.
pub(crate) fn have(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Runs a program that must succeed; its trimmed output.
pub(crate) fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A loop device of the kernel, detached when dropped.
pub(crate) struct LoopDevice(pub(crate) PathBuf);

impl LoopDevice {
    /// Attaches `image`; the reason when this machine cannot.
    pub(crate) fn attach(image: &Path, options: &[&str]) -> Result<LoopDevice, String> {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .args(options)
            .arg(image)
            .output()
            .map_err(|error| format!("losetup: {error}"))?;
        if output.status.success() {
            Ok(LoopDevice(String::from_utf8(output.stdout).unwrap().trim().into()))
        } else {
            Err(format!("losetup: {}", String::from_utf8_lossy(&output.stderr).trim()))
        }
    }

    /// As in `loop7`.
    pub(crate) fn name(&self) -> &str {
        self.0.file_name().unwrap().to_str().unwrap()
    }

    /// A number that sysfs shows below the device's directory.
    pub(crate) fn sysfs(&self, file: &str) -> u64 {
        let path = Path::new("/sys/block").join(self.name()).join(file);
        std::fs::read_to_string(&path).unwrap().trim().parse().unwrap()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// A mount, taken away when dropped.
pub(crate) struct Mount(pub(crate) PathBuf);

impl Mount {
    /// Runs `mount` with these arguments and then `dir`; the reason when this machine cannot.
    pub(crate) fn new(args: &[&str], dir: &Path) -> Result<Mount, String> {
        let output = Command::new("mount").args(args).arg(dir).output().map_err(|e| format!("mount: {e}"))?;
        let mount = Mount(dir.to_owned());
        if output.status.success() {
            Ok(mount)
        } else {
            std::mem::forget(mount);
            Err(format!("mount: {}", String::from_utf8_lossy(&output.stderr).trim()))
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// The file that is a source of an image.
pub(crate) fn source_of(opened: &Opened, source: usize) -> &FileSource {
    let Source::File(file) = &opened.sources[source] else { panic!() };
    file
}

/// Walks a path within the usual limits.
pub(crate) fn look(path: &Path, format: Format, backing_dirs: &[PathBuf]) -> Result<Walk, Error> {
    becket_image::look(path, format, backing_dirs, &Budget::default())
}

//! Where becket keeps what it knows between commands: one private directory of this user.
//! It never uses a directory that another user could have prepared.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::contract::{DIR_VARIABLE, Error, LINKS_VARIABLE, RUNTIME_DIR};

/// The directories of this user's becket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Runtime {
    dir: PathBuf,
    links: PathBuf,
}

impl Runtime {
    /// The directories by the environment; made and checked, once for all devices that a process attaches.
    pub(crate) fn open() -> Result<Runtime, Error> {
        static OPENED: OnceLock<Runtime> = OnceLock::new();
        if let Some(runtime) = OPENED.get() {
            return Ok(runtime.clone());
        }
        let uid = rustix::process::geteuid().as_raw();
        let runtime = Runtime::at(locate(set, uid), links(set))?;
        Ok(OPENED.get_or_init(|| runtime).clone())
    }

    /// The same, but only where there are records.
    pub(crate) fn present() -> Option<Runtime> {
        let uid = rustix::process::geteuid().as_raw();
        let dir = locate(set, uid);
        let mut records = fs::read_dir(dir.join("devices")).ok()?;
        records.next().and_then(|_| Runtime::open().ok())
    }

    /// The same, but only where the directory is there; nothing is made, not even in it.
    pub(crate) fn existing() -> Result<Option<Runtime>, Error> {
        let uid = rustix::process::geteuid().as_raw();
        let dir = absolute(locate(set, uid))?;
        if !dir.is_dir() {
            return Ok(None);
        }
        private_dir(&dir)?;
        Ok(Some(Runtime { dir, links: absolute(links(set))? }))
    }

    /// The same with given directories.
    pub(crate) fn at(dir: PathBuf, links: PathBuf) -> Result<Runtime, Error> {
        let dir = absolute(dir)?;
        private_dir(&dir)?;
        let runtime = Runtime { dir, links: absolute(links)? };
        private_dir(&runtime.records())?;
        private_dir(&runtime.workers())?;
        Ok(runtime)
    }

    /// The directory itself.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// One file per device.
    pub(crate) fn records(&self) -> PathBuf {
        self.dir.join("devices")
    }

    /// Sockets at which the workers wait for a successor of their supervisor.
    pub(crate) fn workers(&self) -> PathBuf {
        self.dir.join("workers")
    }

    /// Names of devices, for udev.
    pub(crate) fn udev(&self) -> PathBuf {
        self.dir.join("udev")
    }

    /// Directories in which images are files, for those who may have no block devices.
    pub(crate) fn files(&self) -> PathBuf {
        self.dir.join("fuse")
    }

    /// Where the links to device nodes are.
    pub(crate) fn links(&self) -> &Path {
        &self.links
    }

    /// The supervisor's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("control")
    }

    /// Held by the one supervisor.
    pub(crate) fn lock(&self) -> PathBuf {
        self.dir.join("lock")
    }

    /// What the supervisor and its worker have to say.
    pub(crate) fn log(&self) -> PathBuf {
        self.dir.join("log")
    }
}

/// Opens a file that is only there to be locked; made where it is not.
pub(crate) fn lock_file(path: &Path) -> Result<File, Error> {
    let mut options = File::options();
    options.write(true).create(true).truncate(false).mode(0o600);
    options.open(path).map_err(Error::io("open", path))
}

/// A variable of the environment that is not empty.
fn set(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The server, which gets both directories from here, has another working directory.
fn absolute(dir: PathBuf) -> Result<PathBuf, Error> {
    std::path::absolute(&dir).map_err(Error::io("find", &dir))
}

/// The directory of links.
fn links(set: impl Fn(&str) -> Option<PathBuf>) -> PathBuf {
    set(LINKS_VARIABLE).unwrap_or_else(|| "/dev/becket".into())
}

fn locate(set: impl Fn(&str) -> Option<PathBuf>, uid: u32) -> PathBuf {
    if let Some(dir) = set(DIR_VARIABLE) {
        return dir;
    }
    if uid == 0 {
        return "/run/becket".into();
    }
    set("XDG_RUNTIME_DIR").unwrap_or_else(|| format!("/run/user/{uid}").into()).join("becket")
}

/// Makes a directory that only this user may enter, or checks that it is one.
fn private_dir(path: &Path) -> Result<(), Error> {
    let look = || fs::symlink_metadata(path);
    let mut found = look();
    // It is there but for the first time, and then another process may make it meanwhile.
    if matches!(&found, Err(error) if error.kind() == io::ErrorKind::NotFound) {
        match fs::DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => found = look(),
            Err(error) => return Err(Error::io(RUNTIME_DIR, path)(error)),
        }
    }
    let meta = found.map_err(Error::io("look at", path))?;
    let own = meta.uid() == rustix::process::geteuid().as_raw();
    if meta.is_dir() && own && meta.permissions().mode() & 0o022 == 0 {
        return Ok(());
    }
    let why = io::Error::new(
        io::ErrorKind::PermissionDenied,
        "it is not a directory that only this user may write",
    );
    Err(Error::io(RUNTIME_DIR, path)(why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_follows_the_environment_and_the_user() {
        let none = |_: &str| None;
        assert_eq!(locate(none, 0), Path::new("/run/becket"));
        assert_eq!(locate(none, 1000), Path::new("/run/user/1000/becket"));
        let xdg = |name: &str| (name == "XDG_RUNTIME_DIR").then(|| PathBuf::from("/x"));
        assert_eq!(locate(xdg, 1000), Path::new("/x/becket"));
        assert_eq!(locate(xdg, 0), Path::new("/run/becket"), "root's place is fixed");
        let own = |name: &str| (name == DIR_VARIABLE).then(|| PathBuf::from("/y"));
        assert_eq!(locate(own, 0), Path::new("/y"));
        assert_eq!(links(none), Path::new("/dev/becket"));
    }

    #[test]
    fn a_directory_that_others_may_write_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("shared");
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        let error = Runtime::at(dir.clone(), temp.path().join("links")).unwrap_err();
        assert_eq!(error.kind(), crate::contract::ErrorKind::Permission);

        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).unwrap();
        let runtime = Runtime::at(dir, temp.path().join("links")).unwrap();
        let mode = fs::metadata(runtime.records()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_link_in_place_of_the_directory_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let real = temp.path().join("real");
        fs::create_dir(&real).unwrap();
        let link = temp.path().join("link");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert!(Runtime::at(link, temp.path().join("links")).is_err());
    }
}

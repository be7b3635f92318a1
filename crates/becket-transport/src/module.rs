//! Whether a kernel driver that is missing could be there: loadable, not built, or unknown.
//! It never loads anything.

use std::fs;
use std::path::Path;

use crate::{Error, Kind};

/// Where the running kernel has a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// A module that can be loaded.
    Module,
    /// In the kernel itself.
    BuiltIn,
    /// Nowhere.
    Absent,
    /// The lists of modules are not here (a container's root), so there is no telling.
    Unknown,
}

/// The error for a driver that does not answer: what is the matter and the command that would fix it. `needs`
/// says what a kernel must be and have for it.
pub(crate) fn missing(kind: Kind, driver: &str, needs: &str) -> Error {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let modules = Path::new("/lib/modules").join(&release);
    let (reason, fix) =
        words(place(driver, &modules, Path::new("/proc/modules")), kind, driver, needs, &release);
    Error::Unavailable { kind, reason, fix }
}

/// Whether the running kernel has a driver, or can load it; `None` where that cannot be seen.
pub fn has_driver(driver: &str) -> Option<bool> {
    if Path::new("/sys/module").join(driver.replace('-', "_")).exists() {
        return Some(true);
    }
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    match place(driver, &Path::new("/lib/modules").join(release), Path::new("/proc/modules")) {
        Place::Module | Place::BuiltIn => Some(true),
        Place::Absent => Some(false),
        Place::Unknown => None,
    }
}

fn place(driver: &str, modules: &Path, loaded: &Path) -> Place {
    let listed = |list: &str| {
        let list = fs::read_to_string(modules.join(list)).unwrap_or_default();
        // A line is a path, in modules.dep followed by a colon and what it needs.
        list.lines().filter_map(|line| line.split(':').next()?.rsplit('/').next()).any(|file| {
            file.strip_prefix(driver).is_some_and(|rest| rest == ".ko" || rest.starts_with(".ko."))
        })
    };
    if listed("modules.dep") {
        Place::Module
    } else if listed("modules.builtin") {
        Place::BuiltIn
    } else if modules.join("modules.dep").exists() || !loaded.exists() {
        // Everything there is was listed, or this kernel cannot load anything.
        Place::Absent
    } else {
        Place::Unknown
    }
}

fn words(place: Place, kind: Kind, driver: &str, needs: &str, release: &str) -> (String, Option<String>) {
    let load = Some(format!("modprobe {driver}"));
    match place {
        Place::Module => (format!("the {kind} driver is not loaded"), load),
        Place::BuiltIn => (
            format!(
                "this kernel ({release}) has the {kind} driver, but its control device is not visible here"
            ),
            None,
        ),
        Place::Absent => {
            (format!("this kernel ({release}) was built without {kind}: it needs {needs}"), None)
        }
        Place::Unknown => (
            format!(
                "the {kind} driver is not loaded, and whether this kernel ({release}) has it cannot be seen here"
            ),
            load,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_follows_the_lists_of_modules() {
        let directory = tempfile::tempdir().unwrap();
        let (modules, loaded) = (directory.path().join("6.12.1"), directory.path().join("loaded"));
        let place = || super::place("ublk_drv", &modules, &loaded);
        assert_eq!(place(), Place::Absent, "no lists, and a kernel that loads nothing");
        fs::write(&loaded, "").unwrap();
        assert_eq!(place(), Place::Unknown);

        fs::create_dir(&modules).unwrap();
        let dep = modules.join("modules.dep");
        fs::write(&dep, "kernel/drivers/block/loop.ko.xz: kernel/x/ublk_drv.ko.xz\nkernel/x/ublk_drv2.ko:\n")
            .unwrap();
        assert_eq!(place(), Place::Absent, "what others need, and longer names, are not what is there");
        fs::write(&dep, "kernel/drivers/block/loop.ko.xz:\nkernel/drivers/block/ublk_drv.ko.xz:\n").unwrap();
        assert_eq!(place(), Place::Module);
        fs::write(&dep, "").unwrap();
        fs::write(modules.join("modules.builtin"), "kernel/drivers/block/ublk_drv.ko\n").unwrap();
        assert_eq!(place(), Place::BuiltIn);
    }

    #[test]
    fn what_can_be_loaded_comes_with_the_command_and_what_cannot_with_the_kernel() {
        let words = |place| super::words(place, Kind::Ublk, "ublk_drv", "Linux 6.0", "6.1.0-50");
        assert_eq!(words(Place::Module).1.as_deref(), Some("modprobe ublk_drv"));
        let (reason, fix) = words(Place::Absent);
        assert!(reason.contains("6.1.0-50") && reason.contains("Linux 6.0"), "{reason}");
        assert_eq!(fix, None);
    }
}

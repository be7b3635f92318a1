//! What becket knows of its devices between commands: one record per device, in one file each.
//! A record is never trusted over the kernel, and no lock is held across anything slower than a file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use becket_image::Identity;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::process::ProcessId;
use crate::runtime::Runtime;
use crate::{DeviceInfo, Error, log};

/// No record that becket writes comes near this many bytes.
const LARGEST: u64 = 1 << 20;
/// Longest name: with `pN` and `.json.corrupt` it stays below what a directory entry holds.
const LONGEST_NAME: usize = 63;
const VERSION: u32 = 1;

/// What a record says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub(crate) enum Entry {
    /// Somebody is attaching under this name.
    Claim {
        /// What is being attached.
        image: PathBuf,
        /// By whom; the claim falls with it.
        claimant: ProcessId,
    },
    /// A device. In a box, since it is so much larger than a claim.
    Device(Box<Device>),
}

/// A device as its record knows it: what people see, and what tells it from others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Device {
    pub(crate) info: DeviceInfo,
    /// Which file the image is, whatever its path.
    pub(crate) image: Identity,
    /// ublk: the supervisor that made it.
    pub(crate) server: Option<ProcessId>,
    /// ublk: the worker that serves it.
    pub(crate) worker: Option<ProcessId>,
    /// loop under a lease: the process that keeps it.
    pub(crate) keeper: Option<ProcessId>,
    /// ublk: added to the kernel but not started yet, so it has no disk.
    pub(crate) starting: bool,
    /// ublk: the number that the kernel keeps with the device, by which it is known for ours.
    pub(crate) mark: u64,
}

/// The file's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    version: u32,
    boot_id: String,
    name: String,
    entry: Entry,
}

/// The records of this user's becket.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    runtime: Runtime,
    boot_id: String,
}

/// A name that is ours until this is dropped or a device's record takes its place.
#[derive(Debug)]
pub(crate) struct Claim {
    store: Store,
    name: String,
    entry: Entry,
    kept: bool,
}

impl Store {
    pub(crate) fn open(runtime: Runtime) -> Result<Store, Error> {
        let path = "/proc/sys/kernel/random/boot_id";
        let boot_id = fs::read_to_string(path).map_err(Error::io("read", path.as_ref()))?;
        Ok(Store { runtime, boot_id: boot_id.trim().to_owned() })
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Takes a name, or says who has it. A claim whose claimant died counts for nothing; whether a
    /// device's record still means a device is for `lives` to say.
    pub(crate) fn claim(
        &self,
        name: &str,
        image: &std::path::Path,
        lives: impl Fn(&Device) -> bool,
    ) -> Result<Claim, Error> {
        check_name(name)?;
        let _lock = self.lock()?;
        match self.read(name)? {
            Some(Entry::Claim { image, claimant }) if claimant.alive() => {
                return Err(Error::NameInUse { name: name.to_owned(), image: Some(image), device: None });
            }
            Some(Entry::Device(device)) if lives(&device) => {
                let info = device.info;
                return Err(Error::NameInUse {
                    name: name.to_owned(),
                    image: Some(info.image),
                    device: Some(info.device),
                });
            }
            Some(_) | None => {}
        }
        let entry = Entry::Claim { image: image.to_owned(), claimant: ProcessId::own() };
        self.write(name, &entry)?;
        Ok(Claim { store: self.clone(), name: name.to_owned(), entry, kept: false })
    }

    /// All records of this boot, sorted by name.
    pub(crate) fn entries(&self) -> Result<Vec<(String, Entry)>, Error> {
        let dir = self.runtime.records();
        let mut names = Vec::new();
        for item in fs::read_dir(&dir).map_err(Error::io("read", &dir))? {
            let item = item.map_err(Error::io("read", &dir))?;
            let file = item.file_name();
            if let Some(name) = file.to_str().and_then(|file| file.strip_suffix(".json"))
                && check_name(name).is_ok()
            {
                names.push(name.to_owned());
            }
        }
        names.sort_unstable();
        let mut entries = Vec::with_capacity(names.len());
        for name in names {
            if let Some(entry) = self.read(&name)? {
                entries.push((name, entry));
            }
        }
        Ok(entries)
    }

    /// The device of that name, whether it still exists or not.
    pub(crate) fn device(&self, name: &str) -> Result<Option<Device>, Error> {
        if check_name(name).is_err() {
            return Ok(None);
        }
        Ok(match self.read(name)? {
            Some(Entry::Device(device)) => Some(*device),
            Some(Entry::Claim { .. }) | None => None,
        })
    }

    /// Puts `new` in the place of `old`, when that is still what the record says.
    pub(crate) fn update(&self, old: &Device, new: Device) -> Result<bool, Error> {
        let name = &old.info.name;
        let _lock = self.lock()?;
        if !matches!(self.read(name)?, Some(Entry::Device(found)) if same_use(&found, old)) {
            return Ok(false);
        }
        self.write(name, &Entry::Device(Box::new(new)))?;
        Ok(true)
    }

    /// Removes the record of a device, unless the name means another use by now.
    pub(crate) fn remove(&self, device: &Device) -> Result<bool, Error> {
        let name = &device.info.name;
        let _lock = self.lock()?;
        match self.read(name)? {
            Some(Entry::Device(found)) if same_use(&found, device) => {
                let path = self.path(name);
                fs::remove_file(&path).map_err(Error::io("remove", &path))?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Removes a claim whose claimant died, unless the name means something else by now.
    pub(crate) fn remove_claim(&self, name: &str, claim: &Entry) -> Result<(), Error> {
        let _lock = self.lock()?;
        if self.read(name)?.as_ref() == Some(claim) {
            let path = self.path(name);
            fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        }
        Ok(())
    }

    /// Guards the directory while a record is looked at and then changed.
    fn lock(&self) -> Result<File, Error> {
        let path = self.runtime.records().join(".lock");
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(Error::io("open", &path))?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive).map_err(Error::io("lock", &path))?;
        Ok(file)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.runtime.records().join(format!("{name}.json"))
    }

    /// `None` when there is no record, or it was set aside: it is of another boot, or it makes no sense.
    fn read(&self, name: &str) -> Result<Option<Entry>, Error> {
        let path = self.path(name);
        let mut text = Vec::new();
        match File::open(&path).and_then(|file| file.take(LARGEST).read_to_end(&mut text)) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io("read", &path)(error)),
        }
        let why = match serde_json::from_slice::<Record>(&text) {
            Ok(record) if record.version != VERSION => format!("its version is {}", record.version),
            Ok(record) if !names_match(&record, name) => format!("it speaks of {:?}", record.name),
            Ok(record) if record.boot_id != self.boot_id => {
                return set_aside(&path, "json.foreign", "it is of another start of the machine");
            }
            Ok(record) => return Ok(Some(record.entry)),
            Err(error) => error.to_string(),
        };
        set_aside(&path, "json.corrupt", &why)
    }

    /// Whole or not at all: readers see the old record or the new one. Synced, although it means nothing after a
    /// restart of the machine: a full disk is found out now, and not when the record is needed. Where records usually
    /// are, in memory, this costs nothing.
    fn write(&self, name: &str, entry: &Entry) -> Result<(), Error> {
        let record = Record {
            version: VERSION,
            boot_id: self.boot_id.clone(),
            name: name.to_owned(),
            entry: entry.clone(),
        };
        let path = self.path(name);
        let temporary = self.runtime.records().join(format!(".{name}.{}.new", std::process::id()));
        let write = || -> io::Result<()> {
            let mut text = serde_json::to_vec_pretty(&record)?;
            text.push(b'\n');
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            file.write_all(&text)?;
            file.sync_data()?;
            fs::rename(&temporary, &path)?;
            File::open(self.runtime.records())?.sync_all()
        };
        write().map_err(|error| {
            // Best effort: what counts is the error that led here.
            let _ = fs::remove_file(&temporary);
            Error::io("write", &path)(error)
        })
    }
}

impl Claim {
    /// The name that is ours.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Puts the device's record in the place of the claim. The name then lives as long as the device.
    pub(crate) fn fill(mut self, device: &Device) -> Result<(), Error> {
        let _lock = self.store.lock()?;
        self.store.write(&self.name, &Entry::Device(Box::new(device.clone())))?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = self.store.remove_claim(&self.name, &self.entry)
        {
            log::warn(format_args!("the name {} stays claimed: {error}", self.name));
        }
    }
}

/// Takes a record out of the way that is not to be trusted.
fn set_aside(path: &Path, extension: &str, why: &str) -> Result<Option<Entry>, Error> {
    let aside = path.with_extension(extension);
    fs::rename(path, &aside).map_err(Error::io("set aside", path))?;
    log::warn(format_args!("{}: not a record ({why}); set aside as {}", path.display(), aside.display()));
    Ok(None)
}

/// Whether two records speak of the same use of the same node.
fn same_use(a: &Device, b: &Device) -> bool {
    a.info.transport == b.info.transport
        && a.info.number == b.info.number
        && a.server == b.server
        && (a.starting || b.starting || a.info.diskseq == b.info.diskseq)
}

fn names_match(record: &Record, name: &str) -> bool {
    record.name == name
        && match &record.entry {
            Entry::Device(device) => device.info.name == name,
            Entry::Claim { .. } => true,
        }
}

/// Names become file names in the runtime directory and in /dev.
pub(crate) fn check_name(name: &str) -> Result<(), Error> {
    let bad = |why| Err(Error::Name { name: name.to_owned(), why });
    let Some(first) = name.bytes().next() else { return bad("it is empty") };
    if name.len() > LONGEST_NAME {
        return bad("it is longer than 63 characters");
    }
    if !first.is_ascii_alphanumeric() {
        return bad("it does not begin with a letter or digit");
    }
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
        return bad("only letters, digits, '.', '_' and '-' are possible");
    }
    Ok(())
}

#[cfg(test)]
#[path = "state_tests.rs"]
pub(crate) mod tests;

//! What becket knows of its devices between commands: one record per device, in one file each.
//! A record is never trusted over the kernel, and recording one device never waits for another.
//!
//! # Locks
//!
//! A process that looks at a record in order to change it holds that record's lock: one byte of one file, at
//! a place that the name's hash says (an OFD lock, which goes with its process). So no two names share a
//! lock, unless 63 bits of a hash meet, and then they only wait. Under it are looks at the record and the
//! kernel, one rename or one write, and never a sync.
//!
//! # Two records for one device
//!
//! A served device is recorded twice: before it has a disk, and when it has one. The second record is
//! appended to the first, in the same file: a rename would cost a new inode and the end of the old one.
//! Readers take the last whole record. All later changes replace the file. If the file system is full they
//! are appended instead, into room that was reserved when the file was made: a successor must be able to say
//! that a device is its own now.
//!
//! # What lasts, and how long
//!
//! A record must outlive every process of becket, and no more: it describes a device of this boot, which ends
//! with its kernel. After a restart it is set aside (it names its boot, or is empty because the power went
//! before it was written). The page cache outlives processes, so nothing is synced
//! ([0182](../../../../docs/decisions/0182-records-are-not-synced.md)). A full disk shows as a device's
//! record is made: its room is reserved then.

mod left;
mod order;
mod reading;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use becket_uapi::lock::{LockKind, ofd_lock_wait, ofd_unlock};
pub(crate) use left::Note;
pub(crate) use reading::{Entry, Record};
use reading::{Looked, same_use};
use rustix::fs::{CWD, RenameFlags};
use tracing::warn;

use crate::contract::Error;
use crate::record::device::Device;
use crate::record::runtime::{Runtime, lock_file};
use crate::record::unknown::Unknown;
use crate::system::many;
use crate::system::process::ProcessId;
use crate::system::space::{is_full, reserve};
use crate::system::sync::lock;

/// No record that becket writes comes near this many bytes.
const LARGEST: u64 = 1 << 20;
/// Longest name: with `pN` and `.json.corrupt` it stays below what a directory entry holds.
const LONGEST_NAME: usize = 63;
/// Descriptors of the file of locks that are kept open.
const MOST_LOCKS: usize = 8;

/// Two records in one file are no longer than this, in bytes: a page is visible at once to all.
const AMENDED: u64 = 4096;
/// Bytes that each device's record has in its file system from the beginning.
const RESERVED: u64 = 2 * AMENDED;

/// A record as it was written.
#[derive(Debug)]
pub(crate) struct Written {
    file: File,
    /// In bytes.
    len: u64,
}

/// The records of this user's becket.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    runtime: Runtime,
    boot_id: String,
    /// The file of locks, opened and without a lock.
    locks: Arc<Mutex<Vec<File>>>,
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
        static BOOT: OnceLock<String> = OnceLock::new();
        let boot_id = match BOOT.get() {
            Some(boot_id) => boot_id.clone(),
            None => {
                let path = "/proc/sys/kernel/random/boot_id";
                let boot_id = fs::read_to_string(path).map_err(Error::io("read", path.as_ref()))?;
                BOOT.get_or_init(|| boot_id.trim().to_owned()).clone()
            }
        };
        Ok(Store { runtime, boot_id, locks: Arc::default() })
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
        let claimant = ProcessId::own();
        let entry = Entry::Claim { image: image.to_owned(), claimant };
        let _lock = self.lock(name)?;
        self.is_free(name, lives)?;
        self.prepare(name, entry.clone())?.publish()?;
        Ok(Claim { store: self.clone(), name: name.to_owned(), entry, kept: false })
    }

    /// Takes a name for a device that is there already: as [`Store::claim`], and [`Claim::fill`] at once.
    pub(crate) fn enter(&self, device: &Device, lives: impl Fn(&Device) -> bool) -> Result<Written, Error> {
        let name = &device.info.name;
        check_name(name)?;
        let prepared = self.prepare(name, Entry::of(device))?;
        let _lock = self.lock(name)?;
        match prepared.publish_first() {
            Ok(written) => Ok(written),
            Err(prepared) => {
                self.is_free(name, lives)?;
                prepared.publish()
            }
        }
    }

    /// Under the name's lock: whether the name is free. Sets aside what is not a record of this boot.
    fn is_free(&self, name: &str, lives: impl Fn(&Device) -> bool) -> Result<(), Error> {
        match self.look(name)? {
            Looked::Entry(entry) => in_use(name, entry, lives).map_or(Ok(()), Err),
            Looked::Nothing => Ok(()),
            wrong @ (Looked::Corrupt(_) | Looked::Foreign) => self.set_aside(name, &wrong),
        }
    }

    /// Who has a name, as one who wants it is answered; `None` if it is free.
    pub(crate) fn taken(&self, name: &str, lives: impl Fn(&Device) -> bool) -> Result<Option<Error>, Error> {
        if check_name(name).is_err() {
            return Ok(None);
        }
        Ok(self.read(name)?.and_then(|entry| in_use(name, entry, lives)))
    }

    /// Under the name's lock: takes what is not a record of this boot out of the way. Only one who takes the
    /// name, or the supervisor when it begins, does so.
    fn set_aside(&self, name: &str, wrong: &Looked) -> Result<(), Error> {
        let (extension, why) = match wrong {
            Looked::Corrupt(why) => ("json.corrupt", why.as_str()),
            Looked::Foreign => ("json.foreign", "it is of another start of the machine"),
            Looked::Nothing | Looked::Entry(_) => return Ok(()),
        };
        let path = self.path(name);
        let aside = path.with_extension(extension);
        fs::rename(&path, &aside).map_err(Error::io("set aside", &path))?;
        warn!("{}: not a record ({why}); set aside as {}", path.display(), aside.display());
        Ok(())
    }

    /// The names for which there is a file, sorted.
    fn names(&self) -> Result<Vec<String>, Error> {
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
        Ok(names)
    }

    /// All records of this boot, sorted by name.
    pub(crate) fn entries(&self) -> Result<Vec<(String, Entry)>, Error> {
        let read = |name: String| Ok(self.read(&name)?.map(|entry| (name, entry)));
        many::each(self.names()?, read).into_iter().filter_map(Result::transpose).collect()
    }

    /// The device of that name, whether it still exists or not.
    pub(crate) fn device(&self, name: &str) -> Result<Option<Device>, Error> {
        if check_name(name).is_err() {
            return Ok(None);
        }
        Ok(match self.read(name)? {
            Some(Entry::Device(device)) => Some(*device),
            Some(Entry::Claim { .. } | Entry::Unknown(_)) | None => None,
        })
    }

    /// What another version of becket has recorded under a name.
    pub(crate) fn unknown(&self, name: &str) -> Result<Option<Box<Unknown>>, Error> {
        if check_name(name).is_err() {
            return Ok(None);
        }
        Ok(match self.read(name)? {
            Some(Entry::Unknown(unknown)) => Some(unknown),
            _ => None,
        })
    }

    /// Puts `new` in the place of `old`, when that is still what the record says.
    pub(crate) fn update(&self, old: &Device, new: &Device) -> Result<bool, Error> {
        let name = &old.info.name;
        let prepared = match self.prepare(name, Entry::of(new)) {
            Err(Error::Io { source, .. }) if is_full(&source) => None,
            other => Some(other?),
        };
        let _lock = self.lock(name)?;
        if !matches!(self.read(name)?, Some(Entry::Device(found)) if same_use(&found, old)) {
            return Ok(false);
        }
        match prepared {
            Some(prepared) => prepared.publish().map(drop)?,
            None => self.append(new).map_err(Error::io("write", &self.path(name)))?,
        }
        Ok(true)
    }

    /// Under the name's lock: writes a record behind the others in its file, where that has room of its own.
    fn append(&self, new: &Device) -> io::Result<()> {
        let name = &new.info.name;
        let text = self.text_of(name, Entry::of(new))?;
        let file = File::options().write(true).open(self.path(name))?;
        let stat = rustix::fs::fstat(&file)?;
        let [len, blocks] = [stat.st_size, stat.st_blocks].map(|count| u64::try_from(count).unwrap_or(0));
        // A record that breaks off would hide those behind it.
        if len + text.len() as u64 > blocks * 512 {
            return Err(rustix::io::Errno::NOSPC.into());
        }
        file.write_all_at(&text, len)
    }

    /// The same of a record that was just written and is most likely unchanged: the new one is appended.
    pub(crate) fn amend(&self, old: &Device, then: &Written, new: &Device) -> Result<bool, Error> {
        let name = &old.info.name;
        let path = self.path(name);
        let text = self.text_of(name, Entry::of(new)).map_err(Error::io("write", &path))?;
        if then.len + text.len() as u64 > AMENDED {
            return self.update(old, new);
        }
        let locked = self.lock(name)?;
        if !then.is_at(&path) {
            drop(locked);
            return self.update(old, new);
        }
        then.file.write_all_at(&text, then.len).map_err(Error::io("write", &path))?;
        Ok(true)
    }

    /// Removes the record of a device, unless the name means another use by now.
    pub(crate) fn remove(&self, device: &Device) -> Result<bool, Error> {
        let name = &device.info.name;
        let _lock = self.lock(name)?;
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
        let _lock = self.lock(name)?;
        if self.read(name)?.as_ref() == Some(claim) {
            let path = self.path(name);
            fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        }
        Ok(())
    }

    /// Guards one record while it is looked at and then changed; until the answer is dropped.
    fn lock(&self, name: &str) -> Result<Locked<'_>, Error> {
        let path = self.runtime.records().join(".lock");
        let pooled = lock(&*self.locks).pop().filter(is_linked);
        let file = pooled.map_or_else(|| lock_file(&path), Ok)?;
        // The file is not read or written: any place will do, up to the largest that there is.
        let place = hash(name) >> 1;
        ofd_lock_wait(file.as_fd(), LockKind::Exclusive, place, 1).map_err(Error::io("lock", &path))?;
        Ok(Locked { file: Some(file), place, pool: &self.locks })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.runtime.records().join(format!("{name}.json"))
    }

    /// `None` when there is no record, or what is there is none of this boot. Nothing is changed.
    fn read(&self, name: &str) -> Result<Option<Entry>, Error> {
        match self.look(name)? {
            Looked::Entry(entry) => Ok(Some(entry)),
            Looked::Nothing | Looked::Foreign => Ok(None),
            Looked::Corrupt(why) => {
                let path = self.path(name);
                warn!("{}: not a record ({why}); it is left alone", path.display());
                Ok(None)
            }
        }
    }

    fn look(&self, name: &str) -> Result<Looked, Error> {
        let path = self.path(name);
        // Most are shorter, and read at once.
        let mut text = Vec::with_capacity(4096);
        match File::open(&path).and_then(|file| file.take(LARGEST).read_to_end(&mut text)) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Looked::Nothing),
            Err(error) => return Err(Error::io("read", &path)(error)),
        }
        Ok(reading::understand(&text, name, &self.boot_id))
    }

    /// Writes a record beside its place, where it is not read. Under no lock.
    fn prepare(&self, name: &str, entry: Entry) -> Result<Prepared, Error> {
        let of_device = matches!(entry, Entry::Device(_));
        let written = self.text_of(name, entry).and_then(|text| self.prepare_text(name, &text, of_device));
        written.map_err(Error::io("write", &self.path(name)))
    }

    fn prepare_text(&self, name: &str, text: &[u8], of_device: bool) -> io::Result<Prepared> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let beside = self.runtime.records().join(format!(".{name}.{}.{serial}.new", std::process::id()));
        Prepared::write(beside, &self.path(name), text, of_device)
    }

    /// A record as it stands in its file.
    fn text_of(&self, name: &str, entry: Entry) -> io::Result<Vec<u8>> {
        let mut text = Vec::with_capacity(2048);
        serde_json::to_writer(&mut text, &Record::new(&self.boot_id, name, entry))?;
        text.push(b'\n');
        Ok(text)
    }
}

/// That a name is in use, if what its record says still means something.
fn in_use(name: &str, entry: Entry, lives: impl Fn(&Device) -> bool) -> Option<Error> {
    let (image, device) = match entry {
        Entry::Claim { image, claimant } if claimant.alive() => (image, None),
        Entry::Device(device) if lives(&device) => (device.info.spec.image, Some(device.info.device)),
        Entry::Unknown(unknown) => (unknown.info.spec.image, Some(unknown.info.device)),
        Entry::Claim { .. } | Entry::Device(_) => return None,
    };
    Some(Error::NameInUse { name: name.to_owned(), image: Some(image), device })
}

/// A record's lock. Its file is opened once for as many as are locked at the same time, and is used again.
struct Locked<'a> {
    file: Option<File>,
    place: u64,
    pool: &'a Mutex<Vec<File>>,
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if let Some(file) = self.file.take()
            && ofd_unlock(file.as_fd(), self.place, 1).is_ok()
        {
            let mut pool = lock(self.pool);
            if pool.len() < MOST_LOCKS {
                pool.push(file);
            }
        }
        // Closing it unlocks as well.
    }
}

/// Whether a file still has a name: who opens the file of locks now must find the same one.
fn is_linked(file: &File) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_nlink > 0)
}

impl Written {
    /// Whether this is the file at `path`, and as long as it was: it was not replaced, moved or amended.
    fn is_at(&self, path: &Path) -> bool {
        let (Ok(ours), Ok(found)) = (rustix::fs::fstat(&self.file), rustix::fs::stat(path)) else {
            return false;
        };
        (ours.st_dev, ours.st_ino) == (found.st_dev, found.st_ino)
            && u64::try_from(ours.st_size) == Ok(self.len)
    }
}

/// A record that lies ready beside its place; without [`Prepared::publish`] it goes again.
struct Prepared {
    beside: Beside,
    place: PathBuf,
    written: Written,
}

impl Prepared {
    fn write(path: PathBuf, place: &Path, text: &[u8], of_device: bool) -> io::Result<Prepared> {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&path)?;
        let beside = Beside { path, there: true };
        if of_device {
            reserve(&file, RESERVED)?;
        }
        file.write_all(text)?;
        Ok(Prepared { beside, place: place.to_owned(), written: Written { file, len: text.len() as u64 } })
    }

    /// Moves it into place if no record is there. Returns it if one is, or may be: the caller checks.
    fn publish_first(mut self) -> Result<Written, Prepared> {
        match rustix::fs::renameat_with(CWD, &self.beside.path, CWD, &self.place, RenameFlags::NOREPLACE) {
            Ok(()) => {
                self.beside.there = false;
                Ok(self.written)
            }
            Err(_) => Err(self),
        }
    }

    /// Puts it in its place, whole or not at all: readers see the old record or the new one.
    fn publish(self) -> Result<Written, Error> {
        let Prepared { mut beside, place, written } = self;
        fs::rename(&beside.path, &place).map_err(Error::io("write", &place))?;
        beside.there = false;
        Ok(written)
    }
}

/// The file of a record that is not in its place.
pub(crate) struct Beside {
    path: PathBuf,
    there: bool,
}

impl Drop for Beside {
    fn drop(&mut self) {
        if self.there {
            // Best effort: what counts is the error that led here.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Where in the file of locks a name's lock is (FNV-1a): the same for every process, so without a random key.
pub(crate) fn hash(name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

impl Claim {
    /// The name that is ours.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Puts the device's record in the place of the claim. The name then lives as long as the device.
    pub(crate) fn fill(mut self, device: &Device) -> Result<Written, Error> {
        let prepared = self.store.prepare(&self.name, Entry::of(device))?;
        let _lock = self.store.lock(&self.name)?;
        let written = prepared.publish()?;
        self.kept = true;
        Ok(written)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = self.store.remove_claim(&self.name, &self.entry)
        {
            warn!("the name {} stays claimed: {error}", self.name);
        }
    }
}

/// Names become file names in the runtime directory and in /dev.
///
/// # Errors
/// It cannot be a device's name: only letters, digits, `.`, `_` and `-`, at most 63, a letter or digit first.
pub fn check_name(name: &str) -> Result<(), Error> {
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
#[path = "store_tests.rs"]
pub(crate) mod tests;

//! The store: a directory of objects, each one version of what a URL has. Shared by the processes of a user.
//! It never removes an object that a process or a device uses, and never believes a file that others can
//! write.
//!
//! ```text
//! STORE/v1/ID/meta.json    what it is; its time is that of the last use
//! STORE/v1/ID/table        which chunks are there (`table`); locked (flock) by who uses the object
//! STORE/v1/ID/data/NAME    the bytes, sparse; alone in its directory, because images name their neighbours
//! STORE/v1/.latest-URL     a link to the version of a URL that was used last (`latest`)
//! ```
//!
//! ID is a digest of URL and version. An object is made under another name and renamed when it is whole. A
//! store of another layout has another `vN` and is left alone.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use becket_image::{Below, Fillers, Identity, Split, one_case};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::home;
use crate::latest;
use crate::place::{Place, short_digest, shown, shown_source, url_of_path};
use crate::signature::unsigned;
use crate::table::Table;
use crate::temporary::Temporary;
use crate::trace::{self, Need};
use crate::version::{Known, Version};
use crate::writing::{CHUNK, CHUNKS};

/// The layout that this build reads and writes.
const LAYOUT: &str = "v1";
/// The longest object, in bytes.
pub(crate) const SIZE_MAX: u64 = 16 << 40;
/// The largest description of an object that is read, in bytes.
const META_MAX: u64 = 64 << 10;
/// The smallest chunk of an object that is fetched, in bytes. Larger ones bring more than a start needs; what
/// is decoded comes in its order, and its chunks need not be as small.
const SMALLEST: u64 = 8 << 10;
/// How often an object that others remove meanwhile is looked for.
const LOOKS: u32 = 8;

/// What an object is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    /// Without a signature in it.
    pub(crate) url: String,
    pub(crate) version: Version,
    /// Length in bytes.
    pub(crate) size: u64,
    /// Length of a chunk in bytes, a power of two.
    pub(crate) chunk: u64,
    /// The name of the file below `data`.
    pub(crate) name: String,
}

impl Meta {
    pub(crate) fn of(url: &str, version: &Version, size: u64, name: &str) -> Meta {
        let unpacked = matches!(version, Version::Unpacked(_));
        let chunk = size.div_ceil(CHUNKS).next_power_of_two().max(if unpacked { CHUNK } else { SMALLEST });
        Meta { url: url.to_owned(), version: version.clone(), size, chunk, name: name.to_owned() }
    }

    /// Bytes of the table; behind them are notes (`trace`).
    pub(crate) fn table_len(&self) -> u64 {
        self.chunks() * 8
    }

    /// How many bytes are there, by the table.
    pub(crate) fn stored(&self, table: &Table) -> u64 {
        let there = (0_u64..).zip(table.sums(0..self.chunks())).filter(|(_, sum)| sum.is_some());
        there
            .map(|(chunk, _)| self.chunk.min(self.size.saturating_sub(chunk.saturating_mul(self.chunk))))
            .sum()
    }

    pub(crate) fn chunks(&self) -> u64 {
        self.size.div_ceil(self.chunk)
    }

    /// The directory's name.
    fn id(&self) -> String {
        // How long a compressed file becomes is not known before it was decoded.
        let size = if self.is_unpacked() { 0 } else { self.size };
        id_of(&self.url, &self.version, size)
    }

    /// Whether a digest of all bytes names it.
    pub(crate) fn has_digest(&self) -> bool {
        matches!(self.version, Version::Digest(_))
    }

    fn is_unpacked(&self) -> bool {
        matches!(self.version, Version::Unpacked(_))
    }

    pub(crate) fn is_sound(&self) -> bool {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte);
        self.chunk.is_power_of_two()
            && self.chunk >= SMALLEST
            && (1..=SIZE_MAX).contains(&self.size)
            && self.chunks() <= CHUNKS
            && !self.name.is_empty()
            && !self.name.starts_with('.')
            && self.name.bytes().all(plain)
    }
}

pub(crate) fn id_of(url: &str, version: &Version, size: u64) -> String {
    short_digest(&format!("{url}\n{}\n{size}\n", version.line()))
}

/// The files of an object that is in use: nobody removes it as long as this lives.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) meta: Meta,
    /// Absolute, without links.
    pub(crate) path: PathBuf,
    pub(crate) data: File,
    pub(crate) table: Table,
    /// The store goes with its last object, if it is one for a single command.
    pub(crate) _temporary: Option<Arc<Temporary>>,
}

/// An object of the store, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// Where it came from; without the query, which may be a signature.
    pub url: String,
    /// The version, as the server names it.
    pub version: Version,
    /// Length in bytes.
    pub size: u64,
    /// How many of them are in the store.
    pub stored: u64,
    /// Seconds since 1970 at the last use.
    pub used: u64,
    /// Whether a process or a device uses it.
    pub in_use: bool,
    /// The file.
    pub path: PathBuf,
    /// The URL with its query, but for a signature in it.
    #[serde(skip)]
    full: String,
    #[serde(skip)]
    pub(crate) dir: PathBuf,
}

/// What became of the objects that were to be removed.
#[derive(Debug, Default)]
pub struct Dropped {
    /// Removed.
    pub gone: Vec<Entry>,
    /// In use, and still there.
    pub kept: Vec<Entry>,
}

/// A file of the store that is complete.
#[derive(Debug)]
pub struct Complete {
    /// They only know that.
    pub fillers: Fillers,
    /// What an overlay of it says, if it came from a server.
    pub below: Option<Below>,
}

/// A directory of objects.
#[derive(Debug, Clone)]
pub struct Store {
    pub(crate) dir: PathBuf,
    temporary: Option<Arc<Temporary>>,
}

impl Store {
    /// The store in `dir`, or else that of the user; it is made if it does not exist.
    ///
    /// # Errors
    /// It cannot be made, or others can write to it.
    pub fn open(dir: Option<&Path>) -> Result<Store, Error> {
        let usual = || home::store(home::variable, rustix::process::geteuid().is_root());
        let dir = dir.map(Path::to_owned).or_else(usual).ok_or(Error::NoStore)?;
        let make = |path: &Path| DirBuilder::new().recursive(true).mode(0o700).create(path);
        let layout = dir.join(LAYOUT);
        make(&layout).map_err(Error::store(&layout, "the store cannot be made"))?;
        let layout = fs::canonicalize(&layout).map_err(Error::store(&layout, "it cannot be looked up"))?;
        let meta = fs::metadata(&layout).map_err(Error::store(&layout, "it cannot be looked up"))?;
        if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
            let why = io::Error::from(io::ErrorKind::PermissionDenied);
            return Err(Error::store(layout, "the store belongs to others, or others can write to it")(why));
        }
        Ok(Store { dir: layout, temporary: None })
    }

    /// A store for one command, whose files have room for nothing: their bytes are kept elsewhere.
    pub(crate) fn temporary() -> Result<Store, Error> {
        let temporary = Temporary::new()?;
        let store = Store::open(Some(temporary.path()))?;
        Ok(Store { temporary: Some(Arc::new(temporary)), ..store })
    }

    /// The object that a place has now, made if it is new.
    pub(crate) fn hold(&self, place: &Place, known: &Known) -> Result<Held, Error> {
        self.hold_meta(&Meta::of(&unsigned(&place.url), &known.version, known.size, &place.file_name()))
    }

    /// The same for an object that is known.
    pub(crate) fn hold_meta(&self, meta: &Meta) -> Result<Held, Error> {
        if !meta.is_sound() {
            let why = format!("it has {} bytes, and the longest object has {SIZE_MAX}", meta.size);
            return Err(Error::Refused { url: shown(&meta.url), why, fix: None });
        }
        let dir = self.dir.join(meta.id());
        for _ in 0..LOOKS {
            match self.take(&dir, meta) {
                Ok(Some(held)) => {
                    if !meta.is_unpacked() {
                        latest::note(&self.dir, &meta.url, &meta.id());
                    }
                    return Ok(held);
                }
                // It is not an object, or damaged: it makes way.
                Ok(None) => self.set_aside(&dir)?,
                Err(error) if is_lost(&error) => match fs::symlink_metadata(&dir) {
                    Ok(_) => self.set_aside(&dir)?,
                    Err(_) => self.make(&dir, meta)?,
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                Err(error) => return Err(Error::store(dir, "the object cannot be opened")(error)),
            }
        }
        Err(Error::store(dir, "the object is removed again and again")(io::ErrorKind::ResourceBusy.into()))
    }

    /// Whether the start of the version that was used last of a URL is here: if the server still has that
    /// version, its start need not be asked for.
    pub(crate) fn has_start(&self, url: &str) -> bool {
        let url = unsigned(url);
        let Some(dir) = latest::of(&self.dir, &url) else { return false };
        let is_its = |meta: Meta| meta.url == url;
        let table = || Table::new(File::open(dir.join("table"))?);
        read_meta(&dir).ok().flatten().is_some_and(is_its)
            && table().is_ok_and(|table| table.get(0).is_some())
    }

    /// The same as [`Store::look`], for who uses the object.
    pub(crate) fn take(&self, dir: &Path, meta: &Meta) -> io::Result<Option<Held>> {
        let held = self.look(dir, meta)?;
        if held.is_some() {
            let now = SystemTime::now();
            // Only the order of removal depends on it.
            let _ = File::open(dir.join("meta.json")).and_then(|file| file.set_modified(now));
        }
        Ok(held)
    }

    /// Opens an object and locks it against removal; `None` if its files are not those of `meta`.
    pub(crate) fn look(&self, dir: &Path, meta: &Meta) -> io::Result<Option<Held>> {
        let Some(found) = read_meta(dir)? else { return Ok(None) };
        let path = dir.join("data").join(&meta.name);
        let open = |path: &Path| File::options().read(true).write(true).open(path);
        let table = open(&dir.join("table"))?;
        rustix::fs::flock(&table, FlockOperation::NonBlockingLockShared)?;
        // It may have been removed, and made anew, before the lock was there.
        let (ours, theirs) = (table.metadata()?, fs::metadata(dir.join("table"))?);
        if (ours.dev(), ours.ino()) != (theirs.dev(), theirs.ino()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // Earlier versions of becket made larger chunks.
        if (Meta { chunk: found.chunk, ..meta.clone() }) != found {
            return Ok(None);
        }
        let data = open(&path)?;
        if data.metadata()?.len() != meta.size || table.metadata()?.len() < meta.table_len() {
            return Ok(None);
        }
        let _temporary = self.temporary.clone();
        Ok(Some(Held { meta: found, path, data, table: Table::new(table)?, _temporary }))
    }

    fn make(&self, dir: &Path, meta: &Meta) -> Result<(), Error> {
        let new = self.dir.join(format!(".new-{}-{}", std::process::id(), unique()));
        let made = || {
            DirBuilder::new().mode(0o700).create(&new)?;
            DirBuilder::new().mode(0o700).create(new.join("data"))?;
            let create = |path: PathBuf| File::options().write(true).create_new(true).mode(0o600).open(path);
            create(new.join("data").join(&meta.name))?.set_len(meta.size)?;
            create(new.join("table"))?.set_len(meta.table_len())?;
            let mut file = create(new.join("meta.json"))?;
            file.write_all(&serde_json::to_vec(meta)?)?;
            file.sync_all()?;
            match fs::rename(&new, dir) {
                // Another process was faster.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOTEMPTY) => Ok(()),
                renamed => renamed,
            }
        };
        let result = made();
        // What was renamed is not there.
        let _ = fs::remove_dir_all(&new);
        result.map_err(Error::store(dir, "the object cannot be made"))
    }

    /// Renames what is in the way; processes that use it go on.
    pub(crate) fn set_aside(&self, dir: &Path) -> Result<(), Error> {
        let aside = self.dir.join(format!(".bad-{}-{}", std::process::id(), unique()));
        match fs::rename(dir, &aside) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Ok(()) => {
                let remove =
                    if aside.is_dir() { fs::remove_dir_all(&aside) } else { fs::remove_file(&aside) };
                remove.map_err(Error::store(aside, "it cannot be removed"))
            }
            Err(error) => Err(Error::store(dir, "a damaged object cannot be set aside")(error)),
        }
    }

    /// All objects, the one that was used last first.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<Entry>, Error> {
        let failed = || Error::store(&self.dir, "the store cannot be read");
        let mut all = Vec::new();
        for dir in fs::read_dir(&self.dir).map_err(failed())? {
            let dir = dir.map_err(failed())?;
            // What is being made or removed has a dot.
            if !dir.file_name().as_encoded_bytes().starts_with(b".")
                && let Some(entry) = describe(dir.path())
            {
                all.push(entry);
            }
        }
        // A compressed file is in use while what it yields is, until all of that is there.
        let decoded = all.iter().filter(|entry| entry.in_use && entry.stored < entry.size);
        let packed = decoded.filter_map(|entry| Some((entry.full.clone(), entry.version.packed()?)));
        let packed: Vec<(String, String)> = packed.collect();
        for entry in &mut all {
            entry.in_use |= packed.contains(&(entry.full.clone(), entry.version.line()));
        }
        all.sort_by(|one, other| other.used.cmp(&one.used).then_with(|| one.url.cmp(&other.url)));
        Ok(all)
    }

    /// The objects of a URL, or of the path of a compressed file of this host.
    ///
    /// # Errors
    /// As [`Store::list`].
    pub fn find(&self, asked: &str) -> Result<Vec<Entry>, Error> {
        let mut all = self.list()?;
        let names = [unsigned(&one_case(asked)), url_of_path(Path::new(asked))];
        // Earlier versions of becket kept the case that was typed.
        all.retain(|entry| names.contains(&one_case(&entry.full)) || names.contains(&entry.url));
        Ok(all)
    }

    /// Removes objects that nobody uses.
    ///
    /// # Errors
    /// One cannot be removed.
    pub fn remove(&self, entries: Vec<Entry>) -> Result<Dropped, Error> {
        let mut dropped = Dropped::default();
        for entry in entries {
            match if entry.in_use { Ok(false) } else { self.remove_one(&entry) } {
                Ok(true) => dropped.gone.push(entry),
                Ok(false) => dropped.kept.push(entry),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::store(entry.dir, "it cannot be removed")(error)),
            }
        }
        Ok(dropped)
    }

    fn remove_one(&self, entry: &Entry) -> io::Result<bool> {
        let Some(_locked) = unused(&entry.dir, &entry.path)? else { return Ok(false) };
        latest::forget(&self.dir, &entry.full, &entry.dir);
        let aside = self.dir.join(format!(".gone-{}-{}", std::process::id(), unique()));
        fs::rename(&entry.dir, &aside)?;
        fs::remove_dir_all(&aside)?;
        Ok(true)
    }

    /// Removes objects that nobody uses until the others have no more than `limit` bytes, beginning with
    /// those whose last use is longest ago.
    ///
    /// # Errors
    /// As [`Store::list`] and [`Store::remove`].
    pub fn shrink(&self, limit: u64) -> Result<Dropped, Error> {
        self.shrink_to(limit).map(|(dropped, _)| dropped)
    }

    /// The same, with how many bytes all objects have then.
    pub(crate) fn shrink_to(&self, limit: u64) -> Result<(Dropped, u64), Error> {
        let all = self.list()?;
        let mut total: u64 = all.iter().map(|entry| entry.stored).sum();
        let mut dropped = Dropped::default();
        for entry in all.into_iter().rev() {
            if total <= limit {
                break;
            }
            let stored = entry.stored;
            let one = self.remove(vec![entry])?;
            if one.kept.is_empty() {
                total = total.saturating_sub(stored);
            }
            dropped.gone.extend(one.gone);
            dropped.kept.extend(one.kept);
        }
        Ok((dropped, total))
    }

    /// What was needed of an object since it is in the store, as far as that was recorded.
    ///
    /// # Errors
    /// Its table cannot be read.
    pub fn trace(&self, entry: &Entry) -> Result<Vec<Need>, Error> {
        let dir = entry.dir.as_path();
        let failed = || Error::store(dir, "what was recorded cannot be read");
        let meta =
            read_meta(dir).map_err(failed())?.ok_or_else(|| failed()(io::ErrorKind::NotFound.into()))?;
        let table = File::open(dir.join("table")).map_err(failed())?;
        let notes = trace::noted(&table, meta.table_len(), meta.chunks()).map_err(failed())?;
        let first = notes.first().map_or(0, |(_, at)| *at);
        let mut needs: Vec<Need> = Vec::new();
        for (chunk, at) in notes {
            let offset = chunk * meta.chunk;
            let len = meta.chunk.min(meta.size - offset);
            let at = at.saturating_sub(first);
            match needs.last_mut().filter(|last| last.at == at && last.offset + last.len == offset) {
                Some(last) => last.len += len,
                None => needs.push(Need { at, offset, len }),
            }
        }
        Ok(needs)
    }
}

/// What an overlay says of an image on a server, without the query of its URL; `inside` is the path in it.
pub(crate) fn below(url: &str, version: &Version, inside: &OsStr) -> Below {
    let mut name = OsString::from(shown(url));
    if !inside.is_empty() {
        name.push("#");
        name.push(inside);
    }
    Below { name: name.into(), version: stamp(&version.line()) }
}

/// A short name of a version.
pub(crate) fn stamp(version: &str) -> String {
    let mut digest = short_digest(version);
    digest.truncate(16);
    digest
}

/// A file of a store that a path of this host names, if it is one.
///
/// # Errors
/// A part of it is missing: that would be zeroes.
pub fn complete(path: &Path) -> Result<Option<Complete>, Error> {
    if !path.iter().any(|name| name == "data") {
        return Ok(None);
    }
    let Split { host, inside } = becket_image::split(path);
    let Some(data) = host.parent().filter(|dir| dir.file_name() == Some("data".as_ref())) else {
        return Ok(None);
    };
    let dir = data.parent().unwrap_or(Path::new("/"));
    let Some(meta) =
        read_meta(dir).ok().flatten().filter(|meta| host.file_name() == Some(meta.name.as_ref()))
    else {
        return Ok(None);
    };
    let table = File::open(dir.join("table")).and_then(Table::new);
    if table.is_ok_and(|table| table.sums(0..meta.chunks()).all(|sum| sum.is_some())) {
        let mut fillers = Fillers::default();
        if let Ok(file) = fs::metadata(&host) {
            fillers.add_complete(Identity { dev: file.dev(), ino: file.ino() }, shown_source(&meta.url));
        }
        // A compressed file of this host may be another one by now.
        let inside = inside.iter().collect::<PathBuf>();
        let is_remote = !meta.url.starts_with("file:");
        let below = is_remote.then(|| below(&meta.url, &meta.version, inside.as_os_str()));
        return Ok(Some(Complete { fillers, below }));
    }
    let of = shown_source(&meta.url);
    let fix = format!("name {of} instead, which brings what is missing");
    Err(Error::Incomplete { path: host.display().to_string(), of, fix })
}

impl Held {
    /// First byte and length of a chunk.
    pub(crate) fn part(&self, chunk: u64) -> (u64, u64) {
        let start = chunk.saturating_mul(self.meta.chunk);
        (start, self.meta.chunk.min(self.meta.size.saturating_sub(start)))
    }
}

/// The checksum of a range of a file.
pub(crate) fn checksum(file: &File, start: u64, len: u64, buffer: &mut [u8]) -> io::Result<u32> {
    use std::os::unix::fs::FileExt as _;
    let mut hash = crc32fast::Hasher::new();
    let mut done = 0;
    while done < len {
        let count = buffer.len().min(usize::try_from(len - done).unwrap_or(usize::MAX));
        let part = buffer.get_mut(..count).unwrap_or_default();
        file.read_exact_at(part, start + done)?;
        hash.update(part);
        done += count as u64;
    }
    Ok(hash.finalize())
}

/// A number that this process has not used yet.
pub(crate) fn unique() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Whether a file of an object is not there, or is not what it should be.
pub(crate) fn is_lost(error: &io::Error) -> bool {
    use io::ErrorKind::{IsADirectory, NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory | IsADirectory)
}

/// What an object is; `None` if that cannot be understood.
pub(crate) fn read_meta(dir: &Path) -> io::Result<Option<Meta>> {
    let path = dir.join("meta.json");
    if fs::metadata(dir).is_ok() && fs::metadata(&path).is_ok_and(|meta| meta.len() > META_MAX) {
        return Ok(None);
    }
    match fs::read(&path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok().filter(Meta::is_sound)),
        Err(error) if error.kind() == io::ErrorKind::NotFound && dir.exists() => Ok(None),
        Err(error) => Err(error),
    }
}

fn describe(dir: PathBuf) -> Option<Entry> {
    let meta = read_meta(&dir).ok().flatten()?;
    // Without its table nothing of it counts.
    let table = File::open(dir.join("table")).and_then(Table::new).ok();
    let path = dir.join("data").join(&meta.name);
    let used = fs::metadata(dir.join("meta.json")).and_then(|meta| meta.modified()).ok()?;
    let used = used.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    Some(Entry {
        url: shown(&meta.url),
        stored: table.map_or(0, |table| meta.stored(&table)),
        size: meta.size,
        used,
        in_use: matches!(unused(&dir, &path), Ok(None)),
        version: meta.version,
        full: meta.url,
        path,
        dir,
    })
}

/// The lock that removes an object; `None` while a process (its flock) or a device (its locks on the data)
/// uses it.
pub(crate) fn unused(
    dir: &Path,
    data: &Path,
) -> io::Result<Option<(Option<File>, Option<becket_image::Claimed>)>> {
    let table = match File::options().read(true).write(true).open(dir.join("table")) {
        Ok(table) => Some(table),
        // Nobody can lock a table that is lost.
        Err(error) if is_lost(&error) && dir.exists() => None,
        Err(error) => return Err(error),
    };
    let lock = FlockOperation::NonBlockingLockExclusive;
    match table.as_ref().map_or(Ok(()), |table| rustix::fs::flock(table, lock)) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    }
    match becket_image::claim(data, &mut Vec::new()) {
        Ok(claim) => Ok(Some((table, Some(claim)))),
        Err(error) if error.kind() == becket_image::ErrorKind::InUse => Ok(None),
        // A damaged object without data may go, too.
        Err(_) if !data.is_file() => Ok(Some((table, None))),
        Err(error) => Err(io::Error::other(error)),
    }
}

//! What compressed files yield, in the store: made as a whole, or found.
//! It never takes an object for whole of which a chunk is damaged.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::Error;
use crate::store::{Held, Meta, Store, checksum, id_of, read_meta, unique};
use crate::table::Table;
use crate::version::Version;
use crate::writing::Writing;

/// What a file is called that is being decoded, and its lock; the object's name follows.
const PART: &str = ".part-";
const PART_LOCK: &str = ".lock-";

/// What there is of an object that a compressed file yields.
#[derive(Debug)]
pub(crate) enum Unpacked {
    Nothing,
    /// Some of it. Chunks may be damaged.
    Part,
    /// All but the last chunk: its file may yield more than it says, or be damaged at its end.
    Unended,
    Whole(Box<Held>),
}

impl Store {
    /// What there is of the object that a compressed file yields.
    pub(crate) fn find_unpacked(&self, url: &str, version: &Version) -> Result<Unpacked, Error> {
        let id = id_of(url, version, 0);
        let dir = self.dir.join(&id);
        self.sweep();
        // A process that decodes all of it is waited for.
        let lock = self.lock_part(&id, FlockOperation::LockExclusive);
        let _lock = lock.map_err(Error::store(&dir, "it cannot be locked"))?;
        self.look_unpacked(&dir, url, version)
    }

    /// The same under the lock.
    fn look_unpacked(&self, dir: &Path, url: &str, version: &Version) -> Result<Unpacked, Error> {
        let failed = |what| Error::store(dir, what);
        let found = read_meta(dir).ok().flatten().filter(|meta| meta.url == url && meta.version == *version);
        let Some(meta) = found else { return Ok(Unpacked::Nothing) };
        let held = match self.take(dir, &meta) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            held => held.map_err(failed("it cannot be opened"))?,
        };
        let Some(held) = held else { return Ok(Unpacked::Nothing) };
        let last = held.meta.chunks() - 1;
        let missing = held.table.sums(0..last).filter(Option::is_none).count();
        Ok(match (missing, held.table.get(last)) {
            (0, None) => Unpacked::Unended,
            (0, Some(_)) if held.is_sound().map_err(failed("it cannot be read"))? => {
                Unpacked::Whole(Box::new(held))
            }
            _ => Unpacked::Part,
        })
    }

    /// The object that a compressed file yields. It is decoded by `decode` unless it is there and sound; one
    /// process does so while others that want the same wait.
    pub(crate) fn unpacked(
        &self,
        url: &str,
        version: &Version,
        name: &str,
        decode: &mut dyn FnMut(&mut Writing<'_>) -> Result<(), Error>,
    ) -> Result<Held, Error> {
        let id = id_of(url, version, 0);
        let dir = self.dir.join(&id);
        let failed = |what| Error::store(&dir, what);
        let _lock =
            self.lock_part(&id, FlockOperation::LockExclusive).map_err(failed("it cannot be locked"))?;
        match self.look_unpacked(&dir, url, version)? {
            // Another process has decoded it meanwhile.
            Unpacked::Whole(held) => return Ok(*held),
            _ if dir.exists() => self.set_aside(&dir)?,
            _ => {}
        }
        let part = self.dir.join(format!("{PART}{id}"));
        let mut create = File::options();
        let file = create.create(true).read(true).write(true).truncate(true).mode(0o600).open(&part);
        let file = file.map_err(failed("the store file cannot be made"))?;
        let mut writing = Writing::new(&file, &part);
        let written = decode(&mut writing).and_then(|()| writing.end());
        let made = written.and_then(|(size, chunk, sums)| {
            let (url, name) = (url.to_owned(), name.to_owned());
            let meta = Meta { url, version: version.clone(), size, chunk, name };
            self.make_of(&dir, &meta, &part, &sums)?;
            self.take(&dir, &meta)
                .map_err(failed("it cannot be opened"))?
                .ok_or_else(|| failed("it is not what was written")(io::ErrorKind::InvalidData.into()))
        });
        if made.is_err() {
            // A later attempt begins anew.
            let _ = fs::remove_file(&part);
        }
        made
    }

    /// The lock of the one process that decodes an object.
    fn lock_part(&self, id: &str, how: FlockOperation) -> io::Result<File> {
        let path = self.dir.join(format!("{PART_LOCK}{id}"));
        loop {
            let lock = File::options().create(true).write(true).truncate(false).mode(0o600).open(&path)?;
            rustix::fs::flock(&lock, how)?;
            // It may have been removed before the lock was there.
            let (ours, theirs) = (lock.metadata()?, fs::metadata(&path));
            if theirs.is_ok_and(|theirs| (theirs.dev(), theirs.ino()) == (ours.dev(), ours.ino())) {
                return Ok(lock);
            }
        }
    }

    /// Removes what processes have left that decode no more: their locks, and parts of files.
    pub fn sweep(&self) {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let id =
                name.to_str().and_then(|name| [PART, PART_LOCK].iter().find_map(|it| name.strip_prefix(it)));
            let Some(id) = id else { continue };
            let lock = self.lock_part(id, FlockOperation::NonBlockingLockExclusive);
            if lock.is_ok() {
                // It is tried again with the next object. The lock goes last.
                for name in [PART, PART_LOCK] {
                    let _ = fs::remove_file(self.dir.join(format!("{name}{id}")));
                }
            }
        }
    }

    /// Makes an object whose file is there already, with all its chunks.
    fn make_of(&self, dir: &Path, meta: &Meta, file: &Path, sums: &[u32]) -> Result<(), Error> {
        let new = self.dir.join(format!(".new-{}-{}", std::process::id(), unique()));
        let made = || {
            DirBuilder::new().mode(0o700).create(&new)?;
            DirBuilder::new().mode(0o700).create(new.join("data"))?;
            let create = |path: PathBuf| {
                File::options().read(true).write(true).create_new(true).mode(0o600).open(path)
            };
            let table = Table::new(create(new.join("table"))?)?;
            // A power cut before the kernel has written the file takes it; the death of a process does not.
            table.set(0, sums, false)?;
            let mut described = create(new.join("meta.json"))?;
            described.write_all(&serde_json::to_vec(meta)?)?;
            described.sync_all()?;
            fs::rename(file, new.join("data").join(&meta.name))?;
            fs::rename(&new, dir)
        };
        let result = made();
        let _ = fs::remove_dir_all(&new);
        result.map_err(Error::store(dir, "the object cannot be made"))
    }
}

impl Held {
    /// Whether all chunks are there, and as their checksums say. Then a power cut takes none of them.
    fn is_sound(&self) -> io::Result<bool> {
        let mut buffer = vec![0; 128 << 10];
        let sums: Vec<Option<u32>> = self.table.sums(0..self.meta.chunks()).collect();
        for (chunk, sum) in (0..).zip(&sums) {
            let Some(sum) = *sum else { return Ok(false) };
            let (start, len) = self.part(chunk);
            if checksum(&self.data, start, len, &mut buffer)? != sum {
                return Ok(false);
            }
        }
        if !self.table.is_durable(self.meta.chunks()) {
            self.data.sync_data()?;
            self.table.set(0, &sums.into_iter().flatten().collect::<Vec<_>>(), true)?;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compressed_file_is_in_use_while_it_is_decoded() {
        let place = tempfile::tempdir().unwrap();
        let store = Store::open(Some(place.path())).unwrap();
        let of = |version: &str| Version::Etag(version.to_owned());
        let (url, packed) = ("http://h/d.img.gz", of("\"one\""));
        let hold = |version: &Version| store.hold_meta(&Meta::of(url, version, 200_000, "d.img")).unwrap();
        drop((hold(&packed), hold(&of("\"two\""))));
        let decoded = hold(&Version::Unpacked(format!("gzip {}", packed.line())));
        let in_use = || store.list().unwrap().iter().filter(|entry| entry.in_use).count();
        assert_eq!(in_use(), 2, "it, and what it is decoded from; not another version of that");
        let dropped = store.remove(store.list().unwrap()).unwrap();
        assert_eq!((dropped.gone.len(), dropped.kept.len()), (1, 2));
        // All of it is there.
        decoded.table.set(0, &[7; 4], false).unwrap();
        assert_eq!(decoded.meta.chunks(), 4);
        assert_eq!(in_use(), 1);
        drop(decoded);
        assert_eq!(store.remove(store.list().unwrap()).unwrap().gone.len(), 2);
    }
}

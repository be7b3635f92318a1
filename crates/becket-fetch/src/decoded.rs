//! Files compressed as one piece, decoded once into an object of the store, which then is an image like any.
//! A stream that is damaged, cut short, or yields more than there is room for leaves nothing behind.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use becket_image::{
    Budget, DirectIo, Error as ImageError, Fillers, Format, Identity, LayerError, OpenOptions, Split,
};

use crate::Error;
use crate::place::{plain_name, shown};
use crate::remote::{Options, Remote};
use crate::store::{Held, Store};
use crate::unpack::Packing;
use crate::version::Version;
use crate::writing::Writing;

/// How much of the stream is read at once.
const READ: usize = 256 << 10;
/// How much is decoded at once.
const YIELD: usize = 256 << 10;
/// How often, in decoded bytes, it is looked whether there is room.
const LOOK_EVERY: u64 = 8 << 20;
/// What is left free on the store's file system: this part of it, and no more than so many bytes.
const FREE_PART: u64 = 32;
const FREE_MOST: u64 = 1 << 30;
/// The longest image that comes of a stream, in bytes.
const LONGEST: u64 = 16 << 40;

/// An image that was decoded.
#[derive(Debug, Clone)]
pub struct Decoded {
    /// Its path on this host, with the way inside it.
    pub path: PathBuf,
    /// It stays in the store as long as this lives, or a device has it.
    _held: Arc<Held>,
}

/// The image in the file that a path enters, if that file can only be decoded from its start: decoded now,
/// unless the store has it. `None` for every other path. `remote` is the object that the path is of.
///
/// # Errors
/// The stream is damaged or too long, or the store cannot be used.
pub fn decoded(
    path: &Path,
    remote: Option<&Remote>,
    format: Format,
    options: &Options,
) -> Result<Option<Decoded>, Error> {
    let Split { host, inside } = becket_image::split(path);
    let fillers = remote.map(|remote| remote.fillers.clone()).unwrap_or_default();
    let Some(packing) = packing_of(&host, &inside, format, &fillers) else { return Ok(None) };
    let open = OpenOptions {
        read_only: true,
        direct_io: DirectIo::Off,
        format: Format::Raw,
        fillers: fillers.clone(),
        ..OpenOptions::default()
    };
    // Its locks keep writers away while it is decoded. What cannot be opened is for the caller to report.
    let Ok(opened) = becket_image::open_partly(&host, &open) else { return Ok(None) };
    let stored = |what| Error::store(&host, what);
    let file = File::open(&opened.path).map_err(stored("it cannot be opened"))?;
    let meta = file.metadata().map_err(stored("its status cannot be read"))?;
    let identity = Identity { dev: meta.dev(), ino: meta.ino() };
    if identity != opened.identity {
        return Ok(None);
    }
    let (url, version) = match remote {
        Some(remote) => (remote.url().to_owned(), remote.version().line()),
        None => (format!("file:{}", opened.path.display()), state_of(&meta)),
    };
    let version = Version::Unpacked(format!("{} {version}", packing.name()));
    let last = host.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let name = plain_name(packing.unpacked_name(&last));
    if options.no_store {
        let file = remote.map_or_else(|| host.display().to_string(), |remote| shown(remote.url()));
        let why = "it can only be decoded from its start, into a store".to_owned();
        return Err(Error::Stream { file, why, fix: Some("run the command without --no-store".to_owned()) });
    }
    let store = Store::open(options.store.as_deref())?;
    let stream = Stream {
        packing,
        called: remote.map_or_else(|| host.display().to_string(), |remote| shown(remote.url())),
        len: meta.len(),
        bytes: fillers.of(identity).map_or_else(|| Bytes::File(file), Bytes::Filled),
    };
    let held = store.unpacked(&url, &version, &name, &mut |writing| {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // The rest of a remote file comes while its start is decoded.
            let brings = remote.map(|remote| scope.spawn(|| remote.bring_until(&stop)));
            let decoded = stream.decode(writing, options);
            stop.store(decoded.is_err(), Ordering::Relaxed);
            match brings.map(std::thread::ScopedJoinHandle::join) {
                // What keeps bytes from coming says more than that they are missing.
                Some(Ok(Err(error))) if decoded.is_err() => Err(error),
                _ => decoded,
            }
        })
    })?;
    if let Some(limit) = options.limit {
        // This object is held, so it stays.
        store.shrink(limit)?;
    }
    let path = inside.iter().fold(held.path.clone(), |path, name| path.join(name));
    Ok(Some(Decoded { path, _held: Arc::new(held) }))
}

/// How a file is packed that can only be read from its start.
fn packing_of(host: &Path, inside: &[OsString], format: Format, fillers: &Fillers) -> Option<Packing> {
    // `raw` is said of what the path names.
    let format = match format {
        Format::Raw if inside.is_empty() => return None,
        Format::Raw => Format::Auto,
        format => format,
    };
    let meta = fs::metadata(host).ok().filter(fs::Metadata::is_file)?;
    let mut head = [0; 8];
    match fillers.of(Identity { dev: meta.dev(), ino: meta.ino() }) {
        Some(filler) => filler.read_at(&mut head, 0).ok()?,
        None => File::open(host).and_then(|file| file.read_exact_at(&mut head, 0)).ok()?,
    }
    if !Packing::may_be(head) {
        return None;
    }
    // Whether it can be read from the middle is for its reader to say.
    match becket_image::look_filled(host, format, &[], &Budget::default(), fillers) {
        Err(ImageError::Layer { source: LayerError::Sequential { packer, .. }, .. }) => Packing::of(packer),
        Err(ImageError::Layer { source: LayerError::Foreign { format, .. }, .. }) => Packing::of(format.name),
        _ => None,
    }
}

/// A line that another state of a file does not have.
fn state_of(meta: &fs::Metadata) -> String {
    let times = (meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec());
    format!("{}:{} {} {times:?}", meta.dev(), meta.ino(), meta.len())
}

/// Where the bytes of a stream are.
enum Bytes {
    File(File),
    Filled(Arc<dyn becket_image::Filler>),
}

impl Bytes {
    fn read_at(&self, buf: &mut [u8], at: u64, len: u64) -> io::Result<usize> {
        match self {
            Bytes::File(file) => std::os::unix::fs::FileExt::read_at(file, buf, at),
            Bytes::Filled(filler) => {
                let most = usize::try_from(len.saturating_sub(at)).unwrap_or(usize::MAX).min(buf.len());
                let part = buf.get_mut(..most).unwrap_or_default();
                filler.read_at(part, at).map(|()| most)
            }
        }
    }
}

/// A stream, read in order.
struct Reader<'a> {
    stream: &'a Stream,
    at: u64,
    report: &'a dyn Fn(u64),
}

impl Read for Reader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.stream.bytes.read_at(buf, self.at, self.stream.len)?;
        self.at += read as u64;
        (self.report)(self.at);
        Ok(read)
    }
}

/// A stream to decode.
struct Stream {
    packing: Packing,
    /// What people know it by.
    called: String,
    /// Its own length in bytes.
    len: u64,
    bytes: Bytes,
}

impl Stream {
    fn failed(&self, why: String, fix: Option<String>) -> Error {
        Error::Stream { file: self.called.clone(), why, fix }
    }

    fn decode(&self, writing: &mut Writing<'_>, options: &Options) -> Result<(), Error> {
        let (name, called) = (self.packing.name(), &self.called);
        let broken = |done: u64, error: &io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.failed(
                format!("it is cut short: {done} bytes could be decoded"),
                Some(format!("fetch or copy it again; {name} -t {called} checks it")),
            ),
            _ => self.failed(
                format!("it is damaged behind the first {done} decoded bytes: {error}"),
                Some(format!("{name} -t {called} checks it")),
            ),
        };
        let report = |at: u64| {
            if let Some(progress) = &options.progress {
                progress(at, self.len);
            }
        };
        let reader = Reader { stream: self, at: 0, report: &report };
        let input = BufReader::with_capacity(READ, reader);
        let mut output = self.packing.reader(input).map_err(|error| broken(0, &error))?;
        let (mut buffer, mut done, mut looked) = (vec![0; YIELD], 0_u64, 0_u64);
        loop {
            let len = match output.read(&mut buffer) {
                Ok(0) => break,
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broken(done, &error)),
            };
            writing.write(buffer.get(..len).unwrap_or_default()).map_err(|error| match error {
                // Others fill it, too.
                Error::Store { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                    self.no_room(done, 0)
                }
                error => error,
            })?;
            done += len as u64;
            if done - looked >= LOOK_EVERY {
                looked = done;
                self.check_room(writing, done, options.limit)?;
            }
        }
        if done == 0 {
            return Err(self.failed("nothing is packed in it".to_owned(), None));
        }
        self.check_room(writing, done, options.limit)?;
        report(self.len);
        Ok(())
    }

    /// That what was decoded may go on: a few bytes can yield any number.
    fn check_room(&self, writing: &Writing<'_>, done: u64, limit: Option<u64>) -> Result<(), Error> {
        if done > LONGEST {
            return Err(self.failed(format!("it yields more than {LONGEST} bytes"), None));
        }
        let stored = writing.stored();
        if let Some(limit) = limit.filter(|limit| stored > *limit) {
            let why = format!("it yields more than the {limit} bytes that the store may have");
            return Err(self.failed(why, Some("a larger --store-limit allows it".to_owned())));
        }
        let room = rustix::fs::fstatvfs(writing.file())
            .map_err(|errno| Error::store(writing.path(), "it cannot be looked up")(errno.into()))?;
        let unit = room.f_frsize.max(1);
        let (free, all) = (room.f_bavail.saturating_mul(unit), room.f_blocks.saturating_mul(unit));
        if free < (all / FREE_PART).min(FREE_MOST) {
            return Err(self.no_room(done, free));
        }
        Ok(())
    }

    fn no_room(&self, done: u64, free: u64) -> Error {
        let why =
            format!("the store has too little room for it: {done} bytes were decoded, and {free} are left");
        self.failed(why, Some("name a directory on a larger file system by --store DIR".to_owned()))
    }
}

//! Files compressed as one piece, decoded once into an object of the store, which then is an image like any.
//! A stream that is damaged, cut short, or yields more than there is room for is never taken for whole.
//!
//! Where its length is known before, what was decoded can be read while the rest is decoded (`steps`). Else
//! all of it is decoded first.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use becket_image::codec::sha256;
use becket_image::filled::Presence;
use becket_image::{
    Below, DirectIo, Error as ImageError, Fillers, Format, Identity, LayerError, OpenOptions, Source, Split,
};

use crate::Error;
use crate::error::is_full;
use crate::in_order::InOrder;
use crate::length;
use crate::object::{Object, Supply};
use crate::place::{plain_name, shown, url_of_file};
use crate::remote::{Options, Remote};
use crate::steps::Steps;
use crate::store::{Held, Meta, SIZE_MAX, Store, stamp};
use crate::stream::{LOOK_EVERY, Packed, PackedFile, Stream, state_of, written};
use crate::unpack::Packing;
use crate::unpacked::Unpacked;
use crate::version::{Known, Version};
use crate::writing::Writing;

/// How much is decoded at once.
const YIELD: usize = 256 << 10;
/// Shorter images are decoded before they are used, in bytes: that takes no time, and they are then like any
/// other file.
const LONG: u64 = 32 << 20;
/// The length of what is read while it is decoded is a multiple of this, in bytes: a disk of another length
/// may have something behind it (a fixed VHD has).
const UNIT: u64 = 1024;
/// How much of a compressed file's start and end tells it from others, in bytes.
const ENDS: u64 = 64 << 10;

/// An image that is decoded.
#[derive(Debug, Clone)]
pub struct Decoded {
    /// Its path on this host, with the way inside it.
    pub path: PathBuf,
    /// What decodes the rest while it is read.
    pub fillers: Fillers,
    /// What an overlay of it says.
    pub below: Below,
    /// What the file is compressed by.
    pub codec: &'static str,
    /// It stays in the store as long as this lives, or a device has it.
    _held: Option<Arc<Held>>,
}

/// The image in the file that a path enters, if that file can only be decoded from its start: as far as it is
/// decoded, or all of it. `None` for every other path. `remote` is the object that the path is of.
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
    let Some((packing, says)) = packing_of(&host, &inside, format, &fillers) else { return Ok(None) };
    let Some(file) = packed_file(&host, &fillers)? else { return Ok(None) };
    let meta = file.metadata().map_err(Error::store(&host, "its status cannot be read"))?;
    let in_it = |path: &Path| inside.iter().fold(path.to_owned(), |path, name| path.join(name));
    let unpacked = |version| Version::Unpacked(format!("{} {version}", packing.name()));
    let (url, version, called, below) = match remote {
        Some(remote) => {
            let version = unpacked(remote.version().line());
            let below = Below { version: stamp(&version.line()), ..remote.below.clone() };
            (remote.url().to_owned(), version, shown(remote.url()), below)
        }
        None => {
            let path = fs::canonicalize(&host).map_err(Error::store(&host, "it cannot be looked up"))?;
            let version = ends(&file, meta.len()).map_err(Error::store(&host, "it cannot be read"))?;
            let below = Below { name: in_it(&path), version: stamp(&version) };
            (url_of_file(&path), unpacked(state_of(&meta)), host.display().to_string(), below)
        }
    };
    let last = host.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let name = plain_name(packing.unpacked_name(&last));
    if options.no_store {
        let why = "it can only be decoded from its start, into a store".to_owned();
        let fix = Some("run the command without --no-store".to_owned());
        return Err(Error::Stream { file: called, why, fix });
    }
    let store = Store::open(options.store.as_deref())?;
    let packed: Arc<dyn Packed> = match remote {
        // Its client has been patient already.
        Some(remote) => Arc::new(InOrder::new(Arc::clone(remote.object()), Box::new(|heard| heard.is_ok()))),
        None => Arc::new(PackedFile { file, state: written(&meta), called: called.clone() }),
    };
    let codec = packing.name();
    let (len, limit, progress) = (meta.len(), options.limit, options.progress.clone());
    let stream = Stream { packing, called: called.clone(), len, packed, limit, progress };
    let found = store.find_unpacked(&url, &version)?;
    if matches!(found, Unpacked::Nothing | Unpacked::Part) && !options.whole {
        let usable = |size: &u64| (LONG..=SIZE_MAX).contains(size) && size.is_multiple_of(UNIT);
        if let Some(size) = length::of(&stream, says, options.certain)?.filter(usable) {
            let (path, fillers) = while_read(&store, Meta::of(&url, &version, size, &name), stream)?;
            shrink(&store, options)?;
            not_again(&path, &fillers, called)?;
            return Ok(Some(Decoded { path: in_it(&path), fillers, below, codec, _held: None }));
        }
    }
    let held = match found {
        Unpacked::Whole(held) => *held,
        _ => store.unpacked(&url, &version, &name, &mut |writing| decode(&stream, writing))?,
    };
    shrink(&store, options)?;
    let file = held.data.metadata().map_err(Error::store(&held.path, "its status cannot be read"))?;
    let mut fillers = Fillers::default();
    fillers.add_complete(Identity { dev: file.dev(), ino: file.ino() }, called.clone());
    not_again(&held.path, &fillers, called)?;
    let (path, _held) = (in_it(&held.path), Some(Arc::new(held)));
    Ok(Some(Decoded { path, fillers, below, codec, _held }))
}

/// That what was decoded is no such file, too.
fn not_again(path: &Path, fillers: &Fillers, file: String) -> Result<(), Error> {
    let Some((packing, _)) = packing_of(path, &[], Format::Auto, fillers) else { return Ok(()) };
    let why = format!("what it yields is compressed once more, by {}", packing.name());
    Err(Error::Stream {
        file,
        why,
        fix: Some("unpack it once, and name the file that this yields".to_owned()),
    })
}

/// A line that a compressed file with other contents does not have, whatever its name and its times. At its
/// end are its length and the checksums of what it yields, as far as its format has them.
fn ends(file: &File, len: u64) -> io::Result<String> {
    let size = ENDS.min(len);
    let part = |at| {
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut bytes, at)?;
        Ok::<_, io::Error>(sha256(&bytes))
    };
    Ok(format!("{len} {:x?} {:x?}", part(0)?, part(len - size)?))
}

/// Whether a file that becket-image cannot read, for this reason, is decoded from its start.
pub fn decodes(error: &ImageError) -> bool {
    packing(error).is_some()
}

/// How such a file is packed, and how long it says that it becomes.
fn packing(error: &ImageError) -> Option<(Packing, Option<u64>)> {
    let ImageError::Layer { source, .. } = error else { return None };
    match source {
        LayerError::Sequential { packer, yields, .. } => Some((Packing::of(packer)?, *yields)),
        LayerError::Foreign { format, .. } => Some((Packing::of(format.name)?, None)),
        _ => None,
    }
}

/// Makes room for an object that is held, so that it stays.
fn shrink(store: &Store, options: &Options) -> Result<(), Error> {
    options.limit.map_or(Ok(()), |limit| store.shrink(limit).map(|_| ()))
}

/// The compressed file, opened with its locks, which keep writers away while it is decoded. `None` where
/// another file is there meanwhile, or it cannot be opened: that is for the caller to report.
fn packed_file(host: &Path, fillers: &Fillers) -> Result<Option<File>, Error> {
    let open = OpenOptions {
        read_only: true,
        direct_io: DirectIo::Off,
        format: Format::Raw,
        fillers: fillers.clone(),
        ..OpenOptions::default()
    };
    let Ok(mut opened) = becket_image::open_partly(host, &open) else { return Ok(None) };
    let Some(Source::File(file)) = opened.sources.pop() else { return Ok(None) };
    Ok(Some(File::from(file.buffered)))
}

/// The object that a stream fills while it is read, and what does that.
fn while_read(store: &Store, meta: Meta, stream: Stream) -> Result<(PathBuf, Fillers), Error> {
    let known = Known { version: meta.version.clone(), size: meta.size };
    let held = store.hold_meta(&meta)?;
    let file = held.data.metadata().map_err(Error::store(&held.path, "its status cannot be read"))?;
    let presence = Presence::new(held.meta.size, held.meta.chunk)
        .map_err(Error::store(&held.path, "there is no memory for it"))?;
    let path = held.path.clone();
    let object = Object::new(held, Supply::Stream(Steps::new(stream)), known, presence, false);
    let mut fillers = Fillers::default();
    fillers.add(Identity { dev: file.dev(), ino: file.ino() }, Arc::new(object));
    Ok((path, fillers))
}

/// How a file is packed that can only be read from its start, and how long it says that it becomes.
fn packing_of(
    host: &Path,
    inside: &[OsString],
    format: Format,
    fillers: &Fillers,
) -> Option<(Packing, Option<u64>)> {
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
    let by = OpenOptions { format, fillers: fillers.clone(), ..OpenOptions::default() };
    let looked = becket_image::look_by(host, &by);
    looked.err().as_ref().and_then(packing)
}

/// Decodes all of a stream.
fn decode(stream: &Stream, writing: &mut Writing<'_>) -> Result<(), Error> {
    let mut decoding = stream.begin()?;
    let (mut buffer, mut looked) = (vec![0; YIELD], 0);
    loop {
        let len = stream.read(&mut decoding, &mut buffer)?;
        if len == 0 {
            break;
        }
        writing.write(buffer.get(..len).unwrap_or_default()).map_err(|error| match error {
            // Others fill it, too.
            Error::Store { source, .. } if is_full(&source) => stream.no_room(decoding.done, 0),
            error => error,
        })?;
        if decoding.done - looked >= LOOK_EVERY {
            looked = decoding.done;
            stream.check_room(writing.file(), writing.path(), decoding.done, writing.stored())?;
        }
    }
    if decoding.done == 0 {
        return Err(stream.failed("nothing is packed in it".to_owned(), None));
    }
    stream.check_room(writing.file(), writing.path(), decoding.done, writing.stored())?;
    if let Some(progress) = &stream.progress {
        progress(stream.len, stream.len);
    }
    Ok(())
}

//! An image on another host, opened: what a URL has now, and the object of the store that has its bytes.

use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use becket_image::filled::Presence;
use becket_image::{Below, Fillers, Identity};

use crate::Error;
use crate::access::Access;
use crate::client::Client;
use crate::error::is_full;
use crate::limit::Limit;
use crate::object::{Object, RUN, Supply};
use crate::place::{Place, shown};
use crate::store::{Store, below};
use crate::table::index;
use crate::trace;
use crate::version::Version;
use crate::waits::Waiting;

/// How many bytes the first request asks for, of what is not in the store.
const FIRST: u64 = 64 << 10;

/// Hears a sentence.
pub type Note = Arc<dyn Fn(&str) + Send + Sync>;

/// How to open an object.
#[derive(Clone, Default)]
pub struct Options {
    /// The store; that of the user if none is named.
    pub store: Option<PathBuf>,
    /// Decode all of a compressed file before it is used.
    pub whole: bool,
    /// Decode all of it, too, where a server has it and it may yield more than it says at its start.
    pub certain: bool,
    /// Use no store: keep what is fetched in memory, as far as it fits there.
    pub no_store: bool,
    /// What the store has no room for is an error; else it is kept in memory.
    pub must_keep: bool,
    /// How many bytes the store may have: objects that nobody uses make way, and then nothing more is stored.
    pub limit: Option<u64>,
    /// How long a server may not answer.
    pub patience: Duration,
    /// Hears how many bytes of how many are there, while many are brought.
    pub progress: Option<Arc<dyn Fn(u64, u64) + Send + Sync>>,
    /// Hears why a server is asked again, when the first second has passed without an answer.
    pub waiting: Option<Waiting>,
    /// Hears what the user should know although it goes on.
    pub note: Option<Note>,
    /// Note which bytes are needed and when, and fetch no others ahead.
    pub record: bool,
    /// What a device will need, by a trace: fetched in this order, behind what is waited for.
    pub foreseen: Vec<Range<u64>>,
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("store", &self.store)
            .field("no_store", &self.no_store)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// An image on another host that is open.
#[derive(Debug, Clone)]
pub struct Remote {
    /// The image's path on this host: the file in the store, and the way inside it.
    pub path: PathBuf,
    /// The file in the store.
    pub file: PathBuf,
    /// What brings its bytes.
    pub fillers: Fillers,
    /// What an overlay of it says.
    pub below: Below,
    object: Arc<Object>,
}

/// Opens the object that a URL names. One request shows which version the server has and brings its first
/// bytes; what the store has of that version is not fetched again.
///
/// # Errors
/// The URL, the server's answer or the store cannot be used.
pub fn open(place: &Place, options: &Options) -> Result<Remote, Error> {
    let mut store = None;
    if !options.no_store {
        store = room(Store::open(options.store.as_deref()), place, options)?;
    }
    let mut client =
        Client::new(&place.url, &Access::of_user(&place.url)?, options.patience, options.patience)?;
    client.waiting = options.waiting.clone();
    let mut head = Vec::new();
    let len = if store.as_ref().is_some_and(|store| store.has_start(&place.url)) { 1 } else { FIRST };
    let known = client.first(len, &mut |bytes| {
        head.extend_from_slice(bytes);
        Ok(())
    })?;
    let mut held = None;
    if let Some(store) = &store {
        held = room(store.hold(place, &known), place, options)?;
    }
    let memory_only = held.is_none();
    let held = match held {
        Some(held) => held,
        None => Store::temporary()?.hold(place, &known)?,
    };
    if let (true, Some(note)) = (memory_only && !options.no_store, &options.note) {
        note(&format!("{}: the store has no room for it, so it is kept in memory", shown(&place.url)));
    }
    let mut limit = Limit::default();
    if let (Some(most), Some(store)) = (options.limit, store) {
        // This object is held, so it stays.
        store.shrink(most)?;
        limit = Limit::of_store(store, most);
    }
    let file = held.path.clone();
    let meta = held.data.metadata().map_err(Error::store(&file, "its status cannot be read"))?;
    let table = Presence::new(held.meta.size, held.meta.chunk)
        .map_err(Error::store(&file, "there is no memory for it"))?;
    table.expect(held.table.count(table.chunks()));
    let mut object = Object::new(held, Supply::Server(client), known, table, false);
    (object.memory_only, object.must_keep) = (memory_only, options.must_keep);
    object.limit = limit;
    object.progress = options.progress.clone();
    (object.record, object.exact) = (options.record, options.record || !options.foreseen.is_empty());
    object.foreseen.clone_from(&options.foreseen);
    let object = Arc::new(object);
    object.take_head(&head)?;
    let mut fillers = Fillers::default();
    fillers.add(Identity { dev: meta.dev(), ino: meta.ino() }, object.clone());
    let path = if place.inside.is_empty() { file.clone() } else { file.join(Path::new(&place.inside)) };
    let below = below(&place.url, &object.held.meta.version, &place.inside);
    Ok(Remote { path, file, fillers, below, object })
}

/// What the store made; `None` where it has no room for that, and memory may keep the object instead.
fn room<T>(made: Result<T, Error>, place: &Place, options: &Options) -> Result<Option<T>, Error> {
    match made {
        Err(Error::Store { source, .. }) if is_full(&source) => match options.must_keep {
            true => Err(Error::Full { url: shown(&place.url), stored: 0 }),
            false => Ok(None),
        },
        made => made.map(Some),
    }
}

impl Remote {
    /// Length of the object in bytes.
    pub fn size(&self) -> u64 {
        self.object.held.meta.size
    }

    pub(crate) fn object(&self) -> &Arc<Object> {
        &self.object
    }

    /// The URL by which the store knows it.
    pub(crate) fn url(&self) -> &str {
        &self.object.held.meta.url
    }

    pub(crate) fn version(&self) -> &Version {
        &self.object.held.meta.version
    }

    /// Fetches all that the store does not have of it.
    ///
    /// # Errors
    /// The server or the store fails.
    pub fn bring_all(&self) -> Result<(), Error> {
        self.object.bring_all(std::slice::from_ref(&(0..self.size())))
    }

    /// Fetches what the store does not have of some ranges, in their order.
    ///
    /// # Errors
    /// The server or the store fails.
    pub fn bring_in_order(&self, ranges: &[Range<u64>]) -> Result<(), Error> {
        let meta = &self.object.held.meta;
        let most = (RUN / meta.chunk).max(1);
        let mut runs = Vec::new();
        for run in trace::in_chunks(ranges, meta.chunk, meta.size) {
            let starts = run.clone().step_by(index(most));
            runs.extend(starts.map(|start| start..run.end.min(start + most)));
        }
        self.object.bring_runs(&runs)
    }

    /// How many bytes were fetched from the server since the object was opened.
    pub fn fetched(&self) -> u64 {
        self.object.fetched.load(Ordering::Relaxed)
    }
}

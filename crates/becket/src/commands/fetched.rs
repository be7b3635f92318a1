//! Images that are not on this host, and files compressed as one piece: from what the user named to a path
//! on this host, whose bytes are fetched when they are read, or were decoded before; and from a name of
//! Ceph's to one that says how its cluster is reached.
//! Only a URL that the user typed is opened, and one in an image that begins with what the user allows.

use crate::{
    args::{LookOptions, OriginOptions, StoreOptions, TraceOptions},
    failure::Failure,
    progress::Progress,
};
use becket_device::AttachOptions;
use becket_fetch::{Complete, Decoded, Options, Place, Remote, Waiting};
use becket_image::{BackingUrl, Below, Fillers, Format, OpenOptions, link::rbd};
use std::{
    borrow::Cow,
    io::{self, Write as _},
    ops::Range,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// How long a server may not answer, unless the user says otherwise.
const PATIENCE: Duration = Duration::from_secs(60);

/// A path on this host, and what fills its file where the user named a URL.
#[derive(Debug)]
pub(super) struct Local<'a> {
    pub(super) path: Cow<'a, Path>,
    pub(super) fillers: Fillers,
    /// What an overlay of it says, where the file only keeps its bytes.
    pub(super) below: Option<Below>,
    /// The URLs below it that the user allows.
    pub(super) backing_urls: Vec<BackingUrl>,
    /// What was decoded for it stays in the store as long as this lives.
    pub(super) decoded: Vec<Decoded>,
}

impl<'a> Local<'a> {
    /// One that is on this host.
    pub(super) fn new(path: impl Into<Cow<'a, Path>>) -> Self {
        let (fillers, backing_urls, decoded) = Default::default();
        Self { path: path.into(), fillers, below: None, backing_urls, decoded }
    }
}

/// Opens the object of a URL, and decodes a file that can only be decoded from its start; other paths stay as
/// they are.
pub(super) fn local<'a>(path: &'a Path, asked: &LookOptions, verb: &str) -> Result<Local<'a>, Failure> {
    let how = by(&asked.store);
    let local = opened(path, asked.format, &asked.store, &how, verb)?;
    with_urls(local, path, &open_options(asked, asked.format), &asked.store, &how, verb)
}

/// The same for a program that reads all of what is named.
pub(super) fn all_of<'a>(path: &'a Path, asked: &LookOptions, verb: &str) -> Result<Local<'a>, Failure> {
    // Who reads a part of it seldom needs all to be decoded.
    let certain = !path.as_os_str().as_bytes().contains(&b'#');
    let how = Options { certain, ..by(&asked.store) };
    let local = opened(path, asked.format, &asked.store, &how, verb)?;
    with_urls(local, path, &open_options(asked, asked.format), &asked.store, &how, verb)
}

/// How images are opened that are not attached.
pub(super) fn open_options(asked: &LookOptions, format: Format) -> OpenOptions {
    OpenOptions {
        format,
        backing_dirs: asked.backing_dirs.clone(),
        no_limits: asked.limits.no_limits,
        patience: asked.store.objects.origin_timeout,
        ..OpenOptions::default()
    }
}

/// Opens the URLs that the image, or one below it, names below itself, as far as the user allows them.
fn with_urls<'a>(
    mut local: Local<'a>,
    path: &Path,
    open: &OpenOptions,
    asked: &OriginOptions,
    how: &Options,
    verb: &str,
) -> Result<Local<'a>, Failure> {
    while !asked.backing_urls.is_empty() {
        let (fillers, backing_urls) = (local.fillers.clone(), local.backing_urls.clone());
        let open = OpenOptions { fillers, backing_urls, ..open.clone() };
        // What is wrong is said when the image is opened.
        let Ok(Some(wanted)) = becket_image::wanted_url(&local.path, &open) else { break };
        let url = wanted.url.to_str().unwrap_or_default();
        if !asked.backing_urls.iter().any(|prefix| becket_image::is_within(url, prefix)) {
            break;
        }
        let format = if wanted.contents { Format::Auto } else { Format::Raw };
        let how = Options { record: false, foreseen: Vec::new(), ..how.clone() };
        let below = opened(&wanted.url, format, asked, &how, verb).map_err(|mut failure| {
            failure.message = format!("{}: {}", named(path), failure.message);
            failure
        })?;
        local.fillers.extend(below.fillers);
        local.decoded.extend(below.decoded);
        let (place, version) = (below.path.into_owned(), below.below.map(|below| below.version));
        local.backing_urls.push(BackingUrl { url: wanted.url, place, version });
    }
    Ok(local)
}

fn opened<'a>(
    path: &'a Path,
    format: Format,
    asked: &OriginOptions,
    how: &Options,
    verb: &str,
) -> Result<Local<'a>, Failure> {
    if rbd::is_name(path) {
        return Ok(Local::new(of_ceph(path, asked)));
    }
    let (local, remote) = stored(path, how, verb)?;
    let decoded = becket_fetch::decoded(&local.path, remote.as_ref(), format, how);
    Ok(match decoded.map_err(|error| failure(verb, path, &error))? {
        None => local,
        Some(decoded) => Local {
            path: Cow::Owned(decoded.path.clone()),
            fillers: decoded.fillers.clone(),
            below: Some(decoded.below.clone()),
            backing_urls: Vec::new(),
            decoded: vec![decoded],
        },
    })
}

/// Opens the object of a URL, as its server has it.
pub(super) fn as_it_is<'a>(path: &'a Path, asked: &LookOptions, verb: &str) -> Result<Local<'a>, Failure> {
    let how = by(&asked.store);
    let local = match rbd::is_name(path) {
        true => Local::new(of_ceph(path, &asked.store)),
        false => stored(path, &how, verb)?.0,
    };
    with_urls(local, path, &open_options(asked, asked.format), &asked.store, &how, verb)
}

/// The name of an image on a server that is written to. One of Ceph says how its cluster is reached.
pub(super) fn written(path: &Path, asked: &OriginOptions) -> PathBuf {
    if rbd::is_name(path) { of_ceph(path, asked) } else { path.to_owned() }
}

/// The name of an image of Ceph that says how its cluster is reached.
fn of_ceph(path: &Path, asked: &OriginOptions) -> PathBuf {
    let variable = std::env::var_os("CEPH_CONF").filter(|value| !value.is_empty()).map(PathBuf::from);
    rbd::by(path, asked.ceph_conf.as_deref(), variable.as_deref(), asked.ceph_id.as_deref())
}

fn stored<'a>(path: &'a Path, how: &Options, verb: &str) -> Result<(Local<'a>, Option<Remote>), Failure> {
    if !becket_fetch::is_remote(path.as_os_str()) {
        let complete = becket_fetch::complete(path).map_err(|error| failure(verb, path, &error))?;
        let local = Local::new(path);
        return Ok(match complete {
            Some(Complete { fillers, below }) => (Local { fillers, below, ..local }, None),
            None => (local, None),
        });
    }
    let remote = Place::parse(path.as_os_str()).and_then(|place| becket_fetch::open(&place, how));
    let remote = remote.map_err(|error| failure(verb, path, &error))?;
    let (fillers, below) = (remote.fillers.clone(), Some(remote.below.clone()));
    Ok((Local { fillers, below, ..Local::new(remote.path.clone()) }, Some(remote)))
}

/// The same for an image that is to be attached; it is attached read-only, unless it has an overlay. The last
/// value must live until the device has the image.
pub(super) fn for_device<'a>(
    path: &'a Path,
    options: &AttachOptions,
    asked: &OriginOptions,
    trace: &TraceOptions,
) -> Result<(Cow<'a, Path>, AttachOptions, Vec<Decoded>), Failure> {
    never_stored(path, options, trace)?;
    let mut how = by(asked);
    how.record = trace.record;
    // Memory keeps nothing for later.
    how.must_keep = options.fill || trace.record;
    how.foreseen = trace.prefetch.as_deref().map(read_trace).transpose()?.unwrap_or_default();
    // Only a server can have readers wait for what is being decoded.
    how.whole = !becket_device::may_be_served(options);
    let local = opened(path, options.open.format, asked, &how, "attach")?;
    let (mut options, is_stored) = (options.clone(), !local.fillers.is_empty());
    let is_decoded = !local.decoded.is_empty();
    options.open.unwritable = local.decoded.first().map(|file| format!("it is compressed by {}", file.codec));
    let local = with_urls(local, path, &options.open, asked, &how, "attach")?;
    on_this_host(path, &options, trace, local.fillers.is_empty())?;
    options.open.backing_urls = local.backing_urls;
    (options.open.fillers, options.open.below) = (local.fillers, local.below);
    let shown = |url: &BackingUrl| becket_fetch::named(url.url.as_os_str());
    options.spec.backing_url = options.open.backing_urls.first().map(shown);
    // The store is never written to.
    options.open.read_only |= is_stored && !is_decoded && options.open.cow.is_none();
    if matches!(local.path, Cow::Owned(_)) && !rbd::is_name(path) {
        options.spec.url = Some(match becket_fetch::is_remote(path.as_os_str()) {
            true => becket_fetch::named(path.as_os_str()),
            false => std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string(),
        });
    }
    if is_decoded && matches!(options.open.format, Format::Gzip | Format::Xz | Format::Zstd) {
        // That is what the file was.
        options.open.format = Format::Auto;
    }
    Ok((local.path, options, local.decoded))
}

/// Refuses what only the store can do, where an image is never kept in it.
fn never_stored(path: &Path, options: &AttachOptions, trace: &TraceOptions) -> Result<(), Failure> {
    if !becket_image::is_remote(path) {
        return Ok(());
    }
    let asked =
        [("--fill", options.fill), ("--record", trace.record), ("--prefetch", trace.prefetch.is_some())];
    let of = if rbd::is_name(path) { "a Ceph cluster" } else { "an NBD server" };
    let why = format!("needs becket's store, and an image on {of} is never in it");
    let copy = format!("or copy all of the image and attach that: becket copy {} FILE", path.display());
    cannot_have(path, asked, &why, format!("leave it away, {copy}"))
}

/// Refuses what only an image can have that is fetched; `complete` says that nothing of it is, nor of those
/// below it.
fn on_this_host(
    path: &Path,
    options: &AttachOptions,
    trace: &TraceOptions,
    complete: bool,
) -> Result<(), Failure> {
    // That there is no such image is said when it is opened.
    let here = !becket_fetch::is_remote(path.as_os_str()) && becket_image::split(path).host.exists();
    let asked = [
        ("--fill", options.fill && here && complete),
        ("--record", trace.record && here),
        ("--prefetch", trace.prefetch.is_some() && here),
    ];
    let why = "is for an image that is fetched from a server, and this one is on this host";
    cannot_have(path, asked, why, "leave it away".to_owned())
}

/// Refuses the first option that is asked for of an image that cannot have it.
fn cannot_have(path: &Path, asked: [(&str, bool); 3], why: &str, hint: String) -> Result<(), Failure> {
    let Some((option, _)) = asked.iter().find(|(_, asked)| *asked) else { return Ok(()) };
    let text = format!("cannot attach {}: {option} {why}", path.display());
    Err(Failure::new("invalid_option", text).hint(hint))
}

/// What the user named, for people: of a URL, without its query.
pub(super) fn named(path: &Path) -> String {
    match becket_fetch::is_remote(path.as_os_str()) {
        true => becket_fetch::named(path.as_os_str()),
        false => path.display().to_string(),
    }
}

/// How to open the object of an image.
fn by(asked: &OriginOptions) -> Options {
    Options { no_store: asked.no_store, ..options(&asked.objects) }
}

/// How to open objects, with a progress line on standard error.
pub(super) fn options(store: &StoreOptions) -> Options {
    let line: Mutex<Option<Progress>> = Mutex::new(None);
    let progress = move |done: u64, total: u64| {
        let mut line = line.lock().unwrap_or_else(PoisonError::into_inner);
        let number = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let shown = line.get_or_insert_with(|| Progress::of_bytes(number(total)));
        shown.reach(number(done));
        if done >= total
            && let Some(mut line) = line.take()
        {
            line.clear();
        }
    };
    let patience = store.origin_timeout.unwrap_or(PATIENCE);
    Options {
        store: store.dir.store.clone(),
        no_store: false,
        limit: store.store_limit,
        patience,
        progress: Some(Arc::new(progress)),
        waiting: Some(Waiting::new(move |url, why| {
            crate::progress::silence();
            let (why, seconds) = (crate::failure::without_errno(why), patience.as_secs_f32());
            // Nothing depends on it.
            let _ = writeln!(
                io::stderr(),
                "becket: {url}: {why}; it is tried again for {seconds} s (--origin-timeout)"
            );
        })),
        note: Some(Arc::new(|note| {
            crate::progress::silence();
            let _ = writeln!(io::stderr(), "becket: {note}");
        })),
        must_keep: false,
        record: false,
        whole: false,
        certain: false,
        foreseen: Vec::new(),
    }
}

/// What a trace names.
pub(super) fn read_trace(path: &Path) -> Result<Vec<Range<u64>>, Failure> {
    becket_fetch::trace::read(path)
        .map_err(|error| Failure::io(format!("cannot use {}", path.display()), &error))
        .map_err(|failure| failure.hint("a trace comes from `becket store trace URL`"))
}

/// What becket-fetch reports, as the failure to `verb` what was named.
pub(super) fn failure(verb: &str, path: &Path, error: &becket_fetch::Error) -> Failure {
    let named = becket_fetch::named(path.as_os_str());
    let text = crate::failure::without_errno(&error.to_string());
    let start = named.split('#').next().unwrap_or_default();
    let why = text.strip_prefix(start).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(&text);
    with_fix(Failure::new(error.kind(), format!("cannot {verb} {named}: {why}")), error)
}

/// A failure, and what the user can do about the error that it reports.
pub(super) fn with_fix(failure: Failure, error: &becket_fetch::Error) -> Failure {
    match error.fix() {
        Some(fix) => failure.hint(crate::failure::without_errno(fix)),
        None => failure,
    }
}

//! Images that are not on this host: from a URL to a path on this host, whose bytes are fetched when they are
//! read; and from a name of Ceph's to one that says how its cluster is reached.
//! Only a URL that the user typed is opened, and what is attached is complete in the store before.

use crate::{
    args::{OriginOptions, StoreOptions},
    failure::Failure,
    progress::Progress,
};
use becket_device::AttachOptions;
use becket_fetch::{Options, Place};
use becket_image::Fillers;
use std::{
    borrow::Cow,
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
}

/// Opens the object of a URL; other paths stay as they are.
pub(super) fn local<'a>(path: &'a Path, asked: &OriginOptions, verb: &str) -> Result<Local<'a>, Failure> {
    let store = &asked.objects;
    if becket_image::link::rbd::is_name(path) {
        let variable = std::env::var_os("CEPH_CONF").filter(|value| !value.is_empty()).map(PathBuf::from);
        let (conf, id) = (asked.ceph_conf.as_deref(), asked.ceph_id.as_deref());
        let path = becket_image::link::rbd::by(path, conf, variable.as_deref(), id);
        return Ok(Local { path: Cow::Owned(path), fillers: Fillers::default() });
    }
    if !becket_fetch::is_remote(path.as_os_str()) {
        return Ok(Local { path: Cow::Borrowed(path), fillers: Fillers::default() });
    }
    let remote = Place::parse(path.as_os_str()).and_then(|place| becket_fetch::open(&place, &options(store)));
    let remote = remote.map_err(|error| failure(verb, path, &error))?;
    Ok(Local { path: Cow::Owned(remote.path), fillers: remote.fillers })
}

/// The same for an image that is to be attached; it is attached read-only, unless it has an overlay.
pub(super) fn for_device<'a>(
    path: &'a Path,
    options: &AttachOptions,
    asked: &OriginOptions,
) -> Result<(Cow<'a, Path>, AttachOptions), Failure> {
    let local = local(path, asked, "attach")?;
    let mut options = options.clone();
    if becket_fetch::is_remote(path.as_os_str()) {
        options.open.read_only |= options.open.cow.is_none();
        options.open.fillers = local.fillers;
        options.spec.url = Some(becket_fetch::named(path.as_os_str()));
    }
    Ok((local.path, options))
}

/// What the user named, for people: of a URL, without its query.
pub(super) fn named(path: &Path) -> String {
    match becket_fetch::is_remote(path.as_os_str()) {
        true => becket_fetch::named(path.as_os_str()),
        false => path.display().to_string(),
    }
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
    Options {
        store: store.store.clone(),
        limit: store.store_limit,
        patience: store.origin_timeout.unwrap_or(PATIENCE),
        progress: Some(Arc::new(progress)),
    }
}

/// What becket-fetch reports, as the failure to `verb` what was named.
pub(super) fn failure(verb: &str, path: &Path, error: &becket_fetch::Error) -> Failure {
    let named = becket_fetch::named(path.as_os_str());
    let text = crate::failure::without_errno(&error.to_string());
    let start = named.split('#').next().unwrap_or_default();
    let why = text.strip_prefix(start).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(&text);
    let failure = Failure::new(error.kind(), format!("cannot {verb} {named}: {why}"));
    match error.fix() {
        Some(fix) => failure.hint(fix),
        None => failure,
    }
}

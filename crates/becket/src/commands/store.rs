//! `becket store ...`: what was fetched from web servers, and is kept on this host.
//! Never removes what a process or a device uses.

use super::fetched;
use crate::{
    args::{self, StoreAction, StoreDir, StoreOptions},
    failure::Failure,
    progress::Progress,
    ui::{Ui, table},
    units::{format_date, format_size},
};
use becket_fetch::{Entry, Options, Place, Store};
use becket_image::OpenOptions;
use serde_json::{Value, json};
use std::{ops::Range, path::Path};

pub(crate) fn run(ui: &Ui, args: &args::Store) -> Result<u8, Failure> {
    match &args.action {
        StoreAction::List { store, urls } => list(ui, store, urls),
        StoreAction::Verify { store, urls } => verify(ui, store, urls),
        StoreAction::Drop { store, urls, all } => drop_objects(ui, store, urls, *all),
        StoreAction::Prefetch { store, trace, urls } => prefetch(ui, store, trace.as_deref(), urls),
        StoreAction::Trace { store, url } => trace(ui, store, url),
    }
}

fn open(store: &StoreDir) -> Result<Store, Failure> {
    Store::open(store.store.as_deref()).map_err(failed)
}

fn failed(error: becket_fetch::Error) -> Failure {
    let text = crate::failure::without_errno(&error.to_string());
    fetched::with_fix(Failure::new(error.kind(), text), &error)
}

/// A URL without its query, which may be a signature.
fn named(url: &str) -> String {
    becket_fetch::named(url.as_ref())
}

/// The objects of these URLs and compressed files, or all; one of which the store has nothing is an error.
fn chosen(store: &Store, urls: &[String]) -> Result<Vec<Entry>, Failure> {
    if urls.is_empty() {
        return store.list().map_err(failed);
    }
    let mut all = Vec::new();
    for url in urls {
        let found = store.find(url).map_err(failed)?;
        if found.is_empty() {
            return Err(Failure::new("not_found", format!("the store has nothing of {}", named(url)))
                .hint("see what it has: becket store list"));
        }
        all.extend(found);
    }
    Ok(all)
}

fn list(ui: &Ui, asked: &StoreDir, urls: &[String]) -> Result<u8, Failure> {
    let objects = chosen(&open(asked)?, urls)?;
    if ui.json {
        ui.document(&json!({ "objects": objects }))?;
        return Ok(0);
    }
    if objects.is_empty() {
        ui.note("the store is empty");
        return Ok(0);
    }
    let head = ["SIZE", "STORED", "USED", "IN USE", "URL"].map(str::to_owned).to_vec();
    let row = |entry: &Entry| {
        let date = format_date(i64::try_from(entry.used).unwrap_or(i64::MAX));
        let in_use = if entry.in_use { "yes" } else { "no" };
        vec![format_size(entry.size), format_size(entry.stored), date, in_use.to_owned(), entry.url.clone()]
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(objects.iter().map(row)).collect();
    ui.line(table(&rows, &[0, 1]).trim_end())?;
    Ok(0)
}

fn verify(ui: &Ui, asked: &StoreDir, urls: &[String]) -> Result<u8, Failure> {
    let store = open(asked)?;
    let objects = chosen(&store, urls)?;
    let number = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut progress = Progress::of_bytes(number(objects.iter().map(|entry| entry.stored).sum()));
    let (mut before, mut reports, mut status) = (0, Vec::new(), 0);
    for entry in &objects {
        let verified = store.verify(entry, &mut |done| progress.reach(number(before + done))).map_err(failed);
        progress.clear();
        let verified = verified?;
        before += verified.good + verified.damaged;
        if verified.damaged > 0 {
            status = 1;
            let damaged = format_size(verified.damaged);
            ui.note(match verified.in_use {
                true => format!(
                    "{}: {damaged} are damaged, and what uses it now may read them; detach it, and they are \
                     fetched again when it is attached",
                    entry.url
                ),
                false => format!("{}: {damaged} were damaged, and are fetched again when needed", entry.url),
            });
        }
        let becket_fetch::Verified { good, damaged, in_use } = verified;
        reports.push(json!({ "url": entry.url, "good": good, "damaged": damaged, "in_use": in_use }));
    }
    if ui.json {
        ui.document(&json!({ "verified": reports }))?;
    } else if status == 0 {
        ui.line(format!("{} in {} objects, none of it damaged", format_size(before), objects.len()))?;
    }
    Ok(status)
}

fn drop_objects(ui: &Ui, asked: &StoreDir, urls: &[String], all: bool) -> Result<u8, Failure> {
    let store = open(asked)?;
    let objects = if all { store.list().map_err(failed)? } else { chosen(&store, urls)? };
    let dropped = store.remove(objects).map_err(failed)?;
    store.sweep();
    for entry in &dropped.kept {
        ui.note(format!("{} is in use and stays", entry.url));
    }
    if ui.json {
        ui.document(&json!({ "dropped": dropped.gone, "kept": dropped.kept }))?;
    } else {
        ui.lines(dropped.gone.iter().map(|entry| format!("{} {}", format_size(entry.stored), entry.url)))?;
    }
    Ok(u8::from(!dropped.kept.is_empty()))
}

fn trace(ui: &Ui, asked: &StoreDir, url: &str) -> Result<u8, Failure> {
    let store = open(asked)?;
    let mut needs = Vec::new();
    for entry in chosen(&store, &[url.to_owned()])? {
        needs.extend(store.trace(&entry).map_err(failed)?);
    }
    if needs.is_empty() {
        let hint = match becket_fetch::is_remote(url.as_ref()) {
            true => format!("becket attach --record {}, start from the device, and ask again", named(url)),
            false => "only of what is fetched from a server it is recorded".to_owned(),
        };
        return Err(Failure::new("not_found", format!("nothing was recorded of {}", named(url))).hint(hint));
    }
    match ui.json {
        true => ui.document(&json!({ "needs": needs }))?,
        false => ui.line(becket_fetch::trace::written(&needs).trim_end())?,
    }
    Ok(0)
}

fn prefetch(ui: &Ui, asked: &StoreOptions, trace: Option<&Path>, urls: &[String]) -> Result<u8, Failure> {
    let ranges = trace.map(fetched::read_trace).transpose()?;
    let (mut reports, mut status) = (Vec::new(), 0);
    for (url, named) in urls.iter().map(|url| (url, named(url))) {
        match fetch(url, asked, ranges.as_deref()) {
            Ok(report) => {
                if !ui.json {
                    let bytes = |key: &str| report.get(key).and_then(Value::as_u64).unwrap_or(0);
                    let size = bytes("size");
                    // A part that came twice is no further part of it.
                    let (fetched, size) = (format_size(bytes("fetched").min(size)), format_size(size));
                    let what = if trace.is_some() { "all that the trace names" } else { "all of it" };
                    ui.line(format!(
                        "{named}: {fetched} of {size} were fetched, and {what} is in the store"
                    ))?;
                }
                reports.push(report);
            }
            Err(failure) => {
                ui.failure(&failure);
                reports.push(json!({ "url": named, "error": failure.to_json() }));
                status = failure.status;
            }
        }
    }
    if ui.json {
        ui.document(&json!({ "fetched": reports }))?;
    }
    Ok(status)
}

/// Brings the whole object, or some ranges of it.
fn fetch(url: &str, asked: &StoreOptions, ranges: Option<&[Range<u64>]>) -> Result<Value, Failure> {
    let path = Path::new(url);
    let failed = |error| fetched::failure("fetch", path, &error);
    if !becket_fetch::is_remote(path.as_os_str()) {
        return Err(not_fetched(path));
    }
    let place = Place::parse(path.as_os_str()).map_err(failed)?;
    let options = Options { must_keep: true, ..fetched::options(asked) };
    let remote = becket_fetch::open(&place, &options).map_err(failed)?;
    match ranges {
        Some(ranges) => remote.bring_in_order(ranges).map_err(failed)?,
        None => remote.bring_all().map_err(failed)?,
    }
    Ok(json!({ "url": named(url), "size": remote.size(), "fetched": remote.fetched() }))
}

/// Why a word is none that is fetched.
fn not_fetched(path: &Path) -> Failure {
    let shown = becket_fetch::named(path.as_os_str());
    if !path.exists() {
        return Failure::usage(format!("{shown} is not a URL of what becket fetches"))
            .hint("such URLs begin with http://, https://, s3:// or oci://");
    }
    let failure = Failure::usage(format!("{shown} is a file of this host: there is nothing to fetch"));
    let looked = becket_image::look_by(path, &OpenOptions::default());
    match looked.is_err_and(|error| becket_fetch::decodes(&error)) {
        true => failure.hint(format!(
            "it is decoded into the store when all of it is first read: becket cat {} >/dev/null",
            becket_image::quoted(path)
        )),
        false => failure.hint("it needs no store: becket reads the file itself"),
    }
}

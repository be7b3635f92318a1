//! `becket attach IMAGE...`: many images at once, one device path a line in the order given.
//! Never detaches what worked because something else failed, unless that was asked for.

use super::{
    attach_from, attach_tab, common,
    common::{Asked, Job, shown},
    export, fetched, foresee,
    interrupts::{self, Interrupts, Watched},
    list, luks, parallel,
};
use crate::{args, failure::Failure, progress::Progress, ui::Ui};
use becket_device::{DetachOptions, DeviceInfo};
use serde_json::{Value, json};
use std::{
    io::{self, IsTerminal as _},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// How long a device that is detached again may take to go. It was never announced, so nothing should use it.
const GONE_WITHIN: Duration = Duration::from_secs(10);

pub(crate) fn run(ui: &Ui, args: &args::Attach) -> Result<u8, Failure> {
    let jobs = jobs(args)?;
    if args.dry_run {
        return foresee::attach(ui, &jobs);
    }
    // One alone is ended by a signal while it is opened, which may take long.
    let watched = (jobs.len() > 1 || args.atomic).then(|| Interrupts::block()?.watch(*ui)).transpose()?;
    let came = || watched.as_ref().and_then(Watched::came);
    // People see what became of many in a table; a program reads paths.
    let table = jobs.len() > 1 && !ui.json && io::stdout().is_terminal();
    let mut devices = Vec::new();
    let mut failures = Vec::new();
    let mut printed = Ok(());
    let progress = Mutex::new(Progress::new(jobs.len()));
    let progress = || progress.lock().unwrap_or_else(PoisonError::into_inner);
    let done = |outcome: &Result<Attached, Failure>| {
        progress().step();
        came().is_none() && (outcome.is_ok() || !args.atomic)
    };
    let attach = |asked: &Asked| match asked {
        Ok(job) => attach(job),
        Err(missing) => Err(missing.failure.clone()),
    };
    parallel::in_order(&jobs, attach, done, |asked, outcome| match outcome {
        Ok(attached) => {
            if !args.atomic && !table {
                progress().clear();
                say(ui, &attached, &mut printed);
            }
            devices.push(attached);
        }
        Err(failure) => {
            progress().clear();
            ui.failure(&failure);
            failures.push((Some(shown(asked).to_owned()), failure));
        }
    });
    progress().clear();
    let interrupted = came();
    let complete = failures.is_empty() && interrupted.is_none();
    if let Some(signal) = interrupted {
        let failure = interrupts::failure(broken_off(args.atomic, devices.len(), jobs.len()), signal);
        ui.failure(&failure);
        failures.push((None, failure));
    }
    if table && (!args.atomic || complete) {
        printed = in_a_table(ui, &devices);
    } else if args.atomic && complete {
        devices.iter().for_each(|attached| say(ui, attached, &mut printed));
    } else if args.atomic {
        take_back(ui, &mut devices);
    }
    printed.map_err(|failure| common::unprinted(failure, devices.iter().map(|attached| &attached.info)))?;
    let status = match (failures.last(), interrupted) {
        (Some((_, failure)), Some(_)) => failure.status,
        (failure, _) => u8::from(failure.is_some()),
    };
    if ui.json {
        let errors: Vec<Value> = failures
            .iter()
            .map(|(image, failure)| {
                let mut error = failure.to_json();
                if let Some(image) = image {
                    error["image"] = json!(becket_device::path_text(image));
                }
                error
            })
            .collect();
        // The shape is one for one image and for many.
        let opened: Vec<Value> = devices
            .iter()
            .filter(|attached| attached.node != attached.info.device)
            .map(|attached| json!({ "name": attached.info.name, "device": attached.node }))
            .collect();
        let devices: Vec<DeviceInfo> = devices.into_iter().map(|attached| attached.info).collect();
        let mut value = json!({ "devices": devices, "errors": errors });
        if !opened.is_empty() {
            value["opened"] = json!(opened);
        }
        ui.value(&value).map_err(|failure| common::unprinted(failure, &devices))?;
    }
    Ok(status)
}

/// What a signal left undone, for people.
fn broken_off(atomic: bool, attached: usize, all: usize) -> String {
    match atomic {
        true => "the attach was interrupted: what was attached is detached again".to_owned(),
        false => format!("the attach was interrupted: {attached} of {all} images are attached"),
    }
}

fn jobs(args: &args::Attach) -> Result<Vec<Asked>, Failure> {
    if let Some(table) = &args.tab {
        return attach_tab::jobs(table, &args.images);
    }
    if let Some(file) = &args.from {
        if args.device.name.is_some() {
            return Err(Failure::usage("one --name cannot name several devices")
                .hint("give each line of the file its own --name"));
        }
        return Ok(attach_from::jobs(file, &args.device)?.into_iter().map(Ok).collect());
    }
    if args.device.name.is_some() && args.images.len() > 1 {
        return Err(Failure::usage("one --name cannot name several devices")
            .hint("attach the images one by one, or omit --name"));
    }
    if args.device.image.cow.is_some() && args.images.len() > 1 {
        return Err(Failure::usage("one --cow cannot be the overlay of several images")
            .hint("attach the images one by one, or give each line of --from its own --cow"));
    }
    let options = common::options(&args.device);
    let store = &args.device.image.store;
    let job = |image: &PathBuf| {
        Ok(Job {
            image: image.clone(),
            options: options.clone(),
            store: store.clone(),
            trace: args.device.image.trace.clone(),
            key_file: args.device.key_file.clone(),
            export: None,
            origin: None,
        })
    };
    Ok(args.images.iter().map(job).collect())
}

/// A device, and the node to use: its own, or that of what was opened on it.
struct Attached {
    info: DeviceInfo,
    node: PathBuf,
}

fn attach(job: &Job) -> Result<Attached, Failure> {
    let attached = match &job.export {
        Some(args) => export::at(args, &job.image, &job.options).map(Attached::whole),
        None => fetched::for_device(&job.image, &job.options, &job.store, &job.trace).and_then(
            |(image, options, _decoded)| {
                job.key_file.iter().try_for_each(|_| luks::ready(&job.image))?;
                let info = becket_device::attach(&image, &options).map_err(|error| {
                    Failure::device("attach", becket_fetch::named(job.image.as_os_str()), &error)
                })?;
                match &job.key_file {
                    None => Ok(Attached::whole(info)),
                    Some(key) => opened(info, key, job),
                }
            },
        ),
    };
    attached.map_err(|mut failure| {
        if let Some(origin) = &job.origin {
            failure.message = format!("{origin}: {}", failure.message);
        }
        failure
    })
}

impl Attached {
    fn whole(info: DeviceInfo) -> Attached {
        Attached { node: info.device.clone(), info }
    }
}

fn in_a_table(ui: &Ui, devices: &[Attached]) -> Result<(), Failure> {
    let shown = |attached: &Attached| DeviceInfo { device: attached.node.clone(), ..attached.info.clone() };
    let shown: Vec<DeviceInfo> = devices.iter().map(shown).collect();
    shown.iter().for_each(|info| ui.explain(info));
    if shown.is_empty() { Ok(()) } else { list::show(ui, &shown) }
}

/// Opens what is encrypted on a new device, which goes again if that fails.
fn opened(info: DeviceInfo, key: &Path, job: &Job) -> Result<Attached, Failure> {
    match luks::open(&info, &info.device, key, &job.image) {
        Ok(mapping) => Ok(Attached { node: mapping.node(), info }),
        Err(failure) => {
            let options = DetachOptions { timeout: GONE_WITHIN, ..DetachOptions::default() };
            match becket_device::detach(&info.name, &options) {
                Ok(_) => Err(failure),
                Err(error) => Err(failure.hint(format!("{} stays attached: {error}", info.device.display()))),
            }
        }
    }
}

fn say(ui: &Ui, attached: &Attached, printed: &mut Result<(), Failure>) {
    ui.explain(&attached.info);
    if !ui.json && printed.is_ok() {
        *printed = ui.line(attached.node.display().to_string());
    }
}

/// Detaches what was attached, the last one first; what does not go stays in the list.
fn take_back(ui: &Ui, devices: &mut Vec<Attached>) {
    let options = DetachOptions { timeout: GONE_WITHIN, ..DetachOptions::default() };
    let mut stay = Vec::new();
    for attached in devices.drain(..).rev() {
        match luks::detach(Path::new(&attached.info.name), &options) {
            Ok(gone) => _ = ui.unsaved(&gone),
            Err(error) if error.kind() == becket_device::ErrorKind::NotFound => {}
            Err(error) => {
                ui.failure(&Failure::device("detach", attached.info.device.display(), &error));
                stay.push(attached);
            }
        }
    }
    *devices = stay;
}

//! `attach --dry-run` and `detach --dry-run`: what these commands would do.
//! Never does any of it: no device, file or record is made, and none goes.

use super::{
    common::{Asked, Job, shown},
    fetched, parallel,
};
use crate::{
    args,
    failure::Failure,
    ui::{Ui, printable},
    units::format_size,
};
use becket_device::{Foreseen, Leaving, Outcome, Rehearsal};
use serde_json::json;
use std::ffi::OsString;

/// What would become of the images, one line each, in their order.
pub(super) fn attach(ui: &Ui, jobs: &[Asked]) -> Result<u8, Failure> {
    let (mut devices, mut errors, mut printed) = (Vec::new(), Vec::new(), Ok(()));
    let rehearsal = Rehearsal::default();
    parallel::in_order(
        jobs,
        |asked| match asked {
            Ok(job) => foresee(&rehearsal, job),
            Err(missing) => Err(missing.failure.clone()),
        },
        |_| true,
        |asked, outcome| match outcome {
            Ok(foreseen) => {
                if !ui.json && printed.is_ok() {
                    printed = show(ui, &foreseen);
                }
                devices.push(foreseen);
            }
            Err(failure) => {
                ui.failure(&failure);
                let mut error = failure.to_json();
                error["image"] = json!(becket_device::path_text(shown(asked)));
                errors.push(error);
            }
        },
    );
    printed?;
    if ui.json {
        ui.value(&json!({ "devices": devices, "errors": errors }))?;
    }
    Ok(u8::from(!errors.is_empty()))
}

fn foresee(rehearsal: &Rehearsal, job: &Job) -> Result<Foreseen, Failure> {
    if job.export.is_some() {
        let image = job.image.display();
        return Err(Failure::new("unsupported", format!("cannot foresee {image}: it is to be exported"))
            .hint("--dry-run is for devices only"));
    }
    let mut store = job.store.clone();
    // Nothing goes from the store for a device that is not made.
    store.objects.store_limit = None;
    let foreseen = fetched::for_device(&job.image, &job.options, &store, &job.trace).and_then(
        |(image, options, _decoded)| {
            rehearsal.foresee(&image, &options).map_err(|error| {
                Failure::device("attach", becket_fetch::named(job.image.as_os_str()), &error)
            })
        },
    );
    foreseen.map_err(|mut failure| {
        if let Some(origin) = &job.origin {
            failure.message = format!("{origin}: {}", failure.message);
        }
        failure
    })
}

fn show(ui: &Ui, foreseen: &Foreseen) -> Result<(), Failure> {
    for warning in &foreseen.warnings {
        ui.note(format!("warning: {warning}"));
    }
    ui.line(printable(&sentence(foreseen)))?;
    if ui.verbose {
        for choice in &foreseen.choices {
            let verdict = if choice.possible { "possible" } else { "not possible" };
            ui.note(format!("{}: {verdict}: {}", choice.transport, choice.reason));
        }
    }
    Ok(())
}

/// What would be made, on one line.
fn sentence(foreseen: &Foreseen) -> String {
    let image = foreseen.url.clone().unwrap_or_else(|| foreseen.image.display().to_string());
    let writes = if foreseen.read_only { "read-only" } else { "writable" };
    let mut text = format!(
        "would attach {image} by {}, {writes}, {}, blocks of {}",
        foreseen.transport,
        format_size(foreseen.size),
        foreseen.block_size
    );
    match foreseen.partitions.len() {
        0 => {}
        1 => text.push_str(", 1 partition"),
        many => text.push_str(&format!(", {many} partitions")),
    }
    if let Some(cow) = &foreseen.cow {
        let creates = if foreseen.creates_cow { "would be created" } else { "is there" };
        text.push_str(&format!(", writes go to {}, which {creates}", cow.display()));
    }
    if foreseen.isolated {
        text.push_str(", in a process of its own");
    }
    if foreseen.starts_server {
        text.push_str(", and would start becket's server");
    }
    text
}

/// What would become of the devices.
pub(super) fn detach(ui: &Ui, args: &args::Detach, targets: &[OsString]) -> Result<u8, Failure> {
    let (mut devices, mut errors, mut stays) = (Vec::new(), Vec::new(), false);
    for target in targets {
        match becket_device::foresee_detach(target, args.lazy) {
            Ok(leaving) => {
                stays |= leaving.outcome == Outcome::Refused;
                if !ui.json {
                    ui.line(printable(&leaving_sentence(&leaving)))?;
                }
                devices.push(leaving);
            }
            Err(error) => {
                let failure = Failure::device("detach", target.display(), &error);
                ui.failure(&failure);
                errors.push(failure.to_json_of(target));
            }
        }
    }
    if ui.json {
        ui.value(&json!({ "devices": devices, "errors": errors }))?;
    }
    Ok(u8::from(stays || !errors.is_empty()))
}

fn leaving_sentence(leaving: &Leaving) -> String {
    let device = leaving.device.display();
    let users = leaving.users.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    match leaving.outcome {
        Outcome::Detached => format!("would detach {device}"),
        Outcome::DetachedLater => format!("would detach {device} when its last user closes it: {users}"),
        Outcome::Refused => format!("would not detach {device}: {users}"),
    }
}

//! `becket detach TARGET...`: devices go, and are really gone when it returns.
//! Never stops at the first that does not go: every other one is tried too.

use super::{foresee, luks, parallel};
use crate::{args, failure::Failure, ui::Ui};
use becket_device::{DetachOptions, DeviceInfo, DeviceState};
use serde_json::json;
use std::{collections::HashSet, ffi::OsString, path::Path};

pub(crate) fn run(ui: &Ui, args: &args::Detach) -> Result<u8, Failure> {
    let options = DetachOptions { lazy: args.lazy, force: args.force, timeout: args.timeout };
    // With --all, devices are no mistake.
    let mut disks = HashSet::new();
    let mut targets = if args.all {
        let devices =
            becket_device::list().map_err(|error| Failure::device("list", "the devices", &error))?;
        let disk = |info: &&DeviceInfo| info.spec.export.is_none();
        disks.extend(devices.iter().filter(disk).map(|info| OsString::from(&info.name)));
        devices.into_iter().map(|info| info.name.into()).collect()
    } else {
        args.targets.clone()
    };
    if args.dry_run {
        return foresee::detach(ui, args, &targets);
    }
    let mut devices = Vec::new();
    let failures = loop {
        let before = devices.len();
        let failures = each(ui, &targets, (&options, &disks), &mut devices);
        // Of several that stand on each other the upper ones go first: as long as some go, others may follow.
        if failures.is_empty() || !args.all || devices.len() == before {
            break failures;
        }
        targets = failures.into_iter().map(|(target, _)| target).collect();
    };
    let mut errors = Vec::new();
    for (target, error) in &failures {
        // With --all it went by itself between listing and detaching: that is what was wanted.
        if args.all && error.kind() == becket_device::ErrorKind::NotFound {
            continue;
        }
        let failure = Failure::device("detach", target.display(), error);
        ui.failure(&failure);
        let mut value = failure.to_json_of(target);
        if let becket_device::Error::Busy { users, .. } = error {
            value["users"] = json!(users);
        }
        errors.push(value);
    }
    if ui.json {
        ui.value(&json!({ "devices": devices, "errors": errors }))?;
    }
    let unsaved = devices.iter().any(|info| info.unsaved.is_some());
    Ok(u8::from(unsaved || !errors.is_empty()))
}

/// Tries each target once, many at the same time; returns those that did not go.
fn each(
    ui: &Ui,
    targets: &[OsString],
    (options, disks): (&DetachOptions, &HashSet<OsString>),
    devices: &mut Vec<DeviceInfo>,
) -> Vec<(OsString, becket_device::Error)> {
    let mut failures = Vec::new();
    let detach = |target: &OsString| {
        let force = options.force && !disks.contains(target);
        luks::detach(Path::new(target), &DetachOptions { force, ..options.clone() })
    };
    parallel::in_order(
        targets,
        detach,
        |_| true,
        |target, outcome| match outcome {
            Ok(info) => {
                if ui.verbose {
                    ui.note(reported(&info));
                }
                ui.unsaved(&info);
                devices.push(info);
            }
            Err(error) => failures.push((target.clone(), error)),
        },
    );
    failures
}

fn reported(info: &DeviceInfo) -> String {
    let device = info.device.display();
    match info.state {
        DeviceState::Detaching => format!("{device} is detached when its last user closes it"),
        _ => format!("{device} is gone"),
    }
}

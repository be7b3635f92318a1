//! `becket detach TARGET...`: devices go, and are really gone when it returns.
//! Never stops at the first that does not go: every other one is tried too.

use crate::{args, failure::Failure, ui::Ui};
use becket_device::{DetachOptions, DeviceInfo, DeviceState};
use serde_json::json;

pub(crate) fn run(ui: &Ui, args: &args::Detach) -> Result<u8, Failure> {
    let options = DetachOptions { lazy: args.lazy, timeout: args.timeout };
    let targets = if args.all {
        let devices =
            becket_device::list().map_err(|error| Failure::device("list", "the devices", &error))?;
        devices.into_iter().map(|info| info.name).collect()
    } else {
        args.targets.clone()
    };
    let mut devices = Vec::new();
    let mut errors = Vec::new();
    for target in &targets {
        match becket_device::detach(target, &options) {
            Ok(info) => {
                if ui.verbose {
                    ui.note(told(&info));
                }
                devices.push(info);
            }
            // With --all it went by itself between listing and detaching: that is what was wanted.
            Err(error) if args.all && error.kind() == becket_device::ErrorKind::NotFound => {}
            Err(error) => {
                let failure = Failure::device("detach", target, &error);
                ui.failure(&failure);
                let mut value = failure.to_json();
                value["target"] = json!(target);
                if let becket_device::Error::Busy { users, .. } = &error {
                    value["users"] = json!(users);
                }
                errors.push(value);
            }
        }
    }
    if ui.json {
        ui.value(&json!({ "devices": devices, "errors": errors }))?;
    }
    Ok(u8::from(!errors.is_empty()))
}

fn told(info: &DeviceInfo) -> String {
    let device = info.device.display();
    match info.state {
        DeviceState::Detaching => format!("{device} goes when its last user lets go"),
        _ => format!("{device} is gone"),
    }
}

//! `becket refresh TARGET...`: devices take over a changed size of their image.
//! Never changes the image.

use crate::{args, failure::Failure, ui::Ui, units::format_size};
use serde_json::json;

pub(crate) fn run(ui: &Ui, args: &args::Refresh) -> Result<u8, Failure> {
    let mut devices = Vec::new();
    let mut errors = Vec::new();
    for target in &args.targets {
        match becket_device::refresh(target) {
            Ok(info) => {
                if !ui.json {
                    ui.line(format!("{}  {}", info.device.display(), format_size(info.size)))?;
                }
                devices.push(info);
            }
            Err(error) => {
                let failure = Failure::device("refresh", target.display(), &error);
                ui.failure(&failure);
                let mut value = failure.to_json();
                value["target"] = json!(target.to_string_lossy());
                errors.push(value);
            }
        }
    }
    if ui.json {
        ui.value(&json!({ "devices": devices, "errors": errors }))?;
    }
    Ok(u8::from(!errors.is_empty()))
}

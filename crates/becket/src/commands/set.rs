//! `becket set TARGET ...`: changes a device while it lives.
//! Never touches what was not asked for.

use crate::{args, failure::Failure, ui::Ui};
use becket_device::Changes;
use serde_json::json;

pub(crate) fn run(ui: &Ui, args: &args::Set) -> Result<u8, Failure> {
    let changes = Changes { direct_io: args.direct_io.map(Into::into) };
    let info = becket_device::set(&args.target, &changes)
        .map_err(|error| Failure::device("change", args.target.display(), &error))?;
    if ui.json {
        ui.value(&json!({ "devices": [info] }))?;
    } else {
        let direct = if info.direct_io { "on" } else { "off" };
        ui.line(format!("{}  direct I/O {direct}: {}", info.device.display(), info.direct_io_reason))?;
    }
    Ok(0)
}

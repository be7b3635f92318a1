//! `becket list`: what is attached, as a table or as JSON.
//! Never changes anything.

use crate::{
    args,
    failure::Failure,
    ui::{Colour, Ui, printable, queues, table},
    units::format_size,
};
use becket_device::{DeviceInfo, DeviceState, Part};
use serde_json::json;
use std::{ffi::OsString, path::Path};

const SIZE_COLUMN: usize = 3;
const BLOCK_COLUMN: usize = 6;
/// How what is said of a server begins, and the state that it is.
const AWAY: [(&str, &str); 4] = [
    ("waiting", "waiting"),
    ("source changed", "source changed"),
    ("source damaged", "source damaged"),
    ("lost", "image lost"),
];

pub(crate) fn run(ui: &Ui, args: &args::List) -> Result<u8, Failure> {
    let devices = becket_device::list().map_err(|error| Failure::device("list", "the devices", &error))?;
    if !args.targets.is_empty() {
        return some(ui, devices, &args.targets);
    }
    if ui.json {
        ui.value(&json!({ "devices": devices }))?;
        return Ok(0);
    }
    if devices.is_empty() {
        // For a program that reads the table, no line at all is no device.
        ui.note("nothing is attached; `becket attach IMAGE` attaches an image");
        return Ok(0);
    }
    show(ui, &devices)?;
    Ok(0)
}

/// Those of all devices that are meant.
fn some(ui: &Ui, mut devices: Vec<DeviceInfo>, targets: &[OsString]) -> Result<u8, Failure> {
    let (mut names, mut errors) = (Vec::new(), Vec::new());
    for target in targets {
        match becket_device::find(target) {
            Ok(found) => names.push(found.name),
            Err(becket_device::Error::Ambiguous { names: all, .. }) => names.extend(all),
            Err(error) => {
                let failure = Failure::device("list", target.display(), &error);
                ui.failure(&failure);
                errors.push(failure.to_json_of(target));
            }
        }
    }
    devices.retain(|info| names.contains(&info.name));
    let code = u8::from(!errors.is_empty());
    if ui.json {
        ui.value(&json!({ "devices": devices, "errors": errors }))?;
    } else if !devices.is_empty() {
        show(ui, &devices)?;
    }
    Ok(code)
}

/// The table of devices, and what should be known of some of them.
pub(super) fn show(ui: &Ui, devices: &[DeviceInfo]) -> Result<(), Failure> {
    let mut head = ["NAME", "DEVICE", "TRANSPORT", "SIZE", "RO", "DIO", "BLOCK", "STATE", "IMAGE"].to_vec();
    if ui.verbose {
        head.push("REASON");
    }
    let mut rows = vec![head.into_iter().map(str::to_owned).collect()];
    rows.extend(devices.iter().map(|info| row(info, ui.verbose)));
    let text = table(&rows, &[SIZE_COLUMN, BLOCK_COLUMN]);
    for (line, info) in text.lines().zip([None].into_iter().chain(devices.iter().map(Some))) {
        let colour = match info.map(|info| info.state) {
            Some(DeviceState::Lost | DeviceState::Failing | DeviceState::NotResponding) => Some(Colour::Red),
            _ => None,
        };
        ui.line(colour.map_or_else(|| line.to_owned(), |colour| ui.paint(colour, line)))?;
    }
    for (info, away) in devices.iter().filter_map(|info| Some((info, info.away.as_ref()?))) {
        ui.note(format!("{}: {}", info.name, printable(away)));
    }
    let ails =
        |info: &&DeviceInfo| matches!(info.state, DeviceState::NotResponding | DeviceState::UnknownVersion);
    for info in devices.iter().filter(ails) {
        let why = info.warnings.first().map_or("", String::as_str);
        ui.note(format!("{}: {why}", info.name));
    }
    Ok(())
}

/// Which image it has, and what takes what is written to it.
fn image(info: &DeviceInfo) -> String {
    let path = |path: &Path| printable(&path.display().to_string());
    let cow = info.spec.cow.as_deref().map_or_else(String::new, |cow| format!(" (--cow {})", path(cow)));
    let offset = match info.spec.offset {
        0 => String::new(),
        offset => format!(" (offset {})", format_size(offset)),
    };
    printable(&info.spec.title()) + &offset + &cow
}

/// What it is doing, and how many clients an export has.
fn state(info: &DeviceInfo) -> String {
    if let Some(away) = info.away.as_ref().filter(|_| info.state == DeviceState::Live) {
        let begins = |(begins, _): &&(&str, &str)| away.starts_with(begins);
        return AWAY.iter().find(begins).map_or("reconnecting", |(_, state)| state).to_owned();
    }
    match info.connections {
        None => info.state.to_string() + &info.stored.and_then(stored).unwrap_or_default(),
        Some(1) => format!("{}, 1 client", info.state),
        Some(clients) => format!("{}, {clients} clients", info.state),
    }
}

/// How much there is of an image that comes while it is read, until all is.
fn stored(part: Part) -> Option<String> {
    let percent = part.bytes.saturating_mul(100).checked_div(part.size).filter(|_| part.bytes < part.size)?;
    Some(format!(", {percent} % stored"))
}

fn row(info: &DeviceInfo, reason: bool) -> Vec<String> {
    let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
    let mut row = vec![
        info.name.clone(),
        info.device.display().to_string(),
        info.transport.to_string(),
        format_size(info.size),
        yes(info.spec.read_only),
        yes(info.direct_io),
        info.spec.block_size.to_string(),
        state(info),
        image(info),
    ];
    if reason {
        let mut reason = printable(&info.spec.reason.replace('\n', " "));
        if let Some(queues) = queues(info) {
            reason.push_str(&format!("; {queues}"));
        }
        if let (true, Some(pid)) = (info.isolated, info.worker_pid) {
            reason.push_str(&format!("; isolated: process {pid} serves it alone"));
        }
        if info.spec.faults.is_some() {
            reason.push_str("; under faults (--fault)");
        }
        if info.recoveries > 0 {
            reason.push_str(&format!("; recovered {} times", info.recoveries));
        }
        row.push(reason);
    }
    row
}

//! `becket doctor`: what works on this machine, and how to fix the rest.
//! Never fixes or creates anything itself, and never fails because of what it finds.

use crate::{
    args, cgroup,
    failure::{Failure, without_errno},
    ui::{Colour, Ui, printable},
};
use becket_device::ServerStatus;
use rustix::{
    process::geteuid,
    thread::{CapabilitySet, capabilities},
};
use serde_json::json;
use std::fmt::Write as _;

pub(crate) fn run(ui: &Ui, _args: &args::Doctor) -> Result<u8, Failure> {
    let uname = rustix::system::uname();
    let kernel = uname.release().to_string_lossy().into_owned();
    let privileges = Privileges::ours();
    let cgroup = cgroup();
    // First: what a killed command has left goes, and is not counted.
    let ailing = becket_device::ailing();
    let transports = becket_device::doctor();
    let facilities = becket_device::facilities();
    let server = server();
    if ui.json {
        let transports: Vec<_> = transports
            .iter()
            .map(|report| {
                let probe = &report.probe;
                let details: serde_json::Map<_, _> =
                    probe.details.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
                json!({
                    "transport": report.kind, "works": probe.works, "reason": probe.reason, "fix": probe.fix,
                    "details": details,
                })
            })
            .collect();
        ui.value(&json!({
            "version": env!("CARGO_PKG_VERSION"),
            "kernel": kernel,
            "uid": geteuid().as_raw(),
            "admin": privileges.admin,
            "cgroup": cgroup.is_ok(),
            "server": server.as_ref().ok().and_then(Option::as_ref).map(|server| json!({
                "version": server.version, "pid": server.pid, "worker_pid": server.worker_pid, "devices": server.devices,
                "fetchers": server.fetchers, "notes": server.notes,
            })),
            "transports": transports,
            "facilities": facilities.iter().map(|(name, probe)| json!({
                "name": name, "works": probe.works, "reason": probe.reason, "fix": probe.fix,
            })).collect::<Vec<_>>(),
            "devices": ailing.iter().flatten().map(|info| json!({
                "name": info.name, "state": info.state, "why": info.warnings.first(),
            })).collect::<Vec<_>>(),
        }))?;
        return Ok(0);
    }

    let mut text =
        format!("becket {} on Linux {kernel}, {}\n", env!("CARGO_PKG_VERSION"), privileges.reported());
    let drivers = transports.iter().map(|report| (report.kind.to_string(), &report.probe));
    let others = facilities.iter().map(|(name, probe)| ((*name).to_owned(), probe));
    for (name, probe) in drivers.chain(others) {
        let verdict = if probe.works {
            ui.paint(Colour::Green, "works")
        } else {
            ui.paint(Colour::Red, "does not work here")
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n{name}: {verdict}\n  {}", without_errno(&probe.reason));
        for (key, value) in &probe.details {
            let _ = writeln!(text, "  {key}: {value}");
        }
        if let Some(fix) = &probe.fix {
            let _ = writeln!(text, "  {} {fix}", ui.paint(Colour::Cyan, "to fix:"));
        }
    }
    let ends = match &cgroup {
        Ok(()) => "a cgroup of its own kills what its command leaves running".to_owned(),
        Err(why) => format!("a guard process kills what its command leaves running (no cgroup: {why})"),
    };
    let _ = writeln!(text, "\nbecket run: {ends}");
    let _ = writeln!(text, "\nserver: {}", reported(&server));
    match &ailing {
        Ok(devices) => {
            for info in devices {
                let why = info.warnings.first().map_or("", String::as_str);
                let _ = writeln!(text, "\n{}: {}\n  {}", info.name, info.state, printable(why));
            }
        }
        Err(error) => {
            let _ = writeln!(text, "\ndevices: {error}");
        }
    }
    if !transports.iter().any(|report| report.probe.works) {
        let _ = writeln!(text, "\nNo transport works here: images cannot be attached as block devices.");
    }
    ui.line(text.trim_end())?;
    Ok(0)
}

/// What the server says of itself; `None` where none runs.
fn server() -> Result<Option<ServerStatus>, String> {
    becket_device::server_status().map_err(|error| error.to_string())
}

fn reported(server: &Result<Option<ServerStatus>, String>) -> String {
    let ServerStatus { version, pid, worker_pid, devices, fetchers, notes, .. } = match server {
        Ok(Some(server)) => server,
        Ok(None) => return "no server runs; the first attach that needs one starts it".to_owned(),
        Err(why) => return why.clone(),
    };
    let worker = worker_pid.map_or("no worker".to_owned(), |pid| format!("worker {pid}"));
    let mut text = format!("becket {version}, process {pid}, {worker}, devices: {devices}");
    if let Some(fetchers) = fetchers.filter(|count| *count > 0) {
        text.push_str(&format!(", processes that fetch or decode images: {fetchers}"));
    }
    text.push_str(match (worker_pid, notes.as_slice()) {
        (Some(_), []) => {
            "\n  confined: no capability, no path, filtered system calls, restricted rings, locked memory"
        }
        _ => "",
    });
    notes.iter().for_each(|note| text.push_str(&format!("\n  {note}")));
    text
}

struct Privileges {
    root: bool,
    admin: bool,
}

impl Privileges {
    fn ours() -> Self {
        let admin = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
        Self { root: geteuid().is_root(), admin }
    }

    fn reported(&self) -> &'static str {
        match (self.root, self.admin) {
            (true, true) => "as root",
            (true, false) => "as root without CAP_SYS_ADMIN (a container?)",
            (false, true) => "as a user with CAP_SYS_ADMIN",
            (false, false) => "as a user without privileges",
        }
    }
}

/// Whether `becket run` could make a control group. None is made.
fn cgroup() -> Result<(), String> {
    cgroup::possible().map_err(|error| crate::failure::plain(&error))
}

//! `becket doctor`: what works on this machine, and what would mend the rest.
//! Never mends anything itself, and never fails because of what it finds.

use crate::{
    args,
    cgroup::Cgroup,
    failure::{Failure, without_errno},
    ui::{Colour, Ui},
};
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
    let transports = becket_device::doctor();
    if ui.json {
        let transports: Vec<_> = transports
            .iter()
            .map(|report| {
                let probe = &report.probe;
                let details: serde_json::Map<_, _> =
                    probe.details.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
                json!({
                    "transport": report.kind, "works": probe.works, "reason": probe.reason, "mend": probe.mend,
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
            "transports": transports,
        }))?;
        return Ok(0);
    }

    let mut text = format!("becket {} on Linux {kernel}, {}\n", env!("CARGO_PKG_VERSION"), privileges.told());
    for report in &transports {
        let probe = &report.probe;
        let verdict = if probe.works {
            ui.paint(Colour::Green, "works")
        } else {
            ui.paint(Colour::Red, "does not work here")
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n{}: {verdict}\n  {}", report.kind, without_errno(&probe.reason));
        for (key, value) in &probe.details {
            let _ = writeln!(text, "  {key}: {value}");
        }
        if let Some(mend) = &probe.mend {
            let _ = writeln!(text, "  {} {mend}", ui.paint(Colour::Cyan, "to mend:"));
        }
    }
    let ends = match &cgroup {
        Ok(()) => "a cgroup of its own ends all that its command leaves running".to_owned(),
        Err(why) => format!("its guard ends what its command leaves running (no cgroup: {why})"),
    };
    let _ = writeln!(text, "\nbecket run: {ends}");
    if !transports.iter().any(|report| report.probe.works) {
        let _ = writeln!(text, "\nNo transport works here: images cannot be attached as block devices.");
    }
    ui.line(text.trim_end())?;
    Ok(0)
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

    fn told(&self) -> &'static str {
        match (self.root, self.admin) {
            (true, true) => "as root",
            (true, false) => "as root without CAP_SYS_ADMIN (a container?)",
            (false, true) => "as a user with CAP_SYS_ADMIN",
            (false, false) => "as a user without privileges",
        }
    }
}

/// Whether `becket run` could make a control group.
fn cgroup() -> Result<(), String> {
    let group = Cgroup::make(&format!("becket-doctor-{}", std::process::id()))
        .map_err(|error| crate::failure::plain(&error))?;
    group.remove();
    Ok(())
}

//! `becket set TARGET... --WHAT HOW`: changes devices while they live.
//! Never touches what was not asked for.

use super::common;
use crate::{
    args::{self, Limit, Switch},
    failure::Failure,
    progress::Progress,
    ui::Ui,
};
use becket_device::{Changed, ChangedDevice, Changes, How};
use std::ffi::OsStr;

/// Bytes that are one step of the progress shown: it counts in `usize`.
const STEP: u64 = 1 << 20;

pub(crate) fn run(ui: &Ui, args: &args::Set) -> Result<u8, Failure> {
    if args.image.is_some() && args.targets.len() > 1 {
        return Err(Failure::usage("one image cannot replace the images of several devices")
            .hint("give each device its own: becket set TARGET --image IMAGE"));
    }
    if let Some(image) = args.image.as_ref().filter(|image| becket_fetch::is_remote(image.as_os_str())) {
        let what = format!("{}: a device cannot go over to a URL", becket_fetch::named(image.as_os_str()));
        return Err(Failure::usage(what)
            .hint("attach the URL as a device of its own, or 'becket copy URL FILE' and --image FILE"));
    }
    let changes = Changes {
        direct_io: args.direct_io.map(Into::into),
        read_only: args.read_only.map(|switch| switch == Switch::On),
        size_limit: args.size_limit.map(|Limit(limit)| limit),
        image: args.image.clone(),
        format: args.format,
        block_size: args.block_size,
        force: args.force,
        shared: args.shared,
        no_limits: args.limits.no_limits,
    };
    common::each(
        ui,
        "change",
        &args.targets,
        |target| change(ui, target, &changes),
        |changed, _| show(ui, changed),
    )
}

/// Says what a change waits for that takes long.
fn change(ui: &Ui, target: &OsStr, changes: &Changes) -> Result<ChangedDevice, becket_device::Error> {
    let what = "waits for requests under way to end, and for what was written to reach the image";
    common::waiting(ui, target, what, |goes_on| compared(target, changes, goes_on))
}

/// Comparing images may take long: a terminal is shown how far it is. `goes_on` is called then.
fn compared(
    target: &OsStr,
    changes: &Changes,
    goes_on: &dyn Fn(),
) -> Result<ChangedDevice, becket_device::Error> {
    let mut shown: Option<(Progress, u64)> = None;
    let mut compared = |done: u64, all: u64| {
        let steps = |bytes: u64| usize::try_from(bytes.div_ceil(STEP)).unwrap_or(usize::MAX);
        let (progress, reported) = shown.get_or_insert_with(|| {
            goes_on();
            (Progress::new(steps(all)), 0)
        });
        while *reported < done / STEP {
            *reported += 1;
            progress.step();
        }
    };
    let outcome = becket_device::set(target, changes, &mut compared);
    if let Some((mut progress, _)) = shown {
        progress.clear();
    }
    outcome
}

fn show(ui: &Ui, changed: &ChangedDevice) -> Result<(), Failure> {
    ui.explain(&changed.device);
    changed.changes.iter().try_for_each(|change| ui.line(reported(changed, change)))
}

fn reported(ChangedDevice { device, .. }: &ChangedDevice, change: &Changed) -> String {
    let Changed { what, from, to, how } = change;
    let node = device.device.display();
    let why = if *what == "direct_io" { format!(": {}", device.direct_io_reason) } else { String::new() };
    let what = what.replace('_', " ").replace("direct io", "direct I/O");
    match how {
        How::Unchanged => format!("{node}  {what} {to}, as before{why}"),
        How::Live => format!("{node}  {what} {to}, was {from}{why}"),
        How::Drained => format!("{node}  {what} {to}, was {from} (the kernel held requests back){why}"),
    }
}

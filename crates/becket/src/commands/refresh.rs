//! `becket refresh TARGET...`: devices take over a changed size or partition table of their image.
//! Never changes the image.

use super::common;
use crate::{args, failure::Failure, ui::Ui, units::format_size};

pub(crate) fn run(ui: &Ui, args: &args::Refresh) -> Result<u8, Failure> {
    common::each(
        ui,
        "refresh",
        &args.targets,
        |target| {
            let what = "waits for what its image is on to say how long that is";
            common::waiting(ui, target, what, |_| becket_device::refresh(target))
        },
        |info, _| {
            ui.explain(info);
            ui.line(format!("{}  {}", info.device.display(), format_size(info.size)))
        },
    )
}

//! `becket why TARGET...`: how a device is offered, why, and what would be faster.
//! Never changes anything.

use super::common;
use crate::{
    args,
    failure::{Failure, without_errno},
    ui::{Colour, Ui, printable},
};
use becket_device::Why;

pub(crate) fn run(ui: &Ui, args: &args::Why) -> Result<u8, Failure> {
    common::each(
        ui,
        "explain",
        &args.targets,
        |target| becket_device::why(target),
        |why, first| {
            if !first {
                ui.line("")?;
            }
            ui.lines(lines(ui, why))
        },
    )
}

fn lines(ui: &Ui, why: &Why) -> Vec<String> {
    let direct = if why.direct_io { "on" } else { "off" };
    let mut lines = vec![
        printable(&format!("{}: {} by {}", why.name, why.device.display(), why.transport)),
        printable(&format!("  why: {}", without_errno(&why.reason))),
        printable(&format!("  direct I/O is {direct}: {}", why.direct_io_reason)),
    ];
    lines.extend((!why.choices.is_empty()).then(|| "  if it were attached now:".to_owned()));
    for choice in &why.choices {
        let verdict = match choice.possible {
            true => ui.paint(Colour::Green, "possible"),
            false => "not possible".to_owned(),
        };
        let reason = printable(&without_errno(&choice.reason));
        lines.push(format!("    {}: {verdict}: {reason}", choice.transport));
    }
    lines.extend(why.note.iter().map(|note| printable(&format!("    ({})", without_errno(note)))));
    if why.faster.is_empty() {
        lines.push("  becket knows nothing that would be faster".to_owned());
    }
    for advice in &why.faster {
        lines.push(format!(
            "  {} {}",
            ui.paint(Colour::Cyan, "slower than it could be:"),
            printable(&without_errno(&advice.what))
        ));
        lines.extend(advice.fix.iter().map(|fix| printable(&format!("    try: {fix}"))));
    }
    lines
}

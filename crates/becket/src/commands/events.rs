//! `becket events`: what happens to devices, a line each.
//! Never changes anything, and starts no server.

use crate::{
    args,
    failure::Failure,
    ui::{Colour, Ui, printable},
};
use becket_device::{Happened, Heard, Listening};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;
use std::{collections::BTreeSet, io};

pub(crate) fn run(ui: &Ui, args: &args::Events) -> Result<u8, Failure> {
    let listening = Listening { recent: args.recent || args.no_follow, follow: !args.no_follow };
    let names: BTreeSet<&str> = args.names.iter().map(String::as_str).collect();
    let mut printed = Ok(());
    let mut each = |heard: Heard| {
        printed = match &heard {
            Heard::Event(event) if !is_meant(&names, event) => Ok(()),
            Heard::Event(event) if ui.json => ui.record(&json!(event)),
            Heard::Event(event) => ui.line(line(ui, event)),
            Heard::Lost(count) => {
                ui.note(format!("{count} events were forgotten before they could be shown"));
                Ok(())
            }
        };
        printed.is_ok()
    };
    let heard = becket_device::events(listening, &mut each, &is_read);
    heard.map_err(|error| Failure::device("follow", "events", &error))?;
    printed.map(|()| 0)
}

/// What concerns no single device may concern each of them.
fn is_meant(names: &BTreeSet<&str>, event: &Happened) -> bool {
    names.is_empty() || event.device.as_deref().is_none_or(|device| names.contains(device))
}

fn line(ui: &Ui, event: &Happened) -> String {
    let word = match event.level.as_str() {
        "info" => event.event.clone(),
        _ => ui.paint(Colour::Red, &printable(&event.event)),
    };
    let device = event.device.as_deref().map_or_else(String::new, |device| format!("{device}: "));
    format!("{} {word} {}", event.at, printable(&(device + &event.message)))
}

/// Whether standard output has a reader: of `becket events | head` there is none some day.
fn is_read() -> bool {
    let stdout = io::stdout();
    let mut waiting = [PollFd::new(&stdout, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut waiting, Some(&now)).is_err()
        || !waiting.iter().any(|one| one.revents().contains(PollFlags::ERR))
}

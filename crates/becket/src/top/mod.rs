//! `becket top`: what devices do, live.
//! It changes nothing but what a key asks for, and reads counters that cost the devices nothing.

mod column;
mod keys;
mod rates;
mod screen;
mod terminal;
pub(crate) mod watch;

pub(crate) use column::Column;

use crate::{args, failure::Failure, ui::Ui};
use becket_device::{DetachOptions, DeviceInfo};
use becket_uapi::signal::SignalFd;
use rates::{Reading, Row, rows};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::Signal,
};
use screen::{View, Wish};
use serde_json::{Value, json};
use std::{
    io::{self, IsTerminal as _},
    thread,
    time::{Duration, Instant, SystemTime},
};
use terminal::Terminal;

pub(crate) fn run(ui: &Ui, args: &args::Top) -> Result<u8, Failure> {
    let view = View { sort: args.sort, filter: args.filter.clone().unwrap_or_default(), ..View::default() };
    if args.once {
        return once(ui, &view, args.interval);
    }
    if ui.json || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let what = "without a terminal, or with --json, becket top shows one interval only";
        return Err(Failure::usage(what).hint("becket top --once"));
    }
    live(ui, view, args.interval)
}

/// Of the time between two lists of many devices, making one takes at most this part, on a few CPUs at once.
const LISTING: u32 = 200;

/// The devices, listed as often as that costs little.
struct Devices {
    infos: Vec<DeviceInfo>,
    changed: Option<SystemTime>,
    /// When they may be listed again although no record has changed.
    again: Instant,
}

impl Devices {
    fn list() -> Result<Devices, Failure> {
        let (changed, began) = (becket_device::last_change(), Instant::now());
        let infos = becket_device::list().map_err(|error| Failure::device("list", "the devices", &error))?;
        Ok(Devices { infos, changed, again: Instant::now() + began.elapsed() * LISTING })
    }

    fn refresh(&mut self) -> Result<(), Failure> {
        if Instant::now() >= self.again || becket_device::last_change() != self.changed {
            *self = Devices::list()?;
        }
        Ok(())
    }

    /// Their counters now.
    fn read(&self) -> (Reading, Instant) {
        let names = self.infos.iter().map(|info| info.name.clone());
        let counters = names.zip(becket_device::counters(&self.infos));
        (Reading { counters: counters.filter_map(|(name, it)| Some((name, it?))).collect() }, Instant::now())
    }
}

fn once(ui: &Ui, view: &View, interval: Duration) -> Result<u8, Failure> {
    let mut devices = Devices::list()?;
    let (before, then) = devices.read();
    thread::sleep(interval);
    devices.refresh()?;
    let (after, now) = devices.read();
    let apart = now.duration_since(then);
    let rows = rows(&devices.infos, &before, &after, apart);
    if ui.json {
        let devices: Vec<Value> = view.arranged(&rows).iter().map(value).collect();
        ui.value(&json!({ "interval_s": apart.as_secs_f64(), "devices": devices }))?;
        return Ok(0);
    }
    // All lines, as wide as they are; the last one is for people at a terminal.
    let lines = view.lines(&rows, apart, (160, rows.len() + 4));
    ui.lines(lines.split_last().map_or(&[][..], |(_, lines)| lines).iter().map(|line| line.text.trim_end()))?;
    Ok(0)
}

fn value(row: &Row) -> Value {
    let DeviceInfo { name, device, transport, state, recoveries, .. } = &row.info;
    json!({
        "name": name, "device": becket_device::path_text(device), "transport": transport, "state": state,
        "recoveries": recoveries, "rates": row.rates,
    })
}

fn live(ui: &Ui, mut view: View, mut interval: Duration) -> Result<u8, Failure> {
    let signals = SignalFd::block(&[Signal::TERM, Signal::HUP, Signal::INT, Signal::WINCH])?;
    let mut devices = Devices::list()?;
    let (mut before, mut then) = devices.read();
    let terminal = Terminal::open(ui.colours())?;
    let mut shown: Vec<Row> = Vec::new();
    // The first figures come soon, the next ones with each interval.
    let mut next = then + interval.min(Duration::from_millis(250));
    loop {
        terminal.show(&view.lines(&shown, interval, Terminal::size()))?;
        let left = next.saturating_duration_since(Instant::now());
        let stdin = io::stdin();
        let mut waiting = [PollFd::new(&stdin, PollFlags::IN), PollFd::new(&signals, PollFlags::IN)];
        let limit = Timespec::try_from(left).ok();
        match poll(&mut waiting, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        let [typed, signalled] = waiting.map(|one| !one.revents().is_empty());
        while signalled && let Some(received) = signals.take()? {
            if received.signal != Signal::WINCH {
                return Ok(0);
            }
        }
        if typed {
            let mut bytes = [0; 256];
            let len = rustix::io::read(io::stdin(), &mut bytes).map_err(io::Error::from)?;
            if len == 0 {
                return Ok(0);
            }
            for key in keys::keys(bytes.get(..len).unwrap_or_default()) {
                match view.press(key, &shown, interval) {
                    Wish::Nothing => {}
                    Wish::Quit => return Ok(0),
                    Wish::Interval(other) => {
                        interval = other;
                        next = then + interval;
                    }
                    Wish::Detach(name) => {
                        view.message = detach(&name);
                        next = Instant::now();
                    }
                }
            }
        }
        if Instant::now() < next {
            continue;
        }
        if !view.paused {
            devices.refresh()?;
            let (after, now) = devices.read();
            shown = rows(&devices.infos, &before, &after, now.duration_since(then));
            (before, then) = (after, now);
        }
        next = Instant::now() + interval;
    }
}

fn detach(name: &str) -> String {
    match becket_device::detach(name, &DetachOptions::default()) {
        Ok(DeviceInfo { unsaved: Some(why), .. }) => {
            format!("{name} is detached, and what was written to it may be lost: {why}")
        }
        Ok(_) => format!("{name} is detached"),
        Err(error) => Failure::device("detach", name, &error).message,
    }
}

//! `becket stat --watch`: what some devices do, a line each at every interval.
//! It changes nothing, and goes on while one of the devices is there.

use super::{
    Devices,
    rates::{Rates, Row, rows},
    value,
};
use crate::{
    failure::Failure,
    ui::{Ui, printable},
    units::format_time,
};
use becket_device::DeviceInfo;
use serde_json::{Value, json};
use std::{
    ffi::OsString,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// After so many lines of figures the titles come again.
const TITLES_EVERY: usize = 20;

/// Shows the rates of the devices that are named, until they are gone or `count` intervals are over.
pub(crate) fn run(
    ui: &Ui,
    targets: &[OsString],
    interval: Duration,
    count: Option<u64>,
) -> Result<u8, Failure> {
    let mut chosen = Vec::new();
    for target in targets {
        let found = becket_device::find(target);
        chosen.push(found.map_err(|error| Failure::device("stat", target.display(), &error))?);
    }
    let mut devices = Devices { infos: chosen.clone(), ..Devices::list()? };
    let (mut before, mut then) = devices.read();
    let (mut shown, mut lines) = (0, 0);
    while count.is_none_or(|count| shown < count) {
        thread::sleep((then + interval).saturating_duration_since(Instant::now()));
        devices.refresh()?;
        devices.infos.retain(|info| chosen.iter().any(|one| same(one, info)));
        if devices.infos.is_empty() {
            ui.note("the devices are gone");
            return Ok(0);
        }
        let (after, now) = devices.read();
        let apart = now.duration_since(then);
        let rows = rows(&devices.infos, &before, &after, apart);
        (before, then) = (after, now);
        shown += 1;
        if ui.json {
            ui.record(&record(&rows, apart))?;
            continue;
        }
        if lines % TITLES_EVERY.max(rows.len()) == 0 {
            ui.line(titles())?;
        }
        lines += rows.len();
        ui.lines(rows.iter().map(line))?;
    }
    Ok(0)
}

/// A name and a node are used again; the kernel's sequence number of a disk is not.
fn same(one: &DeviceInfo, other: &DeviceInfo) -> bool {
    one.name == other.name && one.diskseq == other.diskseq
}

fn record(rows: &[Row], apart: Duration) -> Value {
    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let devices: Vec<Value> = rows.iter().map(value).collect();
    json!({ "at": at.as_secs_f64(), "interval_s": apart.as_secs_f64(), "devices": devices })
}

fn titles() -> String {
    cells(["NAME", "READ/S", "WRITE/S", "READ-MB/S", "WRITE-MB/S", "R-MEAN", "W-MEAN", "DEPTH"])
}

/// One device on one line, in the columns of its titles.
fn line(row: &Row) -> String {
    let name = printable(&row.info.name);
    let Some(Rates { in_flight, read, write, .. }) = &row.rates else {
        return cells([&name, "-", "-", "-", "-", "-", "-", "-"]);
    };
    let number = |value: f64| format!("{value:.0}");
    let megabytes = |value: f64| format!("{:.1}", value / 1e6);
    let time = |nanos: Option<u64>| nanos.map_or_else(|| "-".to_owned(), format_time);
    cells([
        name.as_str(),
        &number(read.operations_per_s),
        &number(write.operations_per_s),
        &megabytes(read.bytes_per_s),
        &megabytes(write.bytes_per_s),
        &time(read.mean_ns),
        &time(write.mean_ns),
        &in_flight.to_string(),
    ])
}

fn cells(cells: [&str; 8]) -> String {
    let [name, reads, writes, read, written, read_time, write_time, depth] = cells;
    format!(
        "{name:<16} {reads:>8} {writes:>8} {read:>10} {written:>10} {read_time:>8} {write_time:>8} {depth:>5}"
    )
}

#[cfg(test)]
mod tests {
    use super::super::rates::Rate;
    use super::*;

    #[test]
    fn a_line_has_the_figures_of_the_interval_below_its_titles() {
        let info = json!({
            "name": "one", "device": "/dev/x", "transport": "ublk", "image": "/i", "offset": 0, "size_limit": null,
            "read_only": false, "block_size": 512, "queues": null, "depth": null, "mode": null, "autoclear": false,
            "reason": "", "size": 0, "direct_io": false, "direct_io_reason": "", "physical_block_size": 512,
            "state": "live", "partitions": [], "number": 0, "diskseq": null, "server_pid": null,
            "worker_pid": null, "isolated": false, "recoveries": 0, "warnings": [],
        });
        let read = Rate { operations_per_s: 100.0, bytes_per_s: 1_500_000.0, mean_ns: Some(1000) };
        let rates = Rates { read, in_flight: 7, ..Rates::default() };
        let mut row = Row { info: serde_json::from_value(info).unwrap(), rates: Some(rates) };
        let words = |row: &Row| line(row).split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&row), ["one", "100", "0", "1.5", "0.0", "1.0us", "-", "7"]);
        assert_eq!(line(&row).chars().count(), titles().chars().count());
        assert!(titles().chars().count() <= 80);
        row.rates = None;
        assert_eq!(words(&row)[1..], ["-"; 7], "what nobody counts is not a zero");
    }
}

//! `becket stat DEV...`: what devices have done, and how long it took.
//! Never stops or changes anything.

use super::common;
use crate::{
    args,
    failure::Failure,
    ui::{Ui, table},
    units::{format_size, format_time},
};
use becket_device::{Activity, Decodings, DeviceStats, Fetched, Summary};

const HEAD: [&str; 11] =
    ["KIND", "OPS", "BYTES", "ERRORS", "MEAN", "P50", "P90", "P99", "P99.9", "MAX", "WINDOW"];

pub(crate) fn run(ui: &Ui, args: &args::Stat) -> Result<u8, Failure> {
    if let Some(interval) = args.watch {
        return crate::top::watch::run(ui, &args.targets, interval, args.count);
    }
    common::each(
        ui,
        "stat",
        &args.targets,
        |target| becket_device::stat(target),
        |reported, first| {
            if !first {
                ui.line("")?;
            }
            show(ui, reported)
        },
    )
}

fn show(ui: &Ui, reported: &DeviceStats) -> Result<(), Failure> {
    let DeviceStats { name, device, transport, note, stats } = reported;
    ui.line(format!("{name}  {}  {transport}  {} in flight", device.display(), stats.in_flight))?;
    let text = table(&rows(stats), &(1..HEAD.len()).collect::<Vec<_>>());
    ui.line(text.trim_end())?;
    stats.decoded.as_ref().map_or(Ok(()), |decoded| ui.line(words(decoded)))?;
    stats.fetched.as_ref().map_or(Ok(()), |fetched| ui.line(store(fetched)))?;
    note.iter().try_for_each(|note| ui.line(format!("({note})")))
}

fn rows(stats: &Summary) -> Vec<Vec<String>> {
    let Summary { read, write, flush, discard, write_zeroes, .. } = stats;
    let kinds = [("read", Some(read)), ("write", Some(write)), ("flush", Some(flush))];
    let rest = [("discard", Some(discard)), ("write-zeroes", write_zeroes.as_ref())];
    let rows = kinds.into_iter().chain(rest).filter_map(|(kind, done)| Some(row(kind, done?)));
    [HEAD.map(str::to_owned).to_vec()].into_iter().chain(rows).collect()
}

/// What was done for the encoded parts of an image, in a line.
fn words(decoded: &Decodings) -> String {
    let Decodings { hits, waits, blocks, bytes, ahead, errors } = decoded;
    let yielded = format_size(*bytes);
    format!(
        "decoded: {blocks} blocks, {yielded}, {ahead} ahead of need, {errors} errors; \
         wanted: {hits} times there, {waits} times not yet"
    )
}

/// What the store has of an image on a server, in a line.
fn store(fetched: &Fetched) -> String {
    let Fetched { bytes, size, waits, memory, no_room } = fetched;
    let memory = match memory {
        0 => String::new(),
        memory => format!(", and {} in memory", format_size(*memory)),
    };
    format!(
        "fetched: {} of {}{memory}; waited {waits} times for more{}",
        format_size(*bytes),
        format_size(*size),
        if *no_room { "; the rest waits for room in the store" } else { "" }
    )
}

fn row(kind: &str, done: &Activity) -> Vec<String> {
    let unknown = || "-".to_owned();
    let times = [done.mean_ns, done.p50_ns, done.p90_ns, done.p99_ns, done.p999_ns, done.max_ns];
    let mut row = vec![kind.to_owned(), done.operations.to_string(), format_size(done.bytes)];
    row.push(done.errors.map_or_else(unknown, |errors| errors.to_string()));
    row.extend(times.map(|time| time.map_or_else(unknown, format_time)));
    row.push(done.window.map_or_else(unknown, |window| window.to_string()));
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_measured_is_a_dash() {
        let read = Activity { operations: 3, bytes: 12 << 10, mean_ns: Some(81_300), ..Activity::default() };
        let rows = rows(&Summary { read, ..Summary::default() });
        assert_eq!(rows[1].join(" "), "read 3 12K - 81.3us - - - - - -");
        assert_eq!(rows.len(), 5, "zeroed ranges that count as writes have no line of their own");
        let known = Activity { errors: Some(1), p999_ns: Some(1), max_ns: Some(2), ..Activity::default() };
        let decoded = Decodings { hits: 9, waits: 4, blocks: 3, bytes: 384 << 10, ahead: 1, errors: 0 };
        let reported =
            "decoded: 3 blocks, 384K, 1 ahead of need, 0 errors; wanted: 9 times there, 4 times not yet";
        assert_eq!(words(&decoded), reported);
        assert_eq!(row("flush", &known).join(" "), "flush 0 0 1 - - - - 1ns 2ns -");
    }
}

//! `becket metrics`: what devices have done, in the text format that Prometheus reads.
//! Never changes a device, and costs its I/O path nothing: counters are read, as `becket stat` does.
//!
//! Format: "Text-based format" of Prometheus' exposition formats, version 0.0.4.

use crate::{args, failure::Failure, ui::Ui};
use becket_device::{Activity, BOUNDS, DeviceInfo, DeviceState, Summary, path_text};
use serde::Serialize;
use std::{
    borrow::Cow,
    fmt::Write as _,
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
    time::Instant,
};

/// One metric with its samples.
#[derive(Debug, Serialize)]
struct Metric {
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    help: String,
    samples: Vec<Sample>,
}

/// A value of one device, by its labels.
#[derive(Debug, Serialize)]
struct Sample {
    /// What follows the metric's name: the parts of a histogram have names of their own.
    #[serde(skip_serializing_if = "str::is_empty")]
    part: &'static str,
    labels: Vec<(&'static str, String)>,
    value: f64,
}

pub(crate) fn run(ui: &Ui, args: &args::Metrics) -> Result<u8, Failure> {
    if let Some(address) = &args.listen {
        let ready = |address: &str| ui.note(format!("answers at {address}, path /metrics"));
        becket_device::publish(address, ready, || Ok(text(&collect()?)))
            .map_err(|error| Failure::device("answer requests at", address, &error))?;
        return Ok(0);
    }
    let metrics = collect().map_err(|error| Failure::device("list", "the devices", &error))?;
    if let Some(path) = &args.textfile {
        replace(path, &text(&metrics))
            .map_err(|error| Failure::io(format!("cannot write {}", path.display()), &error))?;
        return Ok(0);
    }
    match ui.json {
        true => ui.document(&serde_json::json!({ "metrics": metrics }))?,
        false => ui.line(text(&metrics).trim_end())?,
    }
    Ok(0)
}

/// The metrics of this moment.
fn collect() -> Result<Vec<Metric>, becket_device::Error> {
    let began = Instant::now();
    let infos = becket_device::list()?;
    let counters = becket_device::counters(&infos);
    let mut metrics = metrics(&infos, &counters);
    let seconds = began.elapsed().as_secs_f64();
    let help = "Time that reading all devices took.".to_owned();
    let samples = vec![Sample { part: "", labels: Vec::new(), value: seconds }];
    metrics.push(Metric { name: "becket_scrape_duration_seconds".to_owned(), kind: "gauge", help, samples });
    Ok(metrics)
}

/// Puts a text in place as a whole: a reader sees the old file or the new one.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut hidden = path.file_name().unwrap_or_default().to_owned();
    hidden.push(format!(".{}.tmp", std::process::id()));
    let hidden = path.with_file_name(hidden);
    let written = File::create_new(&hidden)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&hidden, path));
    if written.is_err() {
        // The reason that counts is the first one.
        let _ = fs::remove_file(&hidden);
    }
    written
}

/// A value of a device, `None` where nothing measures it.
type Value<'a> = &'a dyn Fn(&DeviceInfo, Option<&Summary>) -> Option<f64>;

fn metrics(infos: &[DeviceInfo], counters: &[Option<Summary>]) -> Vec<Metric> {
    let of_device = |info: &DeviceInfo| vec![("name", info.name.clone())];
    let each = |name: &str, kind, help: &str, value: Value<'_>| {
        let samples = infos.iter().zip(counters).filter_map(|(info, summary)| {
            Some(Sample { part: "", labels: of_device(info), value: value(info, summary.as_ref())? })
        });
        let name = format!("becket_device_{name}");
        Metric { name, kind, help: help.to_owned(), samples: samples.collect() }
    };
    let info = infos.iter().map(|info| {
        let mut labels = of_device(info);
        labels.push(("device", path_text(&info.device).into_owned()));
        labels.push(("transport", info.transport.to_string()));
        labels.push(("state", info.state.to_string()));
        labels.push(("image", info.spec.title()));
        Sample { part: "", labels, value: 1.0 }
    });
    let mut all = vec![
        Metric {
            name: "becket_device_info".to_owned(),
            kind: "gauge",
            help: "A device, with its node, transport, state and image; always 1.".to_owned(),
            samples: info.collect(),
        },
        each("live", "gauge", "Whether the device is live (1) or in another state (0).", &|info, _| {
            Some(f64::from(u8::from(info.state == DeviceState::Live)))
        }),
        each("origin_away", "gauge", "Whether the server of the image cannot be reached (1).", &|info, _| {
            let on_server = info.spec.title().contains("://");
            on_server.then(|| f64::from(u8::from(info.away.is_some())))
        }),
        each("size_bytes", "gauge", "Length of the device.", &|info, _| Some(info.size as f64)),
        each("recoveries_total", "counter", "How often the serving process was replaced.", &|info, _| {
            Some(f64::from(info.recoveries))
        }),
        each("requests_in_flight", "gauge", "Requests that have arrived and not ended.", &|_, summary| {
            Some(summary?.in_flight as f64)
        }),
    ];
    type Kind = (&'static str, &'static str, bool, fn(&Summary) -> Option<&Activity>);
    let kinds: [Kind; 5] = [
        ("reads", "read", true, |summary| Some(&summary.read)),
        ("writes", "write", true, |summary| Some(&summary.write)),
        ("flushes", "flush", false, |summary| Some(&summary.flush)),
        ("discards", "discard", true, |summary| Some(&summary.discard)),
        ("write_zeroes", "write_zeroes", true, |summary| summary.write_zeroes.as_ref()),
    ];
    for (many, one, moves, of) in kinds {
        let said = one.replace('_', "-");
        all.push(each(
            &format!("{many}_completed_total"),
            "counter",
            &format!("Requests ({said}) that have ended."),
            &|_, summary| Some(of(summary?)?.operations as f64),
        ));
        if moves {
            all.push(each(
                &format!("{one}_bytes_total"),
                "counter",
                &format!("Bytes of the requests ({said}) that succeeded."),
                &|_, summary| Some(of(summary?)?.bytes as f64),
            ));
        }
        all.push(each(
            &format!("{one}_errors_total"),
            "counter",
            &format!("Requests ({said}) that failed."),
            &|_, summary| Some(of(summary?)?.errors? as f64),
        ));
        all.push(each(
            &format!("{one}_time_seconds_total"),
            "counter",
            &format!("Time that all requests ({said}) took together."),
            &|_, summary| {
                let kind = of(summary?)?;
                Some(kind.mean_ns? as f64 * kind.operations as f64 / 1e9)
            },
        ));
    }
    for (one, of) in [("read", READ), ("write", WRITE), ("flush", FLUSH)] {
        all.push(histogram(one, of, infos, counters));
    }
    type Decoded = (&'static str, &'static str, fn(&becket_device::Decodings) -> u64);
    let decoded: [Decoded; 6] = [
        ("block_hits", "Compressed blocks that a request found decoded.", |decoded| decoded.hits),
        ("block_waits", "Compressed blocks that a request waited for.", |decoded| decoded.waits),
        ("decoded_blocks", "Blocks that were decoded.", |decoded| decoded.blocks),
        ("decoded_bytes", "Bytes that decoded blocks yielded.", |decoded| decoded.bytes),
        ("read_ahead_blocks", "Blocks that were decoded ahead of need.", |decoded| decoded.ahead),
        ("decode_errors", "Blocks that could not be read or decoded.", |decoded| decoded.errors),
    ];
    for (name, help, of) in decoded {
        let value = |_: &DeviceInfo, summary: Option<&Summary>| Some(of(summary?.decoded.as_ref()?) as f64);
        all.push(each(&format!("{name}_total"), "counter", help, &value));
    }
    all.push(each(
        "store_bytes",
        "gauge",
        "Bytes of a remote image that are in the store.",
        &|_, summary| Some(summary?.fetched?.bytes as f64),
    ));
    all.push(each(
        "store_memory_bytes",
        "gauge",
        "Bytes of a remote image that are in memory, because the store has no room for them.",
        &|_, summary| Some(summary?.fetched?.memory as f64),
    ));
    let help = "How often a request waited for bytes of a remote image that were not in the store.";
    all.push(each("store_waits_total", "counter", help, &|_, summary| Some(summary?.fetched?.waits as f64)));
    // A metric without a sample says nothing.
    all.retain(|metric| !metric.samples.is_empty());
    all
}

const READ: fn(&Summary) -> &Activity = |summary| &summary.read;
const WRITE: fn(&Summary) -> &Activity = |summary| &summary.write;
const FLUSH: fn(&Summary) -> &Activity = |summary| &summary.flush;

/// How long requests of one kind took. Only what becket serves itself has buckets.
fn histogram(
    one: &str,
    of: fn(&Summary) -> &Activity,
    infos: &[DeviceInfo],
    counters: &[Option<Summary>],
) -> Metric {
    let mut samples = Vec::new();
    for (info, summary) in infos.iter().zip(counters) {
        let Some(Activity { below: Some(below), mean_ns: Some(mean), .. }) = summary.as_ref().map(of) else {
            continue;
        };
        let mut sample = |part, le: Option<String>, value| {
            let mut labels = vec![("name", info.name.clone())];
            labels.extend(le.map(|le| ("le", le)));
            samples.push(Sample { part, labels, value });
        };
        // Less than a bound is at most a nanosecond less.
        let bounds = BOUNDS.iter().map(|bound| ((bound - 1) as f64 / 1e9).to_string());
        for (le, count) in bounds.chain(["+Inf".to_owned()]).zip(below) {
            sample("_bucket", Some(le), *count as f64);
        }
        let count = below.last().copied().unwrap_or_default() as f64;
        sample("_sum", None, *mean as f64 * count / 1e9);
        sample("_count", None, count);
    }
    let help = format!("How long requests ({one}) took that succeeded.");
    Metric { name: format!("becket_device_{one}_duration_seconds"), kind: "histogram", help, samples }
}

fn text(metrics: &[Metric]) -> String {
    let mut out = String::new();
    for Metric { name, kind, help, samples } in metrics {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for Sample { part, labels, value } in samples {
            let _ = write!(out, "{name}{part}");
            for (at, (label, text)) in labels.iter().enumerate() {
                let _ = write!(out, "{}{label}=\"{}\"", if at == 0 { '{' } else { ',' }, escaped(text));
            }
            let _ = writeln!(out, "{} {value}", if labels.is_empty() { "" } else { "}" });
        }
    }
    out
}

fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(['\\', '"', '\n']) {
        return text.into();
    }
    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_metrics_without_samples_left_out() {
        assert_eq!(escaped("a\\b\"c\nd"), "a\\\\b\\\"c\\nd");
        assert!(metrics(&[], &[]).is_empty());
        let labels = vec![("name", "a\"b".to_owned()), ("device", "/dev/x".to_owned())];
        let samples = vec![
            Sample { part: "", labels, value: 2.5 },
            Sample { part: "", labels: Vec::new(), value: 1e21 },
        ];
        let metric = Metric { name: "becket_x".to_owned(), kind: "gauge", help: "An x.".to_owned(), samples };
        let expected = "# HELP becket_x An x.\n# TYPE becket_x gauge\nbecket_x{name=\"a\\\"b\",device=\"/dev/x\"} 2.5\n\
            becket_x 1000000000000000000000\n";
        assert_eq!(text(&[metric]), expected);
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("becket.prom");
        replace(&path, "one\n").unwrap();
        replace(&path, "two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
        fs::create_dir(dir.path().join("d")).unwrap();
        assert!(replace(&dir.path().join("d"), "x").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}

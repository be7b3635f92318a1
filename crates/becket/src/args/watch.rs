//! The commands that show what devices do.
//! Never does anything: what a command does lives in `commands` and `top`.

use crate::top::Column;
use crate::units::parse_duration;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::{ffi::OsString, path::PathBuf, time::Duration};

/// Show statistics of devices: requests, bytes, errors and latencies
///
/// The numbers count since the device was attached. Those of loop devices and of device-mapper are the
/// kernel's, which has no percentiles. TARGET is a device path, a name or an
/// image path.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket stat /dev/ublkb0
  becket stat root disk.img         # by name, by image
  becket stat --watch 1 root        # rates, a line each second
  becket stat --json root | jq '.devices[].read.p99_ns'")]
pub(crate) struct Stat {
    /// Devices, names or images to show
    #[arg(required = true, value_name = "TARGET")]
    pub(crate) targets: Vec<OsString>,
    /// Show what the devices do in each interval of this length, until they are gone
    ///
    /// With --json, each interval is one JSON value on a line of its own.
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = parse_interval)]
    pub(crate) watch: Option<Duration>,
    /// End after this many intervals
    #[arg(long, value_name = "N", requires = "watch", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
}

/// Show what happens to devices as it happens: attached, recovered, resized, detached
///
/// The events are those of the devices that becket's server has. Devices of the kernel's own drivers (loop,
/// dm) have none. If the server ends, the next one is waited for. With --json, each event is one JSON value
/// on a line of its own.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket events
  becket events --no-follow root             # what the server remembers of this device
  becket events --json | jq -r 'select(.event == \"recovered\").device'")]
pub(crate) struct Events {
    /// Show only events of these devices, and of no single device
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Begin with the events that the server remembers, at most 1024
    #[arg(long)]
    pub(crate) recent: bool,
    /// End after these
    #[arg(long)]
    pub(crate) no_follow: bool,
}

/// Explain how devices are offered, why, and what would be faster
///
/// becket asks each transport again what it says to the image, and names the command that changes the answer.
/// The image is opened for reading, beside its users; a remote image is not fetched for this. TARGET is a
/// device path, a name or an image path.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket why /dev/loop0
  becket why root --json | jq '.devices[].faster'")]
pub(crate) struct Why {
    /// Devices, names or images to explain
    #[arg(required = true, value_name = "TARGET")]
    pub(crate) targets: Vec<OsString>,
}

/// Show live what devices do: requests and bytes a second, latencies, depth and cache hits
///
/// Keys select, sort, filter and detach devices; h shows them. With --once, the figures of one interval are
/// printed, as a table or with --json for programs. The figures are those of the interval, not since the
/// device was attached; latencies are means.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket top
  becket top --sort reads root          # devices whose name or image has `root`
  becket top --once --json | jq '.devices[] | [.name, .rates.read.bytes_per_s]'")]
pub(crate) struct Top {
    /// Show only devices whose name or image contains this text
    #[arg(value_name = "TEXT")]
    pub(crate) filter: Option<String>,
    /// Print the figures of one interval and end
    #[arg(long)]
    pub(crate) once: bool,
    /// Set the interval
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, default_value = "1s", value_parser = parse_interval)]
    pub(crate) interval: Duration,
    /// Sort by this column
    #[arg(long, value_name = "COLUMN", default_value = "name", value_parser = columns())]
    pub(crate) sort: Column,
}

/// Print statistics of all devices in the text format of Prometheus
///
/// The counters are those of `becket stat`. With --textfile, a file is replaced as a whole, for the textfile
/// collector of Prometheus' node_exporter.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket metrics
  becket metrics --textfile /var/lib/prometheus/node-exporter/becket.prom   # from a timer
  becket metrics --listen tcp:127.0.0.1:10810   # or systemctl enable --now becket-metrics.socket")]
pub(crate) struct Metrics {
    /// Write to this file instead of standard output
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) textfile: Option<PathBuf>,
    /// Answer HTTP requests for /metrics at tcp:HOST:PORT, unix:PATH, fd:N, or systemd's socket (systemd)
    ///
    /// A process of its own, without rights, talks with the clients. It offers no TLS and asks for no
    /// password: everybody who reaches the address can read the names of images.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "textfile")]
    pub(crate) listen: Option<String>,
}

/// Hand out images to systemd's tools as volumes
///
/// It answers io.systemd.StorageProvider, by which systemd-vmspawn, machinectl, storagectl and mount ask for
/// volumes (systemd 261 or later). The volume NAME is a device of becket's by its name, or anything that
/// `becket attach` takes, by its whole path or URL: it is attached then, and detached when its last user
/// closes it. Only root and its own user are served.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  systemctl enable --now becket-storage.socket     # systemd starts it when a volume is asked for
  mount -t storage becket:/srv/disk.qcow2/p1 /mnt
  becket storage-provider --listen unix:/run/me/volumes")]
pub(crate) struct StorageProvider {
    /// Listen at unix:PATH, fd:N, or systemd's socket (systemd)
    #[arg(long, value_name = "ADDRESS", default_value = "systemd")]
    pub(crate) listen: String,
}

/// An interval that is long enough to measure something.
fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    match interval >= Duration::from_millis(50) {
        true => Ok(interval),
        false => Err("an interval is at least 50ms".to_owned()),
    }
}

fn columns() -> impl TypedValueParser<Value = Column> {
    let column =
        |word: String| Column::ALL.into_iter().find(|column| column.word() == word).ok_or("no column");
    PossibleValuesParser::new(Column::ALL.map(Column::word)).try_map(column)
}

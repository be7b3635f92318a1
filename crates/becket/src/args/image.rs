//! The options by which an image is opened and served, whatever it is offered as: devices and exports share
//! them.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _};
use clap::{Args, ValueEnum};

use crate::units::{parse_block_size, parse_duration, parse_size};

/// What the parsing of an image may cost; every command that opens images has this.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct LimitOptions {
    /// Parse the image even if that takes more than 5 s of CPU time or 512 MiB of memory, for images that you
    /// trust
    #[arg(long)]
    pub(crate) no_limits: bool,
}

/// Where the bytes of images on web servers are kept.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct StoreOptions {
    #[command(flatten)]
    pub(crate) dir: StoreDir,
    /// Keep the store this small: what is not in use is removed, the least recently used first
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size)]
    pub(crate) store_limit: Option<u64>,
    /// Give up if a server is away for this time [default: 1min for commands; never for requests to a
    /// device]
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, value_parser = parse_duration)]
    pub(crate) origin_timeout: Option<Duration>,
}

/// Which store.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct StoreDir {
    /// Keep what is fetched from web servers in this directory [default: /var/cache/becket, or
    /// ~/.cache/becket for users who are not root]
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) store: Option<PathBuf>,
}

/// What a start of an image on a server needs.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct TraceOptions {
    /// Note in the store which parts of a remote image are needed and when, and fetch no others; then
    /// `becket store trace URL` writes a trace
    #[arg(long, conflicts_with = "no_store")]
    pub(crate) record: bool,
    /// Fetch what this trace names, in its order, behind what is waited for
    #[arg(long, value_name = "TRACE", value_hint = clap::ValueHint::FilePath, conflicts_with = "record")]
    pub(crate) prefetch: Option<PathBuf>,
}

/// How images that are not on this host are reached.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct OriginOptions {
    /// Also allow backing files of a qcow2 that are URLs and begin with this one; may be given several times
    ///
    /// The scheme, the host and what follows `?` must be the same, and the path must continue behind a slash
    /// or end.
    #[arg(long = "backing-url", value_name = "PREFIX", value_parser = parse_prefix)]
    pub(crate) backing_urls: Vec<String>,
    #[command(flatten)]
    pub(crate) objects: StoreOptions,
    /// Use no store: keep what is fetched from web servers in memory, 256 MiB of each image at most
    #[arg(long, conflicts_with_all = ["store", "store_limit"])]
    pub(crate) no_store: bool,
    /// Read this configuration of the Ceph cluster, for rbd:POOL/IMAGE [default: $CEPH_CONF, or
    /// /etc/ceph/ceph.conf]
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) ceph_conf: Option<PathBuf>,
    /// Reach the Ceph cluster as this user, without the "client." in front [default: admin]
    #[arg(long, value_name = "USER")]
    pub(crate) ceph_id: Option<String>,
}

/// What URLs in images may begin with.
fn parse_prefix(word: &str) -> Result<String, String> {
    becket_image::check_prefix(word).map(|()| word.to_owned())
}

/// How images are opened and served.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Image options")]
pub(crate) struct ImageOptions {
    /// Choose the format of the file instead of detecting it
    ///
    /// With raw, the bytes that the path names are used as they are stored, and becket does not look into
    /// them: use it for a disk that an untrusted guest writes. Every other format is that of the file on the
    /// host. The files that an image refers to are opened only with --format qcow2 or vmdk, or if its name
    /// ends in .qcow2, .qcow, .qc2 or .vmdk.
    #[arg(long, default_value_t = becket_image::Format::Auto, value_parser = format_parser())]
    pub(crate) format: becket_image::Format,
    /// Also allow backing files of a qcow2 in this directory; may be given several times
    #[arg(long = "backing-dir", value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) backing_dirs: Vec<PathBuf>,
    /// Write to this qcow2 overlay, never to the image; create it if it does not exist
    ///
    /// The image is only read, so several overlays of one image may be in use at once. An existing FILE must
    /// be an overlay of this image; the same IMAGE and --cow FILE open it again later.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) cow: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) limits: LimitOptions,
    #[command(flatten)]
    pub(crate) store: OriginOptions,
    #[command(flatten)]
    pub(crate) trace: TraceOptions,
    /// Write to a qcow2 although the first write removes its persistent bitmaps
    ///
    /// Without this option such an image is read-only, because a write by becket would make the
    /// bitmaps that incremental backups rely on invalid. Nothing is removed before the first write.
    #[arg(long)]
    pub(crate) drop_bitmaps: bool,
    /// Skip this many bytes at the start of the image
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, default_value = "0", value_parser = parse_size)]
    pub(crate) offset: u64,
    /// Limit the size of the device or export
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size)]
    pub(crate) size_limit: Option<u64>,
    /// Set the logical block size, a power of two from 512 to the page size [default: what the image needs]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_block_size)]
    pub(crate) block_size: Option<u32>,
    /// Bypass the page cache of the image file: if possible (auto), always (on) or never (off)
    ///
    /// With auto, compressed data in a read-only file still goes through the page cache, so that the kernel
    /// reads ahead.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Toggle::Auto)]
    pub(crate) direct_io: Toggle,
    /// Use an image that is in use: take no lock, even if another program may write to it
    #[arg(long)]
    pub(crate) shared: bool,
    /// Set the size of the cache of decoded blocks, which all devices of the server share, at least 16M
    /// [default: up to 1/16 of memory, at most 1G, and less if blocks are not read again]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size)]
    pub(crate) cache_size: Option<u64>,
    /// Set the number of requests in flight per queue or connection (not with loop and dm) [default: 128; 64
    /// if data is copied; fewer if there are many devices]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) depth: Option<u16>,
    /// Inject errors, short transfers or delays, for testing (not with loop and dm):
    /// error=write:EIO:0.01,delay=read:10ms
    #[arg(long, value_name = "FAULTS", value_parser = crate::faults::parse_faults)]
    pub(crate) fault: Option<becket_device::fault::Faults>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Toggle {
    #[default]
    Auto,
    On,
    Off,
}

/// Reads the name of a format; help and completions show all of them.
pub(super) fn format_parser() -> impl clap::builder::TypedValueParser<Value = becket_image::Format> {
    let name = |names: &'static [&'static str]| {
        let (first, rest) = names.split_first()?;
        Some(PossibleValue::new(first).aliases(rest))
    };
    let names = becket_image::Format::names().filter_map(name);
    PossibleValuesParser::new(names).try_map(|text| text.parse::<becket_image::Format>())
}

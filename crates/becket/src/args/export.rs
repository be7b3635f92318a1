//! The words of `becket export`: which images, where clients reach them, and who may.
//! Never does anything: `commands::export` does.

use crate::units::{parse_block_size, parse_size};
use clap::Args;
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use super::device::{DeviceOptions, LimitOptions, OriginOptions, Toggle, TraceOptions, format_parser};

/// Export images over NBD or vhost-user, and print one URI a line
///
/// Clients can connect when the command ends. becket's server keeps the exports until `becket detach`, as it
/// keeps devices. Each export is served by a process of its own, which holds its image and its clients'
/// connections and nothing else. Several images at one address differ by their names.
///
/// With a command, the export exists exactly as long as the command. In the words of CMD, `{}` is replaced by
/// the URI, which is also in $BECKET_URI. The exit status is that of the command, as for `becket run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket export disk.img --nbd unix:/run/disk.sock
  becket export -r a.img b.qcow2 --nbd tcp:127.0.0.1:10809   # nbd://127.0.0.1:10809/a.img and /b.qcow2
  becket export disk.img --nbd tcp:0.0.0.0 --tls /etc/pki/becket --tls-verify
  becket export vm.qcow2 --vhost-user unix:/run/vm.sock      # a disk of a virtual machine
  becket export -r disk.img --nbd unix:s.sock -- nbdcopy {} copy.img")]
pub(crate) struct Export {
    /// Images to export, or paths of images inside images
    #[arg(required = true, value_name = "IMAGE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) images: Vec<PathBuf>,
    /// Listen for NBD clients: unix:PATH, tcp:HOST, tcp:HOST:PORT, fd:N, or systemd for the socket of a
    /// service manager
    #[arg(long, value_name = "ADDRESS", required_unless_present = "vhost_user")]
    pub(crate) nbd: Option<String>,
    /// Listen for the front-end of a virtual machine (vhost-user-blk): unix:PATH, fd:N or systemd
    #[arg(long, value_name = "ADDRESS", conflicts_with = "nbd")]
    pub(crate) vhost_user: Option<String>,
    /// Name the export [default: the name of the file]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Make the export read-only
    #[arg(short, long)]
    pub(crate) read_only: bool,
    /// Set how many clients of the address are served at once; others wait
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096), allow_negative_numbers = true)]
    pub(crate) max_connections: u32,
    /// Require TLS, with server-cert.pem and server-key.pem of this directory
    ///
    /// ca-cert.pem and ca-crl.pem are read for --tls-verify. These are the names that libnbd, nbdkit and QEMU
    /// use. Pre-shared keys are not supported.
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath, help_heading = "Security options")]
    pub(crate) tls: Option<PathBuf>,
    /// Require a client certificate that ca-cert.pem has signed
    #[arg(long, requires = "tls", help_heading = "Security options")]
    pub(crate) tls_verify: bool,
    /// Require a client certificate with this name (a DNS name, or the common name); may be given several
    /// times
    #[arg(long, value_name = "NAME", requires = "tls", help_heading = "Security options")]
    pub(crate) tls_allow: Vec<String>,
    /// Allow a TCP address that others can reach, without TLS
    #[arg(long, help_heading = "Security options")]
    pub(crate) insecure: bool,
    #[command(flatten)]
    pub(crate) image: ImageOptions,
    /// Command to run while the image is exported, after `--`
    #[arg(last = true, num_args = 1.., value_name = "CMD", value_hint = clap::ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

/// How the images are opened and served: as the options of `attach` with the same names.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Image options")]
pub(crate) struct ImageOptions {
    /// Choose the format of the file instead of detecting it; see `becket attach --help`
    #[arg(long, default_value_t = becket_image::Format::Auto, value_parser = format_parser())]
    pub(crate) format: becket_image::Format,
    /// Also allow backing files of a qcow2 in this directory; may be given several times
    #[arg(long = "backing-dir", value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) backing_dirs: Vec<PathBuf>,
    /// Write to this qcow2 overlay, never to the image; create it if it does not exist
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) cow: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) limits: LimitOptions,
    #[command(flatten)]
    pub(crate) store: OriginOptions,
    #[command(flatten)]
    pub(crate) trace: TraceOptions,
    /// Export a qcow2 writable although the first write removes its persistent bitmaps
    #[arg(long)]
    pub(crate) drop_bitmaps: bool,
    /// Skip this many bytes at the start of the image
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, default_value = "0", value_parser = parse_size)]
    pub(crate) offset: u64,
    /// Limit the size of the export
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size)]
    pub(crate) size_limit: Option<u64>,
    /// Set the logical block size, a power of two from 512 to the page size [default: what the image needs]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_block_size)]
    pub(crate) block_size: Option<u32>,
    /// Bypass the page cache of the image file: if possible (auto), always (on) or never (off)
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Toggle::Auto)]
    pub(crate) direct_io: Toggle,
    /// Export an image that is in use: take no lock, even if another program may write to it
    #[arg(long)]
    pub(crate) shared: bool,
    /// Set the size of the cache of decoded blocks, at least 16M
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size)]
    pub(crate) cache_size: Option<u64>,
    /// Set the number of queues (vhost-user only) [default: up to one per CPU]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=64), conflicts_with = "nbd")]
    pub(crate) queues: Option<u16>,
    /// Set the number of requests in flight of one connection or queue
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) depth: Option<u16>,
    /// Inject errors, short transfers or delays, for testing: error=write:EIO:0.01,delay=read:10ms
    #[arg(long, value_name = "FAULTS", value_parser = crate::faults::parse_faults)]
    pub(crate) fault: Option<becket_device::fault::Faults>,
}

impl Export {
    /// Where clients connect.
    pub(crate) fn address(&self) -> &str {
        self.nbd.as_deref().or(self.vhost_user.as_deref()).unwrap_or_default()
    }

    /// The path of its socket, if it has one.
    pub(crate) fn socket(&self) -> Option<&Path> {
        self.address().strip_prefix("unix:").map(Path::new)
    }

    /// The options as those of a device.
    pub(crate) fn device(&self) -> DeviceOptions {
        let image = self.image.clone();
        DeviceOptions {
            read_only: self.read_only,
            name: self.name.clone(),
            format: image.format,
            backing_dirs: image.backing_dirs,
            cow: image.cow,
            limits: image.limits,
            store: image.store,
            trace: image.trace,
            drop_bitmaps: image.drop_bitmaps,
            offset: image.offset,
            size_limit: image.size_limit,
            block_size: image.block_size,
            direct_io: image.direct_io,
            shared: image.shared,
            cache_size: image.cache_size,
            queues: image.queues,
            depth: image.depth,
            fault: image.fault,
            ..DeviceOptions::default()
        }
    }
}

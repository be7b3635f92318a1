//! The words of `becket export`: which images, where clients reach them, and who may.
//! Never does anything: `commands::export` does.

use clap::Args;
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use super::device::DeviceOptions;
use super::image::ImageOptions;

/// Export images over NBD or vhost-user, and print one URI a line
///
/// Clients can connect when the command ends. becket's server keeps the exports until `becket detach`, as it
/// keeps devices. Each export is served by a process of its own, which holds its image and its clients'
/// connections and nothing else. Several images at one address differ by their names.
///
/// With a command, the export exists exactly as long as the command. In the words of CMD, `{}` is replaced by
/// the URI, which is also in $BECKET_URI. The exit status is that of the command, as for `becket run`.
#[derive(Clone, Debug, Args)]
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
    ///
    /// Clients of NBD may know it by any text of at most 4096 bytes. It has this name in `becket list`, too,
    /// if a device can have it, and one of becket's choice otherwise.
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
    /// Set the number of queues (vhost-user only) [default: up to one per CPU]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=64), conflicts_with = "nbd", help_heading = "Image options")]
    pub(crate) queues: Option<u16>,
    /// Command to run while the image is exported, after `--`
    #[arg(last = true, num_args = 1.., value_name = "CMD", value_hint = clap::ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
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

    /// The options as those of a device. What NBD clients call it need not be a device's name.
    pub(crate) fn device(&self) -> DeviceOptions {
        let possible = |name: &String| self.nbd.is_none() || becket_device::check_name(name).is_ok();
        DeviceOptions {
            image: self.image.clone(),
            read_only: self.read_only,
            name: self.name.clone().filter(possible),
            queues: self.queues,
            ..DeviceOptions::default()
        }
    }
}

//! The commands that look into images without attaching them.
//! Never does anything: what a command does lives in `commands`.

use super::image::{LimitOptions, OriginOptions, format_parser};
use clap::Args;
use std::path::PathBuf;

/// What is looked at, without attaching it.
#[derive(Debug, Args)]
pub(crate) struct Look {
    /// Image, or a path through an image
    #[arg(value_name = "PATH", value_hint = clap::ValueHint::AnyPath)]
    pub(crate) path: PathBuf,
    #[command(flatten)]
    pub(crate) options: LookOptions,
}

/// How images are opened that are not attached.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct LookOptions {
    /// Choose the format of the file instead of detecting it
    ///
    /// With raw, what PATH names is taken as it is stored; every other format is that of the file on the
    /// host.
    #[arg(long, default_value_t = becket_image::Format::Auto, value_parser = format_parser())]
    pub(crate) format: becket_image::Format,
    /// Also allow backing files of a qcow2 in this directory; may be given several times
    #[arg(long = "backing-dir", value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) backing_dirs: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) limits: LimitOptions,
    #[command(flatten)]
    pub(crate) store: OriginOptions,
}

impl Look {
    /// How the last of so many images is to be understood: a format is that of the first, and `raw` that of
    /// the last.
    pub(crate) fn format_of(&self, levels: usize) -> becket_image::Format {
        let format = self.options.format;
        if levels == 1 || format == becket_image::Format::Raw { format } else { becket_image::Format::Auto }
    }
}

/// Show what is inside an image, and inside the images in it, as a tree
///
/// The tree has partitions, file systems, and files of 4 KiB or more that are images themselves, with their
/// sizes, labels, UUIDs and compression. Nothing is attached.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket inspect live.iso
  becket inspect disk.img/p2
  becket inspect --json live.iso | jq '.image.children[].name'")]
pub(crate) struct Inspect {
    #[command(flatten)]
    pub(crate) look: Look,
}

/// List a directory inside an image, or the partitions of a disk
///
/// In the part of PATH inside the image, `*`, `?` and `[...]` stand for names; quote them from the shell.
/// What they match is listed as by ls(1): the files, then each directory.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket ls live.iso/LiveOS
  becket ls disk.img                  # its partitions
  becket ls -l disk.img/p1/var/lib
  becket ls 'disk.img/p1/etc/*.conf'")]
pub(crate) struct Ls {
    #[command(flatten)]
    pub(crate) look: Look,
    /// Also show modes, links, owners and times (in UTC), and sizes in bytes
    #[arg(short, long)]
    pub(crate) long: bool,
    /// List directories below it, too
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,
    /// List names that begin with a dot, too; becket always does
    #[arg(short, long)]
    pub(crate) all: bool,
}

/// Write files inside images to standard output
///
/// Each PATH names a file in an image, which is written as it is stored there, or an image as a whole: a disk
/// or a partition. In the part of PATH inside the image, `*`, `?` and `[...]` stand for names; quote them
/// from the shell.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket cat disk.img/p1/etc/fstab
  becket cat live.iso/md5sum.txt | head
  becket cat 'disk.img/p1/etc/*-release'")]
pub(crate) struct Cat {
    /// Files in images
    #[arg(required = true, value_name = "PATH", value_hint = clap::ValueHint::AnyPath)]
    pub(crate) paths: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) options: LookOptions,
}

/// Copy files and directories out of images
///
/// The last PATH is where the copies go: a directory that exists, or the name of the copy. `PATH/.` copies
/// what is in a directory. Symbolic links are copied as links and hard links stay linked; holes stay holes;
/// permissions (but for the umask), times and the users' extended attributes are kept. Nothing is written
/// outside of that directory, whatever the image says, and files that exist stay as they are. In the part of
/// PATH inside the image, `*`, `?` and `[...]` stand for names; quote them from the shell.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket cp disk.img/p1/etc/fstab .
  becket cp -r disk.img/p1/etc rootfs.squashfs/usr/share/doc backup/
  becket cp -rp disk.img/p1 rootfs     # as root: owners, devices and all modes, too
  becket cp 'disk.img/p1/boot/vmlinuz*' .
  becket cp -r --tar - disk.img/p1/home | tar -t")]
pub(crate) struct Cp {
    /// Files and directories in images, then the place for the copies
    #[arg(required = true, value_name = "PATH", value_hint = clap::ValueHint::AnyPath)]
    pub(crate) paths: Vec<PathBuf>,
    /// Copy directories with all that is in them; of a disk or partition, its files
    #[arg(short, long)]
    pub(crate) recursive: bool,
    /// Keep all of the mode; as root also owners, devices and all extended attributes
    #[arg(short, long)]
    pub(crate) preserve: bool,
    /// Replace files that exist
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Write a tar archive instead, - for standard output; every PATH is a source then
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) tar: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) options: LookOptions,
}

/// Write an image to a raw file, a qcow2 or a device
///
/// What `becket attach` would show of SRC is copied: a compressed image is decompressed, and a qcow2 is
/// followed to its backing files. Holes and zeroes that the image knows of are not read and become holes. The
/// file appears under its name when it is complete and on the disk; before that there is none.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket copy disk.img.xz disk.img
  becket copy live.iso/LiveOS/squashfs.img/LiveOS/rootfs.img rootfs.qcow2
  becket copy --sparse dump.img small.img     # also finds blocks of zeroes
  becket copy disk.qcow2/p1 - | sha256sum
  becket copy --force disk.img /dev/sdx
  becket copy disk.img rbd:POOL/IMAGE         # makes the image if there is none")]
pub(crate) struct Copy {
    /// Image, or a path through an image
    #[arg(value_name = "SRC", value_hint = clap::ValueHint::AnyPath)]
    pub(crate) source: PathBuf,
    /// A new file, - for standard output, or with --force a file, block device, NBD export or image of Ceph
    /// that exists
    #[arg(value_name = "DST", value_hint = clap::ValueHint::AnyPath)]
    pub(crate) target: PathBuf,
    /// Choose the format of DST [default: qcow2 if its name ends in .qcow2, else raw]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) to: Option<CopyFormat>,
    /// Leave holes for blocks of zeroes, too: every byte is looked at
    #[arg(long)]
    pub(crate) sparse: bool,
    /// Replace DST if it exists; write to it if it is a block device or on a server
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Copy an image that is in use: take no lock, even if another program may write to it
    #[arg(long)]
    pub(crate) shared: bool,
    #[command(flatten)]
    pub(crate) options: LookOptions,
}

/// What `becket copy` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CopyFormat {
    /// The bytes of the image
    Raw,
    /// A qcow2 of version 3
    Qcow2,
}

/// Show where the bytes of an image are: data, zeroes and compressed parts
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket map live.iso/LiveOS/squashfs.img
  becket map --svg map.svg disk.img/p1/app.img   # a picture: one bar for each image on the way")]
pub(crate) struct Map {
    #[command(flatten)]
    pub(crate) look: Look,
    /// Draw a picture into this file instead of printing a table
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) svg: Option<PathBuf>,
    /// Also list the blocks of compressed parts, and where each is stored
    #[arg(long)]
    pub(crate) blocks: bool,
}

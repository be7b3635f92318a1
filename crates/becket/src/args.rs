//! Every subcommand, option and help text: one definition for parsing, help, man pages and completions.
//! Never does anything: what a command does lives in `commands`.

use crate::units::{parse_block_size, parse_duration, parse_size};
use becket_device::LogLevel;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, FromArgMatches as _, Parser, Subcommand};
use std::{
    ffi::OsString,
    marker::PhantomData,
    os::{fd::RawFd, unix::ffi::OsStrExt as _},
    path::PathBuf,
    time::Duration,
};

mod device;
mod export;
mod image;
mod look;
mod store;
mod watch;

pub(crate) use device::{DeviceOptions, Switch, Via};
pub(crate) use export::Export;
use image::format_parser;
pub(crate) use image::{
    ImageOptions, LimitOptions, OriginOptions, StoreDir, StoreOptions, Toggle, TraceOptions,
};
pub(crate) use look::{Cat, Copy, CopyFormat, Cp, Inspect, Look, LookOptions, Ls, Map};
pub(crate) use store::{Store, StoreAction};
pub(crate) use watch::{Events, Metrics, Stat, StorageProvider, Top, Why};

const EXAMPLES: &str = "\
Examples:
  becket attach disk.img                 # prints the new device, for example /dev/loop0
  becket run disk.img -- fsck.ext4 -n {} # the device exists exactly as long as the command
  becket mount rootfs.squashfs /mnt      # and `becket umount /mnt`
  becket doctor                          # what works on this machine, and how to fix the rest

Exit status: 0 done, 1 failed, 2 wrong usage. `becket run` passes its command's status on.";

/// Attaches disk images as block devices, without leaving anything behind.
///
/// becket picks the best transport that this machine has for an image (ublk, device-mapper, the kernel's loop
/// driver or FUSE), creates the block device and its partitions, and removes them when they are no longer
/// needed.
#[derive(Debug, Parser)]
#[command(name = "becket", version, after_help = EXAMPLES, max_term_width = 100, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command understands.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Global {
    /// Print JSON, for programs
    ///
    /// The command prints one JSON value to standard output. If the command fails as a whole, the value is
    /// {"error":{"kind","message","hint"}}. Messages for people still go to standard error.
    #[arg(long, global = true, help_heading = "General options")]
    pub(crate) json: bool,
    /// Explain on standard error which transport was chosen, and why
    #[arg(short, long, global = true, help_heading = "General options")]
    pub(crate) verbose: bool,
}

impl Cli {
    /// From a command line's words.
    pub(crate) fn read(words: &[OsString]) -> Result<Self, clap::Error> {
        Self::attaches(words).map_or_else(|| Cli::try_parse_from(words), Ok)
    }

    /// The same for the most frequent command, which is also called in loops: defining all the other commands
    /// takes a fifth of the time in which a device is attached. Help and errors come from the parser that has
    /// them all.
    fn attaches(words: &[OsString]) -> Option<Self> {
        const NAME: &str = "attach";
        if words.iter().skip(1).find(|word| !word.as_bytes().starts_with(b"-"))? != NAME {
            return None;
        }
        let attach = Attach::augment_args(clap::Command::new(NAME));
        let command = Global::augment_args(clap::Command::new("becket")).subcommand(attach);
        Cli::from_arg_matches(&command.try_get_matches_from(words).ok()?).ok()
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Attach(Attach),
    Export(Export),
    Detach(Detach),
    Run(Run),
    Mount(Mount),
    Umount(Umount),
    List(List),
    Inspect(Inspect),
    Ls(Ls),
    Cat(Cat),
    Cp(Cp),
    Copy(Copy),
    Map(Map),
    Refresh(Refresh),
    Set(Set),
    Stat(Stat),
    Store(Store),
    Top(Top),
    Metrics(Metrics),
    Events(Events),
    Why(Why),
    Doctor(Doctor),
    StorageProvider(StorageProvider),
    Losetup(Losetup),
    Serve(Serve),
    Completions(Completions),
    Man(Man),
    CompletePath(CompletePath),
    Worker(Worker),
    Doorman(Doorman),
    Connector(Connector),
    Fetcher(Fetcher),
    Reporter(Reporter),
    RunGuard(RunGuard),
    RunExec(RunExec),
    Generator(Generator),
    UblkGive(UblkGive),
}

impl Command {
    /// Whether it is a long-lived process that another becket starts, by /proc/self/exe.
    pub(crate) fn restarted(&self) -> bool {
        matches!(
            self,
            Command::Serve(_)
                | Command::Worker(_)
                | Command::Doorman(_)
                | Command::Connector(_)
                | Command::Fetcher(_)
                | Command::Reporter(_)
                | Command::RunGuard(_)
        )
    }
}

/// Attach images and print one device path a line
///
/// Images are attached in parallel; the device paths are printed in the order of the images. If one image
/// fails, the others stay attached and the exit status is 1. With --atomic, the others are detached again.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket attach disk.img
  becket attach -r *.squashfs                # many at once, read-only
  becket attach --offset 1MiB --size-limit 64M disk.img
  becket attach --name root -v disk.img      # as /dev/becket/root; says what it took and why
  becket attach disk.img --cow today.qcow2   # disk.img stays as it is
  becket attach --atomic --from images.txt   # all or none; a line: disk.img --name root --read-only
  becket attach --dry-run disk.img           # says what it would do
  becket attach --tab data                   # as the line `data` of /etc/beckettab says")]
pub(crate) struct Attach {
    /// Images to attach: regular files or block devices
    #[arg(required_unless_present = "from", conflicts_with = "from", value_name = "IMAGE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) images: Vec<PathBuf>,
    /// Read images from a file (- is standard input), one IMAGE with its device options per line
    ///
    /// Words are quoted as in a shell, and `#` begins a comment. Device options on the command line apply to
    /// each line, unless the line sets them itself. If a line is wrong, its number is reported and nothing is
    /// attached.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) from: Option<PathBuf>,
    /// Attach the devices with these names from a table [default: /etc/beckettab]
    ///
    /// A line of the table is `NAME IMAGE [OPTIONS]`. The machine attaches these devices when it starts; see
    /// beckettab(5).
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, num_args = 0..=1, require_equals = true,
        default_missing_value = crate::tab::TABLE, conflicts_with = "from")]
    pub(crate) tab: Option<PathBuf>,
    /// Attach all images or none: if one fails, detach the others again
    #[arg(long)]
    pub(crate) atomic: bool,
    /// Say what would be attached, and how, without attaching it
    ///
    /// The images are opened and checked as for an attach. Of a remote image only what opening it needs is
    /// fetched. An overlay (--cow) that does not exist is not created.
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) device: DeviceOptions,
}

/// A line of `attach --from`.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, disable_help_flag = true, args_override_self = true)]
pub(crate) struct AttachLine {
    #[arg(value_name = "IMAGE")]
    pub(crate) image: PathBuf,
    #[command(flatten)]
    pub(crate) device: DeviceOptions,
}

/// A line of the machine's table that is an export.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, disable_help_flag = true, args_override_self = true)]
pub(crate) struct ExportLine {
    #[command(flatten)]
    pub(crate) export: Export,
}

/// What reads such lines: made once for all of them, which takes longer than reading one.
pub(crate) struct LineParser<T>(clap::Command, PhantomData<T>);

impl<T: Parser> LineParser<T> {
    pub(crate) fn new() -> Self {
        Self(T::command(), PhantomData)
    }

    /// From a line's words; an error says on one line what is wrong.
    pub(crate) fn parse(&mut self, words: impl IntoIterator<Item = OsString>) -> Result<T, String> {
        let parsed = self.0.try_get_matches_from_mut(words);
        parsed.and_then(|matches| T::from_arg_matches(&matches)).map_err(|error| {
            let text = error.to_string();
            let first = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
            first.split_whitespace().collect::<Vec<_>>().join(" ")
        })
    }
}

/// Detach devices, and wait until they are gone
///
/// A device in use is not detached, and its users are named. TARGET is a device path, a name or an image
/// path.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket detach /dev/loop0
  becket detach root disk.img         # by name, by image
  becket detach --lazy /dev/loop0     # detaches when its last user closes it
  becket detach --force vm.img        # an export, also from clients that are connected
  becket detach --dry-run root        # says whether it would go, and what uses it
  becket detach --all")]
pub(crate) struct Detach {
    /// Devices, names or images to detach
    #[arg(required_unless_present = "all", conflicts_with = "all", value_name = "TARGET")]
    pub(crate) targets: Vec<OsString>,
    /// Detach everything that becket has attached
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Do not wait: detach a device in use when its last user closes it
    #[arg(short, long)]
    pub(crate) lazy: bool,
    /// End the connections of an export's clients instead of refusing (exports only)
    #[arg(short, long, conflicts_with = "lazy")]
    pub(crate) force: bool,
    /// Say what would be detached, and what uses it, without detaching it
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Set how long to wait until a device is gone
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, default_value = "10s", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
}

/// Run a command with an image attached; the device exists exactly as long as the command
///
/// In the words of CMD, `{}` is replaced by the device path. The command also finds the device path in
/// $BECKET_DEVICE and the paths of the partitions in $BECKET_PARTITIONS, separated by spaces. The exit status
/// is that of the command: 128 plus the signal number if it was killed, 127 if it was not found and 126 if it
/// cannot be run. Processes that the command leaves running are killed when it ends. They and the device also
/// end if becket itself is killed.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket run disk.img -- fsck.ext4 -f {}
  becket run -r disk.img -- sh -c 'sha256sum $BECKET_DEVICE'
  becket run disk.img -- dd if=boot.bin of={}p1 conv=fsync")]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) device: DeviceOptions,
    /// Image to attach
    #[arg(value_name = "IMAGE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) image: PathBuf,
    /// Command to run, after `--`
    #[arg(last = true, required = true, num_args = 1.., value_name = "CMD", value_hint = clap::ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

/// Attach an image and mount it; the device is detached when it is unmounted
///
/// mount(8) detects the file system. `becket umount DIR` and a plain `umount DIR` both detach the device.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket mount rootfs.squashfs /mnt
  becket mount --partition 2 disk.img /mnt
  becket mount -r -o nosuid,nodev disk.img /mnt")]
pub(crate) struct Mount {
    #[command(flatten)]
    pub(crate) device: DeviceOptions,
    /// Mount this partition; 0 is the whole device, even if it has partitions
    #[arg(short, long, value_name = "N")]
    pub(crate) partition: Option<u32>,
    /// Set the file system type, as for mount(8)
    #[arg(short = 't', long = "type", value_name = "FSTYPE", default_value = "auto")]
    pub(crate) fs_type: String,
    /// Set mount options, as for mount(8)
    #[arg(short, long, value_name = "OPTIONS")]
    pub(crate) options: Option<String>,
    /// Image to mount
    #[arg(value_name = "IMAGE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) image: PathBuf,
    /// Directory to mount it on
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) dir: PathBuf,
}

/// Unmount a directory and detach the device under it
///
/// The device stays attached while it is also mounted elsewhere.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket umount /mnt
  becket umount --timeout 1min /mnt   # wait longer for the device to be gone")]
pub(crate) struct Umount {
    /// Directory that an image is mounted on
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) dir: PathBuf,
    /// Set how long to wait until the device is gone
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, default_value = "10s", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
}

/// List what is attached
///
/// With -v, the table also says why each device has its transport.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket list
  becket list disk.img              # what has this image
  becket list --json | jq -r '.devices[].device'")]
pub(crate) struct List {
    /// List only these devices, names or images
    #[arg(value_name = "TARGET")]
    pub(crate) targets: Vec<OsString>,
}

/// Update devices to the changed size and partition table of their image
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  truncate -s +1G disk.img && becket refresh disk.img
  becket refresh /dev/loop0 root   # by device, by name")]
pub(crate) struct Refresh {
    /// Devices, names or images whose size or partition table changed
    #[arg(required = true, value_name = "TARGET")]
    pub(crate) targets: Vec<OsString>,
}

/// Change devices while they are in use
///
/// Requests in flight complete with the old settings, and no request is lost. becket itself makes the change
/// for ublk and fuse devices. The loop driver and device-mapper cannot make every change; becket then refuses
/// it and says what to do instead. TARGET is a device path, a name or an image path.
///
/// A device that is in use gets another image only if it is read-only and both have the same bytes; becket
/// compares them. --force overrides this for programs that merely have it open, not for mounts. Without
/// --force a device in use is not made shorter, nor read-only below a file system mounted for writing.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket set /dev/ublkb0 --direct-io off
  becket set root --read-only on
  becket set root --size-limit 8GiB       # or none: as long as its image
  becket set root --image /mnt/new/root.squashfs")]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true))]
pub(crate) struct Set {
    /// Devices, names or images to change
    #[arg(required = true, value_name = "TARGET")]
    pub(crate) targets: Vec<OsString>,

    /// Bypass the page cache of the image file: if possible (auto), always (on) or never (off)
    #[arg(long, value_name = "MODE", group = "change")]
    pub(crate) direct_io: Option<Toggle>,
    /// Make the device read-only (on) or writable (off)
    #[arg(long, value_name = "SWITCH", group = "change")]
    pub(crate) read_only: Option<Switch>,
    /// Limit the size of the device; `none` removes the limit
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_limit, group = "change")]
    pub(crate) size_limit: Option<Limit>,
    /// Replace the image of the device by this one
    #[arg(long, value_name = "IMAGE", value_hint = clap::ValueHint::FilePath, group = "change")]
    pub(crate) image: Option<PathBuf>,
    /// Choose the format of that image instead of detecting it
    #[arg(long, default_value_t = becket_image::Format::Auto, value_parser = format_parser())]
    pub(crate) format: becket_image::Format,
    /// Always refused: the block size of a device cannot change; the error says what to do instead
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_block_size, group = "change")]
    pub(crate) block_size: Option<u32>,
    /// Proceed even if a mounted file system or partition would be lost, or a program has the device open
    #[arg(long)]
    pub(crate) force: bool,
    /// Use a new image that is in use: take no lock, even if another program may write to it
    #[arg(long)]
    pub(crate) shared: bool,
    #[command(flatten)]
    pub(crate) limits: LimitOptions,
}

/// Most bytes of a device, where there is a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit(pub(crate) Option<u64>);

fn parse_limit(text: &str) -> Result<Limit, String> {
    match text {
        "none" => Ok(Limit(None)),
        _ => parse_size(text).map(|size| Limit(Some(size))),
    }
}

/// Show which transports work on this machine, and how to fix the others
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket doctor
  becket doctor --json | jq '.transports[] | select(.works | not)'")]
pub(crate) struct Doctor {}

/// Behave as losetup, with its options and its output
///
/// A link named losetup to becket does the same. `becket losetup --help` and losetup(8) list the options.
#[derive(Debug, Args)]
#[command(
    disable_help_flag = true,
    after_help = "\
Examples:
  becket losetup --find --show disk.img
  ln -s $(command -v becket) /usr/local/sbin/losetup"
)]
pub(crate) struct Losetup {
    /// Words for losetup
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "WORD")]
    pub(crate) words: Vec<OsString>,
}

/// Serve devices in the foreground
///
/// Other commands start a server if none runs; such a server ends with its last device. This command serves
/// until SIGTERM. It takes over the devices of a server that died. With --takeover it also replaces a server
/// that runs, for an upgrade: requests wait a moment and continue in the new version.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket serve
  becket serve --until-idle              # ends when its last device is gone
  becket serve --takeover --until-idle   # replaces the server and the worker that run")]
pub(crate) struct Serve {
    /// End when the last device is gone
    #[arg(long)]
    pub(crate) until_idle: bool,
    /// Replace the server that runs and the processes that serve its devices
    #[arg(long)]
    pub(crate) takeover: bool,
    /// Set the size of the cache of decoded blocks of each serving process, at least 16M, until an attach
    /// sets another [default: up to 1/16 of memory, at most 1G, and less if blocks are not read again]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size)]
    pub(crate) cache_size: Option<u64>,
    /// Set what is written to the log: error, warn, info, debug or trace
    ///
    /// Without it, the environment variable BECKET_LOG sets the level.
    #[arg(long, value_name = "LEVEL", value_parser = levels())]
    pub(crate) log_level: Option<LogLevel>,
    /// Wait for this pipe's end, and serve only when it ended without a word
    #[arg(long, hide = true, value_name = "FD")]
    pub(crate) after_fd: Option<RawFd>,
    /// Write one byte to this descriptor when ready; ends when idle
    #[arg(long, hide = true, value_name = "FD")]
    pub(crate) ready_fd: Option<RawFd>,
}

fn levels() -> impl TypedValueParser<Value = LogLevel> {
    PossibleValuesParser::new(["error", "warn", "info", "debug", "trace"]).try_map(|word| word.parse())
}

/// Print a completion script for a shell
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket completions bash > /usr/share/bash-completion/completions/becket
  becket completions fish > ~/.config/fish/completions/becket.fish
  becket completions --losetup bash > /usr/share/bash-completion/completions/losetup")]
pub(crate) struct Completions {
    /// Shell to print the script for
    pub(crate) shell: clap_complete::Shell,
    /// Print the script for a link named losetup
    #[arg(long)]
    pub(crate) losetup: bool,
}

/// Write the man pages into a directory
#[derive(Debug, Args)]
#[command(
    hide = true,
    after_help = "\
Examples:
  becket man /usr/share/man/man1"
)]
pub(crate) struct Man {
    /// Directory to write them into; made when missing
    pub(crate) dir: PathBuf,
}

/// List names inside images that begin like a word (called by completion scripts)
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct CompletePath {
    /// The word so far
    #[arg(allow_hyphen_values = true)]
    pub(crate) word: OsString,
}

/// Move bytes for the server (started by it)
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct Worker {
    /// Bytes of decoded blocks that it may keep until a device says otherwise
    #[arg(long, value_name = "BYTES")]
    pub(crate) cache_size: Option<u64>,
}

/// Talk with the clients of exports for the server (started by it)
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct Doorman {}

/// Connect to the server of an image for a worker (started by it)
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct Connector {}

/// Fetch the bytes of an image for devices (started by the server)
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct Fetcher {}

/// Answer requests for metrics (started by `becket metrics`)
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct Reporter {}

/// Guard a command of `becket run` (started by it)
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct RunGuard {
    /// Its end of file says that `becket run` is gone
    #[arg(long, value_name = "FD")]
    pub(crate) alive_fd: RawFd,
    /// The command's own cgroup, removed at the end
    #[arg(long, value_name = "DIR")]
    pub(crate) cgroup: Option<PathBuf>,
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}

/// Become the command of `becket run` (started by its guard)
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct RunExec {
    /// The guard, whose death ends the command
    #[arg(long, value_name = "PID")]
    pub(crate) guard: i32,
    #[arg(long, value_name = "DIR")]
    pub(crate) cgroup: Option<PathBuf>,
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}

/// Give the nodes of a ublk device to the user who added it (started by udev)
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct UblkGive {
    /// The device's number
    pub(crate) number: u32,
}

/// Make units of a table of devices (started by systemd, as becket-generator)
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct Generator {
    #[arg(long, value_name = "FILE", default_value = crate::tab::TABLE)]
    pub(crate) tab: PathBuf,
    /// Where units go, and where those would that come before or after others: three directories
    #[arg(required = true, num_args = 1..=3, value_name = "DIR")]
    pub(crate) dirs: Vec<PathBuf>,
}
#[cfg(test)]
mod tests;

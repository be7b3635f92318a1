//! `cargo xtask bench writeback`: how long a new file system takes to fill and sync while dirty pages are
//! scarce.
//! Never leaves the host changed: the script's settings, mounts and devices are undone however it ends.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::build::Build;
use super::contestant::Field;
use super::guest::{self, Guest};
use super::host::{self, Host};
use super::record::{self, Clock, Setting};
use super::table::LOOP_DIRECT;
use super::{fio, goal, writeback_table};
use crate::vm::quoted;

const SCRIPT: &str = include_str!("guest/writeback.sh");

/// The file systems below the image, and above it.
pub(crate) const SYSTEMS: [&str; 3] = ["xfs", "ext4", "btrfs"];

/// Where it is measured.
pub(crate) const PLACES: [&str; 2] = ["host", "guest"];

/// What lies below the image in the guest.
const GUEST_BACKING: &str = r#"
modprobe loop && modprobe ublk_drv || fail "this kernel lacks loop or ublk"
for module in configfs xfs btrfs; do modprobe $module 2>/dev/null; done
modprobe null_blk nr_devices=0 || fail "this kernel has no null_blk"
backing() {
    local null=/sys/kernel/config/nullb/nullb0 setting
    mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
    mkdir $null || return
    for setting in size=$ROOM memory_backed=1 queue_mode=2 irqmode=0 blocksize=512 discard=1; do
        echo "${setting#*=}" >"$null/${setting%%=*}" || return
    done
    echo 1 >$null/power && BACKING=/dev/nullb0
}
unback() { true; }
"#;

/// The same on the host: a file of this machine's own disk behind the loop driver.
const HOST_BACKING: &str = r#"
backing() {
    truncate -s ${ROOM}M "$WORK/backing" && BACKING=$(losetup --find --show --direct-io=on "$WORK/backing")
}
unback() { losetup -d "$BACKING"; }
"#;

/// Arguments of `cargo xtask bench writeback`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    guest: guest::Options,
    /// Times that each contestant writes, in turn
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// MiB written on the host
    #[arg(long, default_value_t = 4000)]
    host_mib: u32,
    /// MiB written in the guest
    #[arg(long, default_value_t = 400)]
    guest_mib: u32,
    /// Not on the host: root and a loop driver are needed there, and vm.dirty_bytes is changed for the time
    #[arg(long)]
    no_host: bool,
    /// Not in the guest
    #[arg(long, conflicts_with = "no_host")]
    no_guest: bool,
}

/// `target/bench/writeback.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Writeback {
    /// One for each place.
    pub(crate) settings: Vec<Setting>,
    pub(crate) rows: Vec<Row>,
    pub(crate) modes: Vec<Mode>,
}

/// One contestant over one file system in one place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// One of [`PLACES`].
    pub(crate) place: String,
    /// One of [`SYSTEMS`].
    pub(crate) system: String,
    pub(crate) entrant: String,
    /// Of each round.
    pub(crate) seconds: Vec<f64>,
    /// Why a round is missing.
    pub(crate) absent: Option<String>,
}

/// What becket said of an image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Mode {
    pub(crate) place: String,
    /// What the image lay on.
    pub(crate) backing: String,
    /// Transport, whether direct, and why; or why it could not be tried.
    pub(crate) said: Result<Said, String>,
}

/// The part of `becket list --json` that is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Said {
    pub(crate) transport: String,
    pub(crate) direct_io: bool,
    pub(crate) direct_io_reason: String,
}

/// Measures on the host and in the guest, prints the table, and keeps the record.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let build = Build::new(&args.guest)?;
    let mut record = Writeback::default();
    // A place that is left out keeps what the same becket did there before.
    let old = record::load::<Writeback>("writeback.json")?.filter(|_| args.no_host || args.no_guest);
    if let Some(old) = old.filter(|old| old.settings.iter().all(|one| one.build == build.hash)) {
        record = old;
    }
    if !args.no_host {
        on_host(args, &build, &mut record)?;
    }
    if !args.no_guest {
        in_guest(args, &build, &mut record)?;
    }
    let path = record::save("writeback.json", &record)?;
    print!("{}{}", writeback_table::text(&record), goal::text(&writeback_table::verdicts(&record)));
    eprintln!("xtask: everything is in {}", path.display());
    let broken = |row: &Row| row.entrant == "becket" && row.absent.is_some();
    Ok(u8::from(record.rows.iter().any(broken)))
}

fn in_guest(args: &Args, build: &Build, record: &mut Writeback) -> Result<()> {
    let names = [LOOP_DIRECT, "loop-buffered", "becket", "kublk-batch-zero-copy"];
    let field = Field::all(build.path.clone(), &[]).narrowed(&names, &[]);
    let guest = Guest::new(&args.guest, build, Clock::Time, 2).with_memory(2048 + 3 * args.guest_mib);
    let script = script(&field, args.rounds, args.guest_mib, "/root/work", "becket", GUEST_BACKING);
    let report = guest.boot(&field, Vec::new(), &script)?;
    let notes = notes("guest", args.rounds, args.guest_mib, "a memory-backed null_blk");
    record.take("guest", &field, &report, guest.setting(&guest::kernel_of(&report)?, notes)?)
}

fn on_host(args: &Args, build: &Build, record: &mut Writeback) -> Result<()> {
    let host = Host::new()?;
    let becket = host::word(&build.path);
    let mut field = Field::none();
    field.loop_device(LOOP_DIRECT, "--direct-io=on");
    field.loop_device("loop-buffered", "--direct-io=off");
    field.becket_on_host(&becket);
    let script = script(&field, args.rounds, args.host_mib, &host.word("work"), &becket, HOST_BACKING);
    eprintln!("xtask: on the host: {} MiB, {} rounds", args.host_mib, args.rounds);
    let report = host.run(&field, &script)?;
    let backing = "a file of this machine's disk behind loop with direct I/O";
    let setting = host.setting(build, &report, notes("host", args.rounds, args.host_mib, backing))?;
    record.take("host", &field, &report, setting)
}

fn notes(place: &str, rounds: u32, mib: u32, backing: &str) -> Vec<String> {
    vec![
        format!(
            "{place}: vm.dirty_bytes = 64 MiB; {mib} MiB by dd, then sync -f; {rounds} rounds, every other one backwards"
        ),
        format!(
            "a new sparse image on a file system on {backing}; on the device a new file system of the same kind"
        ),
    ]
}

fn script(field: &Field, rounds: u32, mib: u32, work: &str, becket: &str, backing: &str) -> String {
    let entrants: Vec<String> = field.present().map(|one| quoted(&one.entrant.name)).collect();
    format!(
        "ENTRANTS=({})\nSYSTEMS=({})\nROUNDS={rounds} MIB={mib} WORK={} BECKET={becket}\nmkdir -p \"$WORK\"\n{backing}\n{SCRIPT}",
        entrants.join(" "),
        SYSTEMS.join(" "),
        work
    )
}

impl Writeback {
    /// Takes one place's report in the place of what was there before.
    fn take(&mut self, place: &str, field: &Field, report: &str, setting: Setting) -> Result<()> {
        self.rows.retain(|row| row.place != place);
        self.modes.retain(|mode| mode.place != place);
        let is_place = |one: &Setting| one.notes.iter().any(|note| note.starts_with(place));
        self.settings.retain(|one| !is_place(one));
        self.settings.push(setting);
        for one in &field.contestants {
            self.rows.extend(SYSTEMS.map(|system| Row {
                place: place.to_owned(),
                system: system.to_owned(),
                entrant: one.entrant.name.clone(),
                seconds: Vec::new(),
                absent: one.entrant.absent.clone(),
            }));
        }
        for section in fio::sections(report) {
            match section.words[..] {
                ["kernel", _] => {}
                ["took", name, system, microseconds] => {
                    let took: f64 = microseconds.parse().context("no number of microseconds")?;
                    self.row(place, name, system)?.seconds.push(took / 1e6);
                }
                ["absent", name, system] => {
                    self.row(place, name, system)?.absent = Some(section.body.to_owned());
                }
                ["mode", backing] => self.modes.push(mode(place, backing, Ok(said(section.body)?))),
                ["odd", backing] => self.modes.push(mode(place, backing, Err(section.body.to_owned()))),
                _ => bail!("the report has a section `{}`", section.words.join(" ")),
            }
        }
        Ok(())
    }

    fn row(&mut self, place: &str, name: &str, system: &str) -> Result<&mut Row> {
        let is = |row: &&mut Row| row.place == place && row.entrant == name && row.system == system;
        self.rows.iter_mut().find(is).context("the report names an unknown contestant")
    }
}

fn mode(place: &str, backing: &str, said: Result<Said, String>) -> Mode {
    Mode { place: place.to_owned(), backing: backing.to_owned(), said }
}

/// From `becket list --json` with one device.
fn said(json: &str) -> Result<Said> {
    #[derive(Deserialize)]
    struct List {
        devices: Vec<Said>,
    }
    let list: List = serde_json::from_str(json).context("becket's list is not as expected")?;
    let [said]: [Said; 1] = list
        .devices
        .try_into()
        .map_err(|all: Vec<Said>| anyhow::anyhow!("becket lists {} devices", all.len()))?;
    Ok(said)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A report of the host, with becket slower than loop on xfs and absent on ext4.
    pub(crate) fn example() -> Writeback {
        let mut field = Field::none();
        field.loop_device(LOOP_DIRECT, "--direct-io=on");
        field.becket_on_host("becket");
        let report = "@@ kernel 6\n@@ took loop-direct xfs 2000000\n@@ took becket xfs 2200000\n\
            @@ took loop-direct ext4 1000000\n@@ absent becket ext4\nno room\n@@ odd fuse\nno server\n\
            @@ mode xfs\n{\"devices\":[{\"transport\":\"loop\",\"direct_io\":true,\"direct_io_reason\":\"it says so\"}]}\n";
        let setting = crate::bench::grid::tests::example().boots.swap_remove(0);
        let mut record = Writeback::default();
        record.take("host", &field, report, setting).unwrap();
        record
    }

    #[test]
    fn a_report_becomes_rows() {
        let mut record = example();
        assert_eq!(record.rows.len(), 6);
        assert_eq!(record.row("host", "becket", "xfs").unwrap().seconds, [2.2]);
        assert_eq!(record.row("host", "becket", "ext4").unwrap().absent.as_deref(), Some("no room"));
        assert!(record.modes.iter().any(|mode| mode.said == Err("no server".into())));
        assert!(record.row("guest", "becket", "xfs").is_err());
    }

    #[test]
    fn more_than_one_device_is_no_answer() {
        assert!(said("{\"devices\":[]}").is_err());
        assert!(said("nothing is attached").is_err());
    }
}

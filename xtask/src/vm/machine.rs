//! One boot: the parts are put together, the guest runs its script, its reports are gathered.
//! Never calls a run good that it did not see end: only the guest's own `exit` line carries a code.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use super::channel::{Decoder, Report};
use super::console::Console;
use super::kernel::{self, Series};
use super::qemu::{Event, Hardware, Qemu, Source};
use super::{lock, rootfs};
use crate::exec;

/// The guest's process 1.
const INIT: &str = include_str!("guest/init.sh");

/// The disk at /scratch; sparse, so it costs what is written.
const SCRATCH: &str = "8G";

/// How long a broken kernel may go on printing its trace before it is ended.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// How long systemd may take to stop everything and power off.
const ORDERLY_END: Duration = Duration::from_secs(180);

/// A file or directory, and where it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) host: PathBuf,
    /// Absolute.
    pub(crate) guest: String,
}

impl Place {
    /// From `HOSTPATH:GUESTPATH`.
    pub(crate) fn host_to_guest(text: &str) -> Result<Place> {
        let (host, guest) =
            text.split_once(':').with_context(|| format!("`{text}` is not HOSTPATH:GUESTPATH"))?;
        let place = Place { host: host.into(), guest: guest.to_owned() };
        // These are links or mount points in the guest; a directory of this name would cover them.
        const TAKEN: [&str; 9] =
            ["/bin", "/sbin", "/lib", "/lib64", "/proc", "/sys", "/dev", "/run", "/scratch"];
        let top = guest.split('/').nth(1).unwrap_or_default();
        let plain =
            Path::new(guest).components().all(|part| !matches!(part, std::path::Component::ParentDir));
        if !guest.starts_with('/') || top.is_empty() || !plain || TAKEN.contains(&&*format!("/{top}")) {
            bail!(
                "`{guest}` cannot be filled in the guest; take an absolute path as /usr/local/bin/NAME or /root/NAME"
            );
        }
        Ok(place)
    }

    /// From `GUESTFILE:HOSTPATH`.
    pub(crate) fn guest_to_host(text: &str) -> Result<Place> {
        let (guest, host) =
            text.split_once(':').with_context(|| format!("`{text}` is not GUESTFILE:HOSTPATH"))?;
        Ok(Place { host: host.into(), guest: guest.to_owned() })
    }
}

/// What to boot.
pub(crate) struct Machine {
    pub(crate) series: Series,
    pub(crate) script: String,
    pub(crate) timeout: Duration,
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u32,
    pub(crate) icount: bool,
    pub(crate) udev: bool,
    /// systemd is process 1; the script runs when it has reached its target.
    pub(crate) systemd: bool,
    /// Where the disk of `/scratch` is left. systemd then powers the machine off in its own way.
    pub(crate) kept_scratch: Option<PathBuf>,
    pub(crate) verbose: bool,
    pub(crate) files: Vec<Place>,
    pub(crate) outs: Vec<Place>,
    /// Disks that others serve over vhost-user: the socket, and properties of QEMU's device.
    pub(crate) served: Vec<(PathBuf, String)>,
}

impl Machine {
    /// A machine of two CPUs and 2 GiB that runs this shell script.
    pub(crate) fn new(series: Series, script: String) -> Machine {
        Machine {
            series,
            script,
            timeout: Duration::from_secs(300),
            cpus: 2,
            memory_mib: 2048,
            icount: false,
            udev: false,
            systemd: false,
            kept_scratch: None,
            verbose: false,
            files: Vec::new(),
            outs: Vec::new(),
            served: Vec::new(),
        }
    }

    /// Boots, runs the script, hands on what it prints, fetches its files; the script's exit code.
    pub(crate) fn boot(&self, output: &mut dyn FnMut(&[u8])) -> Result<u8> {
        let (kernel, root) = {
            let _lock = lock::lock_cache()?;
            (kernel::prepare(self.series)?, rootfs::prepare()?)
        };
        let work = tempfile::Builder::new().prefix("run-").tempdir_in(lock::cache_dir()?)?;
        let at = |name: &str| work.path().join(name);
        kernel.write_initramfs(&at("initramfs"))?;
        self.write_run(&at("run"))?;
        lock::ext4_of(&at("run"), &at("run.ext4"))?;
        exec::quietly(
            Command::new("mke2fs")
                .args(["-q", "-F", "-t", "ext4", "-m", "0"])
                .arg(at("scratch"))
                .arg(SCRATCH),
        )?;
        let (events, incoming) = mpsc::channel();
        let hardware = Hardware {
            cpus: self.cpus,
            memory_mib: self.memory_mib,
            icount: self.icount,
            kernel: &kernel.vmlinuz(),
            initramfs: &at("initramfs"),
            disks: [
                (&root, "root", false),
                (&at("run.ext4"), "run", false),
                (&kernel.modules(), "modules", false),
                (&at("scratch"), "scratch", true),
            ],
            served: &self.served,
        };
        let mut qemu = Qemu::start(&hardware, &events)?;
        drop(events);

        let mut run = Run { machine: self, console: Console::default(), ready: None, exit: None };
        let result = run.follow(&incoming, output);
        if result.is_ok() {
            qemu.finish(LAST_WORDS);
        }
        let log = lock::cache_dir()?.join(format!("console-{}.log", self.series));
        std::fs::write(&log, run.console.text())?;
        if let (Ok(_), Some(place)) = (&result, &self.kept_scratch) {
            std::fs::rename(at("scratch"), place)
                .with_context(|| format!("cannot leave a disk at {}", place.display()))?;
        }
        result.map_err(|cause| {
            anyhow!(
                "guest {}: {cause:#}; its console ({}) ends:\n{}{}",
                kernel.release,
                log.display(),
                tail(&run.console.text(), 80),
                qemu.said()
            )
        })
    }

    /// Lays out what goes into the guest on this run's own disk.
    fn write_run(&self, dir: &Path) -> Result<()> {
        let own = dir.join("becket-vm");
        std::fs::create_dir_all(&own)?;
        std::fs::write(own.join("script"), &self.script)?;
        let outs: Vec<String> = self.outs.iter().map(|place| quoted(&place.guest)).collect();
        let yes = |flag: bool| if flag { "yes" } else { "no" };
        let settings = format!(
            "UDEV={}\nSYSTEMD={}\nORDERLY={}\nOUTS=({})\n",
            yes(self.udev),
            yes(self.systemd),
            yes(self.kept_scratch.is_some()),
            outs.join(" ")
        );
        std::fs::write(own.join("settings"), settings)?;
        std::fs::write(own.join("init"), INIT)?;
        exec::quietly(Command::new("chmod").arg("755").arg(own.join("init")))?;
        for place in &self.files {
            let target = dir.join(place.guest.trim_start_matches('/'));
            if let Some(parent) = target.parent() {
                std::fs::create_dir_all(parent)?;
            }
            exec::quietly(
                Command::new("cp").args(["-rLT", "--preserve=mode", "--"]).arg(&place.host).arg(&target),
            )
            .with_context(|| format!("cannot put {} into the guest", place.host.display()))?;
        }
        Ok(())
    }
}

/// A guest while it runs.
struct Run<'a> {
    machine: &'a Machine,
    console: Console,
    ready: Option<Instant>,
    exit: Option<u8>,
}

impl Run<'_> {
    fn follow(&mut self, incoming: &mpsc::Receiver<Event>, output: &mut dyn FnMut(&[u8])) -> Result<u8> {
        let begin = Instant::now();
        let mut deadline = begin + self.machine.timeout;
        let mut decoder = Decoder::default();
        let mut open = [Source::Output, Source::Status, Source::Console].to_vec();
        let orderly = self.machine.kept_scratch.is_some();
        // The channels are separate streams: the last output may arrive after the exit code, so all are
        // drained.
        while !open.is_empty() {
            match incoming.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Bytes(Source::Output, bytes)) => output(&bytes),
                Ok(Event::Bytes(Source::Status, bytes)) => {
                    for report in decoder.feed(&bytes)? {
                        self.take(report, begin)?;
                    }
                }
                Ok(Event::Bytes(Source::Console, bytes)) => {
                    if self.machine.verbose {
                        eprint!("{}", String::from_utf8_lossy(&bytes));
                    }
                    let well = self.console.trouble().is_none();
                    self.console.feed(&bytes);
                    if well && self.console.trouble().is_some() {
                        deadline = deadline.min(Instant::now() + LAST_WORDS);
                    }
                }
                Ok(Event::Closed(source)) => open.retain(|one| *one != source),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => break,
            }
            if self.exit.is_some() {
                // Powering off takes a moment; one that hangs there is no failure of the script.
                deadline = deadline.min(Instant::now() + if orderly { ORDERLY_END } else { LAST_WORDS });
            }
        }
        if let Some(line) = self.console.trouble() {
            bail!("the guest's kernel broke: {line}");
        }
        match (self.exit, self.ready) {
            (Some(_), _) if orderly && !open.is_empty() => {
                bail!("it did not power off within {} s", ORDERLY_END.as_secs())
            }
            (Some(code), _) => Ok(code),
            (None, _) if open.len() == 3 => {
                bail!("no end after {} s: the guest was given up", self.machine.timeout.as_secs())
            }
            (None, Some(_)) => bail!("the guest ended without reporting the script's exit code"),
            (None, None) => bail!("the guest ended before the script could start"),
        }
    }

    fn take(&mut self, report: Report, begin: Instant) -> Result<()> {
        let out = |index: usize| {
            self.machine.outs.get(index).context("the guest sent a file that nobody asked for")
        };
        match report {
            Report::Ready => {
                self.ready = Some(Instant::now());
                if self.machine.verbose {
                    eprintln!("xtask: the guest was up after {:.1} s", begin.elapsed().as_secs_f64());
                }
            }
            Report::File(index, contents) => {
                let place = out(index)?;
                std::fs::write(&place.host, contents)
                    .with_context(|| format!("cannot write {}", place.host.display()))?;
            }
            Report::Missing(index) => eprintln!("xtask: the guest has no file {}", out(index)?.guest),
            Report::Exit(code) => self.exit = Some(code),
        }
        Ok(())
    }
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].iter().map(|line| format!("    {line}\n")).collect()
}

/// A word for the shell, whatever it holds.
pub(crate) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_may_go_where_the_guest_keeps_files() {
        let place = Place::host_to_guest("target/release/becket:/usr/local/bin/becket").unwrap();
        assert_eq!(
            place,
            Place { host: "target/release/becket".into(), guest: "/usr/local/bin/becket".into() }
        );
        for bad in ["nothing", "a:relative", "a:/", "a:/lib/x", "a:/dev/x", "a:/scratch", "a:/usr/../lib/x"] {
            assert!(Place::host_to_guest(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_folder_joins_the_files_that_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("usr/share")).unwrap();
        std::fs::write(at("usr/share/b"), "").unwrap();
        std::fs::write(at("a"), "").unwrap();
        let place = |name: &str, guest: &str| Place { host: at(name), guest: guest.to_owned() };
        let mut machine = Machine::new(Series::V7, String::new());
        machine.files = vec![place("a", "/usr/local/bin/a"), place("usr", "/usr")];
        machine.write_run(&at("run")).unwrap();
        assert!(at("run/usr/local/bin/a").is_file() && at("run/usr/share/b").is_file());
    }

    #[test]
    fn words_are_quoted_for_the_shell() {
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}

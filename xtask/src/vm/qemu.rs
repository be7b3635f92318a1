//! One QEMU process: its command line, its sockets, its end.
//! Never outlives us: the kernel ends it when xtask dies, however that happens.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::exec;

/// Debian 12's own QEMU 7.2 dies with two emulated CPUs.
const OLDEST: u32 = 10;

/// The kernel's parameters: every kernel failure ends the guest at once, and nothing takes time that tests do
/// not need.
/// It starts with one CPU: QEMU can trip over its own assertion (iotlb_to_section) when one emulated CPU
/// moves PCI devices about in memory while another touches its interrupt controller. The first program brings
/// up the others.
const PARAMETERS: &str = "console=ttyS0 maxcpus=1 loglevel=5 panic=-1 oops=panic softlockup_panic=1 hung_task_panic=1 \
    sysctl.kernel.hung_task_timeout_secs=90 sysctl.kernel.watchdog_thresh=60 mitigations=off audit=0 apparmor=0 \
    random.trust_cpu=on tsc=reliable nokaslr init_on_alloc=0 rcupdate.rcu_cpu_stall_timeout=120";

/// Where bytes came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The kernel's console.
    Console,
    /// What the script prints.
    Output,
    /// Our own protocol.
    Status,
}

/// Something happened to a running guest.
pub(crate) enum Event {
    /// Bytes arrived.
    Bytes(Source, Vec<u8>),
    /// One of the guest's channels was closed: QEMU is ending.
    Closed(Source),
}

/// What QEMU emulates, and the files that a guest is started with.
pub(crate) struct Hardware<'a> {
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u32,
    /// Time is counted in instructions.
    pub(crate) icount: bool,
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    /// Path, serial number, whether the guest may write.
    pub(crate) disks: [(&'a Path, &'a str, bool); 4],
    /// Disks that others serve over vhost-user: the socket, and properties of the device.
    pub(crate) served: &'a [(PathBuf, String)],
}

/// A running QEMU.
pub(crate) struct Qemu {
    child: Child,
    errors: std::path::PathBuf,
    _sockets: TempDir,
}

impl Qemu {
    /// Starts the guest; everything that it says is sent to `events`.
    pub(crate) fn start(machine: &Hardware<'_>, events: &Sender<Event>) -> Result<Qemu> {
        check_version()?;
        // Not below target/: a socket's path must be short.
        let sockets = tempfile::Builder::new().prefix("becket-vm-").tempdir()?;
        // setpriv's death signal is what keeps QEMU from outliving us.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "pc"]);
        if machine.icount {
            command.args(["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"]);
            command.args(["-cpu", "max,la57=off"]);
        } else {
            command.args(["-accel", "tcg,thread=multi,tb-size=512"]);
            // Memory is copied by words: an emulator is slow by bytes, which is what kernels do where a
            // processor says that it is fast at that.
            command.args(["-cpu", "max,la57=off,erms=off,fsrm=off"]);
        }
        command.args(["-smp", &machine.cpus.to_string(), "-m", &machine.memory_mib.to_string()]);
        command.arg("-kernel").arg(machine.kernel).arg("-initrd").arg(machine.initramfs);
        command.args(["-append", PARAMETERS]);
        for (path, serial, writable) in machine.disks {
            let readonly = if writable { "off,cache=unsafe,discard=unmap" } else { "on" };
            let path = path.display().to_string().replace(',', ",,");
            command
                .arg("-drive")
                .arg(format!("if=none,format=raw,id={serial},file={path},readonly={readonly}"));
            command.arg("-device").arg(format!("virtio-blk-pci,drive={serial},serial={serial}"));
        }
        if !machine.served.is_empty() {
            let memory = format!("memory-backend-memfd,id=memory,size={}M,share=on", machine.memory_mib);
            command.args(["-object", &memory, "-machine", "memory-backend=memory"]);
        }
        for (index, (socket, properties)) in machine.served.iter().enumerate() {
            let socket = socket.display().to_string().replace(',', ",,");
            command.arg("-chardev").arg(format!("socket,id=served{index},path={socket}"));
            command.arg("-device").arg(format!("vhost-user-blk-pci,chardev=served{index}{properties}"));
        }
        command.args(["-device", "virtio-serial-pci"]);
        let listeners =
            [(Source::Console, "console"), (Source::Output, "output"), (Source::Status, "status")];
        let mut waiting = Vec::new();
        for (source, name) in listeners {
            let path = sockets.path().join(name);
            waiting.push((source, UnixListener::bind(&path).context("cannot make a socket")?));
            command.arg("-chardev").arg(format!("socket,id={name},path={}", path.display()));
            if source == Source::Console {
                command.args(["-serial", "chardev:console"]);
            } else {
                command.arg("-device").arg(format!("virtserialport,chardev={name},name={name}"));
            }
        }
        let errors = sockets.path().join("errors");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(&errors)?);
        let child = command.spawn().with_context(|| format!("cannot start `{}`", exec::shown(&command)))?;
        let mut qemu = Qemu { child, errors, _sockets: sockets };
        for (source, listener) in waiting {
            qemu.connect(source, &listener, events)?;
        }
        Ok(qemu)
    }

    fn connect(&mut self, source: Source, listener: &UnixListener, events: &Sender<Event>) -> Result<()> {
        listener.set_nonblocking(true)?;
        let begin = Instant::now();
        let mut stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if let Some(status) = self.child.try_wait()? {
                        bail!("QEMU ended at once ({status}): {}", self.said());
                    }
                    if begin.elapsed() > Duration::from_secs(30) {
                        bail!("QEMU did not open its {source:?} channel: {}", self.said());
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error).context("cannot accept QEMU's connection"),
            }
        };
        stream.set_nonblocking(false)?;
        let events = events.clone();
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            // A receiver that is gone ends the thread, as the end of the stream does.
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                if events.send(Event::Bytes(source, buffer[..count].to_vec())).is_err() {
                    return;
                }
            }
            let _ = events.send(Event::Closed(source));
        });
        Ok(())
    }

    /// What QEMU itself complained about.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap_or_default().trim().to_owned()
    }

    /// Waits for a guest that powers off, and ends it when it does not.
    pub(crate) fn finish(&mut self, patience: Duration) {
        let begin = Instant::now();
        while begin.elapsed() < patience {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn check_version() -> Result<()> {
    let text = exec::output(Command::new("qemu-system-x86_64").arg("--version"))?;
    match major(&text) {
        Some(major) if major >= OLDEST => Ok(()),
        found => bail!(
            "QEMU {OLDEST} or later is needed, this is {}; `scripts/setup.sh` installs it",
            found.map_or_else(|| "unknown".to_owned(), |major| major.to_string())
        ),
    }
}

fn major(version: &str) -> Option<u32> {
    version.split_once("version ")?.1.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemus_version_is_read() {
        assert_eq!(major("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright"), Some(10));
        assert_eq!(major("QEMU emulator version 7.2.19\n"), Some(7));
        assert_eq!(major("hello"), None);
    }
}

//! Who comes after a supervisor that died: a process that does nothing but wait for that.
//! It never takes the place of one that ended in peace, nor of one that a service manager looks after.
//!
//! The guard is a child of the supervisor, started with its first device, and is the successor itself: `becket serve`
//! that reads a pipe before it begins. What comes out of the pipe says that all is well; its end without a word, that the
//! supervisor is dead. So the successor needs no one to start it, its program is the one that ran (also where the
//! file has been replaced), and nothing of it can go wrong before it has its own process. Where systemd has started the
//! supervisor, it is for systemd to start the next. Should all of them be dead, the next command that
//! needs a server starts one.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use crate::runtime::{DIR_VARIABLE, LINKS_VARIABLE};
use crate::state::Store;
use crate::sync::{LAST, Ranked, lock};
use crate::{log, manager};

/// The supervisor's side.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    standing: Ranked<LAST, Option<(Child, File)>>,
    cache_size: Option<u64>,
}

impl Guard {
    /// One whose workers keep so many bytes of decoded blocks, as ours do.
    pub(super) fn new(cache_size: Option<u64>) -> Guard {
        Guard { cache_size, ..Guard::default() }
    }

    /// Sees to it that somebody stands guard.
    pub(super) fn stand(&self, store: &Store) {
        if cfg!(test) || manager::looks_after_us() {
            return;
        }
        let mut guard = lock(&self.standing);
        if guard.as_mut().is_some_and(|(child, _)| matches!(child.try_wait(), Ok(None))) {
            return;
        }
        match start(store, self.cache_size) {
            Ok(started) => *guard = Some(started),
            Err(error) => log::warn(format_args!("server: nobody stands guard: {error}")),
        }
    }

    /// All is well: there is to be no successor.
    pub(super) fn dismiss(&self) {
        if let Some((mut child, mut pipe)) = lock(&self.standing).take() {
            // One that is dead needs no telling.
            let _ = pipe.write_all(b"\n");
            drop(pipe);
            let _ = child.wait();
        }
    }
}

fn start(store: &Store, cache_size: Option<u64>) -> io::Result<(Child, File)> {
    let (theirs, ours) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let runtime = store.runtime();
    let child = Command::new("/proc/self/exe")
        .arg0("becket")
        .args(["serve", "--after-fd", "0"])
        .args(cache_size.map(|size| format!("--cache-size={size}")))
        .env(DIR_VARIABLE, runtime.dir())
        .env(LINKS_VARIABLE, runtime.links())
        .current_dir("/")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()?;
    Ok((child, ours.into()))
}

/// In the guard: waits, and answers whether the supervisor died.
pub(super) fn wait(pipe: OwnedFd) -> bool {
    let mut pipe = File::from(pipe);
    loop {
        match pipe.read(&mut [0]) {
            Ok(read) => return read == 0,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Nothing can be known: whoever comes next looks after the devices.
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_silent_end_is_a_death() {
        // What other tests start meanwhile is not to keep the writing end.
        let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let (reader, writer) = pipe();
        rustix::io::write(&writer, b"\n").unwrap();
        drop(writer);
        assert!(!wait(reader), "it said that all is well");
        let (reader, writer) = pipe();
        drop(writer);
        assert!(wait(reader));
    }
}

//! What a machine has left that was powered off with a file system still mounted on a device of becket's.
//! Read by the tools of ext4 alone: the machine is gone, and nothing of it is asked.
//!
//! `script.sh` mounts an image, `late.img`, in a way that systemd leaves alone until it has ended all
//! processes, and starts a program that writes numbers there until it is killed. A clean file system shows
//! that its device was served until the very end.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::exec;

/// Looks at the disk of `/scratch`; whether all is well. `output` gets a line that is a case for CI.
pub(super) fn check(disk: &Path, output: &mut dyn FnMut(&[u8])) -> bool {
    let (well, said) = match look(disk) {
        Ok(numbers) => ("ok", format!("{numbers} numbers were written until the machine ended")),
        Err(error) => ("FAILED", format!("{error:#}")),
    };
    output(format!("{said}\ntest boot::a_late_mount_is_whole_after_the_end ... {well}\n").as_bytes());
    well == "ok"
}

/// How many numbers there are in the image on the disk.
fn look(disk: &Path) -> Result<usize> {
    let dir = tempfile::tempdir()?;
    let (image, numbers) = (dir.path().join("late.img"), dir.path().join("numbers"));
    // A file on it was in use, so it could not be unmounted: its journal is replayed, which may mean
    // corrections.
    let replayed = Command::new("e2fsck").arg("-fp").arg(disk).output()?;
    ensure!(replayed.status.code().is_some_and(|code| code < 2), "the scratch disk is damaged: {replayed:?}");
    dump(disk, "/late.img", &image)?;
    let about = exec::output(Command::new("dumpe2fs").arg("-h").arg(&image))?;
    let says = |word: &str| about.lines().any(|line| line.contains(word));
    let unmounted = says("Filesystem state:         clean") && !says("needs_recovery");
    ensure!(unmounted, "the file system on the late device was not unmounted");
    exec::quietly(Command::new("e2fsck").arg("-fn").arg(&image))?;
    dump(&image, "/numbers", &numbers)?;
    let text = std::fs::read_to_string(&numbers)?;
    for (number, line) in (1..).zip(text.lines()) {
        ensure!(line == format!("{number}"), "line {number} is {line:?}");
    }
    let count = text.lines().count();
    ensure!(count > 100, "only {count} numbers");
    Ok(count)
}

/// Gets a file out of an ext4.
fn dump(from: &Path, file: &str, to: &Path) -> Result<()> {
    let request = format!("dump {file} {}", to.display());
    exec::quietly(Command::new("debugfs").arg("-R").arg(&request).arg(from))?;
    std::fs::metadata(to).map(drop).with_context(|| format!("there is no {file}"))
}

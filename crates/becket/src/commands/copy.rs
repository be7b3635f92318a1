//! `becket copy SRC DST`: an image as a raw file, as a qcow2, on a device or a server, or to standard output.
//! Never leaves a part of an image under the name that it was to have.

use super::{
    bytes,
    copy_move::{self, BLOCK, Chunk, Failed, Origin, Stream, Taker},
    copy_target::{Goal, Target},
    fetched,
    interrupts::{self, Interrupts},
};
use crate::{
    args::{self, CopyFormat},
    failure::Failure,
    progress::Progress,
    ui::Ui,
};
use becket_image::{
    DirectIo, OpenOptions, Opened, Tail,
    export::{self, CLUSTER, Run},
    link::LinkWriter,
    shown,
};
use rustix::fs::FallocateFlags;
use serde::Serialize;
use std::{
    fs::File,
    io,
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt as _, fs::FileExt as _},
    },
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

pub(crate) fn run(ui: &Ui, args: &args::Copy) -> Result<u8, Failure> {
    let format = format(args);
    if args.target == Path::new("-") {
        if ui.json {
            return Err(Failure::usage("--json and - both write to standard output"));
        }
        if format == CopyFormat::Qcow2 {
            return Err(Failure::usage("a qcow2 is written to a file only"));
        }
    }
    let (opened, origin) = open(args)?;
    let mut target = Target::open(args, format == CopyFormat::Qcow2, &opened, origin.len)?;
    for warning in opened.warnings.iter().chain(&target.warnings) {
        ui.note(format!("warning: {warning}"));
    }
    let copied = write(args, format, &origin, &mut target);
    let allocated = copied.and_then(|()| target.commit())?;
    // The locks were held until here.
    drop(opened);
    let (source, to) = (shown(args.source.as_os_str().as_bytes()), shown(args.target.as_os_str().as_bytes()));
    let size = origin.len;
    if ui.json {
        #[derive(Serialize)]
        struct Done {
            copied: Copied,
        }
        #[derive(Serialize)]
        struct Copied {
            source: String,
            target: String,
            format: &'static str,
            size: u64,
            allocated: Option<u64>,
        }
        let format = if format == CopyFormat::Qcow2 { "qcow2" } else { "raw" };
        ui.document(&Done { copied: Copied { source, target: to, format, size, allocated } })?;
    } else if ui.verbose {
        let allocated = allocated.map_or_else(String::new, |bytes| format!(", of which {bytes} are stored"));
        ui.note(format!("{source}: {size} bytes copied to {to}{allocated}"));
    }
    Ok(0)
}

/// What is written: what was asked for, or what the name says.
fn format(args: &args::Copy) -> CopyFormat {
    let named = args.target.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("qcow2"));
    args.to.unwrap_or(if named { CopyFormat::Qcow2 } else { CopyFormat::Raw })
}

/// Opens the image, with its locks.
fn open(args: &args::Copy) -> Result<(Opened, Origin), Failure> {
    let failed = |error| super::common::image_failure("copy", &args.source, error);
    let local = fetched::all_of(&args.source, &args.options, "copy")?;
    let options = OpenOptions {
        read_only: true,
        fillers: local.fillers,
        shared: args.shared,
        tail: Tail::Keep,
        // All of it is read through the page cache, and nothing is dropped from there first.
        direct_io: DirectIo::Off,
        backing_urls: local.backing_urls,
        ..fetched::open_options(&args.options, args.options.format)
    };
    let opened = becket_image::open_partly(&local.path, &options).map_err(failed)?;
    let origin = Origin::of(&opened, &options.fillers);
    let origin = origin.map_err(|error| {
        Failure::io(format!("cannot read {}", becket_fetch::named(args.source.as_os_str())), &error)
    })?;
    Ok((opened, origin))
}

fn write(args: &args::Copy, format: CopyFormat, origin: &Origin, target: &mut Target) -> Result<(), Failure> {
    let total = usize::try_from(origin.len).unwrap_or(usize::MAX);
    let mut progress = Progress::of_bytes(total);
    let interrupts = target.interrupts()?;
    let mut came = None;
    let mut watch = |done: u64| {
        progress.reach(usize::try_from(done).unwrap_or(usize::MAX));
        came = came.or_else(|| interrupts.as_ref().and_then(Interrupts::take));
        came.is_none()
    };
    let file = || target.file().map_err(|error| target.failure("it cannot be written", &error));
    let moved = match (&target.kind, format) {
        (Goal::Export(export), _) => copy_move::run(origin, &Export(export), export.unit(), &mut watch),
        (Goal::Stream, _) => copy_move::run(origin, &Stream::new(file()?), 1, &mut watch),
        (Goal::Device, _) => {
            copy_move::run(origin, &Raw { file: file()?, sparse: false, device: true }, 1, &mut watch)
        }
        (Goal::New(_), CopyFormat::Raw) => {
            let file = file()?;
            let sized = file.set_len(origin.len).map_err(Failed::Write);
            let raw = Raw { file, sparse: args.sparse, device: false };
            sized.and_then(|()| copy_move::run(origin, &raw, 1, &mut watch))
        }
        (Goal::New(_), CopyFormat::Qcow2) => {
            let size = origin.len.next_multiple_of(512);
            let next = AtomicU64::new(1);
            let qcow2 = Qcow2 { file: file()?, sparse: args.sparse, next, runs: Mutex::new(Vec::new()) };
            export::fits(size).map_err(Failed::Write).and_then(|()| {
                copy_move::run(origin, &qcow2, CLUSTER, &mut watch)?;
                let runs = qcow2.runs.into_inner().unwrap_or_else(PoisonError::into_inner);
                export::finish(&qcow2.file, size, runs).map_err(Failed::Write)
            })
        }
    };
    progress.clear();
    moved.map_err(|failed| match failed {
        Failed::Read(error) => {
            Failure::io(format!("cannot read {}", becket_fetch::named(args.source.as_os_str())), &error)
        }
        // Who reads standard output may have enough: that is a failure without a message.
        Failed::Write(error)
            if error.kind() == io::ErrorKind::BrokenPipe && args.target == Path::new("-") =>
        {
            Failure::from(error)
        }
        Failed::Write(error) => target.failure("it cannot be written", &error),
        Failed::Stopped => {
            let source = becket_fetch::named(args.source.as_os_str());
            let message = format!("cannot copy {source}: it was interrupted");
            match came {
                Some(signal) => interrupts::failure(message, signal),
                None => Failure::new("interrupted", message),
            }
        }
    })
}

/// A new file, in which holes are left; or a device, whose bytes are all written.
struct Raw {
    file: File,
    sparse: bool,
    device: bool,
}

impl Taker for Raw {
    fn take(&self, chunk: Chunk, bytes: Option<&[u8]>) -> io::Result<()> {
        match bytes {
            None if self.device => zero(&self.file, chunk.start, chunk.len),
            None => Ok(()),
            Some(bytes) if self.sparse => copy_move::without_zeroes(bytes, BLOCK)
                .try_for_each(|(at, part)| self.file.write_all_at(part, chunk.start + at as u64)),
            Some(bytes) => self.file.write_all_at(bytes, chunk.start),
        }
    }

    fn copy(&self, at: u64, file: &OwnedFd, offset: u64, len: u64) -> io::Result<bool> {
        if self.sparse || self.device {
            return Ok(false);
        }
        copy_move::copy_range(file, offset, &self.file, at, len)
    }
}

/// An export, whose bytes are all written.
struct Export<'a>(&'a LinkWriter);

impl Taker for Export<'_> {
    fn take(&self, chunk: Chunk, bytes: Option<&[u8]>) -> io::Result<()> {
        match bytes {
            None => self.0.zero(chunk.start, chunk.len),
            Some(bytes) => self.0.write_at(bytes, chunk.start),
        }
    }

    fn threads(&self) -> usize {
        self.0.threads()
    }
}

/// Makes a range of a device read as zeroes.
fn zero(device: &File, start: u64, len: u64) -> io::Result<()> {
    if rustix::fs::fallocate(device, FallocateFlags::ZERO_RANGE, start, len).is_ok() {
        return Ok(());
    }
    // It has no blocks that this would fit.
    let zeroes = vec![0; bytes::CHUNK];
    let mut at = start;
    while at < start + len {
        let left = usize::try_from(start + len - at).unwrap_or(usize::MAX);
        let some = zeroes.get(..left).unwrap_or(&zeroes);
        device.write_all_at(some, at)?;
        at += some.len() as u64;
    }
    Ok(())
}

/// A new qcow2, whose clusters are taken one after another.
struct Qcow2 {
    file: File,
    sparse: bool,
    /// The next free cluster of the file.
    next: AtomicU64,
    runs: Mutex<Vec<Run>>,
}

impl Taker for Qcow2 {
    fn take(&self, chunk: Chunk, bytes: Option<&[u8]>) -> io::Result<()> {
        let Some(bytes) = bytes else { return Ok(()) };
        let write = |(at, part): (usize, &[u8])| {
            let (guest, count) = ((chunk.start + at as u64) / CLUSTER, (part.len() as u64).div_ceil(CLUSTER));
            let host = self.next.fetch_add(count, Ordering::Relaxed);
            self.runs.lock().unwrap_or_else(PoisonError::into_inner).push(Run { guest, host, count });
            self.file.write_all_at(part, host * CLUSTER)
        };
        if self.sparse {
            return copy_move::without_zeroes(bytes, CLUSTER as usize).try_for_each(write);
        }
        write((0, bytes))
    }
}

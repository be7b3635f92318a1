//! The program for one connection of a command. One that reads an image opens it read-only and never locks
//! it; one that attaches it only asks here whether it could be written; one that writes it holds its lock.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use becket_image::link::helper::{Greeting, PROTOCOL, TRY, WRITE};
use becket_image::link::rbd::Rbd;
use becket_uapi::handover::inherited_fd;
use rustix::event::{PollFd, PollFlags, poll};

use crate::cluster::{self, Refusal};
use crate::library::Image;
use crate::lock::{self, NoLock};
use crate::serve::{self, Connection, Progress};

fn socket() -> Result<OwnedFd, String> {
    inherited_fd(0).map_err(|error| error.to_string())
}

/// Refuses a becket of another version, as far as that reads greetings.
pub(crate) fn refuse_version(other: &str) {
    let why = format!("becket-rbd speaks version {PROTOCOL}, and this becket version {other}");
    let hint = Some("install both of the same version".to_owned());
    if let Ok(socket) = socket() {
        let _ = Greeting::Refused { why, hint, errno: libc::ENOTSUP }.send(&UnixStream::from(socket));
    }
}

/// Serves the connection at standard input. `way`: see [`READ`](becket_image::link::helper::READ).
pub(crate) fn main(name: &str, way: &str) -> Result<(), String> {
    let stream = UnixStream::from(socket()?);
    let is_open = ends_with(&stream).map_err(|error| error.to_string())?;
    let opened = Rbd::parse(name).map_err(Refusal::new).and_then(|rbd| {
        let read_only = rbd.snapshot.is_some();
        if way == TRY && !read_only {
            let _ = locked(rbd.clone())?.unlock();
        }
        let image = match way == WRITE && !read_only {
            true => locked(rbd)?,
            false => cluster::prepare(rbd)?.connect()?.open(true)?,
        };
        let size = image.size().map_err(|errno| Refusal::new(cluster::said(errno)).errno(errno))?;
        Ok((image, size, read_only))
    });
    is_open.store(true, Ordering::Release);
    let (image, size, read_only) = match opened {
        Ok(opened) => opened,
        Err(Refusal { why, hint, errno, .. }) => {
            let refused = Greeting::Refused { why, hint, errno };
            return refused.send(&stream).map_err(|error| error.to_string());
        }
    };
    let agreed = serve::agreed(size, read_only, true);
    Greeting::Agreed(agreed).send(&stream).map_err(|error| error.to_string())?;
    let (image, progress) = (Arc::new(image), Progress::of(size));
    let writes = way == WRITE && !read_only;
    let connection = Connection::start(stream.into(), &image, &progress, !writes);
    connection.map_err(|error| error.to_string())?.join();
    if writes {
        // Where that fails, the next one takes it from a client that is gone.
        let _ = image.unlock();
    }
    Ok(())
}

/// Ends this process if nobody waits for it any more before it says that the image is open: the libraries
/// wait for a cluster that does not answer for ever.
fn ends_with(stream: &UnixStream) -> std::io::Result<Arc<AtomicBool>> {
    let (stream, is_open) = (stream.try_clone()?, Arc::new(AtomicBool::new(false)));
    let opened = Arc::clone(&is_open);
    std::thread::spawn(move || {
        let mut fds = [PollFd::new(&stream, PollFlags::RDHUP)];
        let _ = rustix::io::retry_on_intr(|| poll(&mut fds, None));
        if !opened.load(Ordering::Acquire) {
            std::process::exit(1);
        }
    });
    Ok(is_open)
}

/// The image with its lock, where that is free and the user may take it.
fn locked(rbd: Rbd) -> Result<Image, Refusal> {
    let cluster = cluster::prepare(rbd)?.connect()?;
    cluster.has_room()?;
    let image: Image = cluster.open(false)?;
    lock::take(&image, false, &[]).map_err(|no| match no {
        NoLock::Not(refusal) => refusal,
        NoLock::Lost(why) => Refusal::new(why),
    })?;
    Ok(image)
}

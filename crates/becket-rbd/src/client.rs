//! The program for the connections of one command. One that reads an image opens it read-only and never locks
//! it; one that attaches it only asks here whether it could be written; one that writes it holds its lock.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use becket_image::link::helper::{Greeting, PROTOCOL, Way};
use becket_image::link::rbd::Rbd;
use becket_image::link::{Agreed, CONNECTIONS};
use becket_uapi::handover::inherited_fd;
use becket_uapi::nbd;
use rustix::event::{PollFd, PollFlags, poll};

use crate::cluster::{self, Made, Refusal};
use crate::library::Image;
use crate::lock::{self, NoLock};
use crate::serve::{self, Connection, Progress};

/// How long it goes on to open an image that it may have made, although nobody waits for it.
const GRACE: Duration = Duration::from_secs(30);

fn socket() -> Result<OwnedFd, String> {
    inherited_fd(0).map_err(|error| error.to_string())
}

/// Refuses a becket of another version, as far as that reads greetings.
pub(crate) fn refuse_version(other: &str) {
    let why = format!("becket-rbd speaks version {PROTOCOL}, and this becket version {other}");
    let hint = Some("install both of the same version".to_owned());
    if let Ok(socket) = socket() {
        let _ = Greeting::Refused { why, hint, errno: libc::ENOTSUP }.send(&UnixStream::from(socket), &[]);
    }
}

/// Serves the connection at standard input.
pub(crate) fn main(name: &str, way: Way) -> Result<(), String> {
    let stream = UnixStream::from(socket()?);
    let is_open = ends_with(&stream, way).map_err(|error| error.to_string())?;
    let mut made = None;
    let opened = open(name, way, &mut made);
    is_open.store(true, Ordering::Release);
    let served = match opened {
        Ok((image, agreed)) => serve(stream, Arc::new(image), agreed, way, made.clone()),
        Err(Refusal { why, hint, errno, .. }) => Greeting::Refused { why, hint, errno }.send(&stream, &[]),
    };
    if let Some(made) = made {
        made.ends();
    }
    served.map_err(|error| error.to_string())
}

/// Opens the image, and says what a connection to it offers. `made` is the image if this has made it.
fn open(name: &str, way: Way, made: &mut Option<Arc<Made>>) -> Result<(Image, Agreed), Refusal> {
    let rbd = Rbd::parse(name).map_err(Refusal::new)?;
    let read_only = rbd.snapshot.is_some();
    let mut cluster = cluster::prepare(rbd)?.connect()?;
    if way != Way::Read && !read_only {
        cluster.has_room()?;
    }
    let image = match way {
        Way::Write(len) if !read_only => {
            let image = match cluster.open(false) {
                Err(Refusal { errno: libc::ENOENT, .. }) => {
                    *made = Some(Arc::new(cluster.make(len)?));
                    cluster.open(false)
                }
                opened => opened,
            };
            locked(image?)?
        }
        Way::Try if !read_only => {
            let _ = locked(cluster.open(false)?)?.unlock();
            cluster.open(true)?
        }
        _ => cluster.open(true)?,
    };
    let failed = |errno| Refusal::new(cluster::said(errno)).errno(errno);
    let size = image.size().map_err(failed)?;
    let number = cluster.number(&image).map_err(failed)?;
    Ok((image, serve::agreed(size, read_only, number)))
}

/// Serves the connection and its further ones until they end, and closes the image.
fn serve(
    stream: UnixStream,
    image: Arc<Image>,
    agreed: Agreed,
    way: Way,
    made: Option<Arc<Made>>,
) -> io::Result<()> {
    let pairs = (1..CONNECTIONS).map(|_| UnixStream::pair()).collect::<io::Result<Vec<_>>>()?;
    let theirs: Vec<_> = pairs.iter().map(|(_, theirs)| theirs.as_fd()).collect();
    let greeting = if made.is_some() { Greeting::Made(agreed) } else { Greeting::Agreed(agreed) };
    greeting.send(&stream, &theirs)?;
    let progress = Progress::of(agreed.size);
    let writes = matches!(way, Way::Write(_)) && !agreed.has(nbd::READ_ONLY);
    let sockets = [stream].into_iter().chain(pairs.into_iter().map(|(ours, _)| ours));
    let start =
        |socket: UnixStream| Connection::start(socket.into(), &image, &progress, !writes, made.clone());
    let connections = sockets.map(start).collect::<io::Result<Vec<_>>>()?;
    connections.iter().for_each(|connection| connection.join());
    drop(connections);
    if writes {
        // Where that fails, the next one takes it from a client that is gone.
        let _ = image.unlock();
    }
    serve::close(image);
    Ok(())
}

/// Ends this process if nobody waits for it any more before it says that the image is open: the libraries
/// wait for a cluster that does not answer for ever. One that may make an image has some time to remove it.
fn ends_with(stream: &UnixStream, way: Way) -> io::Result<Arc<AtomicBool>> {
    let (stream, is_open) = (stream.try_clone()?, Arc::new(AtomicBool::new(false)));
    let opened = Arc::clone(&is_open);
    std::thread::spawn(move || {
        let mut fds = [PollFd::new(&stream, PollFlags::RDHUP)];
        let _ = rustix::io::retry_on_intr(|| poll(&mut fds, None));
        if matches!(way, Way::Write(_)) {
            std::thread::sleep(GRACE);
        }
        if !opened.load(Ordering::Acquire) {
            std::process::exit(1);
        }
    });
    Ok(is_open)
}

/// The image with its lock, where that is free and the user may take it.
fn locked(image: Image) -> Result<Image, Refusal> {
    lock::take(&image, false, &[], || ()).map_err(|no| match no {
        NoLock::Not(refusal) => refusal,
        NoLock::Lost(why) => Refusal::new(why),
    })?;
    Ok(image)
}

//! Connectors, as the supervisor sees them: one process for each device whose image is on an NBD server,
//! started again when it dies.
//! The supervisor connects to nothing itself, and reads no byte of a server's.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use becket_image::Source;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use tracing::warn;

use crate::contract::Error;
use crate::contract::link::{Connect, LinkOrder, LinkReport};
use crate::contract::protocol;
use crate::contract::spec::Spec;
use crate::system::helper;
use crate::system::role::Role;
use crate::system::sync::spawn;

/// How long a connector may take to begin.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long is waited until another one takes the place of one that died.
const PAUSE: Duration = Duration::from_millis(500);

/// A device's connector. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Connector {
    line: Arc<Line>,
}

#[derive(Debug)]
struct Line {
    order: Connect,
    channel: [OwnedFd; 2],
    ends: AtomicBool,
    /// The connection to the process that there is now.
    control: std::sync::Mutex<Option<Arc<OwnedFd>>>,
}

/// Called with why the server cannot be reached, and with nothing when it can.
pub(crate) type OnChange = Box<dyn Fn(Option<String>) + Send>;

impl Connector {
    /// Starts one, if an image is on an NBD server. `again` says that there was one before.
    pub(crate) fn start(
        spec: &Spec,
        sources: &[Source],
        again: bool,
        on_change: OnChange,
    ) -> Result<Option<Connector>, Error> {
        let Some(link) = sources.iter().find_map(Source::link) else { return Ok(None) };
        let failed =
            |error| Error::Worker { what: format!("to connect to the server could not be started: {error}") };
        let uri = spec.image.to_str().unwrap_or_default();
        let (uri, _) = becket_image::link::split_inside(uri.as_ref());
        let order = Connect {
            uri: uri.to_string_lossy().into_owned(),
            agreed: *link.agreed(),
            shares: link.shares_flushes(),
            again,
            timeout: spec.origin_timeout,
        };
        let copy = |end: BorrowedFd<'_>| end.try_clone_to_owned().map_err(failed);
        let channel = [copy(link.asks())?, copy(link.answers())?];
        let line =
            Arc::new(Line { order, channel, ends: AtomicBool::new(false), control: Default::default() });
        let first = line.begin(again).map_err(failed)?;
        let theirs = Arc::clone(&line);
        spawn(move || theirs.watch(first, &on_change));
        Ok(Some(Connector { line }))
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        self.line.ends.store(true, Ordering::SeqCst);
        if let Some(control) = self.line.held().take() {
            // It hears that, and so does who listens to it.
            let _ = rustix::net::shutdown(&*control, rustix::net::Shutdown::Both);
        }
    }
}

impl Line {
    fn held(&self) -> std::sync::MutexGuard<'_, Option<Arc<OwnedFd>>> {
        self.control.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Starts a process and gives it its order.
    fn begin(&self, again: bool) -> io::Result<(helper::Kept, Arc<OwnedFd>)> {
        let (started, control) = helper::start(Role::Connector, &[], None)?;
        set_socket_timeout(&control, Timeout::Recv, Some(PATIENCE))?;
        match protocol::receive::<LinkReport>(&control)? {
            Some((LinkReport::Started { notes }, _)) => {
                notes.iter().for_each(|note| warn!("connector: {note}"))
            }
            Some((LinkReport::Refused { why }, _)) => return Err(io::Error::other(why)),
            _ => return Err(io::Error::other("it ended before it was ready")),
        }
        set_socket_timeout(&control, Timeout::Recv, None)?;
        let order = Connect { again, ..self.order.clone() };
        protocol::send(
            &control,
            &LinkOrder::Connect(Box::new(order)),
            &self.channel.each_ref().map(AsFd::as_fd),
        )?;
        let child = started.keep().ok_or_else(|| io::Error::other("it ended at once"))?;
        let control = Arc::new(control);
        *self.held() = Some(Arc::clone(&control));
        Ok((child, control))
    }

    /// Hears one process after another until there is to be none.
    fn watch(&self, first: (helper::Kept, Arc<OwnedFd>), on_change: &OnChange) {
        let mut now = Some(first);
        while !self.ends.load(Ordering::SeqCst) {
            if let Some((child, control)) = now.take() {
                self.hear(&control, on_change);
                let _ = rustix::net::shutdown(&*control, rustix::net::Shutdown::Both);
                let _ = child.wait();
                if self.ends.load(Ordering::SeqCst) {
                    return;
                }
                warn!("a connector ended, and another takes its place");
            }
            std::thread::sleep(PAUSE);
            match self.begin(true) {
                Ok(begun) => now = Some(begun),
                Err(error) => warn!("no connector can be started: {error}"),
            }
        }
        if let Some((child, control)) = now {
            let _ = rustix::net::shutdown(&*control, rustix::net::Shutdown::Both);
            let _ = child.wait();
        }
    }

    fn hear(&self, control: &OwnedFd, on_change: &OnChange) {
        while let Ok(Some((report, _))) = protocol::receive::<LinkReport>(control) {
            match report {
                LinkReport::Connected => on_change(None),
                LinkReport::Away { why } => on_change(Some(why.chars().take(300).collect())),
                LinkReport::Started { .. } | LinkReport::Refused { .. } => return,
            }
        }
    }
}

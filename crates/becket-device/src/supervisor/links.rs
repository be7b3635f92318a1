//! Connectors and fetchers, as the supervisor sees them: one connector for each device whose image is on an
//! NBD server, one fetcher for all devices of a store file that were attached alike. One that dies is
//! replaced. The supervisor connects to nothing itself, and reads no byte of a server's.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufReader};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use becket_engine::Fetched;
use becket_image::filled::{Envelopes, FilledSource, Presence};
use becket_image::link::helper::PROTOCOL;
use becket_image::link::{Endpoint, LinkSource, Server};
use becket_image::{Identity, Source};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use tracing::warn;

use super::exports;
use crate::contract::link::{Connect, Fill, LinkOrder, LinkReport};
use crate::contract::messages::Stored;
use crate::contract::protocol;
use crate::contract::spec::Spec;
use crate::contract::{Error, ErrorKind, Part};
use crate::system::helper;
use crate::system::role::Role;
use crate::system::sync::spawn;

/// How long such a process may take to begin.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long is waited until another one takes the place of one that died.
const PAUSE: Duration = Duration::from_millis(500);
/// How long a program beside becket may say nothing, and how long its end may take.
const SILENCE: Duration = Duration::from_secs(15);
const ENDING: Duration = Duration::from_secs(20);

/// What a device has of the process that reaches its server. That ends when its last device drops this.
#[derive(Debug)]
pub(crate) struct Connector {
    helper: Arc<Helper>,
    number: u64,
    /// The device outlives this supervisor.
    stays: bool,
    /// What the device has of the export.
    _part: Option<Arc<exports::Part>>,
}

/// The fetchers that there are, each with the store file that it fills.
#[derive(Debug, Default)]
pub(crate) struct Fetchers(Mutex<Vec<(Identity, Weak<Helper>)>>);

#[derive(Debug)]
pub(crate) struct Helper {
    work: Work,
    fds: Vec<OwnedFd>,
    devices: Mutex<Devices>,
    /// The connection to the process that there is now.
    control: Mutex<Option<Arc<OwnedFd>>>,
    /// As what such processes were known to their server, the last of them at the end.
    clients: Mutex<Vec<String>>,
    /// Since when they cannot reach it.
    away: Mutex<Option<Instant>>,
    /// What keeps them from bringing bytes now: for devices that come later.
    trouble: Mutex<Option<Change>>,
    /// Who waits for [`LinkReport::Looked`], the first one first.
    looking: Mutex<VecDeque<Sender<Result<u64, String>>>>,
}

/// Of how many programs it is known which they were. Each that takes an image's lock takes it from its
/// predecessor; only one that died before it could leaves more than one.
pub(super) const CLIENTS: usize = 16;

#[derive(Debug)]
enum Work {
    Connect(Connect),
    Fill(Fill, Arc<Presence>),
}

/// The devices that a process works for.
#[derive(Default)]
struct Devices {
    all: Vec<(u64, Ours)>,
    /// There are none any more, and there will be none.
    ends: bool,
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Devices").field("count", &self.all.len()).finish_non_exhaustive()
    }
}

/// How the server of an image is.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    /// It can be reached.
    Here,
    /// It cannot, and is connected to again and again.
    Reconnecting(String),
    /// It cannot, and is asked again and again for what is missing.
    Waiting(String),
    /// It has another version of the image.
    Replaced(String),
    /// The image cannot be decoded further, or is not that of its digest.
    Damaged(String),
    /// The image is another host's now.
    Lost(String),
    /// As what the program that reaches it is known there.
    Client(String),
    /// So many bytes long is the image.
    Size(u64),
}

/// Called when that changes.
pub(crate) type OnChange = Arc<dyn Fn(&Change) + Send + Sync>;

/// A device by its mark, and what is called for it.
pub(crate) type Ours = (u64, OnChange);

fn failed(error: io::Error) -> Error {
    Error::Worker { what: format!("to reach the server of the image could not be started: {error}") }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connector {
    /// Keeps what the device has of an export.
    pub(super) fn keep(&mut self, part: Option<Arc<exports::Part>>) {
        self._part = part;
    }

    /// Whether the device goes on when this is dropped, with another supervisor; it is detached otherwise.
    pub(super) fn stays(&mut self, stays: bool) {
        self.stays = stays;
    }

    /// What speaks with the process.
    pub(super) fn helper(&self) -> Arc<Helper> {
        Arc::clone(&self.helper)
    }

    /// How many bytes of an image are there, where it is fetched; requests have waited for it `waits` times.
    pub(super) fn fetched(&self, waits: u64) -> Option<Fetched> {
        let table = self.helper.table()?;
        let (bytes, memory) = table.stored();
        Some(Fetched { bytes, size: table.size(), memory, waits, no_room: table.rests() })
    }

    /// Starts the process that an image needs whose bytes are elsewhere, unless there is one for it already.
    /// `again`: there was one before, with what is known
    /// of [`Change::Client`].
    pub(crate) fn start(
        fetchers: &Fetchers,
        spec: &Spec,
        sources: &mut [Source],
        again: Option<&[String]>,
        ours: Ours,
    ) -> Result<Option<Connector>, Error> {
        for source in sources {
            match source {
                Source::File(_) => {}
                Source::Link(link) => return connect(spec, link, again, ours).map(Some),
                Source::Filled(filled) => {
                    return fetchers.fill(spec, filled, again.is_some(), ours).map(Some);
                }
            }
        }
        Ok(None)
    }

    /// One process for one device, or for the first of several.
    fn begin(work: Work, fds: Vec<OwnedFd>, again: bool, ours: Ours) -> io::Result<(Connector, Arc<Helper>)> {
        let (devices, control, away, trouble, looking) = Default::default();
        let clients = if let Work::Connect(order) = &work { order.clients.clone() } else { Vec::new() };
        let helper =
            Arc::new(Helper { work, fds, devices, control, clients: clients.into(), away, trouble, looking });
        let connector = helper.joined_by(ours).ok_or(io::ErrorKind::NotFound)?;
        let first = helper.begin(again, again)?;
        let theirs = Arc::clone(&helper);
        spawn(move || theirs.watch(first));
        Ok((connector, helper))
    }
}

/// Starts a connector.
fn connect(spec: &Spec, link: &LinkSource, again: Option<&[String]>, ours: Ours) -> Result<Connector, Error> {
    let uri = match &spec.backing_url {
        Some(uri) if link.is_below() => uri,
        _ => spec.image.to_str().unwrap_or_default(),
    };
    let (uri, _) = becket_image::link::split_inside(uri.as_ref());
    let order = Connect {
        uri: uri.to_string_lossy().into_owned(),
        agreed: *link.agreed(),
        shares: link.is_multi_conn(),
        again: again.is_some(),
        inherits: again.is_some(),
        timeout: spec.origin_timeout,
        away: None,
        writes: link.may_write(),
        clients: again.unwrap_or_default().to_vec(),
    };
    let copy = |end: BorrowedFd<'_>| end.try_clone_to_owned().map_err(failed);
    let mut fds = vec![copy(link.asks())?, copy(link.answers())?];
    if let Some(envelope) = link.envelope() {
        fds.push(open(envelope, OFlags::RDONLY).map_err(failed)?);
    }
    let begun = Connector::begin(Work::Connect(order), fds, again.is_some(), ours);
    let (connector, _) = begun.map_err(|error| Error::Failed {
        kind: ErrorKind::Server,
        message: format!("{}: its device cannot be connected to the server: {error}", spec.image.display()),
        hint: Some(
            "look whether it is still there and takes clients; \
             qemu-nbd ends with its first one without --persistent"
                .to_owned(),
        ),
    })?;
    Ok(connector)
}

impl Fetchers {
    /// How many there are.
    pub(super) fn count(&self) -> usize {
        lock(&self.0).iter().filter(|(_, helper)| helper.strong_count() > 0).count()
    }

    /// How much there is of the images that come while they are read. It waits for no device.
    pub(super) fn stored(&self) -> Vec<Stored> {
        let helpers: Vec<Arc<Helper>> =
            lock(&self.0).iter().filter_map(|(_, helper)| helper.upgrade()).collect();
        let mut all = Vec::new();
        for helper in helpers {
            let Some(table) = helper.table() else { continue };
            let part = Part { bytes: table.stored().0, size: table.size() };
            let of = |(_, (mark, _)): &(u64, Ours)| Stored { mark: mark.to_string(), part };
            all.extend(lock(&helper.devices).all.iter().map(of));
        }
        all
    }

    /// Joins the fetcher of a store file that was asked for the same, or starts one. A device that is new
    /// uses the table of the others.
    fn fill(
        &self,
        spec: &Spec,
        filled: &mut FilledSource,
        again: bool,
        ours: Ours,
    ) -> Result<Connector, Error> {
        let file = filled.identity().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let fds = opened(filled).map_err(failed)?;
        let mut all = lock(&self.0);
        all.retain(|(_, helper)| helper.strong_count() > 0);
        for helper in
            all.iter().filter(|(known, _)| *known == file).filter_map(|(_, helper)| helper.upgrade())
        {
            let Work::Fill(order, presence) = &helper.work else { continue };
            // What a worker serves already stays as it is. Another one may have other rights, or less time.
            let is_ours = match again {
                true => same(presence.fd(), filled.presence().fd()),
                false => order.timeout == spec.origin_timeout && sharing(&helper.fds) == sharing(&fds),
            };
            if !is_ours {
                continue;
            }
            if let Some(connector) = helper.joined_by(ours.clone()) {
                if !again {
                    filled.share(Arc::clone(presence));
                }
                return Ok(connector);
            }
        }
        let presence = Arc::clone(filled.presence());
        let order = Fill { size: presence.size(), chunk: presence.chunk(), timeout: spec.origin_timeout };
        let work = Work::Fill(order, presence);
        let (connector, helper) = Connector::begin(work, fds, again, ours).map_err(failed)?;
        all.push((file, Arc::downgrade(&helper)));
        Ok(connector)
    }
}

/// Whether two descriptors are of one file.
fn same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    let of = |fd| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino)).ok();
    of(one).is_some() && of(one) == of(other)
}

/// What the order among a fetcher's descriptors has in common with others that one fetcher can have; nothing
/// where it does not say that.
fn sharing(fds: &[OwnedFd]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Order {
        sharing: String,
    }
    // Not by its own place in the file: a fetcher may be reading it.
    let order = File::from(open(fds.get(ORDER)?.as_fd(), OFlags::RDONLY).ok()?);
    serde_json::from_reader::<_, Order>(BufReader::new(order)).ok().map(|order| order.sharing)
}

/// What such a process says next; that it refuses is an error.
fn said(control: &OwnedFd) -> io::Result<LinkReport> {
    match protocol::receive(control)? {
        Some((LinkReport::Refused { why }, _)) => Err(io::Error::other(why)),
        Some((report, _)) => Ok(report),
        None => Err(io::Error::other("it ended before it was ready")),
    }
}

/// Opens a descriptor that carries no right to read, or fewer rights.
fn open(fd: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
    let stat = rustix::fs::fstat(fd)?;
    // A file of others is not ours to change.
    let ours = stat.st_uid == rustix::process::geteuid().as_raw()
        && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !ours {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the store is not this user's"));
    }
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?)
}

/// Which of them is the order.
const ORDER: usize = 2;

/// What a fetcher needs, opened for it. The worker of the image may only read the file, and has no right to
/// the rest.
fn opened(filled: &FilledSource) -> io::Result<Vec<OwnedFd>> {
    let Envelopes { table, order, packed } = filled.envelopes();
    let mut fds = vec![
        open(filled.file().buffered.as_fd(), OFlags::RDWR)?,
        open(table.as_fd(), OFlags::RDWR)?,
        open(order.as_fd(), OFlags::RDONLY)?,
        filled.presence().fd().try_clone_to_owned()?,
    ];
    for fd in packed {
        // One alone is a file of the user, who could open it.
        fds.push(match packed.len() {
            1 => fd.try_clone()?,
            _ => open(fd.as_fd(), OFlags::RDWR)?,
        });
    }
    Ok(fds)
}

impl Drop for Connector {
    fn drop(&mut self) {
        let mut devices = lock(&self.helper.devices);
        devices.all.retain(|(number, _)| *number != self.number);
        devices.ends = devices.all.is_empty();
        let ends = devices.ends;
        drop(devices);
        if ends && let Some(control) = lock(&self.helper.control).take() {
            // It hears that, and so does who listens to it.
            if !self.stays {
                let _ = protocol::send(&*control, &LinkOrder::End, &[]);
            }
            let _ = rustix::net::shutdown(&*control, rustix::net::Shutdown::Both);
        }
    }
}

impl Helper {
    /// One more device; nothing when the process is about to end.
    fn joined_by(self: &Arc<Helper>, ours: Ours) -> Option<Connector> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut devices = lock(&self.devices);
        if devices.ends {
            return None;
        }
        devices.all.push((number, ours));
        Some(Connector { helper: Arc::clone(self), number, stays: false, _part: None })
    }

    /// What is there of an image that is filled.
    fn table(&self) -> Option<&Presence> {
        if let Work::Fill(_, table) = &self.work { Some(table) } else { None }
    }

    fn ends(&self) -> bool {
        lock(&self.devices).ends
    }

    /// Whether a program beside becket reaches the server.
    fn is_helped(&self) -> bool {
        let Work::Connect(order) = &self.work else { return false };
        Endpoint::parse(&order.uri).is_ok_and(|endpoint| matches!(endpoint.server, Server::Rbd(_)))
    }

    /// What there is, for the log.
    fn what(&self) -> &'static str {
        match self.work {
            Work::Connect(_) => "connector",
            Work::Fill(..) => "fetcher",
        }
    }

    /// Starts a process and gives it its order. `again`: there was one before; `inherits`: it may still be
    /// there, because its supervisor was another one.
    fn begin(&self, again: bool, inherits: bool) -> io::Result<(helper::Kept, Arc<OwnedFd>)> {
        let (role, order) = match &self.work {
            Work::Connect(order) => {
                let role = if self.is_helped() { Role::Helper } else { Role::Connector };
                let clients = lock(&self.clients).clone();
                let away = lock(&self.away).map(|since| since.elapsed().as_secs());
                let order = Connect { again, inherits, clients, away, ..order.clone() };
                (role, LinkOrder::Connect(Box::new(order)))
            }
            Work::Fill(order, _) => (Role::Fetcher, LinkOrder::Fill(order.clone())),
        };
        let version = (role == Role::Helper).then(|| PROTOCOL.to_owned());
        let words: Vec<String> = version.into_iter().collect();
        let (started, control) = helper::start(role, &words, None)?;
        set_socket_timeout(&control, Timeout::Recv, Some(PATIENCE))?;
        match said(&control)? {
            LinkReport::Started { notes } => notes.iter().for_each(|note| warn!("{}: {note}", self.what())),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        let fds: Vec<_> = self.fds.iter().map(AsFd::as_fd).collect();
        protocol::send(&control, &order, &fds)?;
        if role == Role::Connector && !again {
            // The server may be gone since the image was opened: then there is no device that waits for it.
            said(&control)?;
        }
        let silence = self.is_helped().then_some(SILENCE);
        set_socket_timeout(&control, Timeout::Recv, silence)?;
        let child = started.keep().ok_or_else(|| io::Error::other("it ended at once"))?;
        let control = Arc::new(control);
        *lock(&self.control) = Some(Arc::clone(&control));
        Ok((child, control))
    }

    /// Has `hear` hear what was said before the device was there, if that still holds. Nothing newer is heard
    /// meanwhile.
    pub(super) fn catch_up(&self, hear: impl Fn(&Change)) {
        let clients = lock(&self.clients).clone();
        clients.into_iter().for_each(|client| hear(&Change::Client(client)));
        if let Some(trouble) = &*lock(&self.trouble) {
            hear(trouble);
        }
    }

    /// How long the image is now, where its server does not say that by itself; it is asked.
    ///
    /// # Errors
    /// The server does not answer, and why.
    pub(super) fn look(&self) -> Option<Result<u64, String>> {
        if !matches!(self.work, Work::Connect(_)) {
            return None;
        }
        if self.is_helped() {
            return self.is_away().map(Err);
        }
        let (looked, answer) = mpsc::channel();
        {
            // Under the lock, for answers come in the order of the questions.
            let mut looking = lock(&self.looking);
            let control = lock(&self.control).clone();
            if control.is_some_and(|control| protocol::send(&*control, &LinkOrder::Look, &[]).is_ok()) {
                looking.push_back(looked);
            }
        }
        Some(answer.recv_timeout(PATIENCE).unwrap_or_else(|error| {
            Err(match error {
                RecvTimeoutError::Timeout => "it does not answer".to_owned(),
                RecvTimeoutError::Disconnected => "what connects to it has ended".to_owned(),
            })
        }))
    }

    /// Whether the server answers now, as far as it can be asked.
    ///
    /// # Errors
    /// It does not, and why.
    pub(super) fn reach(&self) -> Result<(), String> {
        self.is_away().map_or(Ok(()), Err)?;
        self.look().map_or(Ok(()), |looked| looked.map(drop))
    }

    /// Why the server is away, if that is known.
    fn is_away(&self) -> Option<String> {
        match &*lock(&self.trouble) {
            Some(Change::Reconnecting(why) | Change::Waiting(why)) => Some(why.clone()),
            _ => None,
        }
    }

    /// Keeps in mind what keeps bytes from coming.
    fn note(&self, change: &Change) {
        let trouble = match change {
            Change::Here => None,
            Change::Client(_) | Change::Size(_) => return,
            trouble => Some(trouble.clone()),
        };
        *lock(&self.trouble) = trouble;
    }

    /// Keeps in mind as what a program is known.
    fn known_as(&self, name: &str) {
        let mut clients = lock(&self.clients);
        clients.retain(|known| known != name);
        let surplus = (clients.len() + 1).saturating_sub(CLIENTS);
        clients.drain(..surplus);
        clients.push(name.to_owned());
    }

    /// Hears one process after another until there is to be none.
    fn watch(&self, first: (helper::Kept, Arc<OwnedFd>)) {
        let mut now = Some(first);
        while !self.ends() {
            if let Some((child, control)) = now.take() {
                let silent = self.hear(&control);
                lock(&self.looking).clear();
                self.bury(child, &control, silent);
                if self.ends() {
                    return;
                }
                warn!(event = "helper_ended", "a {} ended, and another takes its place", self.what());
            }
            std::thread::sleep(PAUSE);
            match self.begin(true, false) {
                Ok(begun) => now = Some(begun),
                Err(error) => warn!("no {} can be started: {error}", self.what()),
            }
        }
        if let Some((child, control)) = now {
            self.bury(child, &control, false);
        }
    }

    /// Waits for the end of a process. A program beside becket is ended if it takes too long, or at once
    /// where it is `silent`; one of becket's own may go on for workers that use its connections.
    fn bury(&self, child: helper::Kept, control: &OwnedFd, silent: bool) {
        let _ = rustix::net::shutdown(control, rustix::net::Shutdown::Both);
        let ended = match (self.is_helped(), silent) {
            (false, _) => child.wait(),
            (true, false) => child.wait_for(ENDING),
            (true, true) => child.wait_for(Duration::ZERO),
        };
        if let Err(error) = ended {
            warn!("the end of a {} cannot be waited for: {error}", self.what());
        }
    }

    /// Passes on what a process says until it ends, or until it has said nothing for too long; says which.
    fn hear(&self, control: &OwnedFd) -> bool {
        loop {
            let report = match protocol::receive::<LinkReport>(control) {
                Ok(Some((report, _))) => report,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    warn!(event = "helper_hung", "a {} says nothing any more, and is ended", self.what());
                    return true;
                }
                _ => return false,
            };
            match report {
                LinkReport::Connected => *lock(&self.away) = None,
                LinkReport::Away { .. } => drop(lock(&self.away).get_or_insert_with(Instant::now)),
                _ => {}
            }
            let why = |why: String| why.chars().take(300).collect();
            let change = match (report, &self.work) {
                (LinkReport::Connected, _) => Change::Here,
                (LinkReport::Away { why: said }, Work::Connect(_)) => Change::Reconnecting(why(said)),
                (LinkReport::Away { why: said }, Work::Fill(..)) => Change::Waiting(why(said)),
                (LinkReport::Changed { why: said }, _) => Change::Replaced(why(said)),
                (LinkReport::Damaged { why: said }, _) => Change::Damaged(why(said)),
                (LinkReport::Lost { why: said }, _) => Change::Lost(why(said)),
                (LinkReport::Client { name }, _) => {
                    let name = why(name);
                    self.known_as(&name);
                    Change::Client(name)
                }
                (LinkReport::Alive { size: Some(size) }, _) => Change::Size(size),
                (LinkReport::Looked { size }, _) => {
                    if let Some(looked) = lock(&self.looking).pop_front() {
                        let _ = looked.send(size);
                    }
                    continue;
                }
                (LinkReport::Full, _) => {
                    warn!(event = "store_full", "an image is not filled further: the store has no room");
                    continue;
                }
                (LinkReport::Alive { size: None }, _) => continue,
                (LinkReport::Refused { why }, _) => {
                    warn!("a {} refuses: {why}", self.what());
                    return false;
                }
                (LinkReport::Started { .. }, _) => return false,
            };
            self.note(&change);
            // Not under the lock: a device that goes meanwhile takes it.
            let devices: Vec<OnChange> =
                lock(&self.devices).all.iter().map(|(_, (_, on_change))| Arc::clone(on_change)).collect();
            devices.iter().for_each(|on_change| on_change(&change));
        }
    }
}

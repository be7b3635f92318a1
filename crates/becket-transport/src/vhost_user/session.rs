//! What a front-end and this back-end have agreed on, message by message.
//! Reads and writes no socket: messages come in as values, with their descriptors, and answers go out as
//! bytes. It trusts nothing: what makes no sense is refused, and a ring starts only with all that it needs.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use becket_engine::{GuestMemory, GuestPart};
use rustix::fs::{FileType, MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::io::ioctl_fionbio;

use super::chain::LARGEST;
use super::config::{self, CONFIG_WCE, FLUSH, PROTOCOL, RING_PACKED, SECTOR, VERSION_1, WRITEBACK};
use super::inflight;
use super::message::{Head, InflightPlace, VringAddress, Wanted};
use super::ring::Layout;

/// Protocol features (`VHOST_USER_PROTOCOL_F_*`).
const P_MQ: u64 = 1 << 0;
const P_REPLY_ACK: u64 = 1 << 3;
const P_BACKEND_REQ: u64 = 1 << 5;
const P_CONFIG: u64 = 1 << 9;
const P_INFLIGHT: u64 = 1 << 12;
const P_RESET: u64 = 1 << 13;
const PROTOCOL_FEATURES: u64 = P_MQ | P_REPLY_ACK | P_BACKEND_REQ | P_CONFIG | P_INFLIGHT | P_RESET;

/// Longest part of the configuration space that is asked for.
const MOST_CONFIG: u32 = 256;

/// Why a message is refused; the front-end hears no more than that it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refused(pub(super) String);

fn refused<T>(why: &str) -> Result<T, Refused> {
    Err(Refused(why.to_owned()))
}

/// Bytes of an answer, and the descriptor that goes with it.
pub(super) type Answer = (Vec<u8>, Option<OwnedFd>);

/// What the session asks of the rings that run. A ring that is stopped has given everything back.
pub(super) trait Rings {
    /// Stops a ring, if it runs: where it would have gone on.
    fn stop(&mut self, vring: usize) -> Option<u32>;
    /// Bytes of the device at present, and what it looks like.
    fn device(&self) -> (u64, becket_engine::Geometry);
}

/// A vring as the front-end describes it.
#[derive(Debug, Default)]
pub(super) struct Vring {
    pub(super) count: u16,
    pub(super) address: Option<VringAddress>,
    /// Where it goes on.
    pub(super) base: u32,
    pub(super) kick: Option<Arc<OwnedFd>>,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) enabled: bool,
}

/// Where requests under way are noted.
#[derive(Debug)]
pub(super) struct Notes {
    pub(super) place: InflightPlace,
    pub(super) file: OwnedFd,
    memory: Arc<GuestMemory>,
}

/// See the head of this module.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) features: u64,
    pub(super) protocol: u64,
    /// What the memory was made of.
    pub(super) table: Option<(Vec<GuestPart>, Vec<OwnedFd>)>,
    pub(super) memory: Option<Arc<GuestMemory>>,
    pub(super) vrings: Box<[Vring]>,
    pub(super) inflight: Option<Notes>,
    /// The back-end's own channel to the front-end.
    pub(super) channel: Option<Arc<OwnedFd>>,
    pub(super) writeback: bool,
}

/// What a ring needs to start.
pub(super) struct Ready<'a> {
    pub(super) memory: &'a Arc<GuestMemory>,
    pub(super) vring: &'a Vring,
    pub(super) address: &'a VringAddress,
    pub(super) kick: &'a Arc<OwnedFd>,
}

impl Session {
    /// Of a device with so many queues.
    pub(super) fn new(queues: u16) -> Session {
        Session {
            features: 0,
            protocol: 0,
            table: None,
            memory: None,
            vrings: (0..queues).map(|_| Vring::default()).collect(),
            inflight: None,
            channel: None,
            writeback: true,
        }
    }

    /// What the vring needs to start; `None` as long as something is missing.
    pub(super) fn ready(&self, vring: usize) -> Option<Ready<'_>> {
        let ring = self.vrings.get(vring)?;
        // Without protocol features a ring is enabled from its beginning.
        let enabled = ring.enabled || self.features & PROTOCOL == 0;
        let (memory, address, kick) = (self.memory.as_ref()?, ring.address.as_ref()?, ring.kick.as_ref()?);
        (enabled && ring.count > 0).then_some(Ready { memory, vring: ring, address, kick })
    }

    /// Where the requests of a vring are noted.
    pub(super) fn notes(&self, vring: u16) -> Option<becket_engine::Area> {
        let Notes { place, memory, .. } = self.inflight.as_ref()?;
        let count = self.vrings.get(usize::from(vring))?.count;
        inflight::area_of(self.layout(), memory, place, vring).filter(|_| place.descriptors == count)
    }

    /// Whether the requests of each ring that may run are noted: another back-end knows what was under way.
    pub(super) fn is_noted(&self) -> bool {
        (0u16..).zip(&self.vrings).all(|(index, vring)| vring.kick.is_none() || self.notes(index).is_some())
    }

    /// How the driver lays out its rings.
    pub(super) fn layout(&self) -> Layout {
        if self.has(RING_PACKED) { Layout::Packed } else { Layout::Split }
    }

    /// A driver's writes are on stable storage before they end.
    pub(super) fn is_durable(&self) -> bool {
        let cache = self.features & CONFIG_WCE == 0 || self.writeback;
        self.features & FLUSH == 0 || !cache
    }

    pub(super) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Takes a message in; what is answered, if anything.
    pub(super) fn take(
        &mut self,
        rings: &mut impl Rings,
        head: &Head,
        wanted: Wanted,
        fds: Vec<OwnedFd>,
    ) -> Result<Option<Answer>, Refused> {
        let has_answer = wanted.has_answer();
        match self.carry_out(rings, wanted, fds) {
            Ok(Some((payload, fd))) => Ok(Some((head.answer(&payload), fd))),
            Ok(None) if self.wants_reply(head) => Ok(Some((head.answer(&0u64.to_ne_bytes()), None))),
            Ok(None) => Ok(None),
            Err(why) if self.wants_reply(head) && !has_answer => {
                tracing::warn!("a front-end's message is refused: {why}");
                Ok(Some((head.answer(&1u64.to_ne_bytes()), None)))
            }
            Err(why) => Err(why),
        }
    }

    fn wants_reply(&self, head: &Head) -> bool {
        head.needs_reply() && self.protocol & P_REPLY_ACK != 0
    }

    pub(super) fn carry_out(
        &mut self,
        rings: &mut impl Rings,
        wanted: Wanted,
        fds: Vec<OwnedFd>,
    ) -> Result<Option<Answer>, Refused> {
        let number = |value: u64| Ok(Some((value.to_ne_bytes().to_vec(), None)));
        let (_, geometry) = rings.device();
        match wanted {
            Wanted::GetFeatures => return number(config::features(&geometry)),
            Wanted::SetFeatures(features) => {
                if features & !config::features(&geometry) != 0 || features & VERSION_1 == 0 {
                    return refused("it wants features that were not offered, or is a legacy driver");
                }
                self.stop_all(rings);
                self.features = features;
            }
            Wanted::GetProtocolFeatures => return number(PROTOCOL_FEATURES),
            Wanted::SetProtocolFeatures(features) => self.protocol = features & PROTOCOL_FEATURES,
            Wanted::GetQueueNum => return number(self.vrings.len() as u64),
            Wanted::GetMaxMemSlots => return number(super::message::MOST_FDS as u64),
            Wanted::SetOwner => {}
            Wanted::ResetOwner => {
                self.stop_all(rings);
                self.vrings.iter_mut().for_each(|vring| vring.enabled = false);
            }
            Wanted::ResetDevice => {
                self.stop_all(rings);
                (self.features, self.writeback) = (0, true);
                self.vrings.iter_mut().for_each(|vring| *vring = Vring::default());
            }
            Wanted::SetMemTable(parts) => self.set_memory(rings, &parts, fds)?,
            Wanted::SetVringNum { vring, count } => {
                if count == 0 || count > LARGEST {
                    return refused("a ring of that size cannot be");
                }
                self.vring(rings, vring)?.count = count as u16;
            }
            Wanted::SetVringAddr { vring, address } => self.vring(rings, vring)?.address = Some(address),
            Wanted::SetVringBase { vring, base } => self.vring(rings, vring)?.base = base,
            Wanted::GetVringBase { vring } => {
                let ring = self.vring(rings, vring)?;
                // It is stopped until it gets another one.
                ring.kick = None;
                let answer = [vring, ring.base].map(u32::to_ne_bytes).concat();
                return Ok(Some((answer, None)));
            }
            Wanted::SetVringKick { vring, fd } => {
                let event = event(fd, fds)?;
                if event.is_none() {
                    return refused("a ring that is polled is not served");
                }
                self.vring(rings, vring)?.kick = event;
            }
            Wanted::SetVringCall { vring, fd } => {
                let event = event(fd, fds)?;
                self.vring(rings, vring)?.call = event;
            }
            Wanted::SetVringErr { vring, fd } => {
                // Nothing is signalled there; a ring that is broken is in the log.
                event(fd, fds)?;
                self.vrings.get(vring as usize).ok_or_else(no_vring)?;
            }
            Wanted::SetVringEnable { vring, on } => self.vring(rings, vring)?.enabled = on,
            Wanted::SetBackendReqFd => {
                let channel =
                    fds.into_iter().next().ok_or_else(|| Refused("no channel came along".into()))?;
                // What is said there is not waited for.
                ioctl_fionbio(&channel, true).map_err(|errno| Refused(errno.to_string()))?;
                self.channel = Some(Arc::new(channel));
            }
            Wanted::GetConfig { offset, size, flags } => return self.config(rings, [offset, size, flags]),
            Wanted::SetConfig { offset, bytes } => {
                if (offset, bytes.len()) != (WRITEBACK, 1) || self.features & CONFIG_WCE == 0 {
                    return refused("only the mode of the cache can be set");
                }
                self.stop_all(rings);
                self.writeback = bytes[0] != 0;
            }
            Wanted::GetInflightFd(asked) => return self.new_notes(&asked),
            Wanted::SetInflightFd(place) => self.set_notes(rings, place, fds)?,
            Wanted::Unknown(request) => return refused(&format!("message {request} is not understood")),
        }
        Ok(None)
    }

    /// Stops all rings, and notes where they stopped.
    pub(super) fn stop_all(&mut self, rings: &mut impl Rings) {
        for (index, vring) in self.vrings.iter_mut().enumerate() {
            if let Some(base) = rings.stop(index) {
                vring.base = base;
            }
        }
    }

    /// A vring that is to be changed, which is stopped.
    fn vring(&mut self, rings: &mut impl Rings, vring: u32) -> Result<&mut Vring, Refused> {
        let index = vring as usize;
        let ring = self.vrings.get_mut(index).ok_or_else(no_vring)?;
        if let Some(base) = rings.stop(index) {
            ring.base = base;
        }
        Ok(ring)
    }

    fn set_memory(
        &mut self,
        rings: &mut impl Rings,
        parts: &[GuestPart],
        fds: Vec<OwnedFd>,
    ) -> Result<(), Refused> {
        if parts.len() != fds.len() || parts.is_empty() {
            return refused("a table of memory needs one descriptor for each of its parts");
        }
        let files: Vec<_> = parts.iter().copied().zip(fds.iter().map(|fd| fd.as_fd())).collect();
        let memory = GuestMemory::map(&files).map_err(|error| Refused(error.to_string()))?;
        self.stop_all(rings);
        self.memory = Some(Arc::new(memory));
        self.table = Some((parts.to_vec(), fds));
        Ok(())
    }

    fn config(&self, rings: &impl Rings, [offset, size, flags]: [u32; 3]) -> Result<Option<Answer>, Refused> {
        let (bytes, geometry) = rings.device();
        let queues = u16::try_from(self.vrings.len()).unwrap_or(u16::MAX);
        let space = config::space(&geometry, bytes / SECTOR * SECTOR, queues, self.writeback);
        let end = offset.checked_add(size).filter(|end| *end <= MOST_CONFIG);
        let Some(end) = end else { return refused("there is no such configuration") };
        let byte = |at: u32| space.get(at as usize).copied().unwrap_or(0);
        let mut answer = [offset, size, flags].map(u32::to_ne_bytes).concat();
        answer.extend((offset..end).map(byte));
        Ok(Some((answer, None)))
    }

    /// Makes a region for the front-end to keep.
    fn new_notes(&self, asked: &InflightPlace) -> Result<Option<Answer>, Refused> {
        let count = u32::from(asked.descriptors);
        if usize::from(asked.queues) > self.vrings.len() || count > LARGEST {
            return refused("there are no such rings to be noted");
        }
        let place = inflight::place_of(self.layout(), asked.queues, asked.descriptors);
        let Some(place) = place else { return refused("there are no such rings to be noted") };
        let make = || {
            let file = memfd_create("becket-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&file, place.size)?;
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok(file)
        };
        let file = make().map_err(|errno: rustix::io::Errno| Refused(errno.to_string()))?;
        Ok(Some((place.bytes(), Some(file))))
    }

    fn set_notes(
        &mut self,
        rings: &mut impl Rings,
        place: InflightPlace,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Refused> {
        let file = fds.into_iter().next().ok_or_else(|| Refused("no file came along".to_owned()))?;
        let wanted = inflight::place_of(self.layout(), place.queues, place.descriptors);
        if wanted.is_none_or(|wanted| wanted.size > place.size) || u32::from(place.descriptors) > LARGEST {
            return refused("the region for notes is too small");
        }
        let part = GuestPart { guest: 0, user: 0, len: place.size, offset: place.offset };
        let memory = GuestMemory::map(&[(part, &file)]).map_err(|error| Refused(error.to_string()))?;
        self.stop_all(rings);
        self.inflight = Some(Notes { place, file, memory: Arc::new(memory) });
        Ok(())
    }
}

fn no_vring() -> Refused {
    Refused("there is no such ring".to_owned())
}

/// The event that came with a message that announces one.
fn event(announced: bool, fds: Vec<OwnedFd>) -> Result<Option<Arc<OwnedFd>>, Refused> {
    match (announced, fds.into_iter().next()) {
        (true, Some(fd)) => {
            // An event has no file of any kind. What has one could keep operations waiting without end.
            let stat = fstat(&fd).map_err(|errno| Refused(errno.to_string()))?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Unknown => Ok(Some(Arc::new(fd))),
                _ => refused("what came along is not an event"),
            }
        }
        (false, None) => Ok(None),
        _ => refused("an event is missing, or came along unannounced"),
    }
}

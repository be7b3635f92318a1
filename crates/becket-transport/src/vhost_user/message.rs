//! The messages of the vhost-user protocol: what a front-end says and what is answered, as bytes and as
//! values. Touches no socket and no memory of a virtual machine; a message has at most [`MOST`] bytes and
//! [`MOST_FDS`] descriptors.
//!
//! Source: QEMU, docs/interop/vhost-user.rst. Numbers are in the machine's byte order.

use becket_engine::GuestPart;

/// Bytes of a message's header: request, flags, size of what follows.
pub(super) const HEAD: usize = 12;
/// Most bytes that may follow.
pub(super) const MOST: usize = 4096;
/// Most descriptors with one message: those of a table of memory.
pub(super) const MOST_FDS: usize = 8;

/// The protocol's version, in the flags.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// A vring has no descriptor: it is polled, or signals nothing.
const NO_FD: u64 = 1 << 8;
const VRING: u64 = 0xff;

/// A message's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    request: u32,
    flags: u32,
    /// Bytes that follow.
    pub(super) size: usize,
}

impl Head {
    /// Of its bytes; `None` for one of another version, or one that is too long.
    pub(super) fn read(bytes: [u8; HEAD]) -> Option<Head> {
        let word = |at: usize| u32_at(&bytes, at);
        let (request, flags, size) = (word(0)?, word(4)?, usize::try_from(word(8)?).ok()?);
        (flags & VERSION_MASK == VERSION && size <= MOST).then_some(Head { request, flags, size })
    }

    /// The front-end wants to know whether the message was carried out.
    pub(super) fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// An answer to this message.
    pub(super) fn answer(&self, payload: &[u8]) -> Vec<u8> {
        message(self.request, VERSION | REPLY, payload)
    }
}

fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap_or(0);
    let head = [request, flags, size].map(u32::to_ne_bytes).concat();
    [&head, payload].concat()
}

/// A message as a front-end sends it.
pub(super) fn said(request: u32, payload: &[u8]) -> Vec<u8> {
    message(request, VERSION, payload)
}

/// A message's payload of one number.
pub(super) fn number(number: u64) -> Vec<u8> {
    number.to_ne_bytes().to_vec()
}

/// A message's payload of two words.
pub(super) fn pair(first: u32, second: u32) -> Vec<u8> {
    [first, second].map(u32::to_ne_bytes).concat()
}

/// Says to a front-end, over the back-end's own channel, that the device's properties have changed.
pub(super) fn config_changed() -> Vec<u8> {
    const CONFIG_CHANGE: u32 = 2;
    message(CONFIG_CHANGE, VERSION, &[])
}

/// Where the tables of a vring are, as addresses of the front-end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct VringAddress {
    /// Descriptors.
    pub(super) descriptors: u64,
    /// What the device has used.
    pub(super) used: u64,
    /// What the driver has made available.
    pub(super) available: u64,
}

impl VringAddress {
    /// That of a vring, as the protocol has it: without flags and without a log.
    pub(super) fn bytes(&self, vring: u32) -> Vec<u8> {
        let words = [self.descriptors, self.used, self.available, 0].map(u64::to_ne_bytes);
        [pair(vring, 0), words.concat()].concat()
    }
}

/// A shared region in which requests under way are noted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct InflightPlace {
    /// Bytes of it.
    pub(super) size: u64,
    /// Where it begins in its file.
    pub(super) offset: u64,
    /// Number of vrings.
    pub(super) queues: u16,
    /// Descriptors of each.
    pub(super) descriptors: u16,
}

impl InflightPlace {
    /// As the protocol has it.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let [size, offset] = [self.size, self.offset].map(u64::to_ne_bytes);
        let [queues, descriptors] = [self.queues, self.descriptors].map(u16::to_ne_bytes);
        [&size[..], &offset, &queues, &descriptors, &[0; 4]].concat()
    }
}

/// What a front-end asks for. A vring is named by its number.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the protocol's own names and words")]
pub(super) enum Wanted {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<GuestPart>),
    SetVringNum {
        vring: u32,
        count: u32,
    },
    SetVringAddr {
        vring: u32,
        address: VringAddress,
    },
    SetVringBase {
        vring: u32,
        base: u32,
    },
    GetVringBase {
        vring: u32,
    },
    SetVringKick {
        vring: u32,
        fd: bool,
    },
    SetVringCall {
        vring: u32,
        fd: bool,
    },
    SetVringErr {
        vring: u32,
        fd: bool,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable {
        vring: u32,
        on: bool,
    },
    SetBackendReqFd,
    GetConfig {
        offset: u32,
        size: u32,
        flags: u32,
    },
    SetConfig {
        offset: u32,
        bytes: Vec<u8>,
    },
    GetInflightFd(InflightPlace),
    SetInflightFd(InflightPlace),
    ResetDevice,
    GetMaxMemSlots,
    /// Another one, or one whose bytes make no sense.
    Unknown(u32),
}

impl Wanted {
    /// Of a message. Never fails: what is not understood is [`Wanted::Unknown`].
    pub(super) fn read(head: &Head, payload: &[u8]) -> Wanted {
        parse(head.request, payload).unwrap_or(Wanted::Unknown(head.request))
    }

    /// How many descriptors come with it.
    pub(super) fn descriptors(&self) -> usize {
        match self {
            Wanted::SetMemTable(parts) => parts.len(),
            Wanted::SetVringKick { fd, .. } | Wanted::SetVringCall { fd, .. } => usize::from(*fd),
            Wanted::SetBackendReqFd | Wanted::SetInflightFd(_) => 1,
            _ => 0,
        }
    }

    /// It is answered by something other than whether it was carried out.
    pub(super) fn has_answer(&self) -> bool {
        matches!(
            self,
            Wanted::GetFeatures
                | Wanted::GetVringBase { .. }
                | Wanted::GetProtocolFeatures
                | Wanted::GetQueueNum
                | Wanted::GetConfig { .. }
                | Wanted::GetInflightFd(_)
                | Wanted::GetMaxMemSlots
        )
    }
}

fn parse(request: u32, payload: &[u8]) -> Option<Wanted> {
    let number = || u64_at(payload, 0);
    let pair = || Some((u32_at(payload, 0)?, u32_at(payload, 4)?));
    let vring_fd = || {
        let word = u64_at(payload, 0)?;
        Some(((word & VRING) as u32, word & NO_FD == 0))
    };
    Some(match request {
        1 => Wanted::GetFeatures,
        2 => Wanted::SetFeatures(number()?),
        3 => Wanted::SetOwner,
        4 => Wanted::ResetOwner,
        5 => Wanted::SetMemTable(mem_table(payload)?),
        8 => pair().map(|(vring, count)| Wanted::SetVringNum { vring, count })?,
        9 => {
            let vring = u32_at(payload, 0)?;
            let [descriptors, used, available] = [8, 16, 24].map(|at| u64_at(payload, at));
            let address = VringAddress { descriptors: descriptors?, used: used?, available: available? };
            Wanted::SetVringAddr { vring, address }
        }
        10 => pair().map(|(vring, base)| Wanted::SetVringBase { vring, base })?,
        11 => Wanted::GetVringBase { vring: u32_at(payload, 0)? },
        12 => vring_fd().map(|(vring, fd)| Wanted::SetVringKick { vring, fd })?,
        13 => vring_fd().map(|(vring, fd)| Wanted::SetVringCall { vring, fd })?,
        14 => vring_fd().map(|(vring, fd)| Wanted::SetVringErr { vring, fd })?,
        15 => Wanted::GetProtocolFeatures,
        16 => Wanted::SetProtocolFeatures(number()?),
        17 => Wanted::GetQueueNum,
        18 => pair().map(|(vring, on)| Wanted::SetVringEnable { vring, on: on != 0 })?,
        21 => Wanted::SetBackendReqFd,
        24 => Wanted::GetConfig {
            offset: u32_at(payload, 0)?,
            size: u32_at(payload, 4)?,
            flags: u32_at(payload, 8)?,
        },
        25 => {
            let (offset, size) = pair()?;
            let bytes = payload.get(12..)?.get(..usize::try_from(size).ok()?)?.to_vec();
            Wanted::SetConfig { offset, bytes }
        }
        31 => Wanted::GetInflightFd(inflight(payload)?),
        32 => Wanted::SetInflightFd(inflight(payload)?),
        34 => Wanted::ResetDevice,
        36 => Wanted::GetMaxMemSlots,
        _ => return None,
    })
}

fn mem_table(payload: &[u8]) -> Option<Vec<GuestPart>> {
    let count = usize::try_from(u32_at(payload, 0)?).ok().filter(|count| *count <= MOST_FDS)?;
    let part = |index: usize| {
        let word = |at: usize| u64_at(payload, 8 + index * 32 + at * 8);
        Some(GuestPart { guest: word(0)?, len: word(1)?, user: word(2)?, offset: word(3)? })
    };
    (0..count).map(part).collect()
}

fn inflight(payload: &[u8]) -> Option<InflightPlace> {
    let half = |at: usize| Some(u16::from_ne_bytes(payload.get(at..at + 2)?.try_into().ok()?));
    Some(InflightPlace {
        size: u64_at(payload, 0)?,
        offset: u64_at(payload, 8)?,
        queues: half(16)?,
        descriptors: half(18)?,
    })
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(request: u32, flags: u32, size: u32) -> Option<Head> {
        Head::read([request, flags, size].map(u32::to_ne_bytes).concat().try_into().unwrap())
    }

    fn read(request: u32, payload: &[u8]) -> Wanted {
        Wanted::read(&head(request, 1, 0).unwrap(), payload)
    }

    #[test]
    fn a_header_of_another_version_or_without_bounds_is_none() {
        assert!(head(1, 1, MOST as u32).is_some());
        assert!(head(1, 1, MOST as u32 + 1).is_none());
        assert!(head(1, 2, 0).is_none() && head(1, 0, 0).is_none());
        assert!(head(1, 1 | 8, 0).unwrap().needs_reply());
        let answer = head(17, 1, 0).unwrap().answer(&7u64.to_ne_bytes());
        assert_eq!(answer, [[17, 5, 8].map(u32::to_ne_bytes).concat(), 7u64.to_ne_bytes().to_vec()].concat());
    }

    #[test]
    fn messages_are_read_field_by_field() {
        let words = |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
        assert_eq!(read(2, &words(&[1 << 32])), Wanted::SetFeatures(1 << 32));
        assert_eq!(read(12, &words(&[3])), Wanted::SetVringKick { vring: 3, fd: true });
        assert_eq!(read(13, &words(&[0x103])), Wanted::SetVringCall { vring: 3, fd: false });
        let table = read(5, &words(&[1, 0x1000, 0x2000, 0x3000, 0x4000]));
        let part = GuestPart { guest: 0x1000, len: 0x2000, user: 0x3000, offset: 0x4000 };
        assert_eq!(table, Wanted::SetMemTable(vec![part]));
        let place = InflightPlace { size: 1, offset: 2, queues: 3, descriptors: 4 };
        assert_eq!(read(32, &place.bytes()), Wanted::SetInflightFd(place));
        let addr = read(9, &words(&[2, 10, 11, 12, 13]));
        let address = VringAddress { descriptors: 10, used: 11, available: 12 };
        assert_eq!(addr, Wanted::SetVringAddr { vring: 2, address });
        let config = [[32u32, 1, 0].map(u32::to_ne_bytes).concat(), vec![9]].concat();
        assert_eq!(read(25, &config), Wanted::SetConfig { offset: 32, bytes: vec![9] });
    }

    #[test]
    fn what_is_too_short_or_claims_too_much_is_not_understood() {
        for request in 0..64 {
            // Never a panic, whatever the bytes.
            for len in 0..40 {
                let _ = read(request, &vec![0xff; len]);
            }
        }
        assert_eq!(read(2, &[0; 7]), Wanted::Unknown(2));
        let mut table = vec![0; 8 + 8 * 32];
        table[0] = 9;
        assert_eq!(read(5, &table), Wanted::Unknown(5), "nine parts");
        let config = [0u32, 5, 0].map(u32::to_ne_bytes).concat();
        assert_eq!(read(25, &config), Wanted::Unknown(25), "five bytes that are not there");
    }
}

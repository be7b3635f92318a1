//! The client's side of the negotiation: fixed newstyle, up to the choice of an export.
//! It reads and sends nothing itself, and keeps no more than one reply of the server's.
//!
//! Its driver sends [`Handshake::outgoing`], reads exactly as many bytes as [`Handshake::wants`], and gives
//! them to [`Handshake::feed`]. So no byte that belongs to the transmission is read here.
//!
//! Followed: the NBD project's protocol document.

use becket_uapi::nbd::{self, u16_at, u32_at, u64_at};
use serde::{Deserialize, Serialize};

/// The longest reply of a server, in bytes: a name or a message with what goes with it.
const LONGEST: usize = 16 << 10;
/// The most replies to one option.
const MOST_REPLIES: u32 = 64;
/// The longest message of a server's that is shown, in characters.
const MESSAGE: usize = 200;

/// The largest payload of a request where the server names none: what each must take.
const USUAL_LARGEST: u32 = 32 << 20;

/// How many connections to one export are used at once, where a flush over one of them covers all.
pub const CONNECTIONS: usize = 8;

/// What is asked of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wanted {
    /// Go on over TLS.
    pub tls: bool,
    /// Structured replies, and with them what is allocated.
    pub structured: bool,
    /// The export is to be written, so what stands against that is an error.
    pub writes: bool,
    /// This very connection writes so many bytes to it: a lock that its cluster has is held as long as it
    /// lasts, and an image of Ceph that is missing is made.
    pub copies: Option<u64>,
}

/// What was agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agreed {
    /// Length of the export in bytes.
    pub size: u64,
    /// Transmission flags: see [`becket_uapi::nbd`].
    pub flags: u16,
    /// Replies come in chunks.
    pub structured: bool,
    /// The number of the context of what is allocated.
    pub allocation: Option<u32>,
    /// Requests must be multiples of this, in bytes; a power of two.
    pub smallest: u32,
    /// Preferred length of requests in bytes; a power of two.
    pub preferred: u32,
    /// Longest payload of a request in bytes; a multiple of `smallest`.
    pub largest: u32,
    /// Which image it is, where that is known: another one under the same name has another number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<u64>,
}

impl Agreed {
    /// Whether a connection serves as well as one with which that was agreed on, however it is answered.
    #[must_use]
    pub fn is_like(&self, other: &Agreed) -> bool {
        // Servers offer it only beside structured replies.
        let plain = |agreed: &Agreed| Agreed {
            flags: agreed.flags & !nbd::SEND_DF,
            structured: false,
            allocation: None,
            ..*agreed
        };
        plain(self) == plain(other)
    }

    /// Whether a transmission flag is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & nbd::HAS_FLAGS != 0 && self.flags & flag != 0
    }
}

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// More of the negotiation.
    More,
    /// TLS is to be started, and [`Handshake::tls_started`] called.
    StartTls,
    /// The transmission.
    Done(Agreed),
}

/// Why there is no transmission. The message is safe to show.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The server has no such export.
    #[error("the server has no export named {name:?}{why}")]
    Unknown {
        /// Its name.
        name: String,
        /// What the server says, behind a colon.
        why: String,
    },
    /// The server takes clients over TLS only.
    #[error("the server takes clients over TLS only")]
    TlsRequired,
    /// TLS was asked for, and it has none.
    #[error("the server has no TLS")]
    NoTls,
    /// The server refuses for another reason.
    #[error("the server refuses{why}")]
    Other {
        /// What it says, behind a colon.
        why: String,
    },
    /// It does not speak the protocol, or an old one.
    #[error("{0}")]
    Protocol(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Greeting,
    /// The header of a reply to this option.
    Header(u32),
    /// Its payload, of this kind and length.
    Payload {
        option: u32,
        kind: u32,
    },
    Done,
}

/// A negotiation.
#[derive(Debug)]
pub struct Handshake {
    wanted: Wanted,
    export: String,
    state: State,
    wants: usize,
    out: Vec<u8>,
    replies: u32,
    agreed: Agreed,
    exported: bool,
}

impl Handshake {
    /// One for an export.
    pub fn new(export: &str, wanted: Wanted) -> Handshake {
        let agreed = Agreed { smallest: 1, preferred: 4096, largest: USUAL_LARGEST, ..Agreed::default() };
        Handshake {
            wanted,
            export: export.to_owned(),
            state: State::Greeting,
            wants: 18,
            out: Vec::new(),
            replies: 0,
            agreed,
            exported: false,
        }
    }

    /// What is to be sent before more is read.
    pub fn outgoing(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// How many bytes are to be read next; never more than 16 KiB.
    pub fn wants(&self) -> usize {
        self.wants
    }

    /// TLS is up.
    pub fn tls_started(&mut self) {
        self.after_tls();
    }

    /// Takes in the bytes that were wanted.
    ///
    /// # Errors
    /// The negotiation has failed.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Next, Refused> {
        if bytes.len() != self.wants {
            return Err(Refused::Protocol("a reply of the server is cut short"));
        }
        match self.state {
            State::Greeting => self.greeted(bytes),
            State::Header(option) => self.header(option, bytes),
            State::Payload { option, kind } => self.reply(option, kind, bytes),
            State::Done => Err(Refused::Protocol("the negotiation has ended")),
        }
    }

    fn greeted(&mut self, bytes: &[u8]) -> Result<Next, Refused> {
        if u64_at(bytes, 0) != Some(nbd::MAGIC) {
            return Err(Refused::Protocol("it is not an NBD server"));
        }
        let flags = u16_at(bytes, 16).unwrap_or(0);
        if u64_at(bytes, 8) != Some(nbd::OPTION_MAGIC) || flags & nbd::FLAG_FIXED_NEWSTYLE == 0 {
            return Err(Refused::Protocol("the server speaks only the oldest form of NBD"));
        }
        let ours = nbd::FLAG_FIXED_NEWSTYLE | (flags & nbd::FLAG_NO_ZEROES);
        self.out.extend_from_slice(&u32::from(ours).to_be_bytes());
        if self.wanted.tls {
            self.option(nbd::OPT_STARTTLS, &[]);
        } else {
            self.after_tls();
        }
        Ok(Next::More)
    }

    fn after_tls(&mut self) {
        if self.wanted.structured {
            self.option(nbd::OPT_STRUCTURED_REPLY, &[]);
        } else {
            self.go();
        }
    }

    /// The export's name as options have it.
    fn name(&self) -> Vec<u8> {
        let mut data = Vec::with_capacity(self.export.len() + 32);
        // It has at most 4096 bytes: the URI was refused otherwise.
        data.extend_from_slice(&u32::try_from(self.export.len()).unwrap_or(0).to_be_bytes());
        data.extend_from_slice(self.export.as_bytes());
        data
    }

    fn go(&mut self) {
        let mut data = self.name();
        data.extend_from_slice(&1u16.to_be_bytes());
        data.extend_from_slice(&nbd::INFO_BLOCK_SIZE.to_be_bytes());
        self.option(nbd::OPT_GO, &data);
    }

    fn option(&mut self, option: u32, data: &[u8]) {
        self.out.extend_from_slice(&nbd::OPTION_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&option.to_be_bytes());
        self.out.extend_from_slice(&u32::try_from(data.len()).unwrap_or(0).to_be_bytes());
        self.out.extend_from_slice(data);
        self.replies = 0;
        self.await_reply(option);
    }

    fn await_reply(&mut self, option: u32) {
        (self.state, self.wants) = (State::Header(option), 20);
    }

    fn header(&mut self, option: u32, bytes: &[u8]) -> Result<Next, Refused> {
        let (Some(kind), Some(len)) = (u32_at(bytes, 12), u32_at(bytes, 16)) else {
            return Err(Refused::Protocol("a reply of the server is cut short"));
        };
        if u64_at(bytes, 0) != Some(nbd::OPTION_REPLY_MAGIC) || u32_at(bytes, 8) != Some(option) {
            return Err(Refused::Protocol("the server answers something else than it was asked"));
        }
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        self.replies += 1;
        if len > LONGEST || self.replies > MOST_REPLIES {
            return Err(Refused::Protocol("the server answers without end"));
        }
        if len == 0 {
            return self.reply(option, kind, &[]);
        }
        (self.state, self.wants) = (State::Payload { option, kind }, len);
        Ok(Next::More)
    }

    fn reply(&mut self, option: u32, kind: u32, bytes: &[u8]) -> Result<Next, Refused> {
        let refused = kind & nbd::REP_ERROR != 0;
        match option {
            nbd::OPT_STARTTLS if kind == nbd::REP_ACK => {
                (self.state, self.wants) = (State::Done, 0);
                return Ok(Next::StartTls);
            }
            nbd::OPT_STARTTLS => return Err(Refused::NoTls),
            nbd::OPT_STRUCTURED_REPLY if kind == nbd::REP_ACK => {
                self.agreed.structured = true;
                let mut data = self.name();
                data.extend_from_slice(&1u32.to_be_bytes());
                data.extend_from_slice(&u32::try_from(nbd::BASE_ALLOCATION.len()).unwrap_or(0).to_be_bytes());
                data.extend_from_slice(nbd::BASE_ALLOCATION.as_bytes());
                self.option(nbd::OPT_SET_META_CONTEXT, &data);
            }
            nbd::OPT_STRUCTURED_REPLY if kind == nbd::REP_ERR_TLS_REQD => return Err(Refused::TlsRequired),
            nbd::OPT_STRUCTURED_REPLY if refused => self.go(),
            nbd::OPT_SET_META_CONTEXT if kind == nbd::REP_META_CONTEXT => {
                if bytes.get(4..) == Some(nbd::BASE_ALLOCATION.as_bytes()) {
                    self.agreed.allocation = u32_at(bytes, 0);
                }
                self.await_reply(option);
            }
            // An error concerns the context alone; that the export is not known is said once more.
            nbd::OPT_SET_META_CONTEXT if kind == nbd::REP_ACK || refused => self.go(),
            nbd::OPT_GO if kind == nbd::REP_INFO => {
                self.information(bytes)?;
                self.await_reply(option);
            }
            nbd::OPT_GO if kind == nbd::REP_ACK => return self.done(),
            nbd::OPT_GO if refused => return Err(self.error(kind, bytes)),
            _ => return Err(Refused::Protocol("the server answers something else than it was asked")),
        }
        Ok(Next::More)
    }

    fn information(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        let cut = || Refused::Protocol("the server describes its export in no known form");
        match u16_at(bytes, 0).ok_or_else(cut)? {
            nbd::INFO_EXPORT => {
                self.agreed.size = u64_at(bytes, 2).ok_or_else(cut)?;
                self.agreed.flags = u16_at(bytes, 10).ok_or_else(cut)?;
                self.exported = true;
            }
            nbd::INFO_BLOCK_SIZE => {
                let at = |at| u32_at(bytes, at).ok_or_else(cut);
                (self.agreed.smallest, self.agreed.preferred, self.agreed.largest) =
                    (at(2)?, at(6)?, at(10)?);
            }
            _ => {}
        }
        Ok(())
    }

    fn done(&mut self) -> Result<Next, Refused> {
        let Agreed { size, smallest, preferred, largest, .. } = &mut self.agreed;
        if !self.exported {
            return Err(Refused::Protocol("the server does not say how long its export is"));
        }
        if *size > i64::MAX.unsigned_abs() {
            return Err(Refused::Protocol("the server's export is longer than any device"));
        }
        let sane = smallest.is_power_of_two() && *smallest <= 64 << 10 && *largest >= *smallest;
        if !sane {
            return Err(Refused::Protocol("the server's block sizes are impossible"));
        }
        *largest = (*largest).clamp(*smallest, USUAL_LARGEST.max(*smallest));
        *largest -= *largest % *smallest;
        if !preferred.is_power_of_two() || *preferred < *smallest {
            *preferred = *smallest;
        }
        (self.state, self.wants) = (State::Done, 0);
        Ok(Next::Done(self.agreed))
    }

    fn error(&self, kind: u32, bytes: &[u8]) -> Refused {
        let text = String::from_utf8_lossy(bytes);
        let text: String = text.chars().filter(|c| !crate::is_hidden(*c)).take(MESSAGE).collect();
        let why = if text.trim().is_empty() { String::new() } else { format!(": {}", text.trim()) };
        match kind {
            nbd::REP_ERR_UNKNOWN => Refused::Unknown { name: self.export.clone(), why },
            nbd::REP_ERR_TLS_REQD => Refused::TlsRequired,
            nbd::REP_ERR_UNSUP => Refused::Protocol("the server is too old: it does not know NBD_OPT_GO"),
            _ => Refused::Other { why },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
        let len = u32::try_from(payload.len()).unwrap();
        let numbers =
            [&nbd::OPTION_REPLY_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes()].concat();
        [&numbers[..], &len.to_be_bytes(), payload].concat()
    }

    fn greeting() -> Vec<u8> {
        [&nbd::MAGIC.to_be_bytes()[..], &nbd::OPTION_MAGIC.to_be_bytes(), &3u16.to_be_bytes()].concat()
    }

    fn export(size: u64, flags: u16) -> Vec<u8> {
        let info = [&nbd::INFO_EXPORT.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat();
        reply(nbd::OPT_GO, nbd::REP_INFO, &info)
    }

    fn blocks(sizes: [u32; 3]) -> Vec<u8> {
        let mut info = nbd::INFO_BLOCK_SIZE.to_be_bytes().to_vec();
        sizes.iter().for_each(|size| info.extend_from_slice(&size.to_be_bytes()));
        reply(nbd::OPT_GO, nbd::REP_INFO, &info)
    }

    /// Feeds what a server says, and returns what came last and what was sent.
    fn run(shake: &mut Handshake, mut said: &[u8]) -> (Result<Next, Refused>, Vec<u8>) {
        let mut sent = shake.outgoing();
        let mut last = Ok(Next::More);
        while shake.wants() > 0 && said.len() >= shake.wants() {
            let (now, rest) = said.split_at(shake.wants());
            said = rest;
            last = shake.feed(now);
            sent.extend(shake.outgoing());
            if last.is_err() || matches!(last, Ok(Next::StartTls)) {
                break;
            }
        }
        (last, sent)
    }

    #[test]
    fn an_export_is_agreed_on_with_and_without_structured_replies() {
        let go = [
            export(1 << 20, nbd::HAS_FLAGS | nbd::SEND_FLUSH),
            blocks([512, 4096, 65536]),
            reply(nbd::OPT_GO, nbd::REP_ACK, &[]),
        ]
        .concat();
        let mut shake = Handshake::new("disk", Wanted::default());
        let (last, sent) = run(&mut shake, &[greeting(), go.clone()].concat());
        let Ok(Next::Done(agreed)) = last else { panic!("{last:?}") };
        assert_eq!((agreed.size, agreed.smallest, agreed.largest), (1 << 20, 512, 65536));
        assert!(agreed.has(nbd::SEND_FLUSH) && !agreed.has(nbd::SEND_TRIM) && !agreed.structured);
        assert_eq!(sent.len(), 4 + 16 + 4 + 4 + 4, "flags, the option, the name, one request");

        let context = [&7u32.to_be_bytes()[..], nbd::BASE_ALLOCATION.as_bytes()].concat();
        let said = [
            greeting(),
            reply(nbd::OPT_STRUCTURED_REPLY, nbd::REP_ACK, &[]),
            reply(nbd::OPT_SET_META_CONTEXT, nbd::REP_META_CONTEXT, &context),
            reply(nbd::OPT_SET_META_CONTEXT, nbd::REP_ACK, &[]),
            go,
        ];
        let mut shake = Handshake::new("disk", Wanted { structured: true, ..Wanted::default() });
        let Ok(Next::Done(agreed)) = run(&mut shake, &said.concat()).0 else { panic!() };
        assert_eq!((agreed.structured, agreed.allocation), (true, Some(7)));
    }

    #[test]
    fn tls_is_started_before_anything_is_asked() {
        let mut shake = Handshake::new("x", Wanted { tls: true, ..Wanted::default() });
        let said = [greeting(), reply(nbd::OPT_STARTTLS, nbd::REP_ACK, &[])].concat();
        let (last, sent) = run(&mut shake, &said);
        assert_eq!((last, sent.len()), (Ok(Next::StartTls), 20), "no name goes in the clear");
        shake.tls_started();
        let (_, sent) = run(&mut shake, &[]);
        assert_eq!(u32_at(&sent, 8), Some(nbd::OPT_GO));
        let mut shake = Handshake::new("x", Wanted { tls: true, ..Wanted::default() });
        let said = [greeting(), reply(nbd::OPT_STARTTLS, nbd::REP_ERR_UNSUP, &[])].concat();
        assert_eq!(run(&mut shake, &said).0, Err(Refused::NoTls));
    }

    #[test]
    fn refusals_are_said_and_lies_are_seen() {
        let go = |replies: &[Vec<u8>]| {
            let mut shake = Handshake::new("x", Wanted::default());
            run(&mut shake, &[greeting(), replies.concat()].concat()).0
        };
        let ack = || reply(nbd::OPT_GO, nbd::REP_ACK, &[]);
        let unknown = go(&[reply(nbd::OPT_GO, nbd::REP_ERR_UNKNOWN, b"no \x1b[31msuch")]).unwrap_err();
        assert_eq!(unknown.to_string(), "the server has no export named \"x\": no [31msuch");
        assert_eq!(go(&[reply(nbd::OPT_GO, nbd::REP_ERR_TLS_REQD, b"")]), Err(Refused::TlsRequired));
        let lies: [&[Vec<u8>]; 7] = [
            &[ack()],
            &[export(u64::MAX, 1), ack()],
            &[export(512, 1), blocks([3, 3, 3]), ack()],
            &[export(512, 1), blocks([512, 512, 256]), ack()],
            &[export(512, 1), blocks([0, 0, 0]), ack()],
            &[reply(nbd::OPT_LIST, nbd::REP_ACK, &[])],
            &[reply(nbd::OPT_GO, nbd::REP_INFO, &[0])],
        ];
        for lie in lies {
            assert!(matches!(go(lie), Err(Refused::Protocol(_))), "{lie:?}");
        }
        let endless: Vec<Vec<u8>> = (0..100).map(|_| export(512, 1)).collect();
        assert_eq!(go(&endless), Err(Refused::Protocol("the server answers without end")));
        let mut long = reply(nbd::OPT_GO, nbd::REP_INFO, &[]);
        long[16..20].copy_from_slice(&(1u32 << 30).to_be_bytes());
        assert_eq!(go(&[long]), Err(Refused::Protocol("the server answers without end")));
    }

    proptest! {
        #[test]
        fn any_server_is_heard_out_in_little_memory(said in prop::collection::vec(any::<u8>(), 0..4096), good in 0usize..200) {
            let honest = [greeting(), export(1 << 20, 1), blocks([512, 4096, 65536]), reply(nbd::OPT_GO, nbd::REP_ACK, &[])].concat();
            let mut all = honest[..good.min(honest.len())].to_vec();
            all.extend(said);
            let mut shake = Handshake::new("x", Wanted::default());
            let (_, sent) = run(&mut shake, &all);
            prop_assert!(shake.wants() <= LONGEST && sent.len() < 1024);
        }
    }
}

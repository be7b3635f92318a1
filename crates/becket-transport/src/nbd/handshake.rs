//! The server's side of NBD's handshake (doc/proto.md of the NBD project, "Fixed newstyle negotiation"), from
//! the greeting until a client has chosen an export.
//! It makes no system call and never panics: bytes go in, bytes and one [`Step`] come out. What it holds has
//! a bound, whatever a client sends.

use becket_uapi::nbd as uapi;
use serde::{Deserialize, Serialize};

/// Longest option that is read, in bytes. Names have at most 4,096, and becket knows one metadata context.
const LONGEST_OPTION: usize = 16 << 10;
/// The most queries of one option that are looked at.
const MOST_QUERIES: u32 = 32;
/// Longest request that a client may make, in bytes; a read or write of more is refused.
pub const LARGEST: u32 = 32 << 20;
/// Why a client is refused whose certificate is valid.
pub const STRANGER: &str = "the client's certificate has none of the names that are allowed";
/// The number of the only metadata context, `base:allocation`.
const CONTEXT: u32 = 1;

/// An export, as clients are shown it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// What clients call it. An empty name means the first export, if none has that name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Its disk rotates.
    pub rotational: bool,
    /// Ranges can be given back.
    pub trims: bool,
    /// What offsets and lengths of requests are to be multiples of, in bytes. Others are served all the same.
    pub smallest: u32,
    /// Bytes of a request that is carried out best.
    pub preferred: u32,
}

/// What a client and the server have agreed on. It crosses from the process that has talked with the client
/// to the one that serves it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agreed {
    /// The export's name.
    pub export: String,
    /// Replies are structured.
    pub structured: bool,
    /// Headers are extended, and replies structured in any case.
    pub extended: bool,
    /// The client asks for `base:allocation`.
    pub allocation: bool,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// More bytes of the client.
    More,
    /// TLS, from the next byte of the client on. [`Handshake::secured`] says that it is up.
    StartTls,
    /// The client has chosen: the place of its export in the list, and what was agreed on. What it has sent
    /// since is [`Handshake::into_unread`].
    Agreed(usize, Agreed),
    /// The end of the connection, and why, for people.
    End(&'static str),
}

/// See the head of this module.
#[derive(Debug)]
pub struct Handshake {
    exports: Vec<Shown>,
    /// TLS is offered, and nothing else is answered before it.
    tls: bool,
    secured: bool,
    /// It is refused whatever it asks for.
    stranger: bool,
    input: Vec<u8>,
    output: Vec<u8>,
    state: State,
    structured: bool,
    extended: bool,
    /// The export for which `base:allocation` was chosen.
    allocation: Option<usize>,
    no_zeroes: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// The client's flags come.
    Flags,
    Option,
    /// So many bytes of an option that is too long are passed over.
    Skip(u64),
    Waits,
    Done(Step),
}

impl Handshake {
    /// A handshake with a client that has just connected. With `tls` it must secure its connection first.
    pub fn new(exports: Vec<Shown>, tls: bool) -> Handshake {
        let mut output = Vec::with_capacity(18);
        output.extend_from_slice(&uapi::MAGIC.to_be_bytes());
        output.extend_from_slice(&uapi::OPTION_MAGIC.to_be_bytes());
        output.extend_from_slice(&(uapi::FLAG_FIXED_NEWSTYLE | uapi::FLAG_NO_ZEROES).to_be_bytes());
        Handshake {
            exports,
            tls,
            secured: false,
            stranger: false,
            input: Vec::new(),
            output,
            state: State::Flags,
            structured: false,
            extended: false,
            allocation: None,
            no_zeroes: false,
        }
    }

    /// Takes in what the client has sent.
    pub fn hear(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// What is to be sent to the client, before the step that was returned last is acted upon.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// TLS is up. What came before that and was not understood is returned: it must not be taken for the
    /// client's words, since anybody on the way could have put it there.
    pub fn secured(&mut self) -> Vec<u8> {
        (self.secured, self.state) = (true, State::Option);
        (self.structured, self.extended, self.allocation) = (false, false, None);
        std::mem::take(&mut self.input)
    }

    /// The client has not the right certificate: from now on it is refused whatever it asks for, and hears
    /// why. Says whether it was not refused before.
    pub fn refuse_stranger(&mut self) -> bool {
        !std::mem::replace(&mut self.stranger, true)
    }

    /// What the client has sent after its choice.
    pub fn into_unread(self) -> Vec<u8> {
        self.input
    }

    /// Goes on as far as possible. An end, a choice and TLS are said again when it is asked again.
    pub fn step(&mut self) -> Step {
        loop {
            match self.state.clone() {
                State::Flags => {
                    let Some(flags) = self.take(4) else { return Step::More };
                    let flags = uapi::u32_at(&flags, 0).unwrap_or(u32::MAX);
                    let known = uapi::FLAG_FIXED_NEWSTYLE | uapi::FLAG_NO_ZEROES;
                    if flags & !u32::from(known) != 0 {
                        return self.end("it has flags that nobody knows");
                    }
                    self.no_zeroes = flags & u32::from(uapi::FLAG_NO_ZEROES) != 0;
                    self.state = State::Option;
                }
                State::Option => match self.option() {
                    Ok(true) => {}
                    Ok(false) => return Step::More,
                    Err(why) => return self.end(why),
                },
                State::Skip(left) => {
                    let some = usize::try_from(left).unwrap_or(usize::MAX).min(self.input.len());
                    self.input.drain(..some);
                    let left = left - some as u64;
                    self.state = if left == 0 { State::Option } else { State::Skip(left) };
                    if left > 0 {
                        return Step::More;
                    }
                }
                State::Waits => return Step::StartTls,
                State::Done(step) => return step,
            }
        }
    }

    fn end(&mut self, why: &'static str) -> Step {
        self.state = State::Done(Step::End(why));
        Step::End(why)
    }

    fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        (self.input.len() >= len).then(|| self.input.drain(..len).collect())
    }

    /// Answers one option; `false` when it is not there as a whole yet.
    fn option(&mut self) -> Result<bool, &'static str> {
        const HEAD: usize = 16;
        let (Some(magic), Some(option), Some(len)) =
            (uapi::u64_at(&self.input, 0), uapi::u32_at(&self.input, 8), uapi::u32_at(&self.input, 12))
        else {
            return Ok(false);
        };
        if magic != uapi::OPTION_MAGIC {
            return Err("what it sends is not an option");
        }
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        if size > LONGEST_OPTION {
            if option == uapi::OPT_EXPORT_NAME {
                return Err("it asks for an export by a name that is too long");
            }
            self.input.drain(..HEAD);
            self.reply(option, uapi::REP_ERR_TOO_BIG, &[]);
            self.state = State::Skip(len.into());
            return Ok(true);
        }
        if self.input.len() < HEAD + size {
            return Ok(false);
        }
        self.input.drain(..HEAD);
        let data = self.take(size).unwrap_or_default();
        self.answer(option, &data)?;
        Ok(true)
    }

    fn answer(&mut self, option: u32, data: &[u8]) -> Result<(), &'static str> {
        let insecure = self.tls && !self.secured;
        match option {
            uapi::OPT_ABORT => {
                self.reply(option, uapi::REP_ACK, &[]);
                self.state = State::Done(Step::End("it has ended the handshake"));
            }
            uapi::OPT_STARTTLS if !self.tls => self.reply(option, uapi::REP_ERR_POLICY, &[]),
            uapi::OPT_STARTTLS if self.secured || !data.is_empty() => {
                self.reply(option, uapi::REP_ERR_INVALID, &[]);
            }
            uapi::OPT_STARTTLS => {
                self.reply(option, uapi::REP_ACK, &[]);
                self.state = State::Waits;
            }
            uapi::OPT_EXPORT_NAME if insecure => return Err("it does not use TLS"),
            _ if insecure => self.reply(option, uapi::REP_ERR_TLS_REQD, &[]),
            uapi::OPT_EXPORT_NAME if self.stranger => return Err(STRANGER),
            _ if self.stranger => self.reply(option, uapi::REP_ERR_POLICY, STRANGER.as_bytes()),
            uapi::OPT_EXPORT_NAME => self.choose_by_name(data)?,
            uapi::OPT_LIST => self.list(data),
            uapi::OPT_INFO | uapi::OPT_GO => self.describe(option, data),
            uapi::OPT_STRUCTURED_REPLY if !data.is_empty() => self.reply(option, uapi::REP_ERR_INVALID, &[]),
            uapi::OPT_STRUCTURED_REPLY if self.extended => {
                self.reply(option, uapi::REP_ERR_EXT_HEADER_REQD, &[]);
            }
            uapi::OPT_STRUCTURED_REPLY => {
                self.structured = true;
                self.reply(option, uapi::REP_ACK, &[]);
            }
            uapi::OPT_EXTENDED_HEADERS if !data.is_empty() || self.extended => {
                self.reply(option, uapi::REP_ERR_INVALID, &[]);
            }
            uapi::OPT_EXTENDED_HEADERS => {
                (self.structured, self.extended) = (true, true);
                self.reply(option, uapi::REP_ACK, &[]);
            }
            uapi::OPT_LIST_META_CONTEXT | uapi::OPT_SET_META_CONTEXT => self.contexts(option, data),
            _ => self.reply(option, uapi::REP_ERR_UNSUP, &[]),
        }
        Ok(())
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) {
        self.output.extend_from_slice(&uapi::OPTION_REPLY_MAGIC.to_be_bytes());
        self.output.extend_from_slice(&option.to_be_bytes());
        self.output.extend_from_slice(&kind.to_be_bytes());
        // No reply is longer than a name.
        self.output.extend_from_slice(&(data.len() as u32).to_be_bytes());
        self.output.extend_from_slice(data);
    }

    /// The place of the export with that name.
    fn find(&self, name: &[u8]) -> Option<usize> {
        let named = self.exports.iter().position(|export| export.name.as_bytes() == name);
        named.or_else(|| (name.is_empty() && !self.exports.is_empty()).then_some(0))
    }

    fn flags(&self, export: &Shown) -> u16 {
        let mut flags = uapi::HAS_FLAGS | uapi::SEND_FLUSH | uapi::SEND_FUA | uapi::CAN_MULTI_CONN;
        flags |= uapi::SEND_CACHE;
        if self.structured {
            flags |= uapi::SEND_DF;
        }
        if export.rotational {
            flags |= uapi::ROTATIONAL;
        }
        if export.read_only {
            return flags | uapi::READ_ONLY;
        }
        if export.trims {
            flags |= uapi::SEND_TRIM;
        }
        flags | uapi::SEND_WRITE_ZEROES | uapi::SEND_FAST_ZERO
    }

    fn agreed(&mut self, at: usize) {
        let export = self.exports.get(at);
        let agreed = Agreed {
            export: export.map(|export| export.name.clone()).unwrap_or_default(),
            structured: self.structured,
            extended: self.extended,
            // They are chosen for one export.
            allocation: self.allocation == Some(at),
        };
        self.state = State::Done(Step::Agreed(at, agreed));
    }

    /// The old way: there is no reply that could say why not.
    fn choose_by_name(&mut self, name: &[u8]) -> Result<(), &'static str> {
        let at = self.find(name).ok_or("it asks for an export that there is not")?;
        let export = self.exports.get(at).ok_or("it asks for an export that there is not")?;
        let (size, flags) = (export.size, self.flags(export));
        self.output.extend_from_slice(&size.to_be_bytes());
        self.output.extend_from_slice(&flags.to_be_bytes());
        if !self.no_zeroes {
            self.output.extend_from_slice(&[0; 124]);
        }
        self.agreed(at);
        Ok(())
    }

    fn list(&mut self, data: &[u8]) {
        const OPTION: u32 = uapi::OPT_LIST;
        if !data.is_empty() {
            return self.reply(OPTION, uapi::REP_ERR_INVALID, &[]);
        }
        let names: Vec<Vec<u8>> =
            self.exports.iter().map(|export| prefixed(export.name.as_bytes())).collect();
        names.iter().for_each(|name| self.reply(OPTION, uapi::REP_SERVER, name));
        self.reply(OPTION, uapi::REP_ACK, &[]);
    }

    fn describe(&mut self, option: u32, data: &[u8]) {
        let mut fields = Fields(data);
        let parsed = fields.text().and_then(|name| {
            let count = fields.number16()?;
            let wanted: Option<Vec<u16>> = (0..count).map(|_| fields.number16()).collect();
            Some((name, wanted?))
        });
        let Some((name, wanted)) = parsed.filter(|_| fields.0.is_empty()) else {
            return self.reply(option, uapi::REP_ERR_INVALID, &[]);
        };
        let Some((at, export)) = self.find(name).and_then(|at| Some((at, self.exports.get(at)?.clone())))
        else {
            return self.reply(option, uapi::REP_ERR_UNKNOWN, &[]);
        };
        let info = |kind: u16, rest: &[u8]| [&kind.to_be_bytes()[..], rest].concat();
        let shown = [&export.size.to_be_bytes()[..], &self.flags(&export).to_be_bytes()].concat();
        self.reply(option, uapi::REP_INFO, &info(uapi::INFO_EXPORT, &shown));
        if wanted.contains(&uapi::INFO_NAME) {
            self.reply(option, uapi::REP_INFO, &info(uapi::INFO_NAME, export.name.as_bytes()));
        }
        if wanted.contains(&uapi::INFO_BLOCK_SIZE) {
            let sizes = [export.smallest, export.preferred.max(export.smallest), LARGEST]
                .map(u32::to_be_bytes)
                .concat();
            self.reply(option, uapi::REP_INFO, &info(uapi::INFO_BLOCK_SIZE, &sizes));
        }
        self.reply(option, uapi::REP_ACK, &[]);
        if option == uapi::OPT_GO {
            self.agreed(at);
        }
    }

    fn contexts(&mut self, option: u32, data: &[u8]) {
        let sets = option == uapi::OPT_SET_META_CONTEXT;
        let mut fields = Fields(data);
        let named = fields.text();
        let queries = fields.number32().filter(|count| *count <= MOST_QUERIES).and_then(|count| {
            let queries: Option<Vec<&[u8]>> = (0..count).map(|_| fields.text()).collect();
            queries.filter(|_| fields.0.is_empty())
        });
        let (Some(name), Some(queries)) = (named, queries) else {
            return self.reply(option, uapi::REP_ERR_INVALID, &[]);
        };
        if sets {
            self.allocation = None;
        }
        if !self.structured {
            return self.reply(option, uapi::REP_ERR_INVALID, &[]);
        }
        let Some(at) = self.find(name) else {
            return self.reply(option, uapi::REP_ERR_UNKNOWN, &[]);
        };
        let context = uapi::BASE_ALLOCATION.as_bytes();
        let wanted =
            queries.contains(&context) || (!sets && (queries.is_empty() || queries.contains(&&b"base:"[..])));
        if wanted {
            // What is only listed has no number.
            let number: u32 = if sets { CONTEXT } else { 0 };
            self.reply(option, uapi::REP_META_CONTEXT, &[&number.to_be_bytes()[..], context].concat());
            if sets {
                self.allocation = Some(at);
            }
        }
        self.reply(option, uapi::REP_ACK, &[]);
    }
}

/// A text with its length before it.
fn prefixed(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text].concat()
}

/// The fields of an option's data, one after the other.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn number16(&mut self) -> Option<u16> {
        self.take(2).and_then(|bytes| uapi::u16_at(bytes, 0))
    }

    fn number32(&mut self) -> Option<u32> {
        self.take(4).and_then(|bytes| uapi::u32_at(bytes, 0))
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.number32()?).ok().filter(|len| *len <= uapi::LONGEST_NAME)?;
        self.take(len)
    }
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;

//! The commands of a whole queue instead of each tag's own (`UBLK_F_BATCH_IO`, Linux 7.0).
//! Never lets a result wait beyond the turn in which it came, unless all lists are still with the kernel.
//!
//! PREP announces all tags once. One multishot FETCH answers with the tags of requests that have arrived.
//! Results gather during a turn and go back in one COMMIT, which also prepares their tags for the next
//! requests.

use becket_engine::{Answer, Io, PICK_SIZE, Token};
use becket_uapi::ublk as uapi;
use rustix::io::Errno;

/// Commands of a queue, as [`Token::kind`]; those of single tags have smaller numbers.
pub(super) const PREP: u8 = 16;
pub(super) const COMMIT: u8 = 17;
pub(super) const PICK: u8 = 18;

/// Lists that may be with the kernel at the same time: it gives a list back with the next turn.
const LISTS: u16 = 4;
/// The driver never answers with more tags at once.
const MOST_TAGS: usize = 128;
const _: () = assert!(MOST_TAGS * size_of::<u16>() <= PICK_SIZE);
/// An answer's tags as the driver wrote them: two bytes each.
pub(super) type Tags = [u8; MOST_TAGS * size_of::<u16>()];

/// What a queue's batch commands have under way.
pub(super) struct Batch {
    queue: u16,
    depth: u16,
    /// Elements carry the address of the tag's buffer.
    addresses: bool,
    /// Results that have not gone to the kernel yet.
    pending: Vec<(u16, i32)>,
    /// For each list, how many elements of it are with the kernel; 0 is a free one.
    with_kernel: [u16; LISTS as usize],
    /// Requests that were taken and whose result has not gone to the kernel.
    taken: u16,
    /// The FETCH is with the kernel.
    fetching: bool,
}

impl Batch {
    pub(super) fn new(queue: u16, depth: u16, addresses: bool) -> Batch {
        Batch {
            queue,
            depth,
            addresses,
            pending: Vec::with_capacity(depth.into()),
            with_kernel: [0; LISTS as usize],
            taken: 0,
            fetching: false,
        }
    }

    /// The memory that these commands need.
    pub(super) fn memory(depth: u16, addresses: bool) -> becket_engine::Batch {
        becket_engine::Batch { lists: LISTS, list_size: usize::from(depth) * element_size(addresses) }
    }

    /// Announces all tags and asks for requests.
    pub(super) fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        for tag in 0..self.depth {
            self.pending.push((tag, 0));
        }
        self.send(io, PREP, uapi::UBLK_U_IO_PREP_IO_CMDS)?;
        self.fetch(io)
    }

    fn fetch(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        let header = uapi::BatchIo {
            q_id: self.queue,
            elem_bytes: size_of::<u16>() as u8,
            nr_elem: MOST_TAGS as u16,
            ..uapi::BatchIo::default()
        };
        let token = Token { kind: PICK, tag: 0 };
        io.multishot(token, uapi::UBLK_U_IO_FETCH_IO_CMDS, header.to_bytes())?;
        self.fetching = true;
        Ok(())
    }

    /// The FETCH has answered with the tags of requests that have arrived; returns how many of the bytes they
    /// are.
    pub(super) fn arrived(&mut self, io: &mut Io<'_>, answer: Answer, tags: &mut Tags) -> usize {
        let len = io.picked(answer, tags);
        self.taken += (len / size_of::<u16>()) as u16;
        if !answer.more {
            self.fetching = false;
            // Out of buffers or of room for answers: it is asked again. Everything else is the device's end.
            let passing = answer.result >= 0 || answer.result == -Errno::NOBUFS.raw_os_error();
            if passing && self.fetch(io).is_err() {
                self.fetching = false;
            }
        }
        len
    }

    /// Room for an answer's tags.
    pub(super) const fn no_tags() -> Tags {
        [0; MOST_TAGS * size_of::<u16>()]
    }

    /// A request has its result.
    #[inline]
    pub(super) fn push(&mut self, tag: u16, result: i32) {
        self.pending.push((tag, result));
    }

    /// Sends the results of this turn.
    pub(super) fn turn_ended(&mut self, io: &mut Io<'_>) {
        if !self.pending.is_empty() {
            let count = self.pending.len();
            match self.send(io, COMMIT, uapi::UBLK_U_IO_COMMIT_IO_CMDS) {
                Ok(()) => {}
                // All lists are with the kernel; one of them comes back with another turn.
                Err(Errno::AGAIN) => return,
                // The ring cannot be submitted to: these are never reported.
                Err(_) => self.pending.clear(),
            }
            self.taken = self.taken.saturating_sub((count - self.pending.len()) as u16);
        }
        if !self.fetching && self.taken == 0 {
            io.close();
        }
    }

    /// Puts what is pending into a free list and hands it to the kernel.
    fn send(&mut self, io: &mut Io<'_>, kind: u8, op: u32) -> Result<(), Errno> {
        let list = self.with_kernel.iter().position(|count| *count == 0).ok_or(Errno::AGAIN)?;
        let size = element_size(self.addresses);
        let (buf_index, address, stride) = (io.registered_index(0), io.buffer_address(0), io.buffer_size());
        let elements = io.list(list as u16).chunks_exact_mut(size);
        let count = elements.len().min(self.pending.len());
        for (element, (tag, result)) in elements.zip(self.pending.drain(..count)) {
            let header = uapi::ElemHeader { tag, buf_index: buf_index.wrapping_add(tag), result };
            let (first, rest) = element.split_at_mut(size_of::<uapi::ElemHeader>());
            first.copy_from_slice(&header.to_bytes());
            if !rest.is_empty() {
                rest.copy_from_slice(&(address + u64::from(tag) * stride).to_ne_bytes());
            }
        }
        self.hand_over(io, kind, op, list, count as u16)
    }

    fn hand_over(
        &mut self,
        io: &mut Io<'_>,
        kind: u8,
        op: u32,
        list: usize,
        count: u16,
    ) -> Result<(), Errno> {
        let carrying = if self.addresses {
            uapi::UBLK_BATCH_F_HAS_BUF_ADDR
        } else {
            uapi::UBLK_BATCH_F_AUTO_BUF_REG_FALLBACK
        };
        let header = uapi::BatchIo {
            q_id: self.queue,
            flags: carrying,
            nr_elem: count,
            elem_bytes: element_size(self.addresses) as u8,
            ..uapi::BatchIo::default()
        };
        self.with_kernel[list] = count;
        io.command_with_list(Token { kind, tag: list as u16 }, op, header.to_bytes(), list as u16)
    }

    /// A list has come back.
    ///
    /// The driver answers a COMMIT with the number of bytes that it took. It stops at an element that it
    /// refuses; that one's request is not ours any more, and the elements behind it are sent again.
    pub(super) fn returned(&mut self, io: &mut Io<'_>, token: Token, result: i32) {
        let list = usize::from(token.tag);
        let Some(count) = self.with_kernel.get_mut(list).map(std::mem::take) else { return };
        if token.kind == PREP {
            if result < 0 {
                // No request can come: the queue ends when its FETCH does.
                tracing::error!("ublk queue {} could not be prepared: error {}", self.queue, -result);
            }
            return;
        }
        let size = element_size(self.addresses);
        let taken = usize::try_from(result).unwrap_or(0) / size;
        let skip = if taken == 0 { 1 } else { taken };
        let rest = usize::from(count).saturating_sub(skip);
        if rest > 0 {
            let bytes = io.list(token.tag);
            let end = (usize::from(count) * size).min(bytes.len());
            bytes.copy_within(skip * size..end, 0);
            if self.hand_over(io, COMMIT, uapi::UBLK_U_IO_COMMIT_IO_CMDS, list, rest as u16).is_err() {
                self.with_kernel[list] = 0;
            }
        }
    }
}

/// Bytes of an element: its header, and the buffer's address in copy mode.
const fn element_size(addresses: bool) -> usize {
    size_of::<uapi::ElemHeader>() + if addresses { size_of::<u64>() } else { 0 }
}

//! Submission entries as the kernel has them (`struct io_uring_sqe` of its `io_uring.h`), where the io-uring
//! crate's do too much or too little.
//! They are made here and pushed nowhere but in [`Ring`](super::Ring).

use io_uring::{opcode, squeue, types::Fixed};

/// `IORING_URING_CMD_MULTISHOT` of the kernel's `io_uring.h`; the io-uring crate does not have it yet.
const URING_CMD_MULTISHOT: u32 = 1 << 1;
/// Where `struct io_uring_sqe` keeps a command's flags and its buffer group.
const COMMAND_FLAGS: std::ops::Range<usize> = 28..32;
const BUFFER_GROUP: std::ops::Range<usize> = 40..42;
/// Where it keeps the flags of an entry.
const FLAGS: usize = 1;
/// Where it keeps an operation's length.
const LENGTH: std::ops::Range<usize> = 24..28;

/// An entry with some of its bytes changed.
fn with_bytes(entry: squeue::Entry, change: impl FnOnce(&mut [u8; 64])) -> squeue::Entry {
    // SAFETY: an entry is the kernel's `struct io_uring_sqe`: 64 bytes without padding; any bytes are valid.
    let mut bytes = unsafe { std::mem::transmute::<squeue::Entry, [u8; 64]>(entry) };
    change(&mut bytes);
    // SAFETY: as above.
    unsafe { std::mem::transmute::<[u8; 64], squeue::Entry>(bytes) }
}

/// The same command, answering again and again into buffers of a group.
pub(crate) fn multishot_into(entry: squeue::Entry, group: u16) -> squeue::Entry {
    with_bytes(entry.flags(squeue::Flags::BUFFER_SELECT), |bytes| {
        bytes[COMMAND_FLAGS].copy_from_slice(&URING_CMD_MULTISHOT.to_ne_bytes());
        bytes[BUFFER_GROUP].copy_from_slice(&group.to_ne_bytes());
    })
}

/// The same read or write with fewer bytes.
pub(crate) fn shortened(entry: squeue::Entry, len: u32) -> squeue::Entry {
    with_bytes(entry, |bytes| bytes[LENGTH].copy_from_slice(&len.to_ne_bytes()))
}

/// The same operation, whose success is not answered.
pub(crate) fn unanswered(entry: squeue::Entry) -> squeue::Entry {
    with_bytes(entry, |bytes| bytes[FLAGS] |= squeue::Flags::SKIP_SUCCESS.bits())
}

/// The same read or write of memory in `count` ranges: the address is that of their list (`struct iovec`).
pub(crate) fn listed(entry: squeue::Entry, count: u32) -> squeue::Entry {
    with_bytes(entry, |bytes| {
        bytes[0] = if bytes[0] == opcode::Write::CODE { opcode::Writev::CODE } else { opcode::Readv::CODE };
        bytes[LENGTH].copy_from_slice(&count.to_ne_bytes());
    })
}

/// A read or write of a registered descriptor.
///
/// With a registered buffer the address counts from that buffer's beginning.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Transfer {
    pub(crate) write: bool,
    /// The descriptor's slot.
    pub(crate) target: u32,
    /// First byte in the file.
    pub(crate) offset: u64,
    /// Number of bytes.
    pub(crate) len: u32,
    /// Where they go to or come from.
    pub(crate) address: u64,
    /// The registered buffer that they are in, if it is one.
    pub(crate) buffer: Option<u16>,
    /// `RWF_*`.
    pub(crate) flags: i32,
}

impl Transfer {
    /// The same as the io-uring crate's `Read`, `Write`, `ReadFixed` and `WriteFixed` make of it, in eight
    /// words (a little-endian `struct io_uring_sqe` is eight words): these are most of all entries.
    #[inline]
    pub(crate) fn entry(self) -> squeue::Entry {
        let code = match (self.write, self.buffer) {
            (false, Some(_)) => opcode::ReadFixed::CODE,
            (true, Some(_)) => opcode::WriteFixed::CODE,
            (false, None) => opcode::Read::CODE,
            (true, None) => opcode::Write::CODE,
        };
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let fixed_file = u32::from(squeue::Flags::FIXED_FILE.bits()) << 8;
        let words = [
            pair(u32::from(code) | fixed_file, self.target),
            self.offset,
            self.address,
            pair(self.len, self.flags.cast_unsigned()),
            0,
            u64::from(self.buffer.unwrap_or(0)),
            0,
            0,
        ];
        // SAFETY: an entry is the kernel's `struct io_uring_sqe`: 64 bytes without padding; any are valid.
        unsafe { std::mem::transmute::<[u64; 8], squeue::Entry>(words.map(u64::to_le)) }
    }
}

/// An entry's eight words, for tests that look at what would be submitted.
#[cfg(test)]
pub(crate) fn words_of(entry: &squeue::Entry) -> [u64; 8] {
    // SAFETY: as in `entry`.
    unsafe { std::mem::transmute::<squeue::Entry, [u64; 8]>(entry.clone()) }
}

/// A registered descriptor's place in the ring's table.
pub(crate) fn fixed(slot: u32) -> Fixed {
    Fixed(slot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_are_the_entries_that_the_crate_makes() {
        let plain = Transfer {
            write: false,
            target: 7000,
            offset: 0x1122_3344_5566_7788,
            len: 0x9abc_def0,
            address: 0x0000_7fff_1234_5678,
            buffer: None,
            flags: libc::RWF_NOWAIT,
        };
        let (fd, address, len) = (fixed(plain.target), plain.address as *mut u8, plain.len);
        let theirs = [
            opcode::Read::new(fd, address, len).offset(plain.offset).rw_flags(plain.flags).build(),
            opcode::Write::new(fd, address, len).offset(plain.offset).rw_flags(plain.flags).build(),
            opcode::ReadFixed::new(fd, address, len, 16383)
                .offset(plain.offset)
                .rw_flags(plain.flags)
                .build(),
            opcode::WriteFixed::new(fd, address, len, 16383)
                .offset(plain.offset)
                .rw_flags(plain.flags)
                .build(),
        ];
        let kinds = [(false, None), (true, None), (false, Some(16383)), (true, Some(16383))];
        for ((write, buffer), theirs) in kinds.into_iter().zip(theirs) {
            let ours = Transfer { write, buffer, ..plain }.entry();
            let short = Transfer { write, buffer, len: 7, ..plain }.entry();
            assert_eq!(words_of(&shortened(ours.clone(), 7)), words_of(&short));
            assert_eq!(words_of(&ours), words_of(&theirs), "write {write}, {buffer:?}");
        }
    }
}

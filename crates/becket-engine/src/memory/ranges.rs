//! Where the bytes of a queue's requests are in a virtual machine's memory, as lists for the kernel.
//! Never trusts an address: each range is looked up in the mappings of the queue's memory.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::io::Errno;

use super::guest::{GuestMemory, GuestRange, copy_in, zero};

/// Bits that the address and the length of a range must not have so that a request is one operation of any
/// file: as queues' own buffers are aligned.
const ODD: u64 = 4095;

/// Where the bytes of a queue's requests are.
pub(crate) struct GuestRanges {
    memory: Arc<GuestMemory>,
    /// Ranges that each request may have.
    most: usize,
    /// `most` for each request.
    ranges: Box<[libc::iovec]>,
    /// How many each request has, and their bytes.
    sizes: Box<[(u16, u64)]>,
    /// What is left of them for the operation in flight.
    vectors: Box<[libc::iovec]>,
}

// SAFETY: the addresses in it are of the memory that it keeps mapped, and as good on any thread.
unsafe impl Send for GuestRanges {}

/// The memory of an operation.
pub(crate) struct Vector {
    /// Of its bytes, or of their list if there are several ranges.
    pub(crate) address: u64,
    /// How many ranges; 0 if the address is that of the bytes.
    pub(crate) count: u32,
    pub(crate) len: u64,
    /// The bits of all addresses and lengths.
    pub(crate) odd: u64,
}

impl GuestRanges {
    pub(crate) fn new(memory: Arc<GuestMemory>, depth: u16, most: u16) -> GuestRanges {
        let none = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        let most = usize::from(most.max(1));
        let list = || vec![none; most * usize::from(depth)].into_boxed_slice();
        let sizes = vec![(0, 0); depth.into()].into_boxed_slice();
        GuestRanges { memory, most, ranges: list(), sizes, vectors: list() }
    }

    /// Notes where a request's bytes are; says whether one operation can carry them all, whatever the file.
    pub(crate) fn set(&mut self, tag: u16, ranges: &[GuestRange]) -> Result<bool, Errno> {
        let first = usize::from(tag) * self.most;
        let (mut count, mut bytes) = (0, 0);
        for range in ranges {
            let (mut address, mut left) = (range.address, u64::from(range.len));
            while left > 0 {
                let (start, len) = self.memory.locate_some(address, left).ok_or(Errno::FAULT)?;
                if count == self.most {
                    return Err(Errno::TOOBIG);
                }
                let iov_base = start.as_ptr().cast();
                self.ranges[first + count] = libc::iovec { iov_base, iov_len: len as usize };
                (address, left) = (address.wrapping_add(len), left - len);
                count += 1;
                bytes += len;
            }
        }
        self.sizes[usize::from(tag)] = (count as u16, bytes);
        Ok(count == 1
            && (self.ranges[first].iov_base as u64 | bytes) & (ODD >> 3) == 0
            && (self.ranges[first].iov_base as u64) & ODD == 0)
    }

    /// Bytes of a request.
    pub(crate) fn bytes(&self, tag: u16) -> u64 {
        self.sizes.get(usize::from(tag)).map_or(0, |(_, bytes)| *bytes)
    }

    /// Address of the bytes of a request of one range.
    #[inline]
    pub(crate) fn address(&self, tag: u16) -> u64 {
        self.ranges.get(usize::from(tag) * self.most).map_or(0, |range| range.iov_base as u64)
    }

    fn parts(&self, tag: u16) -> &[libc::iovec] {
        let first = usize::from(tag) * self.most;
        let count = self.sizes.get(usize::from(tag)).map_or(0, |(count, _)| usize::from(*count));
        self.ranges.get(first..first + count).unwrap_or_default()
    }

    /// Up to `len` bytes of a request from byte `from` on, which `one` range must hold if the operation takes
    /// no list.
    pub(crate) fn vector(&mut self, tag: u16, from: u64, len: u64, one: bool) -> Option<Vector> {
        let first = usize::from(tag) * self.most;
        let count = usize::from(self.sizes.get(usize::from(tag))?.0);
        let (mut skip, mut left) = (from, len);
        let mut vector = Vector { address: 0, count: 0, len: 0, odd: 0 };
        for range in self.ranges.get(first..first + count)? {
            let size = range.iov_len as u64;
            if skip >= size {
                skip -= size;
                continue;
            }
            let part = left.min(size - skip);
            let address = range.iov_base as u64 + skip;
            // Inside of the range, whose memory is mapped.
            let iov_base = range.iov_base.cast::<u8>().wrapping_add(skip as usize).cast();
            let place = self.vectors.get_mut(first + vector.count as usize)?;
            *place = libc::iovec { iov_base, iov_len: part as usize };
            vector.odd |= address | part;
            vector.len += part;
            vector.count += 1;
            (skip, left) = (0, left - part);
            if left == 0 || one {
                break;
            }
        }
        let list = self.vectors.get(first)?;
        match vector.count {
            0 => return None,
            1 => (vector.address, vector.count) = (list.iov_base as u64, 0),
            _ => vector.address = ptr::from_ref(list) as u64,
        }
        Some(vector)
    }

    /// Each range of the bytes from `from` on, `len` of them, with how far each is from `from`.
    fn each(&self, tag: u16, from: u64, len: u64, mut act: impl FnMut(NonNull<u8>, usize, usize)) {
        let (mut skip, mut done) = (from, 0);
        for range in self.parts(tag) {
            let size = range.iov_len as u64;
            if skip >= size {
                skip -= size;
                continue;
            }
            let part = (len - done).min(size - skip);
            // Inside of the range, whose memory is mapped.
            let start = range.iov_base.cast::<u8>().wrapping_add(skip as usize);
            if let Some(start) = NonNull::new(start).filter(|_| part > 0) {
                act(start, done as usize, part as usize);
            }
            (skip, done) = (0, done + part);
        }
    }

    /// Copies bytes to a request's memory from its byte `from` on.
    pub(crate) fn fill(&self, tag: u16, from: u64, bytes: &[u8]) {
        self.each(tag, from, bytes.len() as u64, |to, at, len| copy_in(&bytes[at..at + len], to));
    }

    /// Makes zeroes of `len` bytes of it.
    pub(crate) fn zero(&self, tag: u16, from: u64, len: u64) {
        self.each(tag, from, len, |to, _, len| zero(to, len));
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::GuestPart;

    fn guest(depth: u16, most: u16) -> GuestRanges {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 8 << 12).unwrap();
        let part = |guest, offset| (GuestPart { guest, user: guest, len: 4 << 12, offset }, &file);
        // Two neighbours in the machine whose mappings are apart.
        let memory = GuestMemory::map(&[part(1 << 20, 4 << 12), part((1 << 20) + (4 << 12), 0)]).unwrap();
        GuestRanges::new(Arc::new(memory), depth, most)
    }

    fn range(address: u64, len: u32) -> GuestRange {
        GuestRange { address, len }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn one_aligned_range_is_one_operation_and_any_other_request_a_list() {
        let mut guest = guest(2, 4);
        let base = 1 << 20;
        assert_eq!(guest.set(1, &[range(base + 4096, 4096)]), Ok(true));
        assert_eq!((guest.bytes(1), guest.address(1)), (4096, guest.parts(1)[0].iov_base as u64));
        assert_eq!(guest.set(0, &[range(base + 16, 512)]), Ok(false), "not aligned");
        assert_eq!(guest.set(0, &[range(base, 100)]), Ok(false), "nor this length");
        assert_eq!(guest.set(0, &[range(base + (3 << 12), 8192)]), Ok(false));
        assert_eq!((guest.bytes(0), guest.parts(0).len()), (8192, 2), "across two mappings");
        assert_eq!(guest.set(0, &[range(base, 512), range(base + 8192, 1024)]), Ok(false));
        assert_eq!(guest.bytes(1), 4096, "the other request keeps its own");
        assert_eq!(guest.set(0, &[range(base - 1, 2)]), Err(Errno::FAULT));
        assert_eq!(guest.set(0, &[range(base + (8 << 12) - 1, 2)]), Err(Errno::FAULT));
        assert_eq!(guest.set(0, &[range(u64::MAX - 1, 512)]), Err(Errno::FAULT));
        assert_eq!(guest.set(0, &[range(base, 8); 5]), Err(Errno::TOOBIG));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn what_is_left_of_a_request_is_listed_from_any_byte() {
        let mut guest = guest(1, 4);
        let base = 1 << 20;
        guest.set(0, &[range(base, 512), range(base + 4096, 1024), range(base + 8192, 512)]).unwrap();
        let start = guest.address(0);
        let whole = guest.vector(0, 0, 2048, false).unwrap();
        assert_eq!((whole.count, whole.len, whole.address), (3, 2048, guest.vectors.as_ptr() as u64));
        let one = guest.vector(0, 0, 2048, true).unwrap();
        assert_eq!((one.count, one.len, one.address), (0, 512, start));
        let rest = guest.vector(0, 700, 300, false).unwrap();
        assert_eq!((rest.count, rest.len, rest.address), (0, 300, start + 4096 + 188));
        let across = guest.vector(0, 1530, 100, false).unwrap();
        assert_eq!((across.count, across.len), (2, 100));
        assert_eq!(guest.vectors[0].iov_len, 6);
        assert!(guest.vector(0, 2048, 1, false).is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn what_no_source_holds_is_copied_to_all_ranges() {
        let mut guest = guest(1, 4);
        let base = 1 << 20;
        guest.set(0, &[range(base + 1, 3), range(base + 100, 5)]).unwrap();
        guest.fill(0, 1, b"abcdef");
        let mut bytes = [9; 4];
        assert!(guest.memory.read(base, &mut bytes));
        assert_eq!(&bytes, b"\0\0ab");
        assert!(guest.memory.read(base + 100, &mut bytes));
        assert_eq!(&bytes, b"cdef");
        guest.zero(0, 2, 3);
        assert!(guest.memory.read(base + 100, &mut bytes));
        assert_eq!(&bytes, b"\0\0ef");
    }
}

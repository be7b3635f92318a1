//! Memory that the kernel shares with us: data buffers and mappings of device descriptors.
//! Hands out no raw pointer that outlives its owner; every access is bounds-checked.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ffi::c_void,
    os::fd::{AsFd, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::Error;

mod fault;
mod guest;
mod ranges;

pub use guest::{Area, GuestMemory, GuestPart, GuestRange};
pub(crate) use ranges::GuestRanges;

/// What processors fetch at once, in bytes.
const CACHE_LINE: usize = 64;

/// A mapping that is unmapped when dropped, or a piece of the heap that is given back.
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
    /// It is of the heap, got in this way.
    heap: Option<Layout>,
}

// SAFETY: a Region is the only owner of its mapping and an address is as good on one thread as on another.
unsafe impl Send for Region {}

impl Region {
    /// Zeroed memory of our own, page-aligned; `what` it is for, should there be none.
    pub(crate) fn anonymous(len: usize, what: &'static str) -> Result<Region, Error> {
        let failed = |source| Error::Map { what, bytes: len, source };
        // SAFETY: an anonymous mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }
        .map_err(|errno| failed(errno.into()))?;
        let base = NonNull::new(base.cast::<u8>());
        Ok(Region {
            base: base.ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?,
            len,
            heap: None,
        })
    }

    /// Zeroed memory of our own that need not begin a page: for less than one, a mapping would cost a page
    /// and two system calls.
    fn small(len: usize, what: &'static str) -> Result<Region, Error> {
        let failed = |kind: std::io::ErrorKind| Error::Map { what, bytes: len, source: kind.into() };
        let layout = Layout::from_size_align(len, CACHE_LINE);
        let layout = layout.ok().filter(|layout| layout.size() > 0);
        let layout = layout.ok_or_else(|| failed(std::io::ErrorKind::InvalidInput))?;
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) });
        Ok(Region {
            base: base.ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory))?,
            len,
            heap: Some(layout),
        })
    }

    /// The first `len` bytes of a file of memory that is ours alone.
    fn of_a_file(file: &OwnedFd, len: usize, what: &'static str) -> Result<Region, Error> {
        let failed = |source| Error::Map { what, bytes: len, source };
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
        }
        .map_err(|errno| failed(errno.into()))?;
        let base = NonNull::new(base.cast::<u8>());
        Ok(Region {
            base: base.ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?,
            len,
            heap: None,
        })
    }

    /// Asks the kernel to leave the pages where they are: khugepaged then does not remove them for a moment
    /// to merge them into a huge page. A kernel without huge pages is as good.
    fn stay_small(self) -> Region {
        // It takes no advice.
        if cfg!(miri) {
            return self;
        }
        // SAFETY: the range is our mapping, and the advice changes nothing that can be read in it.
        let _ = unsafe { madvise(self.base.as_ptr().cast::<c_void>(), self.len, Advice::LinuxNoHugepage) };
        self
    }

    /// Its first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(layout) = self.heap {
            // SAFETY: it was got by this layout, and only this code gives it back.
            return unsafe { dealloc(self.base.as_ptr(), layout) };
        }
        // SAFETY: base and len are those of a mapping that we made and only we unmap. A failure leaves the
        // mapping in place, which is a leak and not unsound.
        let _ = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
    }
}

/// One page-aligned data buffer for each request of a queue, mapped once when the queue is made. Before each
/// lies its head, of the requested length: the two together are the buffer's frame.
///
/// The kernel reads and writes these buffers while an operation is in flight; [`Buffers::slice`] may only be
/// used for a request that has none, which the queue guarantees by its borrow of the request's slot.
pub(crate) struct Buffers {
    region: Region,
    count: usize,
    size: usize,
    head: usize,
    /// From one buffer to the next, and from the beginning to the first.
    stride: usize,
    first: usize,
    /// Which frames have pages of their own.
    touched: Box<[bool]>,
}

impl Buffers {
    /// `count` buffers of `size` bytes each, without heads; `size` is a multiple of the page size.
    pub(crate) fn new(count: usize, size: usize) -> Result<Buffers, Error> {
        Buffers::framed(count, 0, size)
    }

    /// The same with `head` bytes before each.
    pub(crate) fn framed(count: usize, head: usize, size: usize) -> Result<Buffers, Error> {
        let what = "request buffers";
        let first = head.next_multiple_of(rustix::param::page_size());
        let stride = first.checked_add(size);
        let len = stride.and_then(|stride| count.checked_mul(stride)).filter(|len| *len > 0 && size > 0);
        let (Some(stride), Some(len)) = (stride, len) else {
            return Err(Error::Map { what, bytes: 0, source: std::io::ErrorKind::InvalidInput.into() });
        };
        let region = Region::anonymous(len, what)?;
        let region = if head > 0 { region.stay_small() } else { region };
        let touched = vec![false; if head > 0 { count } else { 0 }].into_boxed_slice();
        Ok(Buffers { region, count, size, head, stride, first, touched })
    }

    /// `count` small buffers of `size` bytes each, one after another, aligned for their contents and not to
    /// pages.
    pub(crate) fn small(count: usize, size: usize) -> Result<Buffers, Error> {
        let what = "lists of commands";
        let len = count.checked_mul(size).ok_or(Error::Map {
            what,
            bytes: 0,
            source: std::io::ErrorKind::InvalidInput.into(),
        })?;
        let region = Region::small(len, what)?;
        Ok(Buffers { region, count, size, head: 0, stride: size, first: 0, touched: Box::default() })
    }

    /// `count` buffers of `size` bytes each in a [memfd](file_of_memory), one after another from its first
    /// byte.
    pub(crate) fn in_a_file(count: usize, size: usize) -> Result<(Buffers, OwnedFd), Error> {
        let what = "bytes that are made up";
        let len = count.checked_mul(size).filter(|len| *len > 0);
        let len =
            len.ok_or(Error::Map { what, bytes: 0, source: std::io::ErrorKind::InvalidInput.into() })?;
        let file = file_of_memory(len as u64, what)?;
        let region = Region::of_a_file(&file, len, what)?;
        let buffers =
            Buffers { region, count, size, head: 0, stride: size, first: 0, touched: Box::default() };
        Ok((buffers, file))
    }

    /// Address of a request's buffer, or null when there is no such request.
    pub(crate) fn address(&self, index: usize) -> *mut u8 {
        if index >= self.count {
            return ptr::null_mut();
        }
        self.region.base.as_ptr().wrapping_add(index * self.stride + self.first)
    }

    /// Address and length of a part of a request's frame; `None` when it reaches beyond.
    pub(crate) fn part(&self, index: usize, from: usize, len: usize) -> Option<(*mut u8, u32)> {
        let inside = from.checked_add(len)? <= self.head + self.size;
        let start = self.address(index);
        (inside && !start.is_null())
            .then(|| Some((start.wrapping_sub(self.head).wrapping_add(from), u32::try_from(len).ok()?)))?
    }

    /// Bytes of each frame.
    pub(crate) fn frame_size(&self) -> usize {
        self.head + self.size
    }

    /// The bytes of a request's frame, under the conditions of [`Buffers::slice`].
    pub(crate) fn frame(&mut self, index: usize) -> &mut [u8] {
        let Some((start, len)) = self.part(index, 0, self.frame_size()) else { return &mut [] };
        // SAFETY: a frame lies in our mapping: heads are no longer than what is before the first buffer and
        // between two. As for the rest see `slice`.
        unsafe { std::slice::from_raw_parts_mut(start, len as usize) }
    }

    /// Makes sure that a frame has its pages, under the conditions of [`Buffers::slice`]: the kernel then
    /// finds them also for a thread that is being killed, whose page faults fail. A request that is delivered
    /// only once must not be lost so; therefore frames [stay small](Region::stay_small), too.
    pub(crate) fn touch(&mut self, index: usize) {
        if self.touched.get(index) == Some(&false) {
            self.frame(index).fill(0);
            self.touched[index] = true;
        }
    }

    /// Bytes in each buffer.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// The bytes of a request's buffer while no operation of it is in flight.
    pub(crate) fn slice(&mut self, index: usize) -> &mut [u8] {
        if index >= self.count {
            return &mut [];
        }
        // SAFETY: index is in range, so the bytes lie in our mapping; `&mut self` keeps every other Rust
        // reference away, and the queue calls this only for a request without an operation in flight.
        unsafe { std::slice::from_raw_parts_mut(self.address(index), self.size) }
    }
}

/// The parts of a message that one operation sends, as the kernel wants to have them (`struct msghdr`).
///
/// The memory that the parts point to is the caller's to keep until the operation has completed.
pub(crate) struct Vectors {
    parts: Box<[libc::iovec]>,
    header: Box<libc::msghdr>,
}

// SAFETY: the addresses in it are of memory that belongs to the same queue, and are as good on one thread as
// on another.
unsafe impl Send for Vectors {}

impl Vectors {
    /// Room for `count` parts.
    pub(crate) fn new(count: usize) -> Vectors {
        let none = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        // SAFETY: `struct msghdr` is numbers and pointers, for which zeroes are valid.
        let header = Box::new(unsafe { std::mem::zeroed::<libc::msghdr>() });
        Vectors { parts: vec![none; count].into_boxed_slice(), header }
    }

    /// How many parts there can be.
    pub(crate) fn count(&self) -> usize {
        self.parts.len()
    }

    /// A part is these bytes.
    pub(crate) fn set(&mut self, index: usize, address: *mut u8, len: u32) {
        if let Some(part) = self.parts.get_mut(index) {
            *part = libc::iovec { iov_base: address.cast::<c_void>(), iov_len: len as usize };
        }
    }

    /// Leaves the first `bytes` of all parts out; returns how many parts there are then. The parts behind
    /// the last that was set have no bytes.
    pub(crate) fn advance(&mut self, mut bytes: usize, parts: usize) -> usize {
        let mut first = 0;
        for part in self.parts.iter_mut().take(parts) {
            if bytes < part.iov_len {
                part.iov_base = part.iov_base.wrapping_byte_add(bytes);
                part.iov_len -= bytes;
                break;
            }
            bytes -= part.iov_len;
            first += 1;
        }
        self.parts.copy_within(first..parts, 0);
        parts - first
    }

    /// A message of the first `count` parts. It stays where it is until the next call.
    pub(crate) fn message(&mut self, count: usize) -> *const libc::msghdr {
        self.header.msg_iov = self.parts.as_mut_ptr();
        self.header.msg_iovlen = count.min(self.parts.len()) as _;
        &raw const *self.header
    }
}

/// A private memfd; it reads as zeroes, and takes memory only where it is written. It is marked as
/// non-blocking, which is true, so a ring knows that its reads need no thread.
pub(crate) fn file_of_memory(len: u64, what: &'static str) -> Result<OwnedFd, Error> {
    let failed =
        |errno: Errno| Error::Map { what, bytes: len.try_into().unwrap_or(usize::MAX), source: errno.into() };
    let file = memfd_create("becket", MemfdFlags::CLOEXEC).map_err(failed)?;
    ftruncate(&file, len).map_err(failed)?;
    // By the call that a worker may make once it serves.
    ioctl_fionbio(&file, true).map_err(failed)?;
    Ok(file)
}

/// A shared read-only mapping of a device's descriptors.
///
/// The kernel changes the words behind our back, between requests; they are read with atomic loads.
pub struct SharedWords {
    region: Region,
}

impl SharedWords {
    /// Maps `len` bytes of `file` from `offset`, which is a multiple of the page size.
    ///
    /// # Errors
    /// [`Error::Map`] with what `mmap(2)` said.
    pub fn map(file: impl AsFd, offset: u64, len: usize) -> Result<SharedWords, Error> {
        let what = "request descriptors";
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, offset) }
            .map_err(|errno| Error::Map { what, bytes: len, source: errno.into() })?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(Error::Map {
            what,
            bytes: len,
            source: std::io::ErrorKind::OutOfMemory.into(),
        })?;
        Ok(SharedWords { region: Region { base, len, heap: None } })
    }

    /// Neighbouring 64-bit words from a byte offset, a multiple of eight; `None` when one is outside the
    /// mapping.
    #[inline]
    pub fn words<const N: usize>(&self, offset: usize) -> Option<[u64; N]> {
        if !offset.is_multiple_of(8) || offset.checked_add(8 * N)? > self.region.len {
            return None;
        }
        // SAFETY: the words lie in our mapping, are aligned (mappings are page-aligned), and are only ever
        // read atomically by us; the kernel's writes to them happen before the completion that makes us look.
        let words = unsafe { &*self.region.base.as_ptr().wrapping_add(offset).cast::<[AtomicU64; N]>() };
        Some(std::array::from_fn(|index| words[index].load(Ordering::Acquire)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn buffers_are_apart_and_page_aligned() {
        let mut buffers = Buffers::new(3, 8192).unwrap();
        for index in 0..3 {
            assert_eq!(buffers.address(index) as usize & 4095, 0);
            buffers.slice(index).fill(index as u8 + 1);
        }
        for index in 0..3 {
            assert!(buffers.slice(index).iter().all(|byte| *byte == index as u8 + 1));
        }
        assert!(buffers.address(3).is_null());
        assert!(buffers.slice(3).is_empty());
    }

    #[test]
    fn a_frame_is_a_head_and_an_aligned_buffer() {
        let mut buffers = Buffers::framed(2, 80, 8192).unwrap();
        buffers.frame(0).fill(1);
        buffers.frame(1).fill(2);
        for index in 0..2 {
            let start = buffers.address(index) as usize;
            assert_eq!((start & 4095, buffers.frame(index).as_ptr() as usize), (0, start - 80));
            assert_eq!(buffers.frame(index).len(), 80 + 8192);
            assert!(buffers.frame(index).iter().all(|byte| *byte == index as u8 + 1));
        }
        buffers.touch(1);
        assert!(buffers.frame(1).iter().all(|byte| *byte == 0) && buffers.frame(0)[0] == 1);
        buffers.frame(1).fill(3);
        buffers.touch(1);
        assert_eq!(buffers.frame(1)[0], 3, "only once");
        assert_eq!(buffers.part(0, 64, 16 + 8192).map(|(_, len)| len), Some(16 + 8192));
        assert_eq!(buffers.part(0, 64, 17 + 8192), None);
        assert_eq!(buffers.part(0, usize::MAX, 2), None);
        assert_eq!(buffers.part(2, 0, 1), None);
        assert!(buffers.frame(2).is_empty());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn buffers_in_a_file_are_what_the_file_holds() {
        use std::os::unix::fs::FileExt;
        let (mut buffers, file) = Buffers::in_a_file(3, 8192).unwrap();
        buffers.slice(1).fill(7);
        let file = std::fs::File::from(file);
        let mut bytes = vec![9; 3 * 8192];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let of = |from: usize, byte| bytes[from..from + 8192].iter().all(|b| *b == byte);
        assert!(of(0, 0) && of(8192, 7) && of(16384, 0));
        assert!(buffers.slice(3).is_empty());
        assert!(Buffers::in_a_file(0, 8192).is_err() && Buffers::in_a_file(usize::MAX, 8192).is_err());
    }

    #[test]
    fn small_buffers_lie_one_after_another() {
        let mut buffers = Buffers::small(3, 24).unwrap();
        assert_eq!(buffers.address(0) as usize % CACHE_LINE, 0);
        for index in 0..3 {
            assert_eq!(buffers.address(index) as usize, buffers.address(0) as usize + 24 * index);
            assert!(buffers.slice(index).iter().all(|byte| *byte == 0));
            buffers.slice(index).fill(index as u8 + 1);
        }
        assert!((0..3).all(|index| buffers.slice(index).iter().all(|byte| *byte == index as u8 + 1)));
        assert!(buffers.address(3).is_null() && buffers.slice(3).is_empty());
        assert!(Buffers::small(0, 24).is_err() && Buffers::small(usize::MAX, 24).is_err());
    }

    #[test]
    fn no_buffers_is_an_error() {
        assert!(Buffers::new(0, 4096).is_err());
        assert!(Buffers::new(usize::MAX, 4096).is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn words_are_bounded() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[0u8; 4088]).unwrap();
        file.write_all(&7u64.to_ne_bytes()).unwrap();
        let words = SharedWords::map(&file, 0, 4096).unwrap();
        assert_eq!(words.words(0), Some([0, 0]));
        assert_eq!(words.words(4080), Some([0, 7]));
        assert_eq!(words.words(4088), Some([7]));
        assert_eq!(words.words::<2>(4088), None);
        assert_eq!(words.words::<1>(4090), None);
        assert_eq!(words.words::<1>(4096), None);
        assert_eq!(words.words::<1>(usize::MAX - 7), None);
    }
}

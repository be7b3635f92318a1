//! Memory of a virtual machine, which its hypervisor shares with us by descriptors.
//! It belongs to a stranger who changes it at any time: it is only read by copies and atomic loads, each
//! within its bounds, and never through a reference to its bytes.

use std::{
    os::fd::AsFd,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering},
    },
};

use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munlock};

use super::{Region, fault::Guard};
use crate::Error;

const WHAT: &str = "a virtual machine's memory";

/// Where a part of the memory is, as the hypervisor describes it. All are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestPart {
    /// Its first address in the virtual machine.
    pub guest: u64,
    /// Its first address in the hypervisor, by which the rings are named.
    pub user: u64,
    /// How long it is.
    pub len: u64,
    /// Where it begins in the file.
    pub offset: u64,
}

/// A range of the virtual machine's memory that a request's bytes are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GuestRange {
    /// First address in the virtual machine.
    pub address: u64,
    /// Number of bytes.
    pub len: u32,
}

/// The memory of a virtual machine. Its mappings stay as long as anybody has a share of it.
pub struct GuestMemory {
    parts: Box<[Part]>,
}

struct Part {
    at: GuestPart,
    /// Its first byte.
    start: NonNull<u8>,
    // Dropped before the mapping, which it must not outlive.
    guard: Guard,
    _region: Region,
}

// SAFETY: a part owns its mapping, whose bytes are only reached by atomic and volatile accesses, and an
// address is as good on one thread as on another.
unsafe impl Send for Part {}
// SAFETY: as above.
unsafe impl Sync for Part {}

impl GuestMemory {
    /// Maps all parts, each of which is a range of a regular file. Nothing of them is locked in memory, also
    /// in a process that locks all that it maps.
    ///
    /// # Errors
    /// A part is empty, overlaps another one, does not lie in its file, or cannot be mapped.
    pub fn map<F: AsFd>(parts: &[(GuestPart, F)]) -> Result<GuestMemory, Error> {
        let mapped = parts.iter().map(|(at, file)| Part::map(*at, file));
        let mut mapped = mapped.collect::<Result<Vec<Part>, Error>>()?;
        mapped.sort_by_key(|part| part.at.guest);
        let overlap = mapped.windows(2).any(|pair| pair[0].at.guest + pair[0].at.len > pair[1].at.guest);
        match overlap {
            true => Err(refused(0, "its parts overlap")),
            false => Ok(GuestMemory { parts: mapped.into() }),
        }
    }

    /// Whether a page of it was not there: its file was truncated. Such pages read as zeroes, and what is
    /// written to them is lost.
    pub fn is_lost(&self) -> bool {
        self.parts.iter().any(|part| part.guard.is_lost())
    }

    /// Where so many bytes from an address of the virtual machine are; `None` where they are not in one part.
    #[inline]
    pub(crate) fn locate(&self, address: u64, len: u64) -> Option<NonNull<u8>> {
        self.find(address, len, |at| at.guest)
    }

    /// The beginning of a range as long as it lies in one part, and how long that is.
    pub(crate) fn locate_some(&self, address: u64, len: u64) -> Option<(NonNull<u8>, u64)> {
        self.parts.iter().find_map(|part| {
            let from = address.wrapping_sub(part.at.guest);
            let inside = part.at.len.checked_sub(from).filter(|inside| *inside > 0)?;
            // SAFETY: `from` is less than the part's length, which is mapped.
            Some((unsafe { part.start.add(from as usize) }, inside.min(len)))
        })
    }

    #[inline]
    fn find(&self, address: u64, len: u64, first: fn(&GuestPart) -> u64) -> Option<NonNull<u8>> {
        self.parts.iter().find_map(|part| {
            let from = address.wrapping_sub(first(&part.at));
            let inside = from < part.at.len && len <= part.at.len - from;
            // SAFETY: `from` is less than the part's length, which is mapped.
            inside.then(|| unsafe { part.start.add(from as usize) })
        })
    }

    /// Copies bytes from an address of the virtual machine; `false` where they are not all in one part.
    #[inline]
    #[must_use]
    pub fn read(&self, address: u64, into: &mut [u8]) -> bool {
        let Some(from) = self.locate(address, into.len() as u64) else { return false };
        copy_out(from, into);
        true
    }

    /// Copies bytes to an address of the virtual machine; `false` where they would not all be in one part.
    #[inline]
    #[must_use]
    pub fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let Some(to) = self.locate(address, bytes.len() as u64) else { return false };
        copy_in(bytes, to);
        true
    }

    /// A table of a ring, named by its address in the hypervisor or (`in_guest`) in the virtual machine.
    /// `None` where it is not in one part, or not aligned to eight bytes or `align`, a power of two.
    pub fn area(self: &Arc<Self>, address: u64, len: usize, align: usize, in_guest: bool) -> Option<Area> {
        let first: fn(&GuestPart) -> u64 = if in_guest { |at| at.guest } else { |at| at.user };
        let start = self.find(address, len as u64, first)?;
        let aligned = (start.as_ptr() as usize).is_multiple_of(align);
        aligned.then(|| Area { start, len, _memory: Arc::clone(self) })
    }
}

impl std::fmt::Debug for GuestMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.parts.iter().map(|part| part.at)).finish()
    }
}

fn refused(bytes: u64, why: &'static str) -> Error {
    let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, why);
    Error::Map { what: WHAT, bytes: bytes.try_into().unwrap_or(usize::MAX), source }
}

impl Part {
    fn map(at: GuestPart, file: impl AsFd) -> Result<Part, Error> {
        let failed = |errno: Errno| Error::Map {
            what: WHAT,
            bytes: at.len.try_into().unwrap_or(usize::MAX),
            source: errno.into(),
        };
        let stat = fstat(&file).map_err(failed)?;
        let end = at.offset.checked_add(at.len);
        let ends = end.zip(at.guest.checked_add(at.len)).zip(at.user.checked_add(at.len));
        let Some(((end, _), _)) = ends.filter(|_| at.len > 0) else {
            return Err(refused(at.len, "a part is empty or too long"));
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refused(at.len, "a part is not in a file"));
        }
        if u64::try_from(stat.st_size).unwrap_or(0) < end {
            return Err(refused(at.len, "a part ends behind its file"));
        }
        // Of a file of huge pages that is what mappings must be multiples of.
        let page = rustix::param::page_size();
        let huge = usize::try_from(stat.st_blksize).unwrap_or(0);
        let page = if huge.is_power_of_two() { page.max(huge) } else { page };
        let before = at.offset % page as u64;
        let len = usize::try_from(before + at.len).ok().and_then(|len| len.checked_next_multiple_of(page));
        let len = len.ok_or_else(|| refused(at.len, "a part is too long"))?;
        // A process that locks all its memory would read in all of it now. What nobody may touch is not read
        // in, and what is not locked any more when it may be touched is not either.
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            mmap(ptr::null_mut(), len, ProtFlags::empty(), MapFlags::SHARED, &file, at.offset - before)
        };
        let base = NonNull::new(base.map_err(failed)?.cast::<u8>()).ok_or_else(|| failed(Errno::NOMEM))?;
        let region = Region { base, len, heap: None };
        let all = base.as_ptr().cast();
        // SAFETY: the range is our mapping, to which no reference exists.
        unsafe {
            munlock(all, len).map_err(failed)?;
            mprotect(all, len, MprotectFlags::READ | MprotectFlags::WRITE).map_err(failed)?;
        }
        let guard = Guard::new(base.as_ptr() as usize, len, page).map_err(failed)?;
        // SAFETY: `before` is less than the mapping's length.
        Ok(Part { at, start: unsafe { base.add(before as usize) }, guard, _region: region })
    }
}

/// Copies bytes that others may change meanwhile.
#[inline]
pub(crate) fn copy_out(from: NonNull<u8>, into: &mut [u8]) {
    let whole = (from.as_ptr() as usize).is_multiple_of(8) && into.len().is_multiple_of(8);
    if whole {
        for (index, word) in into.chunks_exact_mut(8).enumerate() {
            // SAFETY: callers have located so many bytes; the address is aligned.
            let value = unsafe { from.cast::<u64>().add(index).read_volatile() };
            word.copy_from_slice(&value.to_ne_bytes());
        }
    } else {
        for (index, byte) in into.iter_mut().enumerate() {
            // SAFETY: callers have located so many bytes.
            *byte = unsafe { from.add(index).read_volatile() };
        }
    }
}

/// Copies bytes to where others may read or change them meanwhile.
#[inline]
pub(crate) fn copy_in(bytes: &[u8], to: NonNull<u8>) {
    // SAFETY: callers have located so many bytes, in a mapping that no Rust object is in.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
}

/// Makes zeroes of bytes that others may read or change meanwhile.
pub(crate) fn zero(to: NonNull<u8>, len: usize) {
    // SAFETY: callers have located so many bytes, in a mapping that no Rust object is in.
    unsafe { ptr::write_bytes(to.as_ptr(), 0, len) };
}

/// A table in a virtual machine's memory: words that both sides read and write. Offsets are bytes; words
/// outside of the table, or not aligned, read as zero, and writes of them do nothing. Words are
/// little-endian.
pub struct Area {
    start: NonNull<u8>,
    len: usize,
    _memory: Arc<GuestMemory>,
}

// SAFETY: its bytes are only reached by atomic accesses, and it keeps their mapping.
unsafe impl Send for Area {}

impl Area {
    #[inline]
    fn place(&self, at: usize, size: usize) -> Option<NonNull<u8>> {
        let inside = at < self.len && size <= self.len - at;
        // SAFETY: `at` is inside of the area.
        let place = inside.then(|| unsafe { self.start.add(at) })?;
        (place.as_ptr() as usize & (size - 1) == 0).then_some(place)
    }

    /// A word of 16 bits.
    #[inline]
    pub fn u16(&self, at: usize, order: Ordering) -> u16 {
        // SAFETY: the place is mapped and aligned.
        self.place(at, 2).map_or(0, |place| unsafe { place.cast::<AtomicU16>().as_ref() }.load(order).to_le())
    }

    /// Writes a word of 16 bits.
    #[inline]
    pub fn set_u16(&self, at: usize, value: u16, order: Ordering) {
        if let Some(place) = self.place(at, 2) {
            // SAFETY: the place is mapped and aligned.
            unsafe { place.cast::<AtomicU16>().as_ref() }.store(value.to_le(), order);
        }
    }

    /// A word of 32 bits.
    #[inline]
    pub fn u32(&self, at: usize, order: Ordering) -> u32 {
        // SAFETY: the place is mapped and aligned.
        self.place(at, 4).map_or(0, |place| unsafe { place.cast::<AtomicU32>().as_ref() }.load(order).to_le())
    }

    /// Writes a word of 32 bits.
    #[inline]
    pub fn set_u32(&self, at: usize, value: u32, order: Ordering) {
        if let Some(place) = self.place(at, 4) {
            // SAFETY: the place is mapped and aligned.
            unsafe { place.cast::<AtomicU32>().as_ref() }.store(value.to_le(), order);
        }
    }

    /// A word of 64 bits.
    #[inline]
    pub fn u64(&self, at: usize, order: Ordering) -> u64 {
        // SAFETY: the place is mapped and aligned.
        self.place(at, 8).map_or(0, |place| unsafe { place.cast::<AtomicU64>().as_ref() }.load(order).to_le())
    }

    /// Writes a word of 64 bits.
    #[inline]
    pub fn set_u64(&self, at: usize, value: u64, order: Ordering) {
        if let Some(place) = self.place(at, 8) {
            // SAFETY: the place is mapped and aligned.
            unsafe { place.cast::<AtomicU64>().as_ref() }.store(value.to_le(), order);
        }
    }

    /// Number of bytes.
    #[allow(clippy::len_without_is_empty, reason = "no table is empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl std::fmt::Debug for Area {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Area").field("len", &self.len).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    const PAGE: u64 = 4096;

    fn file(pages: u64) -> OwnedFd {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, pages * PAGE).unwrap();
        file
    }

    fn part(guest: u64, len: u64, offset: u64) -> GuestPart {
        GuestPart { guest, user: guest.wrapping_add(1 << 40), len, offset }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn bytes_are_found_by_both_kinds_of_addresses_and_within_bounds() {
        let file = file(8);
        rustix::io::pwrite(&file, &[7; 16], 5 * PAGE + 32).unwrap();
        let parts = [(part(0x10000, 2 * PAGE, 0), &file), (part(0x100, 2 * PAGE, 5 * PAGE + 16), &file)];
        let memory = Arc::new(GuestMemory::map(&parts).unwrap());
        let mut bytes = [0; 17];
        assert!(memory.read(0x110, &mut bytes[..16]));
        assert_eq!(bytes[..16], [7; 16]);
        assert!(memory.read(0x110, &mut bytes));
        assert_eq!(bytes[16], 0);
        assert!(!memory.read(0x10000 + 2 * PAGE - 16, &mut bytes), "beyond the end");
        assert!(!memory.read(0xff, &mut bytes[..1]) && !memory.read(u64::MAX, &mut bytes));
        assert!(memory.write(0x10000, b"ring"));
        let area = memory.area(0x10000 + (1 << 40), 4096, 16, false).unwrap();
        assert_eq!(area.u16(0, Ordering::Relaxed), u16::from_le_bytes(*b"ri"));
        assert_eq!(area.u16(1, Ordering::Relaxed), 0, "not aligned");
        assert_eq!((area.u64(4089, Ordering::Relaxed), area.u64(4096, Ordering::Relaxed)), (0, 0));
        area.set_u32(4092, 5, Ordering::Relaxed);
        assert!(memory.read(0x10000 + 4092, &mut bytes[..4]));
        assert_eq!(bytes[..4], [5, 0, 0, 0]);
        assert!(memory.area(0x10000 + (1 << 40), 3 * PAGE as usize, 16, false).is_none());
        assert!(memory.area(0x10000, 8, 16, false).is_none());
        assert!(memory.area(0x10000, 8, 16, true).is_some());
        assert_eq!(memory.locate_some(0x10000 + PAGE, 1 << 40).unwrap().1, PAGE);
        assert!(!memory.is_lost());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn parts_that_make_no_sense_are_refused() {
        let file = file(4);
        let map = |parts: &[GuestPart]| {
            GuestMemory::map(&parts.iter().map(|part| (*part, &file)).collect::<Vec<_>>())
        };
        assert!(map(&[part(0, 4 * PAGE, 0)]).is_ok());
        for refused in [
            vec![part(0, 0, 0)],
            vec![part(0, 5 * PAGE, 0)],
            vec![part(0, PAGE, 4 * PAGE)],
            vec![part(0, PAGE, u64::MAX)],
            vec![part(u64::MAX, PAGE, 0)],
            vec![part(0, u64::MAX, 1)],
            vec![part(0, 2 * PAGE, 0), part(PAGE, PAGE, 0)],
        ] {
            assert!(map(&refused).is_err(), "{refused:?}");
        }
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(GuestMemory::map(&[(part(0, PAGE, 0), &reader)]).is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn memory_is_not_locked_nor_read_in_where_all_else_is() {
        const CHILD: &str = "BECKET_TEST_LOCKS";
        if std::env::var_os(CHILD).is_some() {
            rustix::mm::mlockall(rustix::mm::MlockAllFlags::FUTURE).unwrap();
            let taken = |file: &OwnedFd| fstat(file).unwrap().st_blocks;
            // What is mapped as anything else is read in.
            let plain = file(16);
            Region::of_a_file(&plain, 16 * PAGE as usize, "a test").unwrap();
            assert!(taken(&plain) > 0);
            let file = file(16);
            let memory = GuestMemory::map(&[(part(0, 16 * PAGE, 0), &file)]).unwrap();
            assert_eq!(taken(&file), 0);
            assert!(memory.write(PAGE, &[1]));
            assert_eq!(taken(&file), 8, "one page");
            return;
        }
        let name = "memory::guest::tests::memory_is_not_locked_nor_read_in_where_all_else_is";
        let mut test = std::process::Command::new(std::env::current_exe().unwrap());
        let child = test.args(["--exact", name, "--test-threads=1"]).env(CHILD, "1").output().unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn memory_that_is_truncated_reads_as_zeroes_and_says_so() {
        let file = file(4);
        rustix::io::pwrite(&file, &[9; 4 * PAGE as usize], 0).unwrap();
        let memory = GuestMemory::map(&[(part(0, 4 * PAGE, 0), &file)]).unwrap();
        let mut bytes = [1; 8];
        ftruncate(&file, PAGE).unwrap();
        assert!(memory.read(2 * PAGE + 8, &mut bytes));
        assert_eq!(bytes, [0; 8]);
        assert!(memory.is_lost());
        assert!(memory.write(3 * PAGE, &[1; 8]), "not even this ends the process");
        assert!(memory.read(0, &mut bytes));
        assert_eq!(bytes, [9; 8], "what is still there");
    }
}

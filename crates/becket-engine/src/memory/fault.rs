//! Memory that another process may take away: a shared file that is truncated raises SIGBUS in its readers.
//! The handler puts zeroes in the place of a page of such memory, notes the loss, and touches nothing else.
//!
//! The same is done by compositors for the buffers of their clients (libwayland's `wl_shm`). Sealed files
//! (`F_SEAL_SHRINK`) cannot be truncated, but not every hypervisor seals its memory.

use std::{
    ffi::{c_int, c_void},
    mem::MaybeUninit,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
};

use rustix::io::Errno;

/// Mappings that can be guarded at the same time.
const MOST: usize = 1024;

/// A guarded mapping; empty where `len` is 0.
struct Entry {
    start: AtomicUsize,
    len: AtomicUsize,
    /// Bytes of a page of it.
    page: AtomicUsize,
    taken: AtomicBool,
    lost: AtomicBool,
}

static ENTRIES: [Entry; MOST] = [const {
    Entry {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        taken: AtomicBool::new(false),
        lost: AtomicBool::new(false),
    }
}; MOST];

/// What handled the signal before; set once, before the handler is installed.
static BEFORE: OnceLock<Result<libc::sigaction, Errno>> = OnceLock::new();

/// Guards one mapping for as long as it lives. It must be dropped before the mapping goes.
pub(super) struct Guard(&'static Entry);

impl Guard {
    /// Guards `len` bytes from `start`, which are made of pages of `page` bytes.
    ///
    /// # Errors
    /// The handler cannot be installed, or too many mappings are guarded.
    pub(super) fn new(start: usize, len: usize, page: usize) -> Result<Guard, Errno> {
        install()?;
        let free = |entry: &&Entry| entry.taken.compare_exchange(false, true, SeqCst, SeqCst).is_ok();
        let entry = ENTRIES.iter().find(free).ok_or(Errno::NOBUFS)?;
        entry.lost.store(false, SeqCst);
        entry.page.store(page, SeqCst);
        entry.start.store(start, SeqCst);
        entry.len.store(len, SeqCst);
        Ok(Guard(entry))
    }

    /// Whether a page of it was not there.
    pub(super) fn is_lost(&self) -> bool {
        self.0.lost.load(SeqCst)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.len.store(0, SeqCst);
        self.0.taken.store(false, SeqCst);
    }
}

fn install() -> Result<(), Errno> {
    let installed = BEFORE.get_or_init(|| {
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: zeroes are a valid `struct sigaction`; the handler has the signature that SA_SIGINFO asks
        // for, and does only what a signal handler may.
        let done = unsafe {
            let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            let function: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = handler;
            action.sa_sigaction = function as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &raw const action, before.as_mut_ptr())
        };
        if done != 0 {
            return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
        }
        // SAFETY: the call above has filled it.
        Ok(unsafe { before.assume_init() })
    });
    installed.as_ref().map(drop).map_err(|errno| *errno)
}

extern "C" fn handler(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`, and for SIGBUS it has an address.
    let address = unsafe { (*info).si_addr() } as usize;
    // SAFETY: errno is this thread's own, and is put back for the code that was interrupted.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    let replaced = replace(address);
    // SAFETY: as above.
    unsafe { *errno = saved };
    if replaced {
        return;
    }
    // Not ours: the instruction is repeated under whatever handled the signal before.
    let none = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: zeroes are the default action; what was there before is a valid action.
    unsafe {
        let before = match BEFORE.get() {
            Some(Ok(before)) => ptr::from_ref(before),
            _ => none.as_ptr(),
        };
        libc::sigaction(libc::SIGBUS, before, ptr::null_mut());
    }
}

/// Puts zeroes in the place of the page of an address, if it is guarded.
fn replace(address: usize) -> bool {
    for entry in &ENTRIES {
        let (start, len, page) = (entry.start.load(SeqCst), entry.len.load(SeqCst), entry.page.load(SeqCst));
        if address.wrapping_sub(start) >= len || page == 0 {
            continue;
        }
        entry.lost.store(true, SeqCst);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let first = start + (address - start) / page * page;
        // SAFETY: the page lies in a mapping of ours that is guarded, so it is unmapped only later. Nothing
        // holds a reference to its bytes: they are only reached by atomic and volatile accesses.
        let mapped = unsafe { libc::mmap(first as *mut c_void, page, protection, flags, -1, 0) };
        return mapped != libc::MAP_FAILED;
    }
    false
}

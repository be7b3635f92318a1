//! Signals as readable events: which came, and whether the kernel (a terminal) or a process sent it.
//! It never installs a handler and never decides what a signal means.

use rustix::process::Signal;
use std::{
    io,
    marker::PhantomData,
    mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr,
};

/// Signals of this process that are blocked and read instead.
///
/// Dropping it leaves them blocked: blocked signals are inherited through fork and exec, so call [`unblock`]
/// before executing another program. Block before the first thread starts, or a thread may still be
/// interrupted.
#[derive(Debug)]
pub struct SignalFd {
    fd: OwnedFd,
    signals: Vec<Signal>,
}

/// One signal that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Which.
    pub signal: Signal,
    /// Raised by the kernel: a key typed at the terminal, or its hangup. The terminal sends it to the whole
    /// foreground process group. False when a process sent it, with kill(2) or its like.
    pub from_kernel: bool,
}

impl SignalFd {
    /// Blocks `signals` in this thread and returns where they are read from; the descriptor is close-on-exec
    /// and never waits.
    ///
    /// # Errors
    /// That of signalfd(2).
    pub fn block(signals: &[Signal]) -> io::Result<Self> {
        let set = set_of(signals);
        // SAFETY: `set` is a valid signal set for the whole call; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        change_mask(libc::SIG_BLOCK, signals)?;
        Ok(Self { fd, signals: signals.to_vec() })
    }

    /// The next signal that has come; `None` when there is none.
    ///
    /// # Errors
    /// That of read(2).
    pub fn take(&self) -> io::Result<Option<Received>> {
        // SAFETY: all zeroes is a value of this plain structure.
        let mut info: libc::signalfd_siginfo = unsafe { mem::zeroed() };
        let size = mem::size_of_val(&info);
        loop {
            // SAFETY: the buffer is `info`, `size` bytes long, written by the kernel with any bytes, all
            // valid.
            let n = unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut info).cast(), size) };
            if n < 0 {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => return Ok(None),
                    _ => return Err(error),
                }
            }
            let number = info.ssi_signo;
            match self.signals.iter().find(|signal| u32::try_from(signal.as_raw()) == Ok(number)) {
                // Codes above zero are the kernel's (SI_KERNEL, CLD_*); SI_USER, SI_QUEUE and SI_TKILL are
                // not.
                Some(&signal) => return Ok(Some(Received { signal, from_kernel: info.ssi_code > 0 })),
                None => continue,
            }
        }
    }
}

impl AsFd for SignalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Signals that are held back from this thread until this is dropped, in the same thread. Those that have
/// come are delivered then.
#[derive(Debug)]
pub struct Held {
    before: libc::sigset_t,
    /// The mask is the thread's.
    _here: PhantomData<*const ()>,
}

impl Held {
    /// Holds `signals` back, too.
    ///
    /// # Errors
    /// That of pthread_sigmask(3).
    pub fn back(signals: &[Signal]) -> io::Result<Self> {
        let set = set_of(signals);
        let mut before = set_of(&[]);
        // SAFETY: both sets are valid for the call, and `before` is exclusively ours.
        match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut before) } {
            0 => Ok(Self { before, _here: PhantomData }),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the set is valid for the call; the old mask is not asked for. Setting a mask that was set
        // before cannot fail.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

/// Lets `signals` through again in this thread; what is pending is delivered.
///
/// # Errors
/// That of pthread_sigmask(3).
pub fn unblock(signals: &[Signal]) -> io::Result<()> {
    change_mask(libc::SIG_UNBLOCK, signals)
}

/// Whether this process ignores a signal, as `nohup` has it do.
pub fn is_ignored(signal: Signal) -> bool {
    ignores(signal.as_raw())
}

/// Gives every signal that is ignored its default effect again, and lets all of them through in this thread.
/// Ignored and blocked signals are inherited through fork and exec. SIGPIPE stays as it is: Rust's runtime
/// ignores it on purpose.
///
/// # Errors
/// That of pthread_sigmask(3).
pub fn restore_defaults() -> io::Result<()> {
    for number in (1..=libc::SIGRTMAX()).filter(|number| *number != libc::SIGPIPE) {
        if ignores(number) {
            // SAFETY: sets no handler.
            unsafe { libc::signal(number, libc::SIG_DFL) };
        }
    }
    // SAFETY: all zeroes is a value of this plain structure, and sigemptyset makes it an empty set.
    let mut none: libc::sigset_t = unsafe { mem::zeroed() };
    // SAFETY: `none` is valid and exclusively ours.
    unsafe { libc::sigemptyset(&raw mut none) };
    // SAFETY: `none` is valid for the call; the old mask is not asked for.
    match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

fn ignores(number: libc::c_int) -> bool {
    // SAFETY: all zeroes is a value of this plain structure.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    // SAFETY: only asks; `action` is valid for the call. Numbers that the C library keeps for itself are
    // refused.
    let asked = unsafe { libc::sigaction(number, ptr::null(), &raw mut action) };
    asked == 0 && action.sa_sigaction == libc::SIG_IGN
}

fn set_of(signals: &[Signal]) -> libc::sigset_t {
    // SAFETY: all zeroes is a value of this plain structure, and sigemptyset makes it an empty set.
    let mut set: libc::sigset_t = unsafe { mem::zeroed() };
    // SAFETY: `set` is valid and exclusively ours.
    unsafe { libc::sigemptyset(&raw mut set) };
    for signal in signals {
        // SAFETY: as above; the number is that of a signal by its type.
        unsafe { libc::sigaddset(&raw mut set, signal.as_raw()) };
    }
    set
}

fn change_mask(how: libc::c_int, signals: &[Signal]) -> io::Result<()> {
    let set = set_of(signals);
    // SAFETY: `set` is valid for the call; the old mask is not asked for.
    match unsafe { libc::pthread_sigmask(how, &raw const set, ptr::null_mut()) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_is_held_back_comes_later() {
        std::thread::spawn(|| {
            let signals = SignalFd::block(&[Signal::USR1]).unwrap();
            unblock(&[Signal::USR1]).unwrap();
            let held = Held::back(&[Signal::USR1]).unwrap();
            // SAFETY: sends this thread a signal that it holds back.
            assert_eq!(unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR1) }, 0);
            // Not delivered, or it would have ended the test.
            assert_eq!(signals.take().unwrap().map(|came| came.signal), Some(Signal::USR1));
            drop(held);
            let inner = Held::back(&[Signal::USR1]).unwrap();
            drop(Held::back(&[Signal::USR1]).unwrap());
            // SAFETY: as above; the inner one left what the outer one holds back.
            assert_eq!(unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR1) }, 0);
            assert!(signals.take().unwrap().is_some());
            drop(inner);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_signal_is_read_instead_of_delivered() {
        // In a thread of its own: the mask is the thread's.
        std::thread::spawn(|| {
            let signals = SignalFd::block(&[Signal::USR1, Signal::USR2]).unwrap();
            assert_eq!(signals.take().unwrap(), None);
            // SAFETY: sends this thread a signal that it has just blocked.
            assert_eq!(unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2) }, 0);
            let received = signals.take().unwrap();
            assert_eq!(received, Some(Received { signal: Signal::USR2, from_kernel: false }));
            assert_eq!(signals.take().unwrap(), None);
            // Unblocked, nothing is pending and nothing kills the test.
            unblock(&[Signal::USR1, Signal::USR2]).unwrap();
        })
        .join()
        .unwrap();
    }
}

//! What a worker may still ask of the kernel once it runs: to move bytes between descriptors that it holds,
//! and no more.
//! It never opens a way back, and adds only one lookup for each turn of a ring to the hot path.
//!
//! Three fences, each behind the other, against an attacker who gets hold of a worker (the decoders read
//! untrusted data):
//!
//! - **Landlock** with no path allowed ([`shut`]), before the first thread, because threads inherit it. It
//!   also covers io_uring, whose operations run with the rights of the thread that submits them.
//! - **The rings** carry out a dozen operations and no others (`becket_engine`'s `ring`): a filter of system
//!   calls does not see what a ring is asked for.
//! - **A filter of system calls** ([`filter`]), after the rings are made: no other ring can be made, which
//!   would be unrestricted.
//!
//! **What is refused fails with EPERM.** A process that is killed for one call that a newer C library makes,
//! or that was forgotten here, takes all its devices down, and the next worker as well; refused, most such
//! calls have another way. For keeping an attacker in, both are the same. Only what no mistake of ours can be
//! (running programs, reaching into other processes, calls of another architecture) ends the worker, which
//! the kernel logs: its devices get another.
//!
//! **The user stays root's**, though without capabilities. Block allocation of ext4 and XFS keeps a reserve
//! for user 0: an image on a full file system would fail earlier than with the kernel's loop driver. No other
//! number is becket's to take without an administrator having set it aside, and processes of a shared one
//! such as nobody's may signal each other.

use std::io;

use becket_uapi::landlock;
use becket_uapi::seccomp::{Filter, Verdict, When};

use crate::contract::Error;

/// Takes every path from the calling thread and those it starts; answers with a note if the kernel cannot.
pub(super) fn shut() -> Result<Option<String>, Error> {
    // What this and the clock know of the machine may come from a file; their first use of it does not expect
    // failure.
    let _ = rustix::param::page_size();
    match landlock::allow_nothing() {
        Ok(_) => Ok(None),
        Err(error) if lacking(&error) => Ok(Some(format!("Landlock: this kernel has none ({error})"))),
        Err(error) => Err(refused("give up its paths", &error)),
    }
}

/// Puts all threads under the filter; answers with a note where the kernel cannot.
pub(super) fn filter() -> Result<Option<String>, Error> {
    let installed = rules(std::process::id()).and_then(Filter::install);
    match installed {
        Ok(()) => Ok(None),
        Err(error) if lacking(&error) || error.kind() == io::ErrorKind::InvalidInput => {
            Ok(Some(format!("system calls are not filtered: {error}")))
        }
        Err(error) => Err(refused("filter its system calls", &error)),
    }
}

fn lacking(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
        || matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EOPNOTSUPP))
}

fn refused(what: &str, error: &io::Error) -> Error {
    Error::Worker { what: format!("will not serve: it could not {what}: {error}") }
}

/// Calls that are let through whatever their arguments. The first are the most frequent: on kernels that do
/// not cache the verdict (before 5.11) they are the cheapest.
const ALLOWED: [libc::c_long; 60] = [
    // The rings that there are.
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Waiting for each other.
    libc::SYS_futex,
    libc::SYS_ppoll,
    libc::SYS_sched_yield,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_eventfd2,
    // Descriptors that it holds.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fstat,
    libc::SYS_close,
    // What is too long for a message to the supervisor; neither run nor mapped as code.
    libc::SYS_memfd_create,
    // The supervisor and its successor. No socket is made or connected.
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_listen,
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // Threads that begin and end.
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Facts, which cannot be refused: callers know no failure of these.
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_sysinfo,
    libc::SYS_uname,
];

/// Calls that no mistake of ours can be.
const KILLED: [libc::c_long; 5] = [
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
];

/// What a duplicate of a descriptor and a sealed file in memory need.
const FCNTL: [u32; 6] = [
    libc::F_DUPFD_CLOEXEC as u32,
    libc::F_GETFD as u32,
    libc::F_SETFD as u32,
    libc::F_GETFL as u32,
    libc::F_GET_SEALS as u32,
    libc::F_ADD_SEALS as u32,
];
/// A thread's name, and that of a range of memory.
const PRCTL: [u32; 2] = [libc::PR_SET_NAME as u32, libc::PR_SET_VMA as u32];

fn rules(pid: u32) -> io::Result<Filter> {
    let [allow, kill] = [Verdict::Allow, Verdict::Kill];
    let executable = libc::PROT_EXEC as u32;
    let filter = ALLOWED.iter().fold(Filter::new()?, |filter, call| filter.rule(*call, When::Always, allow));
    // What ppoll is elsewhere.
    #[cfg(target_arch = "x86_64")]
    let filter = filter.rule(libc::SYS_poll, When::Always, allow);
    let filter = filter
        .rule(libc::SYS_fcntl, When::Is(1, &FCNTL), allow)
        // Whether a descriptor blocks.
        .rule(libc::SYS_ioctl, When::Is(1, &[libc::FIONBIO as u32]), allow)
        // No code but what was there from the beginning.
        .rule(libc::SYS_mmap, When::HasNot(2, executable), allow)
        .rule(libc::SYS_mprotect, When::HasNot(2, executable), allow)
        // Threads and no processes. The newer call hides its flags; C libraries take the older one if it is
        // missing.
        .rule(libc::SYS_clone, When::Has(0, (libc::CLONE_THREAD | libc::CLONE_VM) as u32), allow)
        .rule(libc::SYS_clone3, When::Always, Verdict::Refuse(libc::ENOSYS as u16))
        // A descriptor's metadata, never that of a path.
        .rule(libc::SYS_newfstatat, When::Has(3, libc::AT_EMPTY_PATH as u32), allow)
        .rule(libc::SYS_statx, When::Has(2, libc::AT_EMPTY_PATH as u32), allow)
        .rule(libc::SYS_prctl, When::Is(0, &PRCTL), allow)
        // Its own end, by abort().
        .rule(libc::SYS_tgkill, When::Is(0, &[pid]), allow);
    Ok(KILLED.iter().fold(filter, |filter, call| filter.rule(*call, When::Always, kill)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    use std::path::Path;
    use std::process::Command;

    use becket_engine::{Decoding, IoThreads};

    use super::*;

    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;
    const EPERM: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;

    #[test]
    fn what_is_not_named_is_refused() {
        let filter = rules(77).unwrap();
        let ways_out = [
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_open_by_handle_at,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_io_uring_setup,
            libc::SYS_kill,
            libc::SYS_pidfd_open,
            libc::SYS_pidfd_getfd,
            libc::SYS_bpf,
            libc::SYS_mount,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_init_module,
            libc::SYS_fchmod,
            libc::SYS_fchown,
            libc::SYS_setuid,
            libc::SYS_prlimit64,
            libc::SYS_userfaultfd,
            libc::SYS_keyctl,
        ];
        for call in ways_out {
            assert_eq!(filter.judge(call, [0; 6]), EPERM, "call {call}");
        }
        for call in KILLED {
            assert_eq!(filter.judge(call, [0; 6]), KILL, "call {call}");
        }
        let open = (0..2048).filter(|call| filter.judge(*call, [0; 6]) == ALLOW).count();
        // And those with conditions that zeroes fulfil: mappings without rights.
        let more = 2 + usize::from(cfg!(target_arch = "x86_64"));
        assert_eq!(open, ALLOWED.len() + more);
    }

    #[test]
    fn arguments_count_where_a_call_can_be_both() {
        let filter = rules(77).unwrap();
        let judged = |call, index: usize, value: i32| {
            let mut arguments = [0; 6];
            arguments[index] = value as u32;
            filter.judge(call, arguments)
        };
        let (data, code) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_READ | libc::PROT_EXEC);
        let thread =
            libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
        for (call, index, may, may_not) in [
            (libc::SYS_mmap, 2, data, code),
            (libc::SYS_mprotect, 2, data, code),
            (libc::SYS_clone, 0, thread, libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD),
            (libc::SYS_fcntl, 1, libc::F_GETFL, libc::F_SETOWN),
            (libc::SYS_ioctl, 1, libc::FIONBIO as i32, libc::TIOCSTI as i32),
            (libc::SYS_prctl, 0, libc::PR_SET_NAME, libc::PR_SET_DUMPABLE),
            (libc::SYS_statx, 2, libc::AT_EMPTY_PATH, 0),
            (libc::SYS_tgkill, 0, 77, 1),
        ] {
            assert_eq!(judged(call, index, may), ALLOW, "call {call}");
            assert_eq!(judged(call, index, may_not), EPERM, "call {call}");
        }
    }

    /// In processes of their own, which are confined as a worker is and then try to get out.
    #[test]
    fn a_confined_process_gets_nowhere() {
        const CHILD: &str = "BECKET_TEST_CONFINED";
        if let Some(way) = std::env::var_os(CHILD) {
            rustix::thread::set_no_new_privs(true).unwrap();
            let notes = [shut().unwrap(), None];
            let threads = IoThreads::start(2).unwrap();
            let notes = [notes[0].clone(), filter().unwrap()];
            match way.to_str() {
                Some("run a program") => drop(Command::new("/bin/true").exec()),
                _ => attempts(&notes),
            }
            drop(threads);
            return;
        }
        let run = |way: &str| {
            let mut test = Command::new(std::env::current_exe().unwrap());
            test.args(["a_confined_process_gets_nowhere", "--nocapture"]).env(CHILD, way).output().unwrap()
        };
        let tried = run("everything");
        assert!(tried.status.success(), "{}", String::from_utf8_lossy(&tried.stderr));
        assert_eq!(run("run a program").status.signal(), Some(libc::SIGSYS));
    }

    fn attempts(notes: &[Option<String>]) {
        assert_eq!(notes, [None, None], "this kernel has both");
        let denied = |what: &str, result: io::Result<()>| {
            let error = result.expect_err(what);
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{what}: {error}");
        };
        denied("read a file", File::open("/etc/passwd").map(drop));
        denied("read the root", std::fs::read_dir("/").map(drop));
        denied("make a file", File::create("/tmp/becket-confined").map(drop));
        denied("look at a path", Path::new("/etc/passwd").symlink_metadata().map(drop));
        denied("connect to a port", TcpStream::connect("127.0.0.1:1").map(drop));
        denied("connect to a socket", UnixStream::connect("/run/becket/control").map(drop));
        denied("start a process", Command::new("/bin/true").spawn().map(drop));
        let parent = rustix::process::getppid().unwrap();
        let signalled = rustix::process::kill_process(parent, rustix::process::Signal::CONT);
        denied("signal another process", signalled.map_err(Into::into));
        denied("mount", becket_uapi::handover::unshare_mounts());
        denied("be traced", becket_uapi::process::set_dumpable(true));
        assert!(IoThreads::start(1).is_err(), "another ring");
        // What a worker does goes on: threads, memory, decoders, rings.
        assert!(rustix::param::page_size() >= 4096);
        assert_eq!(std::thread::spawn(|| vec![1u8; 64 << 20].len()).join().unwrap(), 64 << 20);
        drop(Decoding::start(2, 1 << 20).unwrap());
    }
}

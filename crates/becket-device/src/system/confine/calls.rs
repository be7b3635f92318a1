//! The list of system calls of each role, and the paths that it may read.
//! It never names a call that makes a way out of what the role is there for.

use std::io;

use becket_uapi::landlock::Left;
use becket_uapi::seccomp::{Filter, Verdict, When};

use crate::system::role::Role;

/// The calls that a role's processes may make whatever the arguments. The first are the most frequent: on
/// kernels that do not cache the verdict (before 5.11) they are the cheapest.
pub(super) fn allowed(role: Role) -> Vec<libc::c_long> {
    let sets: &[&[libc::c_long]] = match role {
        Role::Worker => &[RINGS, ALL, FILES, DOORS, PAIRS],
        Role::Doorman => &[ALL, STREAMS, DOORS],
        Role::Reporter => &[ALL, ANSWERS, DOORS],
        Role::Connector => &[ALL, STREAMS, NETWORK],
        Role::Fetcher => &[ALL, FILES, STREAMS, NETWORK, ROOM],
        Role::Helper => &[ALL, FILES, STREAMS, NETWORK, LIBRARY],
    };
    sets.concat()
}

/// What a role keeps of paths and ports.
pub(super) fn left(role: Role) -> Left<'static> {
    match role.reaches_servers() {
        false => Left::default(),
        true => Left { readable: NAMES, connect: true },
    }
}

/// Files by which a C library resolves names, and certificates of authorities.
const NAMES: &[&str] = &[
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/gai.conf",
    "/etc/nsswitch.conf",
    "/etc/services",
    // Where links of /etc/resolv.conf lead, which are replaced as a whole.
    "/run/systemd/resolve",
    "/run/NetworkManager",
    "/run/resolvconf",
    "/etc/ssl/certs",
    "/etc/pki",
    "/etc/ca-certificates",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
];

/// The rings that there are.
const RINGS: &[libc::c_long] = &[libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

/// What every process needs.
const ALL: &[libc::c_long] = &[
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
    libc::SYS_fstat,
    libc::SYS_close,
    // The process that started it, and its successor. No socket is bound or connected.
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    // What is too long for a message; neither run nor mapped as code.
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_lseek,
    libc::SYS_pread64,
    // Memory.
    libc::SYS_munmap,
    // Of a virtual machine, which is not ours to lock.
    libc::SYS_munlock,
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

/// Places in files that it holds.
const FILES: &[libc::c_long] = &[
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
];

/// How much room their file systems have.
const ROOM: &[libc::c_long] = &[libc::SYS_fstatfs];

/// Sockets that listen, which it was handed.
const DOORS: &[libc::c_long] = &[libc::SYS_listen, libc::SYS_accept4];

/// Two ends of which another process gets one.
const PAIRS: &[libc::c_long] = &[libc::SYS_socketpair];

/// Answers to a client that it has accepted.
const ANSWERS: &[libc::c_long] = &[libc::SYS_sendto];

/// Connections that it was handed or has made. A pair of sockets leads nowhere else.
const STREAMS: &[libc::c_long] = &[
    libc::SYS_sendto,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_socketpair,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
];

/// What a client of a network needs, beside the sockets themselves ([`rules`]): a resolver reads files, which
/// Landlock limits to [`NAMES`].
const NETWORK: &[libc::c_long] = &[
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_openat,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_getdents64,
];

/// What libraries of a cluster use beside that.
const LIBRARY: &[libc::c_long] = &[
    libc::SYS_pipe2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_getrusage,
    libc::SYS_getcpu,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_clock_getres,
    libc::SYS_fadvise64,
    libc::SYS_flock,
];

/// The families of sockets that a role may make.
fn families(role: Role) -> &'static [u32] {
    const INTERNET: &[u32] = &[libc::AF_INET as u32, libc::AF_INET6 as u32];
    const ALSO_LOCAL: &[u32] = &[libc::AF_INET as u32, libc::AF_INET6 as u32, libc::AF_UNIX as u32];
    match role {
        Role::Worker | Role::Doorman | Role::Reporter => &[],
        Role::Connector => ALSO_LOCAL,
        Role::Fetcher | Role::Helper => INTERNET,
    }
}

/// Calls that no mistake of ours can be.
pub(super) const KILLED: [libc::c_long; 5] = [
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

/// A worker never lets a descriptor stop blocking by `fcntl`; a standard library does so for a socket.
fn fcntl(role: Role) -> &'static [u32] {
    const AND_SET: [u32; 7] = {
        let [a, b, c, d, e, f] = FCNTL;
        [a, b, c, d, e, f, libc::F_SETFL as u32]
    };
    // It lets chunks go from a table only where no other process does.
    const AND_LOCK: [u32; 8] = {
        let [a, b, c, d, e, f, g] = AND_SET;
        [a, b, c, d, e, f, g, libc::F_SETLK as u32]
    };
    match role {
        Role::Worker | Role::Reporter => &FCNTL,
        Role::Doorman | Role::Connector | Role::Helper => &AND_SET,
        Role::Fetcher => &AND_LOCK,
    }
}

fn ioctl(role: Role) -> &'static [u32] {
    match role {
        Role::Worker | Role::Doorman | Role::Reporter => &[libc::FIONBIO as u32],
        Role::Connector | Role::Fetcher | Role::Helper => &[libc::FIONBIO as u32, libc::FIONREAD as u32],
    }
}

/// Calls that only this architecture has beside newer ones.
#[cfg(target_arch = "x86_64")]
pub(super) fn older(role: Role) -> &'static [libc::c_long] {
    match role {
        Role::Worker | Role::Reporter => &[libc::SYS_poll],
        Role::Doorman => &[libc::SYS_poll, libc::SYS_epoll_wait],
        Role::Connector | Role::Fetcher => {
            &[libc::SYS_poll, libc::SYS_epoll_wait, libc::SYS_open, libc::SYS_access, libc::SYS_readlink]
        }
        Role::Helper => &[
            libc::SYS_poll,
            libc::SYS_epoll_create,
            libc::SYS_epoll_wait,
            libc::SYS_open,
            libc::SYS_access,
            libc::SYS_readlink,
        ],
    }
}

/// The filter of a role, for the process of that number.
pub(super) fn rules(role: Role, pid: u32) -> io::Result<Filter> {
    let [allow, kill] = [Verdict::Allow, Verdict::Kill];
    let executable = libc::PROT_EXEC as u32;
    let always = |filter: Filter, call: &libc::c_long| filter.rule(*call, When::Always, allow);
    let filter = allowed(role).iter().fold(Filter::new()?, always);
    let filter = match families(role) {
        [] => filter,
        families => filter.rule(libc::SYS_socket, When::Is(0, families), allow),
    };
    // What ppoll is elsewhere, and older names of calls of a resolver.
    #[cfg(target_arch = "x86_64")]
    let filter = older(role).iter().fold(filter, always);
    let filter = filter
        .rule(libc::SYS_fcntl, When::Is(1, fcntl(role)), allow)
        // Whether a descriptor blocks, and how much it has.
        .rule(libc::SYS_ioctl, When::Is(1, ioctl(role)), allow)
        // No code but what was there from the beginning.
        .rule(libc::SYS_mmap, When::HasNot(2, executable), allow)
        .rule(libc::SYS_mprotect, When::HasNot(2, executable), allow)
        // Threads and no processes. The newer call hides its flags; C libraries take the older one if it is
        // missing.
        .rule(libc::SYS_clone, When::Has(0, (libc::CLONE_THREAD | libc::CLONE_VM) as u32), allow)
        .rule(libc::SYS_clone3, When::Always, Verdict::Refuse(libc::ENOSYS as u16))
        // A descriptor's metadata; that of a path only where paths are resolved.
        .rule(libc::SYS_newfstatat, of_path(role, 3), allow)
        .rule(libc::SYS_statx, of_path(role, 2), allow)
        .rule(libc::SYS_prctl, When::Is(0, &PRCTL), allow)
        // Its own end, by abort().
        .rule(libc::SYS_tgkill, When::Is(0, &[pid]), allow);
    Ok(KILLED.iter().fold(filter, |filter, call| filter.rule(*call, When::Always, kill)))
}

/// When metadata may be asked for, by the flags in that argument.
fn of_path(role: Role, flags: u8) -> When<'static> {
    match role {
        Role::Worker | Role::Doorman | Role::Reporter => When::Has(flags, libc::AT_EMPTY_PATH as u32),
        Role::Connector | Role::Fetcher | Role::Helper => When::Always,
    }
}

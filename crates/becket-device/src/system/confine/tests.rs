//! Holds each role to its list, in the filter itself and in processes that try to get out.

use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::Command;

use becket_engine::{Decoding, IoThreads};

use super::calls::{KILLED, allowed, older, rules};
use super::*;

const ROLES: [Role; 6] =
    [Role::Worker, Role::Doorman, Role::Reporter, Role::Connector, Role::Fetcher, Role::Helper];

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;
const EPERM: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;

/// How many calls a role may make that no list names whatever the arguments, but which have no forbidden one
/// when all are zero: mappings without rights, and metadata where paths are resolved.
fn with_conditions(role: Role) -> usize {
    match role {
        Role::Worker | Role::Doorman | Role::Reporter => 2,
        Role::Connector | Role::Fetcher | Role::Helper => 4,
    }
}

#[test]
fn what_is_not_named_is_refused_to_every_role() {
    let ways_out = [
        libc::SYS_openat2,
        libc::SYS_open_by_handle_at,
        libc::SYS_io_uring_setup,
        libc::SYS_kill,
        libc::SYS_pidfd_open,
        libc::SYS_pidfd_getfd,
        libc::SYS_bpf,
        libc::SYS_mount,
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_init_module,
        libc::SYS_unlinkat,
        libc::SYS_renameat2,
        libc::SYS_mkdirat,
        libc::SYS_fchmod,
        libc::SYS_fchown,
        libc::SYS_setuid,
        libc::SYS_prlimit64,
        libc::SYS_userfaultfd,
        libc::SYS_keyctl,
    ];
    for role in ROLES {
        let filter = rules(role, 77).unwrap();
        for call in ways_out {
            assert_eq!(filter.judge(call, [0; 6]), EPERM, "{role:?}: call {call}");
        }
        for call in KILLED {
            assert_eq!(filter.judge(call, [0; 6]), KILL, "{role:?}: call {call}");
        }
        let open = (0..2048).filter(|call| filter.judge(*call, [0; 6]) == ALLOW).count();
        #[cfg(target_arch = "x86_64")]
        let named = allowed(role).len() + older(role).len();
        #[cfg(not(target_arch = "x86_64"))]
        let named = allowed(role).len();
        assert_eq!(open, named + with_conditions(role), "{role:?}");
    }
}

/// A call that only some roles need is refused to the others.
#[test]
fn each_role_has_its_own_calls() {
    let may = |call: libc::c_long, first: i32| -> Vec<Role> {
        let judged = |role: &Role| rules(*role, 77).unwrap().judge(call, [first as u32, 0, 0, 0, 0, 0]);
        ROLES.into_iter().filter(|role| judged(role) == ALLOW).collect()
    };
    use Role::{Connector, Doorman, Fetcher, Helper, Reporter, Worker};
    assert_eq!(may(libc::SYS_io_uring_enter, 0), [Worker]);
    assert_eq!(may(libc::SYS_accept4, 0), [Worker, Doorman, Reporter]);
    assert_eq!(may(libc::SYS_sendto, 0), [Doorman, Reporter, Connector, Fetcher, Helper]);
    assert_eq!(may(libc::SYS_socketpair, 0), [Worker, Doorman, Connector, Fetcher, Helper]);
    assert_eq!(may(libc::SYS_pwrite64, 0), [Worker, Fetcher, Helper]);
    assert_eq!(may(libc::SYS_connect, 0), [Connector, Fetcher, Helper]);
    assert_eq!(may(libc::SYS_openat, 0), [Connector, Fetcher, Helper]);
    assert_eq!(may(libc::SYS_socket, libc::AF_INET6), [Connector, Fetcher, Helper]);
    assert_eq!(may(libc::SYS_socket, libc::AF_UNIX), [Connector]);
    assert_eq!(may(libc::SYS_socket, libc::AF_PACKET), []);
    assert_eq!(may(libc::SYS_socket, libc::AF_NETLINK), []);
}

#[test]
fn arguments_count_where_a_call_can_be_both() {
    let filter = rules(Role::Worker, 77).unwrap();
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

/// In processes of their own, which are confined as each role is and then try to get out.
#[test]
fn a_confined_process_gets_nowhere() {
    const CHILD: &str = "BECKET_TEST_CONFINED";
    if let Some(way) = std::env::var_os(CHILD) {
        let (role, way) = way.to_str().unwrap().split_once(' ').unwrap();
        let role = ROLES.into_iter().find(|known| known.word() == role).unwrap();
        rustix::thread::set_no_new_privs(true).unwrap();
        let shut = shut(role).unwrap();
        let threads = (role == Role::Worker).then(|| IoThreads::start(2).unwrap());
        let notes = [shut, filter(role).unwrap()];
        match way {
            "run a program" => drop(Command::new("/bin/true").exec()),
            _ => attempts(role, &notes),
        }
        drop(threads);
        return;
    }
    let run = |role: Role, way: &str| {
        let mut test = Command::new(std::env::current_exe().unwrap());
        let way = format!("{} {way}", role.word());
        test.args(["a_confined_process_gets_nowhere", "--nocapture"]).env(CHILD, way).output().unwrap()
    };
    for role in ROLES {
        let tried = run(role, "everything");
        assert!(tried.status.success(), "{role:?}: {}", String::from_utf8_lossy(&tried.stderr));
        assert_eq!(run(role, "run a program").status.signal(), Some(libc::SIGSYS), "{role:?}");
    }
}

fn attempts(role: Role, notes: &[Option<String>]) {
    assert_eq!(notes, [None, None], "this kernel has both");
    let denied = |what: &str, result: io::Result<()>| {
        let error = result.expect_err(what);
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{what}: {error}");
    };
    let networks = matches!(role, Role::Connector | Role::Fetcher | Role::Helper);
    denied("read a file", File::open("/etc/passwd").map(drop));
    denied("read the root", std::fs::read_dir("/").map(drop));
    denied("make a file", File::create("/tmp/becket-confined").map(drop));
    denied(
        "write a file that it may read",
        File::options().append(true).open("/etc/nsswitch.conf").map(drop),
    );
    denied("remove a file", std::fs::remove_file("/etc/nsswitch.conf"));
    // Resolvers look whether files have changed; what is in them stays closed.
    if !networks {
        denied("look at a path", Path::new("/etc/passwd").symlink_metadata().map(drop));
        denied("connect to a port", TcpStream::connect("127.0.0.1:1").map(drop));
    } else {
        let refused = TcpStream::connect("127.0.0.1:1").unwrap_err().kind();
        assert_eq!(refused, io::ErrorKind::ConnectionRefused, "its work is to connect");
        denied("listen at a port", TcpListener::bind("127.0.0.1:0").map(drop));
    }
    if role != Role::Connector {
        denied("connect to a socket", UnixStream::connect("/run/becket/control").map(drop));
    }
    denied("start a process", Command::new("/bin/true").spawn().map(drop));
    let parent = rustix::process::getppid().unwrap();
    let signalled = rustix::process::kill_process(parent, rustix::process::Signal::CONT);
    denied("signal another process", signalled.map_err(Into::into));
    denied("mount", becket_uapi::handover::unshare_mounts());
    denied("be traced", becket_uapi::process::set_dumpable(true));
    assert!(IoThreads::start(1).is_err(), "another ring");
    // What it does goes on: threads, memory, decoders.
    assert!(rustix::param::page_size() >= 4096);
    assert_eq!(std::thread::spawn(|| vec![1u8; 64 << 20].len()).join().unwrap(), 64 << 20);
    if role == Role::Worker {
        drop(Decoding::start(2, 1 << 20).unwrap());
    }
}

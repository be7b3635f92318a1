//! Attacks by other users of the machine: the server's socket in all its ways, and runtime directories that
//! they prepared.
//! Each attack goes further than it could: doors that are closed by their modes are opened first.

use std::fs::{self, Permissions};
use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use becket_testkit as testkit;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Value;

use crate::place::{Place, status_field};

/// Nobody, and nobody's neighbour.
const STRANGER: u32 = 65534;
const VICTIM: u32 = 65533;
/// How many connections of a storm are open at once.
const AT_ONCE: usize = 100;
/// Descriptors in one message: as many as the kernel passes.
const FLOOD: usize = 253;

/// This program, where other users can run it.
struct Program(PathBuf);

impl Program {
    fn new(place: &Place) -> Option<Program> {
        if !(testkit::require_root(place.name) && testkit::require_tools(place.name, &["setpriv"])) {
            return None;
        }
        open(place.temp.path(), 0o755);
        let program = place.path("program");
        fs::copy("/proc/self/exe", &program).unwrap();
        Some(Program(program))
    }

    fn run_as(&self, user: u32) -> Command {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={user}"), format!("--regid={user}"), "--clear-groups".to_owned()]);
        command.arg(&self.0);
        command
    }
}

fn open(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Opens the doors that keep others out, so that the server itself must.
fn open_the_doors(place: &Place) -> PathBuf {
    let socket = place.runtime().join("control");
    open(&place.runtime(), 0o755);
    open(&socket, 0o666);
    socket
}

pub(crate) fn a_stranger_can_ask_for_nothing(place: &Place) {
    let Some(program) = Program::new(place) else { return };
    let supervisor = place.supervisor();
    let socket = place.runtime().join("control");
    let talk = |call: &str| {
        let output = program.run_as(STRANGER).arg("talk").arg(&socket).arg(call).output().unwrap();
        String::from_utf8(if output.status.success() { output.stdout } else { output.stderr }).unwrap()
    };
    let list = r#"{"method":"org.becket.Becket1.List"}"#;
    assert!(talk(list).contains("Permission denied"), "the directory keeps it out: {}", talk(list));
    open_the_doors(place);
    for (method, parameters) in [
        ("Attach", "{}"),
        ("Detach", r#"{"name":"x","lazy":true}"#),
        ("Set", r#"{"name":"x","read_only":true}"#),
        ("Refresh", r#"{"name":"x"}"#),
        ("Stat", r#"{"name":"x"}"#),
        ("List", "{}"),
        ("Status", "{}"),
        ("HandOver", "{}"),
        ("Nothing", "{}"),
    ] {
        let call = format!(r#"{{"method":"org.becket.Becket1.{method}","parameters":{parameters}}}"#);
        let answer = talk(&call);
        let answer: Value = serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{method}: {answer}"));
        assert_eq!(answer["error"], "org.varlink.service.PermissionDenied", "{method}");
    }
    assert_eq!(place.run(&["status"]).unwrap()["pid"], supervisor.pid(), "it was not handed over");
}

pub(crate) fn a_storm_of_strangers_passes(place: &Place) {
    let Some(program) = Program::new(place) else { return };
    let supervisor = place.supervisor();
    let socket = open_the_doors(place);
    let pid = supervisor.pid();
    let descriptors = || fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let memory = || status_field(pid, "VmRSS").trim_end_matches(" kB").parse::<usize>().unwrap() / 1024;
    let _keeps = kept(place);
    let before = (descriptors(), memory());
    testkit::tool(program.run_as(STRANGER).arg("storm").arg(&socket).arg(fewer_in_a_guest(10_000)));
    assert_eq!(place.run(&["status"]).unwrap()["pid"], pid, "root is answered");
    let quiet =
        || descriptors() <= before.0 + 1 && status_field(pid, "Threads").parse::<usize>().unwrap() < 16;
    assert!(
        testkit::wait_until(Duration::from_secs(30), quiet),
        "{} of {} descriptors",
        descriptors(),
        before.0
    );
    assert!(memory() < before.1 + 64, "{} MiB, and {} before", memory(), before.1);
}

/// A connection, so that the server does not end for want of clients; it has all that it opens for the first
/// one.
fn kept(place: &Place) -> UnixStream {
    let stream = UnixStream::connect(place.runtime().join("control")).unwrap();
    place.run(&["status"]).unwrap();
    stream
}

/// No kernel has a part in how many there are, and the guests are slow.
fn fewer_in_a_guest(count: usize) -> String {
    (if becket_testkit::in_a_guest() { count / 50 } else { count }).to_string()
}

/// What a stranger does, and a mad client of one's own.
pub(crate) fn storm(socket: &Path, connections: usize) {
    let mut open = Vec::new();
    for number in 0..connections {
        if open.len() == AT_ONCE {
            open.clear();
        }
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        bother(&stream, number);
        open.push(stream);
    }
}

/// Nothing, half a call, no call at all, endless words, descriptors with half a call. The server should hang
/// up meanwhile.
fn bother(mut stream: &UnixStream, how: usize) {
    let half = br#"{"method":"org.becket.Becket1.Attach","parameters":{"name":"#;
    let _ = match how % 5 {
        0 => Ok(()),
        1 => stream.write_all(half),
        2 => stream.write_all(b"\0\0\xff\xfe{{{\0[[[[[[[[[[[[\0"),
        3 if how % 500 == 3 => stream.write_all(&vec![b'['; 1 << 20]),
        3 => stream.write_all(&[b'{'; 4096]),
        _ => {
            let null = fs::File::open("/dev/null").unwrap();
            flood(stream, half, &[null.as_fd(); FLOOD]);
            Ok(())
        }
    };
}

fn flood(stream: &UnixStream, words: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FLOOD))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    // It may have hung up.
    let _ = sendmsg(stream, &[IoSlice::new(words)], &mut control, SendFlags::NOSIGNAL);
}

/// The server's own user may talk to it, and may make mistakes.
pub(crate) fn a_mad_client_harms_nobody_else(place: &Place) {
    let supervisor = place.supervisor();
    let pid = supervisor.pid();
    let socket = place.runtime().join("control");
    let descriptors = || fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let _keeps = kept(place);
    let before = descriptors();
    let held: Vec<_> = (0..200)
        .map(|number| {
            let stream = UnixStream::connect(&socket).unwrap();
            bother(&stream, number);
            stream
        })
        .collect();
    // A call with more descriptors than it announces, one nested deeper than is ever read, and one longer
    // than any.
    let null = fs::File::open("/dev/null").unwrap();
    let mut surplus = UnixStream::connect(&socket).unwrap();
    flood(&surplus, b"{\"method\":\"org.becket.Becket1.List\"}\0", &[null.as_fd(); FLOOD]);
    let mut answer = [0; 4096];
    let len = surplus.read(&mut answer).unwrap();
    assert!(
        answer[..len].starts_with(br#"{"parameters":{"devices":["#),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    let deep = format!(r#"{{"method":"org.becket.Becket1.Attach","parameters":{}"#, "[".repeat(1 << 20));
    for call in [deep.into_bytes(), vec![b' '; 104 << 20]] {
        let mut stream = UnixStream::connect(&socket).unwrap();
        let _ = stream.write_all(&call).and_then(|()| stream.write_all(&[0]));
        let mut rest = Vec::new();
        assert!(stream.read_to_end(&mut rest).is_err() || rest.is_empty(), "it hangs up");
    }
    assert_eq!(place.run(&["status"]).unwrap()["pid"], pid, "others are answered meanwhile");
    drop((held, surplus));
    assert!(
        testkit::wait_until(Duration::from_secs(30), || descriptors() <= before + 1),
        "{}",
        descriptors()
    );
}

/// A user who can be made to use another user's directory would believe records in it and give images to a
/// socket in it.
pub(crate) fn what_others_prepared_is_not_used(place: &Place) {
    let Some(program) = Program::new(place) else { return };
    let image = place.image("image", 1 << 20);
    open(&image, 0o666);
    let dir = |name: &str, owner: u32, mode: u32| {
        let path = place.path(name);
        fs::create_dir(&path).unwrap();
        chown(&path, Some(owner), Some(owner)).unwrap();
        open(&path, mode);
        path
    };
    let refused = |runtime: &Path, why: &str| {
        let mut attach = program.run_as(VICTIM);
        attach.args(["attach", image.to_str().unwrap(), "via=ublk"]);
        attach.env("BECKET_RUNTIME_DIR", runtime).env("BECKET_LINK_DIR", place.path("links"));
        let output = attach.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{}: {said}", runtime.display());
    };
    let not_ours = "only this user may write";
    refused(&dir("planted", STRANGER, 0o755), not_ours);
    refused(&dir("shared", VICTIM, 0o777), not_ours);
    let own = dir("own", VICTIM, 0o700);
    let link = place.path("link");
    symlink(&own, &link).unwrap();
    refused(&link, not_ours);
    // Records of another user, in a directory that is one's own.
    let records = dir("own/devices", STRANGER, 0o755);
    fs::write(records.join("disk.json"), "{}").unwrap();
    refused(&own, not_ours);
    fs::remove_dir_all(&records).unwrap();
    symlink(dir("elsewhere", VICTIM, 0o700), &records).unwrap();
    refused(&own, not_ours);
    // Where the runtime directory of a session is another user's, or missing and all may write to where it
    // should be.
    let session = dir("session", STRANGER, 0o777);
    dir("session/becket", STRANGER, 0o755);
    let mut list = program.run_as(VICTIM);
    let list =
        list.arg("list").env_remove("BECKET_RUNTIME_DIR").env("XDG_RUNTIME_DIR", &session).output().unwrap();
    assert!(String::from_utf8_lossy(&list.stderr).contains(not_ours), "{list:?}");
}

/// A socket at which another user listens gets no descriptor and no message.
pub(crate) fn a_planted_socket_hears_nothing(place: &Place) {
    let Some(program) = Program::new(place) else { return };
    let runtime = place.runtime();
    fs::create_dir(&runtime).unwrap();
    let socket = runtime.join("control");
    // Credentials are those of who listens: a stranger's process.
    open(&runtime, 0o777);
    let mut ear = program
        .run_as(STRANGER)
        .arg("eavesdrop")
        .arg(&socket)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    assert!(testkit::wait_until(Duration::from_secs(20), || UnixStream::connect(&socket).is_ok()));
    chown(&runtime, Some(VICTIM), Some(VICTIM)).unwrap();
    open(&runtime, 0o700);
    let victim = program.run_as(VICTIM).arg("status").env("BECKET_RUNTIME_DIR", &runtime).output().unwrap();
    let said = String::from_utf8_lossy(&victim.stderr);
    assert!(!victim.status.success() && said.contains("another user's"), "{victim:?}");
    let mut heard = String::new();
    ear.stdout.take().unwrap().read_to_string(&mut heard).unwrap();
    assert!(ear.wait().unwrap().success());
    assert_eq!(heard, "0 bytes\n");
}

/// Listens until the second caller has hung up (the first only probes), and says how much that one sent.
pub(crate) fn eavesdrop(socket: &Path) {
    let listener = UnixListener::bind(socket).unwrap();
    open(socket, 0o666);
    drop(listener.accept().unwrap());
    let mut heard = Vec::new();
    let _ = listener.accept().unwrap().0.read_to_end(&mut heard);
    println!("{} bytes", heard.len());
}

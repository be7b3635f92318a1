//! The supervisor and its worker as processes: what they give up, whom they serve, when they end.
//! No device is made here.

use std::fs;
use std::io::{IoSlice, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use becket_testkit as testkit;
use serde_json::Value;

use crate::place::{Place, Running, mount_points, status_field};
use crate::talk;

pub(crate) fn worker_gives_up_its_rights(place: &Place) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    if !testkit::require_root(place.name) {
        return;
    }
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let child = place.command(&["worker"]).stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn().unwrap();
    let mut worker = Running(child);
    let mut packet = vec![0; 1 << 16];
    let len = rustix::io::read(&ours, &mut packet).unwrap();
    let report: Value = serde_json::from_slice(&packet[..len]).unwrap();
    let notes: Vec<&str> = report["started"]["notes"]
        .as_array()
        .expect("it starts")
        .iter()
        .map(|n| n.as_str().unwrap())
        .collect();
    let threads = std::thread::available_parallelism().unwrap().get();
    assert_eq!(report["started"]["threads"], threads);

    let pid = worker.pid();
    for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&status_field(pid, field), 16), Ok(0), "{field}");
    }
    assert_eq!(status_field(pid, "NoNewPrivs"), "1");
    // The I/O threads as well: capabilities belong to threads.
    let mut tasks = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        let status = fs::read_to_string(task.path().join("status")).unwrap();
        assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
        // The filter of system calls; `system::confine` tries what it lets through.
        assert!(status.contains("\nSeccomp:\t2\n"), "{status}");
        tasks += 1;
    }
    assert!(tasks > threads, "{tasks} threads");
    // What the environment forbids is noted, and only that.
    let had = u64::from_str_radix(&status_field(std::process::id(), "CapEff"), 16).unwrap();
    let sys_resource = had & (1 << 24) != 0;
    assert_eq!(notes.iter().any(|note| note.contains("IO_FLUSHER")), !sys_resource, "{notes:?}");
    for precaution in ["mlockall", "Landlock", "system calls"] {
        assert!(!notes.iter().any(|note| note.contains(precaution)), "{notes:?}");
    }
    assert_ne!(status_field(pid, "VmLck").split(' ').next(), Some("0"), "its memory is locked");
    let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/mnt")).unwrap();
    assert_ne!(namespace(pid), namespace(std::process::id()));
    // Terminals and service managers do not end it; the end of its supervisor does.
    worker.signal(rustix::process::Signal::TERM);
    worker.signal(rustix::process::Signal::INT);
    std::thread::sleep(Duration::from_millis(100));
    assert!(worker.0.try_wait().unwrap().is_none());
    drop(ours);
    assert_eq!(worker.ends(Duration::from_secs(5)), Some(0));
}

pub(crate) fn worker_answers_within_tight_limits(place: &Place) {
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
        sendmsg, socketpair,
        sockopt::{Timeout, set_socket_timeout},
    };
    use rustix::process::{Pid, Resource, Rlimit, Signal};
    if !testkit::require_root(place.name) {
        return;
    }
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let shell = ["-c", "ulimit -S -f 8; ulimit -n 100; exec \"$0\" worker"];
    let mut command = Command::new("sh");
    command.args(shell).arg(std::env::current_exe().unwrap());
    let mut worker = Running(command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn().unwrap());
    // A worker that does not answer is a failure, not a test that never ends.
    set_socket_timeout(&ours, Timeout::Recv, Some(Duration::from_secs(60))).unwrap();
    let mut packet = vec![0; 1 << 16];
    let mut answer = || -> Value {
        let len = rustix::io::read(&ours, &mut packet).unwrap();
        serde_json::from_slice(&packet[..len]).expect("it answers")
    };
    assert!(answer()["started"].is_object());
    let limits = fs::read_to_string(format!("/proc/{}/limits", worker.pid())).unwrap();
    let of = |name: &str| -> Vec<&str> {
        limits.lines().find_map(|line| line.strip_prefix(name)).unwrap().split_whitespace().take(2).collect()
    };
    for name in ["Max file size", "Max open files"] {
        assert_eq!(of(name)[0], of(name)[1], "{name}: as much as it may have");
    }
    let own = rustix::thread::capabilities(None).unwrap();
    if own.effective.contains(rustix::thread::CapabilitySet::SYS_RESOURCE) {
        let most = fs::read_to_string("/proc/sys/fs/nr_open").unwrap();
        assert_eq!(of("Max open files")[0], most.trim(), "whatever the limit of who started it");
    }
    // What a write beyond a limit that could not be lifted raises.
    worker.signal(Signal::XFSZ);

    // It may open no more: an order's descriptors do not arrive, and that is the answer.
    let pid = Pid::from_raw(i32::try_from(worker.pid()).unwrap());
    let open = fs::read_dir(format!("/proc/{}/fd", worker.pid())).unwrap().count() as u64;
    rustix::process::prlimit(pid, Resource::Nofile, Rlimit { current: Some(open), maximum: Some(100) })
        .unwrap();
    let order =
        br#"{"serve":{"kind":"ublk","id":3,"first":3,"queues":1,"depth":1,"direct_io":true,"merge":false,"flags":0,"map":[],"files":[],"geometry":{"size":4096,
        "logical_block":512,"physical_block":512,"io_min":512,"io_opt":0,"dma_align":1,"read_only":false,
        "rotational":false,"discard":false,"discard_granularity":0,"write_zeroes":true,"max_io":65536},
        "mark":1,"isolated":false,"lease":false,"cgroup":false,"partitions":[]}}"#;
    for _ in 0..2 {
        let fds = [ours.as_fd()];
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&ours, &[IoSlice::new(order)], &mut control, SendFlags::empty()).unwrap();
        let failed = answer();
        assert!(failed["failed"]["why"].as_str().unwrap().contains("missing"), "{failed}");
        assert_eq!(answer()["closed"]["id"], 3);
    }
    // Words that mean nothing are no reason to hear no others.
    rustix::io::write(&ours, b"nonsense").unwrap();
    rustix::io::write(&ours, br#"{"change":{"id":3,"map":[],"read_only":false,"direct_io":true}}"#).unwrap();
    assert!(answer()["failed"].is_object());
    drop(ours);
    assert_eq!(worker.ends(Duration::from_secs(5)), Some(0));
}

pub(crate) fn worker_is_not_started_by_hand(place: &Place) {
    let error = place.run(&["worker"]).unwrap_err();
    assert!(error.contains("not by hand"), "{error}");
}

pub(crate) fn supervisor_describes_itself_and_ends(place: &Place) {
    assert_eq!(place.run(&["status"]), Ok(Value::Null), "asking starts none");
    let mut supervisor = place.supervisor();
    let mode = |name: &str| fs::metadata(place.runtime().join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("control"), 0o600);
    assert_eq!(mode(""), 0o700);

    let info = place.call(r#"{"method":"org.varlink.service.GetInfo"}"#);
    let interfaces = info["parameters"]["interfaces"].as_array().unwrap();
    assert!(interfaces.contains(&"org.becket.Becket1".into()), "{info}");
    let describe = |interface: &str| {
        place.call(&format!(
            r#"{{"method":"org.varlink.service.GetInterfaceDescription","parameters":{{"interface":"{interface}"}}}}"#
        ))
    };
    for interface in interfaces {
        let answer = describe(interface.as_str().unwrap());
        let text = answer["parameters"]["description"].as_str().unwrap();
        assert!(text.contains(&format!("interface {}", interface.as_str().unwrap())), "{text}");
    }
    assert_eq!(describe("org.nowhere")["error"], "org.varlink.service.InterfaceNotFound");

    let status = place.run(&["status"]).unwrap();
    assert_eq!(status["pid"], supervisor.pid());
    assert_eq!((&status["devices"], &status["worker_pid"]), (&0.into(), &Value::Null));
    assert_eq!(
        place.call(r#"{"method":"org.becket.Becket1.List","parameters":{}}"#)["parameters"]["devices"],
        Value::Array(vec![])
    );
    // Nothing to do: it ends by itself and cleans up.
    assert_eq!(supervisor.ends(Duration::from_secs(10)), Some(0));
    assert!(!place.runtime().join("control").exists());
}

/// systemd's client reads the descriptions, and calls each method that it finds in them.
pub(crate) fn varlinkctl_reads_and_calls_it(place: &Place) {
    if !testkit::require_plain_machine(place.name, &["varlinkctl"]) {
        return;
    }
    let mut supervisor = place.supervisor();
    let socket = place.runtime().join("control");
    let run = |command: &str, words: &[&str]| {
        Command::new("varlinkctl").arg(command).arg(&socket).args(words).output().unwrap()
    };
    let said = |command: &str, words: &[&str]| {
        let output = run(command, words);
        assert!(output.status.success(), "{command} {words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let info = said("info", &[]);
    let line = format!("Version: {}", env!("CARGO_PKG_VERSION"));
    assert!(info.contains("Product: becket") && info.contains(&line), "{info}");
    assert_eq!(said("list-interfaces", &[]), "org.becket.Becket1\norg.varlink.service\n");
    for interface in ["org.becket.Becket1", "org.varlink.service"] {
        let text = said("introspect", &[interface]);
        assert!(text.contains(&format!("interface {interface}\n")), "{text}");
    }
    let json = |text: String| serde_json::from_str::<Value>(&text).unwrap();
    let status = json(said("call", &["org.becket.Becket1.Status", "{}"]));
    assert_eq!(status["pid"], supervisor.pid());
    for more in ["--more", "--oneway", "--quiet"] {
        assert!(said("call", &["org.becket.Becket1.List", "{}", more]).len() < 20);
    }

    let methods = said("list-methods", &[]);
    assert!(methods.lines().count() > 10, "{methods}");
    for method in methods.lines().filter(|method| !method.ends_with(".HandOver")) {
        let output = run("call", &[method, "{}"]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() || error.contains("InvalidParameter"), "{method}: {error}");
    }
    let output = run("call", &["org.becket.Becket1.Detach", r#"{"name":"x","lazy":false}"#]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("org.becket.Becket1.Failed"), "{output:?}");
    assert_eq!(json(String::from_utf8(output.stdout).unwrap())["kind"], "not_found");
    said("call", &["org.becket.Becket1.HandOver", "{}"]);
    assert_eq!(supervisor.ends(Duration::from_secs(10)), Some(0));
}

pub(crate) fn supervisor_refuses_nonsense_and_goes_on(place: &Place) {
    let _supervisor = place.supervisor();
    let error = |call: &str| place.call(call)["error"].as_str().unwrap().to_owned();
    assert_eq!(error(r#"{"method":"org.becket.Becket1.Nothing"}"#), "org.varlink.service.MethodNotFound");
    assert_eq!(error(r#"{"method":"nothing"}"#), "org.varlink.service.InterfaceNotFound");
    let detach =
        |parameters: &str| format!(r#"{{"method":"org.becket.Becket1.Detach","parameters":{parameters}}}"#);
    assert_eq!(error(&detach("{}")), "org.varlink.service.InvalidParameter");
    assert_eq!(error(&detach(r#"{"name":1,"lazy":false}"#)), "org.varlink.service.InvalidParameter");
    for name in ["x", "../../etc/passwd", ""] {
        let call = detach(&format!(r#"{{"name":"{name}","lazy":false}}"#));
        let answer = place.call(&call);
        assert_eq!(answer["error"], "org.becket.Becket1.Failed", "{answer}");
        assert_eq!(answer["parameters"]["kind"], "not_found", "{answer}");
    }
    // What is no JSON ends that connection, and nothing else.
    let _ = talk(&place.runtime().join("control"), "{{{");
    let _half = UnixStream::connect(place.runtime().join("control")).unwrap();
    assert_eq!(place.run(&["status"]).unwrap()["devices"], 0);
}

pub(crate) fn supervisor_pins_nobodys_mounts(place: &Place) {
    if !testkit::require_root(place.name) {
        return;
    }
    let dir = place.path("mnt");
    fs::create_dir(&dir).unwrap();
    let dir = dir.to_str().unwrap();
    testkit::tool(Command::new("mount").args(["-t", "tmpfs", "tmpfs", dir]));
    let supervisor = place.supervisor();
    let theirs = mount_points(supervisor.pid());
    let ours = mount_points(std::process::id());
    testkit::umount(dir);
    assert!(ours.iter().any(|place| place == dir), "it must not unmount what others see");
    assert!(!theirs.iter().any(|place| place == dir), "{theirs:?}");
    assert!(
        ["/", "/proc", "/dev"].iter().all(|needed| theirs.iter().any(|place| place == needed)),
        "{theirs:?}"
    );
}

pub(crate) fn of_two_supervisors_one_stays(place: &Place) {
    let start = || {
        place
            .command(&["serve", "--ready-fd", "1"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut both = [Running(start()), Running(start())];
    for running in &mut both {
        let mut byte = Vec::new();
        running.0.stdout.take().unwrap().read_to_end(&mut byte).unwrap();
        assert_eq!(byte, b"\n", "a process that waits for either learns that one answers");
    }
    let status = place.run(&["status"]).unwrap();
    let (mut winners, losers): (Vec<_>, Vec<_>) =
        both.into_iter().partition(|running| status["pid"] == running.pid());
    assert_eq!((winners.len(), losers.len()), (1, 1));
    for mut loser in losers {
        assert_eq!(loser.ends(Duration::from_secs(5)), Some(0));
    }
    assert!(winners[0].0.try_wait().unwrap().is_none());
    // One that is not waited for says so.
    let error = place.command(&["serve"]).output().unwrap();
    assert!(!error.status.success());
    assert!(String::from_utf8_lossy(&error.stderr).contains("runs already"));
}

pub(crate) fn another_user_is_refused(place: &Place) {
    if !(testkit::require_root(place.name) && testkit::require_tools(place.name, &["setpriv"])) {
        return;
    }
    // Before the server is there, which ends when it gets no call for a while.
    let program = place.path("program");
    fs::copy("/proc/self/exe", &program).unwrap();
    let _supervisor = place.supervisor();
    // The directory's mode keeps others out. With it and the socket's opened, the server itself must.
    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    open(place.temp.path(), 0o755);
    open(&place.runtime(), 0o755);
    open(&place.runtime().join("control"), 0o666);
    let socket = place.runtime().join("control");
    let call = r#"{"method":"org.becket.Becket1.Status"}"#;
    let talk_as = |user: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(user).arg(&program).args(["talk", socket.to_str().unwrap(), call]);
        testkit::tool(&mut command)
    };
    let answer = talk_as(&["--reuid=65534", "--regid=65534", "--clear-groups"]);
    assert!(answer.contains("PermissionDenied"), "{answer}");
    let answer = talk_as(&["--reuid=0"]);
    assert!(answer.contains("\"stopping\":false"), "{answer}");
}

pub(crate) fn told_to_end_it_ends(place: &Place) {
    let child = place.command(&["serve"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut supervisor = Running(child);
    assert!(testkit::wait_until(Duration::from_secs(10), || place.runtime().join("control").exists()));
    // In the foreground it stays, whether it has something to do or not.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(place.run(&["status"]).unwrap()["pid"], supervisor.pid());
    supervisor.signal(rustix::process::Signal::TERM);
    assert_eq!(supervisor.ends(Duration::from_secs(5)), Some(0));
    assert!(!place.runtime().join("control").exists());
}

/// What systemd does, done by hand: it listens, hears what the server says, and tells it to end.
pub(crate) fn a_service_managers_server_speaks_and_leaves(place: &Place) {
    use std::os::unix::net::{UnixDatagram, UnixListener};
    if !testkit::require_root(place.name) {
        return;
    }
    fs::create_dir(place.runtime()).unwrap();
    fs::set_permissions(place.runtime(), fs::Permissions::from_mode(0o700)).unwrap();
    let socket = place.runtime().join("control");
    let listener = UnixListener::bind(&socket).unwrap();
    let hears = UnixDatagram::bind(place.path("notify")).unwrap();
    hears.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let heard = || {
        let mut words = [0; 256];
        let len = hears.recv(&mut words).unwrap();
        String::from_utf8(words[..len].to_vec()).unwrap()
    };
    for _ in 0..2 {
        let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" serve";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(std::env::current_exe().unwrap());
        command.env("BECKET_RUNTIME_DIR", place.runtime()).env("BECKET_LINK_DIR", place.path("links"));
        command.env("NOTIFY_SOCKET", place.path("notify"));
        command.stdin(Stdio::from(std::os::fd::OwnedFd::from(listener.try_clone().unwrap())));
        let mut server = Running(command.spawn().unwrap());
        // In either order: devices of an old server move beside the calls, and then it is ready.
        let mut said = [heard(), heard()];
        said.sort();
        assert_eq!(said, ["READY=1", "STATUS=devices: 0"]);
        assert_eq!(place.run(&["status"]).unwrap()["pid"], server.pid(), "it serves the socket it was given");
        let takeover = place.run(&["serve", "--takeover"]).unwrap_err();
        assert!(takeover.contains("service manager"), "{takeover}");
        server.signal(rustix::process::Signal::TERM);
        assert_eq!((heard(), server.ends(Duration::from_secs(10))), ("STOPPING=1".into(), Some(0)));
        // The next one finds the socket as it was, and a client that comes meanwhile waits there.
        assert!(socket.exists());
        UnixStream::connect(&socket).unwrap();
    }
}

//! Real processes and real loop devices: the supervisor, its worker, and commands that are killed.
//!
//! The program is its own supervisor and worker (`/proc/self/exe serve`), so it has a harness of its own.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use becket_device::{AttachOptions, DetachOptions, DeviceState, ServeOptions, Via};
use becket_testkit as testkit;
use serde_json::Value;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["serve", "--ready-fd", number] => serve(Some(number.parse().unwrap())),
        ["serve"] => serve(None),
        ["worker"] => becket_device::worker_main().map_err(|error| error.to_string()),
        ["attach", image, more @ ..] => attach(image, more),
        ["lease", image] => lease(image),
        ["detach", target, more @ ..] => detach(target, more),
        ["refresh", target] => show(becket_device::refresh(target)),
        ["list"] => show(becket_device::list()),
        ["status"] => show(becket_device::server_status()),
        ["talk", socket, call] => talk(Path::new(socket), call).map(|answer| println!("{answer}")),
        ["--list", ..] => {
            TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
            Ok(())
        }
        filters => return run_tests(filters),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

type Test = (&'static str, fn(&Place));

const TESTS: [Test; 12] = [
    ("worker_gives_up_its_rights", worker_gives_up_its_rights),
    ("worker_is_not_started_by_hand", worker_is_not_started_by_hand),
    ("supervisor_describes_itself_and_ends", supervisor_describes_itself_and_ends),
    ("supervisor_refuses_nonsense_and_goes_on", supervisor_refuses_nonsense_and_goes_on),
    ("supervisor_pins_nobody_s_mounts", supervisor_pins_nobodys_mounts),
    ("of_two_supervisors_one_stays", of_two_supervisors_one_stays),
    ("another_user_is_refused", another_user_is_refused),
    ("told_to_end_it_ends", told_to_end_it_ends),
    ("a_device_comes_and_goes", a_device_comes_and_goes),
    ("a_device_in_use_stays", a_device_in_use_stays),
    ("a_killed_keeper_s_device_goes", a_killed_keepers_device_goes),
    ("a_failed_attach_leaves_nothing", a_failed_attach_leaves_nothing),
];

fn run_tests(filters: &[&str]) -> ExitCode {
    let filters: Vec<&&str> = filters.iter().filter(|word| !word.starts_with('-')).collect();
    let mut failed = Vec::new();
    let chosen =
        TESTS.iter().filter(|(name, _)| filters.is_empty() || filters.iter().any(|f| name.contains(**f)));
    for (name, test) in chosen {
        let place = Place::new(name);
        let ok = catch_unwind(AssertUnwindSafe(|| test(&place))).is_ok();
        println!("test {name} ... {}", if ok { "ok" } else { "FAILED" });
        if !ok {
            eprintln!(
                "--- the server's log:\n{}",
                fs::read_to_string(place.runtime().join("log")).unwrap_or_default()
            );
            failed.push(name);
        }
    }
    println!("test result: {}. {} failed", if failed.is_empty() { "ok" } else { "FAILED" }, failed.len());
    ExitCode::from(u8::from(!failed.is_empty()))
}

// What the started copies do.

fn serve(ready: Option<i32>) -> Result<(), String> {
    let ready_fd = ready.map(becket_device::inherited_fd).transpose().map_err(|error| error.to_string())?;
    let stay = ready_fd.is_none();
    becket_device::serve(ServeOptions { stay, ready_fd }).map_err(|error| error.to_string())
}

fn show<T: serde::Serialize>(result: Result<T, becket_device::Error>) -> Result<(), String> {
    match result {
        Ok(value) => {
            println!("{}", serde_json::to_string(&value).unwrap());
            Ok(())
        }
        Err(error) => Err(format!("{:?}: {error}", error.kind())),
    }
}

fn attach(image: &str, more: &[&str]) -> Result<(), String> {
    let mut options = AttachOptions { via: Via::Loop, ..AttachOptions::default() };
    for word in more {
        match word.split_once('=').unwrap() {
            ("name", name) => options.name = Some(name.to_owned()),
            ("offset", offset) => options.offset = offset.parse().unwrap(),
            ("via", via) => options.via = via.parse().unwrap(),
            ("partitions", partitions) => options.partitions = partitions.parse().unwrap(),
            other => panic!("{other:?}"),
        }
    }
    show(becket_device::attach(Path::new(image), &options))
}

fn lease(image: &str) -> Result<(), String> {
    let options = AttachOptions { via: Via::Loop, ..AttachOptions::default() };
    let (info, lease) =
        becket_device::attach_leased(Path::new(image), &options).map_err(|error| error.to_string())?;
    println!("{}", serde_json::to_string(&info).unwrap());
    // Until told to let go, or killed.
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(lease);
    println!("{}", becket_device::list().unwrap().len());
    Ok(())
}

fn detach(target: &str, more: &[&str]) -> Result<(), String> {
    let options = DetachOptions { lazy: more.contains(&"lazy"), timeout: Duration::from_secs(5) };
    show(becket_device::detach(target, &options))
}

/// One varlink call, as anybody could write it.
fn talk(socket: &Path, call: &str) -> Result<String, String> {
    let text = |error: std::io::Error| error.to_string();
    let mut stream = UnixStream::connect(socket).map_err(text)?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).map_err(text)?;
    stream.write_all(call.as_bytes()).and_then(|()| stream.write_all(&[0])).map_err(text)?;
    let mut answer = Vec::new();
    BufReader::new(stream).read_until(0, &mut answer).map_err(text)?;
    answer.pop();
    String::from_utf8(answer).map_err(|error| error.to_string())
}

// What the tests need.

/// A directory of its own for each test, with becket's directories in it.
struct Place {
    name: &'static str,
    temp: tempfile::TempDir,
}

impl Place {
    fn new(name: &'static str) -> Place {
        Place { name, temp: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    fn runtime(&self) -> PathBuf {
        self.path("run")
    }

    fn image(&self, name: &str, size: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(size).unwrap();
        path
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command
            .args(words)
            .env("BECKET_RUNTIME_DIR", self.runtime())
            .env("BECKET_LINK_DIR", self.path("links"));
        command
    }

    fn run(&self, words: &[&str]) -> Result<Value, String> {
        let output = self.command(words).output().unwrap();
        if output.status.success() {
            return Ok(serde_json::from_slice(&output.stdout).unwrap());
        }
        Err(String::from_utf8(output.stderr).unwrap())
    }

    /// A supervisor that is ready.
    fn supervisor(&self) -> Running {
        let mut child = self
            .command(&["serve", "--ready-fd", "1"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut byte = Vec::new();
        child.stdout.take().unwrap().read_to_end(&mut byte).unwrap();
        assert_eq!(byte, b"\n", "one byte when it is ready, and then the pipe is closed");
        Running(child)
    }

    fn call(&self, call: &str) -> Value {
        serde_json::from_str(&talk(&self.runtime().join("control"), call).unwrap()).unwrap()
    }

    fn records(&self) -> usize {
        let files = fs::read_dir(self.runtime().join("devices")).unwrap();
        files.flatten().filter(|item| item.path().extension().is_some_and(|e| e == "json")).count()
    }

    /// Whether loop devices can be attached here.
    fn has_loop(&self) -> bool {
        testkit::require_root(self.name) && testkit::require_loop(self.name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A test that failed leaves nothing attached either.
        if let Ok(Value::Array(devices)) = self.run(&["list"]) {
            for device in devices {
                let _ = self.run(&["detach", device["name"].as_str().unwrap(), "lazy"]);
            }
        }
    }
}

/// A process that does not outlive its test.
struct Running(Child);

impl Running {
    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.pid()).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn ends(&mut self, within: Duration) -> Option<i32> {
        let deadline = Instant::now() + within;
        while Instant::now() < deadline {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("still there after {within:?}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn status_field(pid: u32, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().to_owned()
}

fn mount_points(pid: u32) -> Vec<String> {
    let table = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    table.lines().map(|line| line.split(' ').nth(4).unwrap().to_owned()).collect()
}

// The tests.

fn worker_gives_up_its_rights(place: &Place) {
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
        tasks += 1;
    }
    assert!(tasks > threads, "{tasks} threads");
    // What the environment forbids is noted, and only that.
    let had = u64::from_str_radix(&status_field(std::process::id(), "CapEff"), 16).unwrap();
    let sys_resource = had & (1 << 24) != 0;
    assert_eq!(notes.iter().any(|note| note.contains("IO_FLUSHER")), !sys_resource, "{notes:?}");
    assert!(!notes.iter().any(|note| note.contains("mlockall")), "{notes:?}");
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

fn worker_is_not_started_by_hand(place: &Place) {
    let error = place.run(&["worker"]).unwrap_err();
    assert!(error.contains("not by hand"), "{error}");
}

fn supervisor_describes_itself_and_ends(place: &Place) {
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

fn supervisor_refuses_nonsense_and_goes_on(place: &Place) {
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

fn supervisor_pins_nobodys_mounts(place: &Place) {
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
    testkit::tool(Command::new("umount").arg(dir));
    assert!(ours.iter().any(|place| place == dir), "it must not unmount what others see");
    assert!(!theirs.iter().any(|place| place == dir), "{theirs:?}");
    assert!(
        ["/", "/proc", "/dev"].iter().all(|needed| theirs.iter().any(|place| place == needed)),
        "{theirs:?}"
    );
}

fn of_two_supervisors_one_stays(place: &Place) {
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
        assert_eq!(byte, b"\n", "whoever waits for either learns that one answers");
    }
    let status = place.run(&["status"]).unwrap();
    let (mut winners, losers): (Vec<_>, Vec<_>) =
        both.into_iter().partition(|running| status["pid"] == running.pid());
    assert_eq!((winners.len(), losers.len()), (1, 1));
    for mut loser in losers {
        assert_eq!(loser.ends(Duration::from_secs(5)), Some(0));
    }
    assert!(winners[0].0.try_wait().unwrap().is_none());
    // One that nobody waits for says so.
    let error = place.command(&["serve"]).output().unwrap();
    assert!(!error.status.success());
    assert!(String::from_utf8_lossy(&error.stderr).contains("runs already"));
}

fn another_user_is_refused(place: &Place) {
    if !(testkit::require_root(place.name) && testkit::require_tools(place.name, &["setpriv"])) {
        return;
    }
    let _supervisor = place.supervisor();
    // The directory's mode keeps others out. With it and the socket's opened, the server itself must.
    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    open(place.temp.path(), 0o755);
    open(&place.runtime(), 0o755);
    open(&place.runtime().join("control"), 0o666);
    let program = place.path("program");
    fs::copy("/proc/self/exe", &program).unwrap();
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

fn told_to_end_it_ends(place: &Place) {
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

fn a_device_comes_and_goes(place: &Place) {
    if !place.has_loop() {
        return;
    }
    let image = place.image("image", 1 << 20);
    let image = image.to_str().unwrap();
    let info = place.run(&["attach", image, "name=one"]).unwrap();
    assert_eq!(
        (&info["transport"], &info["size"], &info["state"]),
        (&"loop".into(), &(1 << 20).into(), &"live".into())
    );
    let node = info["device"].as_str().unwrap();
    assert_eq!(fs::read_link(place.path("links/one")).unwrap(), Path::new(node));
    assert_eq!(place.run(&["list"]).unwrap(), Value::Array(vec![info.clone()]));

    // The same image, and another one under the same name.
    let error = place.run(&["attach", image]).unwrap_err();
    assert!(error.starts_with("InUse") && error.contains("as one"), "{error}");
    let other = place.image("other", 4096);
    let error = place.run(&["attach", other.to_str().unwrap(), "name=one"]).unwrap_err();
    assert!(error.starts_with("NameInUse") && error.contains(image), "{error}");

    File::options().write(true).open(image).unwrap().set_len(2 << 20).unwrap();
    assert_eq!(place.run(&["refresh", "one"]).unwrap()["size"], 2 << 20);
    assert_eq!(place.run(&["list"]).unwrap()[0]["size"], 2 << 20);

    // By each of its names.
    let link = place.path("links/one");
    for target in ["one", node, link.to_str().unwrap(), image] {
        assert_eq!(place.run(&["detach", target]).unwrap()["name"], "one", "{target}");
        assert!(!link.is_symlink());
        assert_eq!(place.records(), 0);
        let error = place.run(&["detach", target]).unwrap_err();
        assert!(error.starts_with("NotFound"), "{error}");
        place.run(&["attach", image, "name=one"]).unwrap();
    }
    // Detached behind our back: the record falls.
    let node = place.run(&["list"]).unwrap()[0]["device"].as_str().unwrap().to_owned();
    testkit::tool(Command::new("losetup").args(["--detach", &node]));
    assert_eq!(place.run(&["list"]).unwrap(), Value::Array(vec![]));
    assert_eq!(place.records(), 0);
    assert!(!link.is_symlink());
}

fn a_device_in_use_stays(place: &Place) {
    if !(place.has_loop() && testkit::require_tools(place.name, &["mkfs.ext4"])) {
        return;
    }
    let image = place.image("image", 8 << 20);
    testkit::tool(Command::new("mkfs.ext4").arg("-q").arg(&image));
    let info = place.run(&["attach", image.to_str().unwrap(), "name=one"]).unwrap();
    let node = info["device"].as_str().unwrap();
    let dir = place.path("mnt");
    fs::create_dir(&dir).unwrap();
    testkit::tool(Command::new("mount").arg(node).arg(&dir));
    let refused = place.run(&["detach", "one"]);
    let lazy = place.run(&["detach", "one", "lazy"]);
    let still = place.run(&["list"]);
    testkit::tool(Command::new("umount").arg(&dir));
    let refused = refused.unwrap_err();
    assert!(refused.starts_with("Busy") && refused.contains(dir.to_str().unwrap()), "{refused}");
    let detaching = serde_json::to_value(DeviceState::Detaching).unwrap();
    assert_eq!(lazy.unwrap()["state"], detaching);
    assert_eq!(still.unwrap()[0]["state"], detaching);
    assert_eq!(place.run(&["list"]).unwrap(), Value::Array(vec![]));

    // A descriptor is a use as well.
    let info = place.run(&["attach", image.to_str().unwrap(), "name=one"]).unwrap();
    let open = File::open(info["device"].as_str().unwrap()).unwrap();
    let refused = place.run(&["detach", "one"]).unwrap_err();
    assert!(refused.contains(&format!("pid {}", std::process::id())), "{refused}");
    drop(open);
    place.run(&["detach", "one"]).unwrap();
}

fn a_killed_keepers_device_goes(place: &Place) {
    if !place.has_loop() {
        return;
    }
    let image = place.image("image", 1 << 20);
    let start = || {
        let mut child = place
            .command(&["lease", image.to_str().unwrap()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let info: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        (Running(child), info, lines)
    };
    let (mut keeper, info, _) = start();
    assert_eq!(place.run(&["list"]).unwrap()[0]["name"], info["name"]);
    keeper.0.kill().unwrap();
    keeper.0.wait().unwrap();
    let gone = || place.run(&["list"]).unwrap() == Value::Array(vec![]);
    assert!(testkit::wait_until(Duration::from_secs(1), gone), "within a second");
    assert_eq!(place.records(), 0);

    // Let go in peace, it is gone when the lease is.
    let (mut keeper, _, mut lines) = start();
    keeper.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "0");
    assert_eq!(keeper.ends(Duration::from_secs(5)), Some(0));
    assert_eq!(place.records(), 0);
}

fn a_failed_attach_leaves_nothing(place: &Place) {
    if !place.has_loop() {
        return;
    }
    let image = place.image("image", 1 << 20);
    let image = image.to_str().unwrap();
    let error = place.run(&["attach", image, "name=one", "partitions=on"]).unwrap_err();
    assert!(error.starts_with("InvalidOption"), "{error}");
    assert!(place.run(&["attach", image, "name=a/b"]).unwrap_err().starts_with("InvalidOption"));
    assert!(place.run(&["attach", image, "name=one", "offset=2097152"]).is_err());
    assert!(place.run(&["attach", image, "name=one", "via=dm"]).unwrap_err().starts_with("Unsupported"));
    assert_eq!(place.records(), 0);
    // The name is free, and the image's locks are.
    place.run(&["attach", image, "name=one"]).unwrap();
    place.run(&["detach", "one"]).unwrap();
}

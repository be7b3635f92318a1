//! `becket run`: the device exists exactly as long as the command, however either of them ends.
//! Every test looks at processes and devices themselves, not at what becket says of them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Scratch, crc_whole, image, require_device, require_tools, tool, via, wait_until};
use common::{Use, WRITE_USE, alive, ended, numbers, scratch, text};
use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

/// What the issue promises: gone within a second of the last user letting go.
const A_SECOND: Duration = Duration::from_secs(1);

/// A place with an image `a.img` in it.
fn place_with_image() -> Scratch {
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    place
}

fn run(place: &Scratch, words: &[&str]) -> becket_testkit::Ran {
    let via = via();
    place.run(["run", "--via", &via, "a.img", "--"].iter().chain(words))
}

/// Begins a command line that ignores no signal: tests that a shell runs in the background inherit that
/// SIGINT is ignored, below nohup(1) SIGHUP, and a shell can set no trap for what was ignored when it began.
fn attentive(place: &Scratch) -> Command {
    let mut command = Command::new("env");
    place.prepare(&mut command);
    command.arg("--default-signal");
    command
}

/// Starts `becket run` with a shell script, which writes process ids and the device into files.
fn start(place: &Scratch, script: &str) -> Child {
    let log = fs::File::create(place.path("log")).unwrap();
    let mut command = attentive(place);
    command.arg(place.becket().get_program());
    command.args(["run", "--via", &via(), "a.img", "--", "sh", "-c", script]);
    command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

fn kill(signal: &str, pid: u32) {
    tool(Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]));
}

/// The use of the device that a script wrote down.
fn used(place: &Scratch) -> Use {
    Use::written(&place.path("device"))
}

/// No group of `becket run` with this process id is left.
fn no_cgroup_left(pid: u32) -> bool {
    !below(Path::new("/sys/fs/cgroup"), &format!("becket-run-{pid}"), 6)
}

/// Whether there is such a directory, so many levels below this one. Others come and go meanwhile, as those
/// of other tests do: find(1) would fail when one does.
fn below(dir: &Path, name: &str, levels: u32) -> bool {
    let mut dirs = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    dirs.any(|entry| entry.file_name() == name || (levels > 1 && below(&entry.path(), name, levels - 1)))
}

#[test]
fn passes_the_command_through() {
    if !require_device("run::passes_the_command_through") {
        return;
    }
    let place = place_with_image();
    for code in [0, 1, 2, 42, 255] {
        assert_eq!(run(&place, &["sh", "-c", &format!("exit {code}")]).code, code);
    }
    assert_eq!(run(&place, &["sh", "-c", "kill -TERM $$"]).code, 128 + 15);
    assert_eq!(run(&place, &["sh", "-c", "kill -KILL $$"]).code, 128 + 9);
    let ran = run(&place, &["no-such-command"]);
    assert_eq!(ran.code, 127, "{ran:?}");
    assert!(ran.err.contains("cannot run no-such-command: no such file"), "{ran:?}");
    assert!(ran.err.contains("hint: "), "{ran:?}");
    assert_eq!(run(&place, &["/dev/null"]).code, 126);
    // For programs as for people; what a command prints that could be run is its own.
    for (command, status) in [("no-such-command", 127), ("/dev/null", 126)] {
        let ran = place.run(["run", "--json", "--via", &via(), "a.img", "--", command]);
        assert_eq!((ran.code, text(&ran.json()["error"], "kind")), (status, "command"), "{ran:?}");
    }
    let ran = place.run(["run", "--json", "--via", &via(), "a.img", "--", "false"]);
    assert_eq!((ran.code, ran.out.as_str()), (1, ""), "{ran:?}");

    let ran = run(&place, &["sh", "-c", "echo out; echo err >&2; echo \"$@\"", "sh", "--json", "-v", "{}x"]);
    let words: Vec<&str> = ran.out.split_whitespace().collect();
    assert_eq!((words[0], words[1], words[2]), ("out", "--json", "-v"));
    assert!(words[3].starts_with("/dev/") && words[3].ends_with('x'), "{ran:?}");
    assert_eq!(ran.err, "err\n");
    assert!(place.devices().is_empty());
}

#[test]
fn standard_input_reaches_the_command() {
    if !require_device("run::standard_input_reaches_the_command") {
        return;
    }
    let place = place_with_image();
    let mut command = place.becket();
    command.args(["run", "--via", &via(), "a.img", "--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"through").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"through");
}

#[test]
fn the_device_is_there_during_and_gone_after() {
    if !require_device("run::the_device_is_there_during_and_gone_after") {
        return;
    }
    let place = place_with_image();
    let script = format!(
        "{WRITE_USE}; cmp \"$BECKET_DEVICE\" a.img && test \"$BECKET_DEVICE\" = \"$1\" \
        && \"$BECKET\" list | grep -q \"$1\""
    );
    let ran = run(&place, &["sh", "-c", &script, "sh", "{}"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(!used(&place).lasts(), "gone when run returns");
    assert!(place.devices().is_empty());
    assert_eq!(crc_whole(&place.path("a.img")).1, 1 << 20);
}

#[test]
fn the_command_does_not_inherit_descriptors() {
    if !require_device("run::the_command_does_not_inherit_descriptors") {
        return;
    }
    let place = place_with_image();
    // As many as without becket, whatever the tests themselves have inherited.
    let mut without = Command::new("ls");
    place.prepare(&mut without);
    let without = place.finish(without.arg("/proc/self/fd"));
    let ran = run(&place, &["ls", "/proc/self/fd"]);
    assert_eq!(ran.out, without.out, "{ran:?}");
    // Nor blocked signals, nor an ignored SIGPIPE.
    let words = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"];
    let mut without = Command::new(words[0]);
    place.prepare(&mut without);
    let without = place.finish(without.args(&words[1..]));
    let ran = run(&place, &words);
    assert_eq!(ran.out, without.out, "{ran:?}");
}

#[test]
fn an_image_that_fails_runs_nothing() {
    if !require_device("run::an_image_that_fails_runs_nothing") {
        return;
    }
    let place = scratch();
    let ran = place.run(["run", "--json", "--via", &via(), "missing.img", "--", "touch", "ran"]);
    assert_eq!(ran.code, 1);
    assert!(ran.err.starts_with("becket: cannot attach missing.img: "), "{ran:?}");
    assert_eq!(ran.json()["error"]["kind"], "not_found");
    assert!(!place.path("ran").exists());
}

#[test]
fn signals_reach_the_command() {
    if !require_device("run::signals_reach_the_command") {
        return;
    }
    for (signal, code) in [("TERM", 15), ("INT", 2), ("HUP", 1), ("USR1", 10)] {
        let place = place_with_image();
        let script = format!("trap 'exit {code}' {signal}; echo $$ > pids; while :; do sleep 0.05; done");
        let mut child = start(&place, &script);
        numbers(&place.path("pids"), 1);
        kill(signal, child.id());
        assert_eq!(ended(&mut child).code(), Some(code), "{signal}");
        assert!(place.devices().is_empty());
    }
}

/// A script that leaves a daemon of every kind behind and then does `rest`.
fn daemons(rest: &str) -> String {
    format!(
        "{WRITE_USE}; echo $$ >> pids; \
        sleep 300 & echo $! >> pids; \
        setsid sh -c 'echo $$ >> pids; exec sleep 300' & \
        setsid sh -c '(setsid sh -c \"echo \\$\\$ >> pids; exec 9< $BECKET_DEVICE; exec sleep 300\" &) & exit' & \
        while [ $(wc -l < pids) -lt 4 ]; do sleep 0.05; done; echo 0 > ready; {rest}"
    )
}

#[test]
fn what_the_command_leaves_running_ends_with_it() {
    let name = "run::what_the_command_leaves_running_ends_with_it";
    if !require_device(name) || !require_tools(name, &["setsid"]) {
        return;
    }
    let place = place_with_image();
    let mut child = start(&place, &daemons("exit 3"));
    let id = child.id();
    assert_eq!(ended(&mut child).code(), Some(3));
    // No waiting here: when run has returned, they are gone.
    let pids = numbers(&place.path("pids"), 4);
    assert!(pids.iter().all(|&pid| !alive(pid)), "{pids:?}");
    assert!(!used(&place).lasts(), "also the one that kept the device open");
    assert!(no_cgroup_left(id));
}

#[test]
fn killed_run_takes_everything_along() {
    let name = "run::killed_run_takes_everything_along";
    if !require_device(name) || !require_tools(name, &["setsid"]) {
        return;
    }
    let place = place_with_image();
    let mut child = start(&place, &daemons("sleep 300"));
    let id = child.id();
    numbers(&place.path("ready"), 1);
    let pids = numbers(&place.path("pids"), 4);
    assert!(pids.iter().all(|&pid| alive(pid)), "{pids:?}");
    kill("KILL", id);
    ended(&mut child);
    assert!(wait_until(A_SECOND, || !used(&place).lasts()), "the device is gone within a second");
    assert!(wait_until(A_SECOND, || pids.iter().all(|&pid| !alive(pid))), "{pids:?}");
    assert!(wait_until(A_SECOND, || place.devices().is_empty()));
    assert!(wait_until(A_SECOND, || no_cgroup_left(id)));
}

#[test]
fn without_a_cgroup_too() {
    let name = "run::without_a_cgroup_too";
    if !require_device(name) || !require_tools(name, &["setsid", "unshare"]) {
        return;
    }
    let place = place_with_image();
    // With nothing mounted there becket can make no group, as most users cannot.
    let mut command = Command::new("unshare");
    place.prepare(&mut command);
    let hide =
        "mount -t tmpfs none /sys/fs/cgroup && exec \"$BECKET\" run -v --via \"$0\" a.img -- sh -c \"$1\"";
    command.args(["--mount", "sh", "-c", hide, &via(), &daemons("sleep 300")]);
    let log = fs::File::create(place.path("log")).unwrap();
    let mut child = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
    numbers(&place.path("ready"), 1);
    let pids = numbers(&place.path("pids"), 4);
    let log = fs::read_to_string(place.path("log")).unwrap();
    assert!(log.contains("no cgroup for the command"), "{log}");
    assert!(pids.iter().all(|&pid| alive(pid)), "{pids:?}");
    kill("KILL", child.id());
    ended(&mut child);
    assert!(wait_until(A_SECOND, || !used(&place).lasts()), "the device is gone within a second");
    assert!(wait_until(A_SECOND, || pids.iter().all(|&pid| !alive(pid))), "{pids:?}");
}

#[test]
fn a_killed_guard_takes_the_command_along() {
    if !require_device("run::a_killed_guard_takes_the_command_along") {
        return;
    }
    let place = place_with_image();
    let script = format!("{WRITE_USE}; echo $$ >> pids; exec sleep 300");
    let mut child = start(&place, &script);
    let pids = numbers(&place.path("pids"), 1);
    let status = fs::read_to_string(format!("/proc/{}/status", pids[0])).unwrap();
    let guard = status.lines().find_map(|line| line.strip_prefix("PPid:\t")).unwrap().parse().unwrap();
    assert_ne!(guard, child.id());
    kill("KILL", guard);
    assert_eq!(ended(&mut child).code(), Some(1));
    assert!(!alive(pids[0]) && !used(&place).lasts());
    let log = fs::read_to_string(place.path("log")).unwrap();
    assert!(log.contains("guard was killed by signal 9"), "{log}");
    assert!(no_cgroup_left(child.id()));
}

/// As a container's first process, whose group and session are outside and have no number inside.
#[test]
fn a_process_group_of_another_pid_namespace() {
    let name = "run::a_process_group_of_another_pid_namespace";
    if !require_device(name) || !require_tools(name, &["unshare"]) {
        return;
    }
    let place = place_with_image();
    let mut command = Command::new("unshare");
    place.prepare(&mut command);
    let script = format!("{WRITE_USE}; exit 7");
    let run = "\"$BECKET\" run --via \"$0\" a.img -- sh -c \"$1\"; exit $?";
    command.args(["--pid", "--fork", "--mount-proc", "sh", "-c", run, &via(), &script]);
    let ran = place.finish(&mut command);
    assert_eq!(ran.code, 7, "{ran:?}");
    assert!(wait_until(A_SECOND, || !used(&place).lasts()));
}

#[test]
fn a_killed_process_group_leaves_nothing() {
    let name = "run::a_killed_process_group_leaves_nothing";
    if !require_device(name) || !require_tools(name, &["setsid"]) {
        return;
    }
    let place = place_with_image();
    let mut command = Command::new("setsid");
    place.prepare(&mut command);
    command.arg(env!("CARGO_BIN_EXE_becket")).args(["run", "--via", &via(), "a.img", "--", "sh", "-c"]);
    let mut child = command.arg(daemons("sleep 300")).spawn().unwrap();
    numbers(&place.path("ready"), 1);
    let pids = numbers(&place.path("pids"), 4);
    // As a shell or a CI runner does with a job: becket run and its command at one blow.
    tool(Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]));
    ended(&mut child);
    assert!(wait_until(A_SECOND, || !used(&place).lasts()));
    assert!(wait_until(A_SECOND, || pids.iter().all(|&pid| !alive(pid))), "{pids:?}");
}

#[test]
fn a_device_that_others_hold_goes_when_they_let_go() {
    if !require_device("run::a_device_that_others_hold_goes_when_they_let_go") {
        return;
    }
    let place = place_with_image();
    let mut child = start(&place, &format!("{WRITE_USE}; echo $$ >> pids; exec sleep 300"));
    numbers(&place.path("pids"), 1);
    let used = used(&place);
    let held = fs::File::open(used.device()).unwrap();
    kill("KILL", child.id());
    ended(&mut child);
    assert!(!wait_until(A_SECOND, || !used.lasts()), "it is still open here");
    assert_eq!(crc_whole(&used.device()), crc_whole(&place.path("a.img")), "and it still works");
    drop(held);
    assert!(wait_until(A_SECOND, || !used.lasts()), "gone within a second of the last user letting go");
}

/// The mount is the user's and stays; nothing keeps the device beyond it, even if another process serves it
/// meanwhile.
#[test]
fn a_mount_that_outlives_a_killed_run_is_the_last_user() {
    let name = "run::a_mount_that_outlives_a_killed_run_is_the_last_user";
    if !require_device(name) || !require_tools(name, &["mke2fs", "mount"]) {
        return;
    }
    for also in [None, Some("server_pid"), Some("worker_pid")] {
        let place = scratch();
        image::ext4(&place.path("a.img"), 4 << 20, &place.dir("tree"));
        let point = place.dir("mnt");
        let mut child =
            start(&place, &format!("{WRITE_USE}; mount {{}} mnt && echo $$ >> pids; exec sleep 300"));
        let pids = numbers(&place.path("pids"), 1);
        let used = used(&place);
        let device = place.devices().remove(0);
        kill("KILL", child.id());
        if let Some(pid) = also.and_then(|key| device[key].as_u64()) {
            kill("KILL", u32::try_from(pid).unwrap());
        }
        ended(&mut child);
        assert!(wait_until(A_SECOND, || !alive(pids[0])));
        assert!(!wait_until(A_SECOND, || !used.lasts()), "it is mounted");
        assert_eq!(place.devices().len(), 1, "{also:?}");
        fs::write(point.join("file"), "still here").unwrap();
        becket_testkit::umount(&point);
        assert!(wait_until(10 * A_SECOND, || !used.lasts()), "gone with the mount ({also:?})");
        assert!(wait_until(A_SECOND, || place.devices().is_empty()));
    }
}

#[test]
fn a_terminal_interrupts_only_once() {
    let name = "run::a_terminal_interrupts_only_once";
    if !require_device(name) || !require_tools(name, &["script", "setsid"]) {
        return;
    }
    let place = place_with_image();
    // script(1) gives it a terminal, and types ^C there once the trap is set.
    let inner = "trap 'echo int >> ints' INT; echo $$ > pids; n=0; \
        while [ $n -lt 10 ]; do sleep 0.1; [ -s ints ] && n=$((n+1)); done; exit 5";
    fs::write(place.path("inner.sh"), inner).unwrap();
    let mut command = attentive(&place);
    command.args(["script", "--quiet", "--return", "--command"]);
    // Not below a shell: some die of the key themselves.
    command.arg(format!("exec \"$BECKET\" run --via {} a.img -- sh inner.sh", via())).arg("typescript");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    numbers(&place.path("pids"), 1);
    let mut keys = child.stdin.take().unwrap();
    keys.write_all(&[3]).unwrap();
    let status = ended(&mut child);
    assert_eq!(status.code(), Some(5), "{}", typescript(&place.path("typescript")));
    assert_eq!(fs::read_to_string(place.path("ints")).unwrap(), "int\n", "the key reached the command once");
    assert!(place.devices().is_empty());
}

fn typescript(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

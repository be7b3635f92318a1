//! Every attribute that a process inherits, and what becket does with it where a command starts a server.
//!
//! The command is hostile: its shell has set whatever can be set. The table below has each file of /proc/PID
//! and each line of `status` and `limits`; what a newer kernel adds is printed, to be decided.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use becket_testkit as testkit;
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::place::{Place, status_field};

/// What becket does with an attribute.
enum Fate {
    /// It is what a child of init has, by this look at a process of the server (and at init).
    Default(fn(u32) -> bool),
    /// A server sets its own.
    Own(fn(u32) -> bool),
    /// The kernel hands it to no child, or to no program that is executed; or it only describes or counts.
    Not,
    /// It stays the caller's, and why.
    Stays(&'static str),
}
use Fate::{Default, Not, Own, Stays};

const RIGHTS: &str = "a server has the rights of its caller, nobody else's; its worker gives all of them up";
const SPACES: &str = "a namespace cannot be left for one that is not its ancestor; see docs/SECURITY.md";
const KERNEL: &str = "the kernel cannot undo it: noted in `becket doctor`";

/// Files of /proc/PID.
const FILES: &[(&str, Fate)] = &[
    ("attr", Stays("security modules decide by policy, when a program is executed")),
    ("autogroup", Default(|pid| text(pid, "autogroup").ends_with("nice 0"))),
    ("cgroup", Default(|pid| !text(pid, "cgroup").contains("hostile"))),
    ("coredump_filter", Default(|pid| text(pid, "coredump_filter") == "00000033")),
    ("cpu_resctrl_groups", Stays("resource control is the machine's administrator's, by hand")),
    ("cpuset", Default(|pid| !text(pid, "cpuset").contains("hostile"))),
    ("cwd", Default(|pid| link(pid, "cwd") == "/")),
    ("environ", Default(|pid| !text(pid, "environ").contains("HOSTILE"))),
    ("fd", Default(|pid| !holds(pid, "hostile-lock"))),
    ("gid_map", Stays(SPACES)),
    ("limits", Default(no_limits)),
    ("loginuid", Stays("whose audit session began it is what audit wants to know")),
    ("make-it-fail", Stays("fault injection of a test kernel")),
    ("mountinfo", Own(|pid| !text(pid, "mountinfo").contains("/hostile-mount"))),
    ("ns", Stays(SPACES)),
    ("oom_adj", Own(|_| true)),
    ("oom_score_adj", Own(|pid| text(pid, "oom_score_adj") == if may_lift() { "-900" } else { "0" })),
    ("personality", Default(|pid| text(pid, "personality") == "00000000")),
    ("projid_map", Stays(SPACES)),
    ("root", Stays("a root directory cannot be left; images and runtime directory are the caller's")),
    ("sched", Default(|pid| stat(pid, 41) == "0" && stat(pid, 40) == "0")),
    ("sessionid", Stays("as loginuid")),
    ("setgroups", Stays(SPACES)),
    ("stat", Default(|pid| stat(pid, 19) == "0" && stat(pid, 18) == "20" && stat(pid, 7) == "0")),
    ("status", Default(|_| true)),
    ("timens_offsets", Stays(SPACES)),
    ("timerslack_ns", Default(|pid| text(pid, "timerslack_ns") == "50000")),
    ("uid_map", Stays(SPACES)),
];

/// Files that describe what a process has become, or count what it did.
const DESCRIBE: &[&str] = &[
    "arch_status",
    "auxv",
    "clear_refs",
    "cmdline",
    "comm",
    "exe",
    "fdinfo",
    "io",
    "ksm_merging_pages",
    "ksm_stat",
    "latency",
    "map_files",
    "maps",
    "mem",
    "mounts",
    "mountstats",
    "net",
    "numa_maps",
    "oom_score",
    "pagemap",
    "patch_state",
    "sched_ext",
    "schedstat",
    "seccomp_cache",
    "smaps",
    "smaps_rollup",
    "stack",
    "statm",
    "syscall",
    "task",
    "timers",
    "wchan",
    "fail-nth",
];

/// Lines of /proc/PID/status.
const STATUS: &[(&str, Fate)] = &[
    ("Umask", Default(|pid| status_field(pid, "Umask") == "0022")),
    ("Uid", Stays(RIGHTS)),
    ("Gid", Stays(RIGHTS)),
    ("Groups", Default(|pid| status_field(pid, "Groups").is_empty())),
    ("NSsid", Own(|pid| stat(pid, 6) == stat(supervisor_of(pid), 1))),
    ("THP_enabled", Default(|pid| status_field(pid, "THP_enabled") == "1")),
    ("ShdPnd", Not),
    ("SigPnd", Not),
    ("SigQ", Not),
    // SIGUSR1 and SIGUSR2, SIGCHLD, SIGHUP in the supervisor: none blocked, none ignored.
    ("SigBlk", Own(|pid| mask(pid, "SigBlk") & (1 << 9 | 1 << 11 | 1 << 16) == 0)),
    // But for SIGPIPE, which Rust ignores, and the C library's own two.
    ("SigIgn", Default(|pid| mask(pid, "SigIgn") & !(1 << 12 | 3 << 31) == 0)),
    ("SigCgt", Not),
    ("CapInh", Stays(RIGHTS)),
    ("CapPrm", Stays(RIGHTS)),
    ("CapEff", Stays(RIGHTS)),
    ("CapBnd", Stays(RIGHTS)),
    ("CapAmb", Stays(RIGHTS)),
    ("NoNewPrivs", Stays(KERNEL)),
    ("Seccomp", Stays(KERNEL)),
    ("Seccomp_filters", Stays(KERNEL)),
    ("Speculation_Store_Bypass", Stays("costs time and breaks nothing")),
    ("SpeculationIndirectBranch", Stays("costs time and breaks nothing")),
    ("Cpus_allowed", Default(|pid| status_field(pid, "Cpus_allowed") == status_field(1, "Cpus_allowed"))),
    ("Cpus_allowed_list", Default(|_| true)),
    ("Mems_allowed", Default(|pid| status_field(pid, "Mems_allowed") == status_field(1, "Mems_allowed"))),
    ("Mems_allowed_list", Default(|_| true)),
    ("TracerPid", Not),
];

/// Attributes that /proc does not show.
const HIDDEN: &[(&str, Fate)] = &[
    ("I/O class and priority", Default(|pid| io_class(pid) == "none: prio 0")),
    (
        "NUMA policy",
        Default(|pid| text(pid, "numa_maps").lines().all(|line| line.split(' ').nth(1) == Some("default"))),
    ),
    ("controlling terminal", Default(|pid| stat(pid, 7) == "0")),
    ("core scheduling cookie, KSM, machine-check policy", Default(|_| true)),
    ("session keyring", Own(|_| true)),
    ("securebits", Stays(RIGHTS)),
    ("parent-death signal, child subreaper, timers, locks of records", Not),
    ("dumpable", Not),
    ("Landlock domain, MDWE", Stays(KERNEL)),
];

/// Whether root has CAP_SYS_RESOURCE here: containers often go without.
fn may_lift() -> bool {
    mask(std::process::id(), "CapEff") & (1 << 24) != 0
}

fn text(pid: u32, file: &str) -> String {
    let text = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    String::from_utf8_lossy(&text).trim_end().to_owned()
}

fn link(pid: u32, file: &str) -> String {
    fs::read_link(format!("/proc/{pid}/{file}")).unwrap().display().to_string()
}

/// A field of proc_pid_stat(5), by its number there.
fn stat(pid: u32, number: usize) -> String {
    let text = text(pid, "stat");
    if number == 1 {
        return text.split(' ').next().unwrap().to_owned();
    }
    text.rsplit_once(") ").unwrap().1.split(' ').nth(number - 3).unwrap().to_owned()
}

/// Workers and guards are children of the supervisor; its parent is none of becket's.
fn supervisor_of(pid: u32) -> u32 {
    let parent = stat(pid, 4).parse().unwrap();
    let words = text(parent, "cmdline");
    if words.starts_with("becket\0serve") { parent } else { pid }
}

fn holds(pid: u32, name: &str) -> bool {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    fds.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|file| file.ends_with(name))
}

fn mask(pid: u32, field: &str) -> u64 {
    u64::from_str_radix(&status_field(pid, field), 16).unwrap()
}

fn no_limits(pid: u32) -> bool {
    let limits = text(pid, "limits");
    let limit =
        |name: &str| limits.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    let unlimited = |name| limit(name).starts_with("unlimited");
    let unlimited = [
        "Max cpu time",
        "Max file size",
        "Max data size",
        "Max address space",
        "Max resident set",
        "Max file locks",
    ]
    .into_iter()
    .all(unlimited);
    unlimited
        && limit("Max stack size").starts_with("8388608 ")
        && limit("Max core file size").starts_with("0 ")
}

fn io_class(pid: u32) -> String {
    let asked = Command::new("ionice").args(["-p", &pid.to_string()]).output();
    asked.map_or_else(
        |_| "none: prio 0".to_owned(),
        |said| String::from_utf8_lossy(&said.stdout).trim().to_owned(),
    )
}

/// In the command's place: sets all that can be set, and becomes `attach`.
pub(crate) fn hostile(image: &str, dir: &str) -> io::Error {
    for (resource, soft) in [
        (Resource::As, 1 << 30),
        (Resource::Data, 1 << 29),
        (Resource::Fsize, 1 << 20),
        (Resource::Cpu, 60),
        (Resource::Stack, 1 << 20),
        (Resource::Nproc, 5000),
        (Resource::Locks, 10),
        (Resource::Rss, 1 << 29),
        (Resource::Nofile, 64),
        (Resource::Core, 4096),
    ] {
        let now = getrlimit(resource).maximum;
        // A hard limit comes back only where the server may lift it.
        let maximum = if may_lift() { Some(now.map_or(soft, |most| most.min(soft))) } else { now };
        setrlimit(resource, Rlimit { current: Some(soft), maximum }).unwrap();
    }
    rustix::process::umask(Mode::from_raw_mode(0o077));
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::USR1)).unwrap();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    // Where this kernel has it.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    let _ = rustix::thread::set_thread_groups(&[rustix::process::Gid::from_raw(4242)]);
    for (file, words) in [
        ("oom_score_adj", "500"),
        ("coredump_filter", "0x7"),
        ("timerslack_ns", "1234567"),
        ("autogroup", "10"),
    ] {
        let _ = fs::write(format!("/proc/self/{file}"), words);
    }
    fs::write(format!("{dir}/hostile-status"), fs::read("/proc/self/status").unwrap()).unwrap();
    Command::new("/proc/self/exe").args(["attach", image, "via=fuse"]).exec()
}

/// Control groups named `hostile`, in the hierarchies where this test may make one.
struct Groups(Vec<std::path::PathBuf>);

impl Groups {
    fn new() -> Groups {
        let tops = ["", "unified", "pids", "cpuset", "memory"]
            .map(|name| std::path::Path::new("/sys/fs/cgroup").join(name));
        let made = tops.into_iter().filter(|top| top.join("cgroup.procs").exists()).filter_map(|top| {
            let group = top.join(format!("hostile-{}", std::process::id()));
            fs::create_dir(&group).ok()?;
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let _ = fs::read(top.join(file)).and_then(|all| fs::write(group.join(file), all));
            }
            let _ = fs::write(group.join("pids.max"), "200");
            Some(group)
        });
        Groups(made.collect())
    }

    fn join(&self) -> String {
        self.0.iter().map(|group| format!("echo 0 > {}/cgroup.procs && ", group.display())).collect()
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for group in &self.0 {
            testkit::wait_until(Duration::from_secs(5), || fs::remove_dir(group).is_ok());
        }
    }
}

pub(crate) fn a_server_begins_as_init_would_begin_it(place: &Place) {
    let tools = ["nice", "ionice", "taskset", "chrt", "setarch", "env"];
    if !testkit::require_fuse(place.name) || !testkit::require_tools(place.name, &tools) {
        return;
    }
    let image = place.image("a.img", 1 << 20);
    let groups = Groups::new();
    let script = format!(
        "{}cd \"$1\" && exec nice -n 10 ionice -c 3 taskset -c 0 chrt --batch 0 setarch -R \
        env --ignore-signal=USR1,CHLD,HUP --block-signal=USR2,CHLD,ALRM HOSTILE=1 LD_HOSTILE=1 \
        \"$0\" hostile \"$2\" \"$1\" 9>hostile-lock",
        groups.join()
    );
    let command = place.command(&[]);
    let becket = std::env::current_exe().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).arg(becket).arg(place.temp.path()).arg(&image);
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = shell.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let before = fs::read_to_string(place.path("hostile-status")).unwrap();
    println!("the caller:\n{before}");

    let status = place.run(&["status"]).unwrap();
    let pid = |key: &str| u32::try_from(status[key].as_u64().unwrap()).unwrap();
    let supervisor = pid("pid");
    let mut processes = vec![("supervisor", supervisor), ("worker", pid("worker_pid"))];
    let children = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).unwrap();
    processes.extend(
        children
            .split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .filter(|pid| text(*pid, "cmdline").contains("--after-fd"))
            .map(|pid| ("guard", pid)),
    );
    assert_eq!(processes.len(), 3, "{children}");

    let mut wrong = Vec::new();
    for (table, attribute, fate) in [("", FILES), ("status ", STATUS), ("", HIDDEN)]
        .into_iter()
        .flat_map(|(name, table)| table.iter().map(move |(attribute, fate)| (name, attribute, fate)))
    {
        let said = match fate {
            Default(_) => "as a child of init has it",
            Own(_) => "a server's own",
            Not => "not inherited",
            Stays(why) => why,
        };
        println!("{table}{attribute}: {said}");
        for (name, pid) in &processes {
            if let Default(look) | Own(look) = fate
                && !look(*pid)
            {
                wrong.push(format!("{name}: {table}{attribute}"));
            }
        }
    }
    decided();
    let log = fs::read_to_string(place.runtime().join("log")).unwrap();
    assert_eq!(wrong, [""; 0], "\n{log}");
    // As root, nothing of it has to stay.
    let notes: Vec<&str> = log.lines().filter(|line| line.contains("command that started it")).collect();
    assert_eq!(notes, [""; 0]);
    place.run(&["detach", image.to_str().unwrap()]).unwrap();
}

/// Prints what this kernel has and the tables do not.
fn decided() {
    let known: BTreeSet<&str> = FILES.iter().map(|(name, _)| *name).chain(DESCRIBE.iter().copied()).collect();
    for file in fs::read_dir("/proc/self").unwrap().flatten() {
        let name = file.file_name().into_string().unwrap();
        if !known.contains(name.as_str()) {
            println!("UNDECIDED /proc/PID/{name}");
        }
    }
    let known: BTreeMap<&str, ()> = STATUS.iter().map(|(name, _)| (*name, ())).collect();
    for line in fs::read_to_string("/proc/self/status").unwrap().lines() {
        let name = line.split(':').next().unwrap();
        let describes = name.starts_with("Vm") || name.starts_with("Rss") || name.starts_with("NS");
        let counts = [
            "Name",
            "State",
            "Tgid",
            "Ngid",
            "Pid",
            "PPid",
            "FDSize",
            "Kthread",
            "HugetlbPages",
            "CoreDumping",
            "untag_mask",
            "Threads",
            "voluntary_ctxt_switches",
            "nonvoluntary_ctxt_switches",
            "x86_Thread_features",
            "x86_Thread_features_locked",
        ];
        if !describes && !counts.contains(&name) && !known.contains_key(name) {
            println!("UNDECIDED status {name}");
        }
    }
}

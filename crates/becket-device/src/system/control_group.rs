//! A control group of the server's own, outside of the one of the command that started it.
//!
//! A group ends with its session, container or `becket run`, and its limits are meant for the caller's
//! processes. Where systemd runs, it makes a scope, so that the groups stay its own; `busctl` asks for that,
//! to need no D-Bus library. Elsewhere the server makes the group `becket` at the top of each hierarchy. It
//! never touches a group that another program made.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::system::users::unescape;

/// The group's name where no service manager makes one. All servers of the machine share it.
const NAME: &str = "becket";
/// How long the service manager may take, for the answer and then for the move.
const PATIENCE: Duration = Duration::from_secs(5);

/// Leaves the caller's groups.
///
/// # Errors
/// Why the process stays in one of them.
pub(crate) fn leave() -> Result<(), String> {
    let own = own();
    if by_manager(&own) {
        return Ok(());
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut stays = Ok(());
    for top in tops(&own, &mounts) {
        if let Err(error) = join(&top.join(NAME)) {
            stays = Err(format!("{}: {error}", top.join(NAME).display()));
        }
    }
    stays
}

fn own() -> String {
    fs::read_to_string("/proc/self/cgroup").unwrap_or_default()
}

/// Whether a service manager has moved us into a scope.
fn by_manager(before: &str) -> bool {
    let manager = if rustix::process::geteuid().is_root() {
        // See sd_booted(3).
        Path::new("/run/systemd/system").is_dir().then_some("--system")
    } else {
        let place = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        place.filter(|place| place.join("systemd/private").exists()).map(|_| "--user")
    };
    manager.is_some_and(|manager| {
        let asked = Command::new("busctl").args(request(manager, std::process::id())).run(PATIENCE);
        // It has answered once the move is in its queue.
        asked && within(PATIENCE, || own() != before)
    })
}

/// `StartTransientUnit` of systemd's Manager, see org.freedesktop.systemd1(5).
fn request(manager: &str, pid: u32) -> Vec<String> {
    let (unit, pid) = (format!("becket-{pid}.scope"), pid.to_string());
    let call = [manager, "--quiet", "--timeout=5", "call", "org.freedesktop.systemd1"];
    let method = ["/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager", "StartTransientUnit"];
    let properties = [
        // Name, mode, and five properties.
        &["ssa(sv)a(sa(sv))", &unit, "fail", "5"][..],
        &["Description", "s", "becket's server of block devices"],
        &["PIDs", "au", "1", &pid],
        // File systems on its devices are unmounted before it ends.
        &["DefaultDependencies", "b", "false"],
        // With it a worker that runs out of memory does not take the others along: OOMPolicy=continue.
        &["Delegate", "b", "true"],
        &["CollectMode", "s", "inactive-or-failed"],
        // No other units.
        &["0"],
    ];
    let words = call.iter().chain(&method).chain(properties.into_iter().flatten());
    words.map(|word| (*word).to_owned()).collect()
}

trait Bounded {
    /// Whether the command ends well in that time; its words go nowhere.
    fn run(&mut self, patience: Duration) -> bool;
}

impl Bounded for Command {
    fn run(&mut self, patience: Duration) -> bool {
        let null = self.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let Ok(mut child) = null.spawn() else { return false };
        let mut status = None;
        if within(patience, || {
            status = child.try_wait().ok().flatten();
            status.is_some()
        }) {
            return status.is_some_and(|status| status.success());
        }
        // It may have ended just now.
        let _ = child.kill();
        let _ = child.wait();
        false
    }
}

fn within(patience: Duration, mut done: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + patience;
    while !done() {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

/// Where the hierarchies are mounted in which this process is in a group below the top: `own` is
/// /proc/self/cgroup, `mounts` is /proc/self/mountinfo.
fn tops(own: &str, mounts: &str) -> Vec<PathBuf> {
    let mut tops = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let place = mounts.lines().rev().find_map(|mount| {
            let mut words = mount.split(' ').skip(3);
            let (root, point) = (words.next()?, words.next()?);
            let mut words = words.skip_while(|word| *word != "-").skip(1);
            let (kind, options) = (words.next()?, words.nth(1)?);
            let has = |controller| options.split(',').any(|option| option == controller);
            let ours = match controllers {
                "" => kind == "cgroup2",
                some => kind == "cgroup" && some.split(',').all(has),
            };
            ours.then(|| (unescape(root), PathBuf::from(unescape(point))))
        });
        let Some((root, point)) = place else { continue };
        // At the top there is no process to end with; in our own group we are already.
        if path != root && path != Path::new(&root).join(NAME).to_string_lossy() {
            tops.push(point);
        }
    }
    tops
}

/// Moves this process into a group, which is made when it is not there.
fn join(group: &Path) -> io::Result<()> {
    match fs::create_dir(group) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Version 1: a group without CPUs and memory takes no process.
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let empty = fs::read_to_string(group.join(file)).is_ok_and(|text| text.trim().is_empty());
        if empty && let Some(all) = group.parent().and_then(|top| fs::read(top.join(file)).ok()) {
            // Where it fails, joining does, and says so.
            let _ = fs::write(group.join(file), all);
        }
    }
    fs::write(group.join("cgroup.procs"), "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw
31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 /docker/x /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
32 30 0:28 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 cgroup2 rw,nsdelegate
";

    #[test]
    fn the_top_of_every_hierarchy_is_found_in_which_the_caller_has_a_group() {
        let groups = |own: &str| -> Vec<String> {
            tops(own, HYBRID).iter().map(|top| top.display().to_string()).collect()
        };
        assert_eq!(groups("0::/\n4:memory:/\n"), [""; 0], "at the top already");
        assert_eq!(groups("0::/becket\n"), [""; 0], "in the server's group already");
        assert_eq!(groups("0::/becket-run-7\n"), ["/sys/fs/cgroup/unified"]);
        assert_eq!(
            groups("5:cpu,cpuacct:/a\n4:memory:/a/b\n3:pids:/docker/x\n0::/\n"),
            ["/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/memory"]
        );
        assert_eq!(groups("3:pids:/docker/x/y\n"), ["/sys/fs/cgroup/pids"]);
        assert_eq!(groups("7:freezer:/a\n"), [""; 0], "it is not mounted here");
    }

    #[test]
    fn the_service_manager_gets_as_many_properties_as_were_announced() {
        let words = request("--user", 77);
        let at = words.iter().position(|word| word == "5").unwrap();
        let rest: Vec<&str> = words[at + 1..].iter().map(String::as_str).collect();
        assert_eq!(rest[3..7], ["PIDs", "au", "1", "77"]);
        assert_eq!(rest.len(), 3 + 4 + 3 + 3 + 3 + 1);
        assert_eq!(words[0], "--user");
    }
}

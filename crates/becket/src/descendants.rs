//! Ending all that a process has started, where no control group does it.
//! Never signals a process that is not a descendant of the caller, nor becket's server, which serves
//! all users.
//!
//! The caller is a subreaper, so a descendant whose parent died is handed to the caller: no process leaves
//! the tree by `setsid` or by forking twice. Killing the tree again until it is empty catches processes that
//! fork meanwhile.

use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};
use std::{
    collections::HashMap,
    fs, process, thread,
    time::{Duration, Instant},
};

/// Kills every descendant of this process but servers, and reaps them, until none is left or `patience` is
/// over.
pub(crate) fn kill_all(patience: Duration) -> bool {
    let until = Instant::now() + patience;
    loop {
        for pid in of(process::id()) {
            // Gone already is as good as killed; anything else shows when the time is over.
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        if of(process::id()).is_empty() {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// The descendants of `ancestor`, as far as /proc shows them now, without servers and what those have
/// started.
fn of(ancestor: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut session = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Some((parent, of)) = fs::read(entry.path().join("stat")).ok().and_then(|stat| relations(&stat))
        else {
            continue;
        };
        children.entry(parent).or_default().push(pid);
        session.insert(pid, of);
    }
    let own = session.get(&ancestor).copied();
    let mut found = Vec::new();
    let mut next = vec![ancestor];
    while let Some(pid) = next.pop() {
        for child in children.remove(&pid).unwrap_or_default() {
            let elsewhere = own.is_some() && session.get(&child).copied() != own;
            if elsewhere && fs::read(format!("/proc/{child}/cmdline")).is_ok_and(|words| is_server(&words)) {
                continue;
            }
            found.push(child);
            next.push(child);
        }
    }
    found
}

/// Whether a process in a session of its own, by its command line, is a server, a guard or a helper that the
/// command was the first to need. One that the command runs itself is in the command's session. The name is a
/// convention, not a protection: a program that takes it to survive does no harm.
fn is_server(command_line: &[u8]) -> bool {
    let mut words = command_line.split(|&byte| byte == 0);
    matches!(
        (words.next(), words.next()),
        (Some(b"becket"), Some(b"serve"))
            | (
                Some(b"@becket"),
                Some(b"worker" | b"doorman" | b"connector" | b"helper" | b"reporter" | b"fetcher")
            )
    )
}

/// Parent and session in /proc/PID/stat: `PID (name) state PPID group session ...`, where the name may hold
/// anything.
fn relations(stat: &[u8]) -> Option<(u32, u32)> {
    let after = stat.iter().rposition(|&byte| byte == b')')? + 1;
    let mut words = std::str::from_utf8(stat.get(after..)?).ok()?.split_ascii_whitespace().skip(1);
    Some((words.next()?.parse().ok()?, words.nth(1)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_does_not_hide_the_parent() {
        assert_eq!(relations(b"12 (a) S 99 (b) R 7 1 2 3"), Some((7, 2)));
        assert_eq!(relations(b"12 (a"), None);
        assert_eq!(relations(b""), None);
    }

    #[test]
    fn servers_are_known_by_their_command_lines() {
        assert!(is_server(b"becket\0serve\0--ready-fd\x001\0"));
        for role in ["worker", "doorman", "connector", "helper", "reporter", "fetcher"] {
            assert!(is_server(format!("@becket\0{role}\0").as_bytes()), "{role}");
        }
        for other in [&b""[..], b"becket\0run\0", b"becket serve\0", b"sh\0serve\0"] {
            assert!(!is_server(other), "{other:?}");
        }
    }

    #[test]
    fn finds_grandchildren() {
        let mut child = process::Command::new("sh")
            .args(["-c", "sleep 60 & echo; wait"])
            .stdout(process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = child.stdout.take().unwrap();
        std::io::Read::read_exact(&mut out, &mut [0]).unwrap();
        let found = of(child.id());
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(of(process::id()).contains(&found[0]), "a grandchild is a descendant too");
        for pid in found.into_iter().chain([child.id()]) {
            kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
        }
        child.wait().unwrap();
    }
}

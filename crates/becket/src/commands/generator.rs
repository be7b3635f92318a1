//! The hidden `becket generator`, systemd's becket-generator: reads /etc/beckettab and writes what the
//! machine's start waits for.
//! Never keeps a machine from starting: a wrong line is reported in the kernel's log, and the others are
//! used.
//!
//! One unit, `becket-attach@NAME.service`, makes a device; it reads the table itself. The generator only
//! writes when the unit starts: a drop-in file for the order, and links from the units that pull it in
//! (systemd.generator(7)).

use crate::{
    args::{self, Export},
    failure::Failure,
    tab::{self, Entry, Wrong},
};
use std::{
    fmt::Write as _,
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::symlink,
    path::Path,
};

/// The unit of every device. Only the last part of it means something to systemd, in the links.
const UNIT: &str = "/usr/lib/systemd/system/becket-attach@.service";
/// The longest name of a unit, for systemd.
const LONGEST_UNIT: usize = 255;

pub(crate) fn run(args: &args::Generator) -> Result<u8, Failure> {
    // The first is for units that neither hide an administrator's nor are hidden by the distribution's.
    let Some(dir) = args.dirs.first() else { return Err(Failure::usage("no directory for units")) };
    let complaints = generate(dir, &args.tab);
    complaints.iter().for_each(|complaint| log(complaint));
    Ok(u8::from(!complaints.is_empty()))
}

/// Writes what the table asks for; answers with what could not be.
fn generate(dir: &Path, table: &Path) -> Vec<String> {
    let text = match tab::text(table) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => return vec![format!("cannot read {}: {error}", table.display())],
    };
    let one = |found: Result<Entry, Wrong>| {
        let (line, why) = match found {
            Ok(entry) => (entry.line, write(dir, table, &entry).err()?.to_string()),
            Err(Wrong { line, why, .. }) => (line, why),
        };
        Some(format!("{} line {line} is left out: {why}", table.display()))
    };
    tab::entries(&text, &[]).into_iter().filter_map(one).collect()
}

/// Before there is a journal: the kernel's log, and standard error for a run by hand.
fn log(message: &str) {
    // On one line, whatever the table holds.
    let message = message.replace(char::is_control, "?");
    let line = format!("becket-generator[{}]: {message}\n", std::process::id());
    // If neither can be written to, there is no reader. The kernel takes each write as a message.
    let _ = io::stderr().write_all(line.as_bytes());
    let kernel = OpenOptions::new().write(true).open("/dev/kmsg");
    let _ = kernel.and_then(|mut kernel| kernel.write_all(format!("<3>{line}").as_bytes()));
}

/// What makes the machine attach one device.
fn write(dir: &Path, table: &Path, entry: &Entry) -> io::Result<()> {
    let unit = format!("becket-attach@{}.service", entry.name);
    let node = escape(&format!("dev/becket/{}", entry.name));
    if unit.len().max(node.len() + "blockdev@.target".len()) > LONGEST_UNIT {
        return Err(io::Error::other("a unit of systemd cannot have such a long name"));
    }
    let drop_in = dir.join(format!("{unit}.d"));
    fs::create_dir_all(&drop_in)?;
    let text = match &entry.export {
        Some(export) => order_of_export(table, entry, export),
        None => order(table, entry, &node),
    };
    fs::write(drop_in.join("50-beckettab.conf"), text)?;
    let pull = |what: &str| {
        let by = dir.join(what);
        fs::create_dir_all(&by)?;
        symlink(UNIT, by.join(&unit))
    };
    if entry.export.is_some() {
        // No file system waits for it, so the machine's start does not fail with it.
        return if entry.start.noauto { Ok(()) } else { pull("multi-user.target.wants") };
    }
    if !entry.start.noauto {
        let how = if entry.start.nofail { "wants" } else { "requires" };
        pull(&format!("{}.{how}", target(entry)))?;
    }
    // A unit that needs the device pulls it in, even if the machine's start does not.
    pull(&format!("{node}.device.requires"))?;
    // Ordering applies only to units that are started or stopped together, and mounts know the target only:
    // it ends with the device.
    pull(&format!("blockdev@{node}.target.requires"))
}

/// What waits for the device when the machine starts.
fn target(entry: &Entry) -> &'static str {
    if entry.start.netdev { "remote-fs.target" } else { "local-fs.target" }
}

/// The beginning of what is said of a unit: where it comes from, and the places that it needs.
fn needs(table: &Path, entry: &Entry) -> String {
    let image = entry.image.to_string_lossy();
    let mut unit = format!(
        "# Made by becket-generator of line {} of {}.\n[Unit]\nSourcePath={}\n",
        entry.line,
        table.display(),
        table.display()
    );
    // Writing to a string cannot fail.
    if entry.image.is_absolute() {
        let _ = writeln!(unit, "RequiresMountsFor={}", quoted(&image));
    } else {
        unit.push_str("Wants=network-online.target\nAfter=network-online.target\n");
    }
    if let Some(cow) = &entry.device.image.cow {
        let _ = writeln!(unit, "RequiresMountsFor={}", quoted(&cow.to_string_lossy()));
    }
    if let Some(path) = image.strip_prefix("/dev/") {
        let _ = writeln!(unit, "Requires={0}.device\nAfter={0}.device", escape(&format!("dev/{path}")));
    }
    unit
}

/// An export has no node. It begins like a service of the machine: after the file systems, and where it
/// listens at a TCP address, after the network.
fn order_of_export(table: &Path, entry: &Entry, export: &Export) -> String {
    let mut unit = needs(table, entry);
    for path in [export.socket(), export.tls.as_deref()].into_iter().flatten() {
        let _ = writeln!(unit, "RequiresMountsFor={}", quoted(&path.to_string_lossy()));
    }
    unit.push_str("Description=Export %i\nAfter=local-fs.target\n");
    if export.address().starts_with("tcp:") || entry.start.netdev {
        unit.push_str("Wants=network-online.target\nAfter=network-online.target\n");
    }
    if entry.start.netdev {
        unit.push_str("After=remote-fs.target\n");
    }
    unit.push_str("[Service]\nEnvironment=DETACH_OPTIONS=--force\n");
    unit
}

fn order(table: &Path, entry: &Entry, node: &str) -> String {
    let mut unit = needs(table, entry);
    // Units that use the device begin after it and, when the machine ends, end before it.
    let _ = writeln!(unit, "Wants=blockdev@{node}.target\nBefore=blockdev@{node}.target");
    if entry.start.netdev {
        unit.push_str("After=remote-fs-pre.target\n");
    }
    if !entry.start.nofail {
        let _ = writeln!(unit, "Before={}", target(entry));
    }
    unit
}

/// A value as systemd reads it back: one word, without specifiers.
fn quoted(value: &str) -> String {
    let value = value.replace('\\', r"\\").replace('"', "\\\"").replace('%', "%%");
    format!("\"{value}\"")
}

/// A path without its first slash as a part of a unit's name: see systemd.unit(5), on escaping.
fn escape(path: &str) -> String {
    let mut name = String::new();
    let parts = path.split('/').filter(|part| !part.is_empty());
    for byte in parts.collect::<Vec<_>>().join("/").bytes() {
        match byte {
            b'/' => name.push('-'),
            b'.' if name.is_empty() => name.push_str(r"\x2e"),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b':' | b'_' | b'.' => name.push(char::from(byte)),
            _ => {
                let _ = write!(name, r"\x{byte:02x}");
            }
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeMap, path::PathBuf};

    /// What a table becomes: each file with its text, each link with `-> ` and its target.
    fn generated(text: &[u8]) -> (Vec<String>, BTreeMap<String, String>) {
        let temp = tempfile::tempdir().unwrap();
        let (dir, tab) = (temp.path().join("normal"), temp.path().join("tab"));
        fs::write(&tab, text).unwrap();
        let complaints = generate(&dir, &tab);
        let mut found = BTreeMap::new();
        let mut todo: Vec<PathBuf> = vec![dir.clone()];
        while let Some(path) = todo.pop() {
            let name = path.strip_prefix(&dir).unwrap().display().to_string();
            if let Ok(target) = fs::read_link(&path) {
                found.insert(name, format!("-> {}", target.display()));
            } else if path.is_dir() {
                todo.extend(fs::read_dir(&path).unwrap().map(|item| item.unwrap().path()));
            } else if path.exists() {
                let text = fs::read_to_string(&path).unwrap();
                found.insert(name, text.replace(temp.path().to_str().unwrap(), ""));
            }
        }
        (complaints, found)
    }

    #[test]
    fn a_line_becomes_an_order_and_links() {
        let (complaints, found) = generated(b"# one\nsnap-1 '/srv/a b%.img' ro\n");
        assert_eq!(complaints, Vec::<String>::new());
        let link = "-> /usr/lib/systemd/system/becket-attach@.service".to_owned();
        let order = "# Made by becket-generator of line 2 of /tab.\n[Unit]\nSourcePath=/tab\n\
            RequiresMountsFor=\"/srv/a b%%.img\"\n\
            Wants=blockdev@dev-becket-snap\\x2d1.target\nBefore=blockdev@dev-becket-snap\\x2d1.target\n\
            Before=local-fs.target\n";
        let expected = BTreeMap::from([
            ("becket-attach@snap-1.service.d/50-beckettab.conf".to_owned(), order.to_owned()),
            ("local-fs.target.requires/becket-attach@snap-1.service".to_owned(), link.clone()),
            (r"dev-becket-snap\x2d1.device.requires/becket-attach@snap-1.service".to_owned(), link.clone()),
            (r"blockdev@dev-becket-snap\x2d1.target.requires/becket-attach@snap-1.service".to_owned(), link),
        ]);
        assert_eq!(found, expected);
    }

    #[test]
    fn options_say_who_waits() {
        let (_, found) =
            generated(b"a /a nofail\nb /b noauto\nc /nfs/c _netdev\nd /dev/mapper/vg-d nofail,_netdev\ne https://host/e.iso nofail\n");
        let pulled: Vec<&str> =
            found.keys().map(String::as_str).filter(|name| name.contains("-fs.target")).collect();
        assert_eq!(
            pulled,
            [
                "local-fs.target.wants/becket-attach@a.service",
                "remote-fs.target.requires/becket-attach@c.service",
                "remote-fs.target.wants/becket-attach@d.service",
                "remote-fs.target.wants/becket-attach@e.service"
            ]
        );
        let order = |name: &str| &found[&format!("becket-attach@{name}.service.d/50-beckettab.conf")];
        assert!(!order("a").contains("Before=local-fs.target"));
        assert!(order("b").contains("Before=local-fs.target"), "if a unit asks for it");
        assert!(order("c").contains("After=remote-fs-pre.target\nBefore=remote-fs.target\n"));
        assert!(
            order("d").contains("After=dev-mapper-vg\\x2dd.device\n")
                && !order("d").contains("Before=remote-fs")
        );
        assert!(order("e").contains("Wants=network-online.target\nAfter=network-online.target\n"));
        assert!(found.contains_key("dev-becket-b.device.requires/becket-attach@b.service"));
    }

    #[test]
    fn an_export_is_a_service_without_a_node() {
        let (complaints, found) = generated(
            b"vm /srv/vm.img 'vhost-user=unix:/run/a b/vm.sock'\nnet /dev/vg/d nbd=tcp:10.0.0.1,tls=/pki,_netdev\noff /c nbd=unix:/s,noauto\n",
        );
        assert_eq!(complaints, Vec::<String>::new());
        let links: Vec<&str> =
            found.keys().map(String::as_str).filter(|name| !name.ends_with(".conf")).collect();
        assert_eq!(
            links,
            [
                "multi-user.target.wants/becket-attach@net.service",
                "multi-user.target.wants/becket-attach@vm.service"
            ]
        );
        let order = |name: &str| found[&format!("becket-attach@{name}.service.d/50-beckettab.conf")].as_str();
        assert_eq!(
            order("vm"),
            "# Made by becket-generator of line 1 of /tab.\n[Unit]\nSourcePath=/tab\n\
             RequiresMountsFor=\"/srv/vm.img\"\nRequiresMountsFor=\"/run/a b/vm.sock\"\n\
             Description=Export %i\nAfter=local-fs.target\n[Service]\nEnvironment=DETACH_OPTIONS=--force\n"
        );
        let net = order("net");
        for line in [
            "After=dev-vg-d.device",
            "RequiresMountsFor=\"/pki\"",
            "Wants=network-online.target\nAfter=network-online.target",
            "After=remote-fs.target",
        ] {
            assert!(net.contains(&format!("{line}\n")), "{line}: {net}");
        }
        assert!(!order("off").contains("network"));
    }

    #[test]
    fn wrong_and_hostile_lines_are_left_out_and_the_others_done() {
        let (complaints, found) = generated(
            b"good /a\nbad\n../../etc/x /b\ngood /twice\na@b /c\nx '/y\r\nExecStart=/bin/sh'\n\xff\xfe /z\nlast /d offset=-1\nfine /e",
        );
        assert_eq!(complaints.len(), 8, "{complaints:#?}");
        assert!(complaints[1].contains("tab line 3 is left out: "), "{complaints:#?}");
        let units: Vec<&String> = found.keys().filter(|name| name.ends_with(".conf")).collect();
        assert_eq!(
            units,
            [
                "becket-attach@fine.service.d/50-beckettab.conf",
                "becket-attach@good.service.d/50-beckettab.conf"
            ]
        );
        assert!(found.values().all(|text| !text.contains("ExecStart") && !text.contains("twice")));
        // All that is written is there where it belongs.
        assert!(found.keys().all(|name| !name.contains("..")), "{found:?}");
    }

    #[test]
    fn names_that_are_too_long_for_a_unit_are_left_out() {
        let name = "-".repeat(62);
        let (complaints, found) = generated(format!("a{name} /a\n{} /b", "b".repeat(63)).as_bytes());
        assert_eq!(complaints.len(), 1);
        assert_eq!(found.keys().filter(|name| name.ends_with(".conf")).count(), 1);
    }

    #[test]
    fn no_table_is_no_error() {
        let temp = tempfile::tempdir().unwrap();
        assert!(generate(&temp.path().join("normal"), &temp.path().join("none")).is_empty());
        assert!(!temp.path().join("normal").exists());
    }

    #[test]
    fn paths_are_escaped_as_systemd_does() {
        for (path, name) in [
            ("dev/becket/a.b_c", "dev-becket-a.b_c"),
            ("dev//a-b/", r"dev-a\x2db"),
            (".x/é", r"\x2ex-\xc3\xa9"),
        ] {
            assert_eq!(escape(path), name);
        }
        assert_eq!(quoted("a\\b\"%"), "\"a\\\\b\\\"%%\"");
    }
}

//! One of two tools under comparison: its files, its devices, what it printed and what the kernel has of it.
//! Never touches a device that it did not make or bind itself.

use crate::sequence::{FILES, SLOTS, Step, Word};
use becket_uapi::loop_ as uapi;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::time::Duration;

/// Between fork and exec a child of one lane has the descriptors of all: a device open just then would be in
/// use.
static ALONE: Mutex<()> = Mutex::new(());

/// A tool with everything that is its own.
pub(crate) struct Side {
    tool: PathBuf,
    dir: PathBuf,
    /// Numbers of its devices.
    slots: [u32; SLOTS],
    held: [Option<File>; SLOTS],
    found: Option<PathBuf>,
    /// Of every file that was ever made: a device keeps one that was removed.
    inodes: Vec<u64>,
}

/// What a step came to, with everything that is one side's own replaced.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
    pub(crate) kernel: Vec<String>,
}

impl Side {
    pub(crate) fn new(tool: &Path, dir: &Path, slots: [u32; SLOTS]) -> Side {
        fs::create_dir_all(dir).expect("creates");
        let mut side = Side {
            tool: tool.to_owned(),
            dir: dir.to_owned(),
            slots,
            held: [const { None }; SLOTS],
            found: None,
            inodes: Vec::new(),
        };
        (0..FILES.len()).for_each(|file| side.make(file));
        side
    }

    fn make(&mut self, file: usize) {
        let path = self.dir.join(FILES[file]);
        let _ = fs::remove_file(&path);
        match FILES[file] {
            "link.img" => symlink("even.img", &path).expect("links"),
            name => {
                let size = match name {
                    "even.img" => 1 << 20,
                    "odd.img" => 700_100,
                    "tiny.img" => 100,
                    _ => 300 << 10,
                };
                let made = File::create(&path).expect("creates");
                made.set_len(size).expect("grows");
                self.inodes.push(made.metadata().expect("is there").ino());
            }
        }
    }

    fn node(&self, slot: usize) -> PathBuf {
        format!("/dev/loop{}", self.slots[slot]).into()
    }

    /// Takes a step; `None` when it has no meaning here.
    pub(crate) fn step(&mut self, step: &Step) -> Option<Seen> {
        let mut seen = Seen { code: None, out: String::new(), err: String::new(), kernel: Vec::new() };
        match step {
            Step::Run { words, whole } => {
                // Gone from us, and perhaps another program's by now.
                if !self.found.as_deref().is_some_and(|found| self.is_ours(found)) {
                    self.found = None;
                }
                let column = |word: &Word| matches!(word, Word::Text(text) if text.contains("BACK-INO"));
                // Where inodes have small numbers, other columns may have the same.
                let ambiguous = words.iter().any(column) && self.inodes.iter().any(|&inode| inode < 100_000);
                if ambiguous || (words.contains(&Word::Found) && self.found.is_none()) {
                    return None;
                }
                self.run(words, *whole, &mut seen);
            }
            Step::Resize(file, size) => {
                let opened = File::options().write(true).open(self.dir.join(FILES[*file])).expect("opens");
                opened.set_len(*size).expect("resizes");
            }
            Step::Replace(file) => self.make(*file),
            Step::Hold(slot) => {
                let _alone = ALONE.lock().expect("nobody panics");
                self.held[*slot] = File::open(self.node(*slot)).ok();
            }
            Step::Release(slot) => {
                let _alone = ALONE.lock().expect("nobody panics");
                self.held[*slot] = None;
            }
        }
        seen.kernel = self.kernel();
        Some(seen)
    }

    fn run(&mut self, words: &[Word], whole: bool, seen: &mut Seen) {
        let mut command = Command::new(&self.tool);
        command.arg0("losetup");
        for word in words {
            match word {
                Word::Text(text) => command.arg(text),
                Word::File(file, false) => command.arg(FILES[*file]),
                Word::File(file, true) => command.arg(self.dir.join(FILES[*file])),
                Word::Device(slot) => command.arg(self.node(*slot)),
                Word::Found => command.arg(self.found.as_ref().expect("was looked at")),
            };
        }
        command.current_dir(&self.dir).env("LC_ALL", "C.UTF-8").env_remove("BECKET_LOSETUP_VIA");
        let mut output = ended(&mut command);
        // A program that lists all devices delays the end of one that was just detached: it is free, and busy
        // for a moment.
        let busy =
            |output: &Output| String::from_utf8_lossy(&output.stderr).contains("Device or resource busy");
        let unbound =
            |word: &Word| matches!(word, Word::Device(slot) if !is_below(&self.node(*slot), &self.dir));
        becket_testkit::wait_until(Duration::from_secs(5), || {
            let again = busy(&output) && words.iter().any(unbound);
            if again {
                output = ended(&mut command);
            }
            !again
        });
        seen.code = output.status.code();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let free =
            words.iter().any(|word| [Word::Text("-f".into()), Word::Text("--find".into())].contains(word));
        if free && output.status.success() && out.starts_with("/dev/loop") {
            self.let_go();
            self.found = Some(out.trim_end().into());
        }
        let out = if whole { self.own_of(&out) } else { out.into_owned() };
        let out = self.inodes.iter().fold(out, |out, inode| without_inode(&out, *inode));
        (seen.out, seen.err) = (sorted(&self.neutral(&out)), self.neutral(&reported(&err)));
    }

    /// Without what depends on which side this is.
    fn neutral(&self, text: &str) -> String {
        let mut text = text.replace(&self.dir.display().to_string(), "DIR");
        for (slot, number) in self.slots.iter().enumerate() {
            text = text.replace(&number.to_string(), &format!("SLOT{slot}"));
        }
        if let Some(found) = &self.found {
            text = text.replace(&found.display().to_string(), "FOUND");
        }
        text
    }

    /// Our part of a list of all devices.
    fn own_of(&self, list: &str) -> String {
        let ours = |text: &str| {
            text.contains(&self.dir.display().to_string())
                || (0..SLOTS).any(|slot| text.contains(&format!("loop{}", self.slots[slot])))
                || self
                    .found
                    .as_ref()
                    .is_some_and(|found| text.split(['"', ' ', ':']).any(|word| Path::new(word) == found))
        };
        if list.starts_with('{') {
            let value: serde_json::Value = serde_json::from_str(list).expect("JSON");
            let rows = value["loopdevices"].as_array().expect("an array");
            let rows: Vec<String> =
                rows.iter().map(|row| format!("row {row}")).filter(|row| ours(row)).collect();
            return rows.join("\n");
        }
        list.lines().filter(|line| ours(line)).map(|line| squeezed(line) + "\n").collect()
    }

    fn is_ours(&self, node: &Path) -> bool {
        is_below(node, &self.dir)
    }

    /// What the kernel has of each of our devices.
    pub(crate) fn kernel(&self) -> Vec<String> {
        let found = self.found.iter().filter(|found| self.is_ours(found)).cloned();
        let nodes = (0..SLOTS).map(|slot| self.node(slot)).chain(found);
        nodes.map(|node| self.neutral(&state(&node))).collect()
    }

    fn let_go(&mut self) {
        if let Some(found) = self.found.take().filter(|found| self.is_ours(found)) {
            clear(&found, &self.dir);
        }
    }

    /// Everything as it was before.
    pub(crate) fn reset(&mut self) {
        {
            let _alone = ALONE.lock().expect("nobody panics");
            self.held = [const { None }; SLOTS];
        }
        self.let_go();
        (0..SLOTS).for_each(|slot| clear(&self.node(slot), &self.dir));
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Runs a command to its end.
fn ended(command: &mut Command) -> Output {
    let child = {
        let _alone = ALONE.lock().expect("nobody panics");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs")
    };
    child.wait_with_output().expect("ends")
}

/// Detaches a device whose file is below `dir`, and waits until it is gone: a program that lists all devices
/// has it open for a moment. Its number may be another program's at once.
pub(crate) fn clear(node: &Path, dir: &Path) {
    let gone = becket_testkit::wait_until(Duration::from_secs(10), || {
        let _alone = ALONE.lock().expect("nobody panics");
        let device = match File::open(node) {
            Ok(device) => device,
            // The kernel is still taking it down.
            Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => return false,
            Err(_) => return true,
        };
        // While it is open it cannot become another's.
        let ours = is_below(node, dir);
        if ours {
            uapi::clr_fd(device.as_fd()).expect("clears");
        }
        !ours
    });
    assert!(gone, "{} stays", node.display());
}

fn is_below(node: &Path, dir: &Path) -> bool {
    let name = node.file_name().expect("a name").to_string_lossy();
    let backing = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).unwrap_or_default();
    backing.starts_with(&format!("{}/", dir.display()))
}

fn state(node: &Path) -> String {
    let name = node.file_name().expect("a name").to_string_lossy().into_owned();
    let mut reported = BTreeMap::new();
    for attribute in [
        "loop/backing_file",
        "loop/offset",
        "loop/sizelimit",
        "loop/autoclear",
        "loop/partscan",
        "loop/dio",
        "ro",
        "size",
        "queue/logical_block_size",
    ] {
        let text = fs::read_to_string(format!("/sys/block/{name}/{attribute}")).unwrap_or_default();
        reported.insert(attribute, text.trim_end().to_owned());
    }
    let info = {
        let _alone = ALONE.lock().expect("nobody panics");
        File::open(node).and_then(|device| uapi::get_status64(device.as_fd()))
    };
    let file_name =
        info.map(|info| String::from_utf8_lossy(&info.lo_file_name).trim_end_matches('\0').to_owned());
    format!("{reported:?} {file_name:?}")
}

/// A list in one order, whichever it came in; what is not a list is left alone.
fn sorted(list: &str) -> String {
    if list.starts_with('{') {
        let rows = list.split("\n      },{\n").map(|row| row.trim_end_matches("\n      }\n   ]\n}\n"));
        let mut rows: Vec<&str> =
            rows.map(|row| row.trim_start_matches("{\n   \"loopdevices\": [\n      {\n")).collect();
        rows.sort_unstable();
        return rows.join("\n");
    }
    let mut lines: Vec<&str> = list.lines().collect();
    lines.sort_unstable();
    lines.join("\n")
}

/// Puts a word in place of an inode's number, where an inode stands: in a plain line, or large and by itself.
fn without_inode(text: &str, inode: u64) -> String {
    let text = text.replace(&format!("]:{inode} ("), "]:INODE (");
    if inode < 100_000 { text } else { text.replace(&inode.to_string(), "INODE") }
}

/// Runs of blanks as one: names of different length move columns.
pub(crate) fn squeezed(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// In place of a warning about the file's size.
pub(crate) const WARNING: &str = "losetup: WARNING";
/// In place of becket's word about an offset past the end.
pub(crate) const EMPTY: &str = "losetup: EMPTY";

/// Standard error without what docs/losetup-compat.md lets differ.
fn reported(err: &str) -> String {
    let mut lines = Vec::new();
    for line in err.lines() {
        if line.contains("goes when its last user does") {
            continue;
        }
        let known = [
            ("Warning: the device is empty", EMPTY),
            ("Warning: file is smaller", WARNING),
            ("Warning: file does not", WARNING),
            ("mutually exclusive arguments", "losetup: EXCLUSIVE"),
            ("cannot be combined", "losetup: EXCLUSIVE"),
        ];
        let same = known.iter().find(|(part, _)| line.contains(part)).map(|(_, same)| (*same).to_owned());
        // Newer options are possible meanings of an abbreviation, too.
        let line = same.unwrap_or_else(|| line.replace(" '--loop-ref'", "").replace(" '--remove'", ""));
        lines.push(line);
    }
    lines.join("\n")
}

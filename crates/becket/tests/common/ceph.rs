//! A Ceph cluster for tests, by `scripts/ceph.sh`, which ends it when this process ends.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use becket_testkit::{Scratch, require_plain_machine, skip, tool, wait_until};
use serde_json::Value;

use super::alive;

const TOOLS: [&str; 4] = ["ceph-mon", "ceph-osd", "rbd", "mke2fs"];

/// See the module.
pub(crate) struct Cluster {
    dir: PathBuf,
    script: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    _child: Child,
}

/// The program that reaches clusters, where it was built.
pub(crate) fn helper() -> &'static Path {
    static HELPER: OnceLock<PathBuf> = OnceLock::new();
    HELPER.get_or_init(|| Path::new(env!("CARGO_BIN_EXE_becket")).with_file_name("becket-rbd"))
}

pub(crate) fn has_helper() -> bool {
    helper().exists()
}

impl Cluster {
    /// One for all tests of this process, which is gone when that ends.
    pub(crate) fn shared() -> &'static Cluster {
        static SHARED: OnceLock<Cluster> = OnceLock::new();
        SHARED.get_or_init(|| Cluster::start("memstore"))
    }

    /// One that keeps its bytes in this way: `memstore`, or `bluestore` whose OSD may die.
    pub(crate) fn start(store: &str) -> Cluster {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/ceph.sh");
        let dir = tempfile::Builder::new().prefix("becket-ceph-").tempdir_in("/tmp").unwrap().keep();
        let mut child = Command::new(script)
            .arg(&dir)
            .arg(store)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let script = Mutex::new((input, BufReader::new(output)));
        let cluster = Cluster { dir, script, _child: child };
        cluster.answer("ready");
        cluster
    }

    fn answer(&self, expected: &str) {
        let mut line = String::new();
        self.script.lock().unwrap().1.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), expected, "scripts/ceph.sh says it");
    }

    /// A word to the script: `kill-osd`, `start-osd`, `kill-mon`, `start-mon`.
    pub(crate) fn say(&self, word: &str) {
        writeln!(self.script.lock().unwrap().0, "{word}").unwrap();
        self.answer("done");
    }

    pub(crate) fn conf(&self) -> PathBuf {
        self.dir.join("ceph.conf")
    }

    pub(crate) fn rbd(&self, words: &[&str]) -> String {
        tool(Command::new("rbd").arg("--conf").arg(self.conf()).args(words))
    }

    pub(crate) fn ceph(&self, words: &[&str]) -> String {
        tool(Command::new("ceph").arg("--conf").arg(self.conf()).args(words))
    }
}

/// The cluster of this process's tests, if there can be one.
pub(crate) fn cluster(name: &str) -> Option<&'static Cluster> {
    if !require_plain_machine(name, &TOOLS) {
        return None;
    }
    if !has_helper() {
        skip(name, "needs becket-rbd beside becket: cargo build -p becket-rbd");
        return None;
    }
    Some(Cluster::shared())
}

/// Attaches over FUSE and returns the disk.
pub(crate) fn attach(cluster: &Cluster, place: &Scratch, words: &[&str]) -> PathBuf {
    let conf = cluster.conf();
    let mut all = vec!["attach", "--via", "fuse", "--ceph-conf", conf.to_str().unwrap()];
    all.extend(words);
    place.ok(&all).trim().into()
}

pub(crate) fn only(place: &Scratch) -> Value {
    place.devices().remove(0)
}

pub(crate) fn kill(pid: u32) {
    tool(Command::new("kill").args(["-KILL", &pid.to_string()]));
    assert!(wait_until(Duration::from_secs(20), || !alive(pid)));
}

pub(crate) fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

/// The programs that reach the cluster for a supervisor.
pub(crate) fn helpers(parent: &Value) -> Vec<u32> {
    let found = Command::new("pgrep").args(["-P", &parent.to_string(), "-f", "^@becket helper"]).output();
    let found = String::from_utf8(found.unwrap().stdout).unwrap();
    found.lines().filter_map(|line| line.parse().ok()).collect()
}

pub(crate) fn open(disk: &Path) -> fs::File {
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    fs::OpenOptions::new().read(true).write(true).custom_flags(flags).open(disk).unwrap()
}

/// A block that is aligned for direct I/O, filled with a number.
#[repr(align(4096))]
pub(crate) struct Block(pub(crate) [u8; 4096]);

impl Block {
    pub(crate) fn of(number: u64) -> Box<Self> {
        let mut block = Box::new(Self([0; 4096]));
        block.0.chunks_exact_mut(8).for_each(|place| place.copy_from_slice(&number.to_le_bytes()));
        block
    }
}

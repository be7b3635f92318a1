//! A Ceph cluster for tests, by `scripts/ceph.sh`, which ends it when this process ends.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, OnceLock};

use becket_testkit::{Scratch, require_fuse, require_plain_machine, skip, tool};
use serde_json::Value;

/// See the module.
pub(crate) struct Cluster {
    dir: PathBuf,
    script: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    _child: Child,
}

/// Whether there can be a cluster; when not, the test is skipped.
#[must_use]
pub(crate) fn require_cluster(name: &str) -> bool {
    let helper = Path::new(env!("CARGO_BIN_EXE_becket")).with_file_name("becket-rbd");
    if !require_plain_machine(name, &["ceph-mon", "ceph-osd", "rbd", "mke2fs"]) {
        return false;
    }
    if !helper.exists() {
        skip(name, "needs becket-rbd beside becket: cargo build -p becket-rbd");
    }
    helper.exists()
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

    /// Its configuration with another line for an option, in a file of that place.
    pub(crate) fn conf_with(&self, place: &Scratch, option: &str, value: &str) -> String {
        let text = fs::read_to_string(self.conf()).unwrap();
        let line = text.lines().find(|line| line.starts_with(option)).unwrap();
        let other = place.path(&format!("{option}.conf"));
        fs::write(&other, text.replace(line, &format!("{option} = {value}"))).unwrap();
        other.to_str().unwrap().to_owned()
    }

    /// A user with these rights, and a key in that file.
    pub(crate) fn user(&self, name: &str, rights: &str, ring: &Path) {
        self.ceph(&["auth", "add", name, "mon", rights, "osd", rights]);
        self.ceph(&["auth", "get", name, "-o", ring.to_str().unwrap()]);
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
    require_cluster(name).then(Cluster::shared)
}

/// The same for a test that attaches over FUSE.
pub(crate) fn fuse(name: &str) -> Option<&'static Cluster> {
    if require_fuse(name) { cluster(name) } else { None }
}

/// Attaches over FUSE and returns the disk.
pub(crate) fn attach(cluster: &Cluster, place: &Scratch, words: &[&str]) -> PathBuf {
    let conf = cluster.conf();
    let mut all = vec!["attach", "--via", "fuse", "--ceph-conf", conf.to_str().unwrap()];
    all.extend(words);
    place.ok(&all).trim().into()
}

/// The programs that reach the cluster for a supervisor.
pub(crate) fn helpers(parent: &Value) -> Vec<u32> {
    super::helpers(parent.as_u64().unwrap().try_into().unwrap(), "helper")
}

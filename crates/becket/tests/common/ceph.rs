//! A Ceph cluster for tests, by `scripts/ceph.sh`, which ends it when this process ends.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, OnceLock};

use becket_testkit::tool;

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

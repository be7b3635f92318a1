//! Loads that are scripts of real programs: a file system with a git clone, SQLite, fio.
//! None ends well when it saw anything wrong.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
};

use becket_testkit::{Scratch, image, tool, wait_until};

use crate::common::disturb::PATIENCE;

/// A new file system, a clone in it, and each byte of that read back past the page cache. A process that
/// begins to serve has a copy of all mounts for a moment, before it drops them: until then what was unmounted
/// is in use.
const CLONE: &str = "
    n=0; until mkfs.ext4 -q -F $0; do n=$((n + 1)); [ $n -lt 50 ]; sleep 0.1; done
    mkdir -p mnt; mount $0 mnt
    git clone -q ../repository mnt/clone
    umount mnt; mount $0 mnt
    git -C mnt/clone fsck --strict --no-progress; diff -r --exclude=.git ../repository mnt/clone
    umount mnt; e2fsck -fn $0 >e2fsck 2>&1";
/// One row per transaction; `acked`, on another file system, holds what was acknowledged. Now and then all is
/// read again.
const SQLITE: &str = "
    [ -d mnt ] || { mkfs.ext4 -q -F $0; mkdir mnt; }
    mountpoint -q mnt || mount $0 mnt
    sqlite3 mnt/db 'PRAGMA synchronous=FULL; CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, x BLOB)' >/dev/null
    for i in 1 2 3 4 5 6 7 8; do
        sqlite3 mnt/db 'PRAGMA synchronous=FULL; INSERT INTO t(x) VALUES(randomblob(3000))' >/dev/null; echo >>acked
    done
    umount mnt; mount $0 mnt
    test \"$(sqlite3 mnt/db 'PRAGMA integrity_check; SELECT count(*) FROM t' | tr '\\n' ' ')\" = \"ok $(wc -l <acked) \"
    # It begins anew before its device is full.
    [ $(wc -l <acked) -lt 4000 ] || { sqlite3 mnt/db 'DROP TABLE t; VACUUM' >/dev/null; : >acked; }
    umount mnt";
/// Transactions of a turn.
pub(crate) const TRANSACTIONS: usize = 8;
const FIO: &str = "
    fio --name=v --filename=$0 --rw=randwrite --bs=4k --size=8M --direct=1 --ioengine=libaio --iodepth=8 \\
        --verify=crc32c --verify_fatal=1 --do_verify=1 --fsync=64";

/// What they are run with.
pub(crate) const TOOLS: [&str; 4] = ["fio", "git", "sqlite3", "mkfs.ext4"];

/// A load that is a script of its own. It goes on until the file `stop` exists, and ends with 0 if it saw
/// nothing wrong; each turn is a line of its file.
pub(crate) struct Script {
    name: &'static str,
    child: Child,
    turns: PathBuf,
}

/// Starts all three, each on a device of its own that is attached here.
pub(crate) fn start(place: &Scratch, attach: impl Fn(&str, u64) -> PathBuf) -> [Script; 3] {
    repository(place);
    [
        Script::start(place, "clone", &attach("clone.img", 64 << 20), CLONE),
        Script::start(place, "sqlite", &attach("sqlite.img", 32 << 20), SQLITE),
        Script::start(place, "fio", &attach("fio.img", 8 << 20), FIO),
    ]
}

/// What is cloned.
fn repository(place: &Scratch) {
    let repository = place.dir("repository");
    for number in 0..20u64 {
        fs::write(repository.join(number.to_string()), image::random_bytes(30_000, number)).unwrap();
    }
    let git = |words: &[&str]| {
        let who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"];
        tool(Command::new("git").args(who).args(words).current_dir(&repository).env("HOME", &repository))
    };
    git(&["init", "-q"]);
    git(&["add", "."]);
    git(&["commit", "-q", "-m", "m"]);
}

impl Script {
    fn start(place: &Scratch, name: &'static str, device: &Path, body: &str) -> Script {
        let dir = place.dir(name);
        let text = format!("set -eu\nwhile [ ! -e stop ]; do\n{body}\necho $? >>turns\ndone >log 2>&1");
        let child = Command::new("sh").args(["-c", &text]).arg(device).current_dir(&dir).spawn().unwrap();
        Script { name, child, turns: dir.join("turns") }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.turns.with_file_name("log")).unwrap_or_default()
    }

    pub(crate) fn turns(&self) -> usize {
        fs::read_to_string(&self.turns).map_or(0, |text| text.lines().count())
    }

    /// Fails when it has ended, which it does only when it saw something wrong.
    pub(crate) fn goes_on(&mut self) {
        assert!(self.child.try_wait().unwrap().is_none(), "{} ended:\n{}", self.name, self.log());
    }

    /// Lets it end, and tells how many turns it has made.
    pub(crate) fn end(&mut self) -> usize {
        // At least one, however slow this machine is.
        assert!(
            wait_until(PATIENCE, || self.turns() > 0 || self.child.try_wait().unwrap().is_some()),
            "{}",
            self.name
        );
        fs::write(self.turns.with_file_name("stop"), "").unwrap();
        let mut status = None;
        let ended = wait_until(PATIENCE, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        assert!(ended, "{} does not end:\n{}", self.name, self.log());
        assert!(status.unwrap().success(), "{} saw something wrong:\n{}", self.name, self.log());
        self.turns()
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Else the device stays in use.
        let _ = Command::new("umount").arg("--quiet").arg(self.turns.with_file_name("mnt")).output();
    }
}

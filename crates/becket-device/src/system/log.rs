//! Warnings for people: standard error of a command, the log file of a server.
//! It never fails and never carries a result; what a caller must act on is returned instead.
//!
//! A server's standard error is the file `log` in its runtime directory. Lines there begin with the time
//! (UTC) and the process. Supervisor, guard and workers write to it; the supervisor keeps it short: of a log
//! longer than [`LONGEST`] bytes the end is moved to `log.old`. Where a service manager or a person has
//! started the server, standard error is theirs, without times.

use std::fmt::Arguments;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::FileType;

/// Bytes that a log may have. What a server says of a device is some hundred.
const LONGEST: u64 = 1 << 20;
/// Bytes of the end of a longer one that `log.old` has.
const KEPT: u64 = 512 << 10;

/// Whether lines begin with the time.
static DATED: OnceLock<bool> = OnceLock::new();
/// The log that this process keeps short.
static KEEPS: OnceLock<PathBuf> = OnceLock::new();

/// This process is a server's: its standard error may be a log.
pub(crate) fn of_server() {
    let is_file = |stat: rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let _ = DATED.set(rustix::fs::fstat(rustix::stdio::stderr()).is_ok_and(is_file));
}

/// This process keeps the log at that path short, if it is its own.
pub(crate) fn keep_short(path: PathBuf) {
    let _ = KEEPS.set(path);
}

/// Opens a new log if the one that this process writes was removed.
pub(crate) fn reopen() {
    let (Some(true), Some(path)) = (DATED.get(), KEEPS.get()) else { return };
    let mut options = File::options();
    if let Ok(log) = options.create(true).append(true).mode(0o600).open(path) {
        // Where it fails, what is said goes on to the old one.
        let _ = rustix::stdio::dup2_stderr(&log);
    }
}

/// One line on standard error.
pub(crate) fn warn(message: Arguments<'_>) {
    let line = match DATED.get() {
        Some(true) => format!("{} becket[{}]: {message}\n", utc(SystemTime::now()), std::process::id()),
        _ => format!("becket: {message}\n"),
    };
    // At once: supervisor and worker write to one log. A closed standard error is no reason to fail.
    let _ = io::stderr().write_all(line.as_bytes());
    shorten();
}

/// Moves the end of a log that is too long aside. A worker may write as much as it likes, so this is asked
/// from time to time as well.
pub(crate) fn shorten() {
    let Some(path) = KEEPS.get() else { return };
    let Ok(stat) = rustix::fs::fstat(rustix::stdio::stderr()) else { return };
    if u64::try_from(stat.st_size).unwrap_or(0) <= LONGEST {
        return;
    }
    let ours = |found: rustix::fs::Stat| (found.st_dev, found.st_ino) == (stat.st_dev, stat.st_ino);
    if rustix::fs::stat(path).is_ok_and(ours) {
        // Without room for the old one the log is cut all the same: it must not fill the directory.
        let _ = set_aside(path);
        let _ = File::options().write(true).open(path).and_then(|log| log.set_len(0));
    }
}

fn set_aside(path: &Path) -> io::Result<()> {
    let mut log = File::open(path)?;
    let len = log.metadata()?.len();
    log.seek(SeekFrom::Start(len.saturating_sub(KEPT)))?;
    let mut end = Vec::new();
    log.take(KEPT).read_to_end(&mut end)?;
    // Not from the middle of a line.
    let whole = end.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let old = path.with_extension("old");
    let written = fs::write(&old, end.get(whole..).unwrap_or_default());
    written.inspect_err(|_| drop(fs::remove_file(&old)))
}

/// A line of a log without its time and process.
pub(crate) fn words(line: &str) -> &str {
    let dated = line.split_once(" becket[").and_then(|(time, rest)| {
        let rest = rest.split_once("]: ")?.1;
        time.ends_with('Z').then_some(rest)
    });
    dated.unwrap_or(line)
}

/// `2026-11-23T19:05:07.123Z`.
fn utc(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (hour, minute, second, milli) = (second / 3600, second / 60 % 60, second % 60, since.subsec_millis());
    // Years that begin in March, in eras of 400 of them, counted from March of the year 0.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month, late) = (day - (153 * month + 2) / 5 + 1, (month + 2) % 12 + 1, month >= 10);
    let year = era * 400 + year + u64::from(late);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        let at = |seconds: u64, milli: u32| utc(UNIX_EPOCH + Duration::new(seconds, milli * 1_000_000));
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_399, 5), "2000-02-28T23:59:59.005Z");
        assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_709_251_199, 0), "2024-02-29T23:59:59.000Z");
        assert_eq!(at(1_735_689_599, 0), "2024-12-31T23:59:59.000Z");
        assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn a_line_s_words_are_those_behind_its_time() {
        assert_eq!(words("2026-11-23T19:05:07.123Z becket[12]: server: x"), "server: x");
        for plain in ["becket: x", "", "thread 'main' panicked", "a becket[1]: y"] {
            assert_eq!(words(plain), plain);
        }
    }

    #[test]
    fn the_end_of_a_long_log_is_kept_in_whole_lines() {
        let temp = tempfile::tempdir().unwrap();
        let log = temp.path().join("log");
        let text: String = (0..100_000).map(|number| format!("line {number}\n")).collect();
        fs::write(&log, &text).unwrap();
        set_aside(&log).unwrap();
        let old = fs::read_to_string(temp.path().join("log.old")).unwrap();
        assert!(old.starts_with("line ") && text.ends_with(&old), "{}", &old[..40]);
        assert!(old.len() as u64 > KEPT - 20 && old.len() as u64 <= KEPT);
    }
}

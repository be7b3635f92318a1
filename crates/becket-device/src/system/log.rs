//! Where events (`tracing`) of becket's processes go: standard error of a command, the log of a server.
//! It never fails and carries no result; what a caller must act on is returned instead. A program that uses
//! this crate as a library has its own subscriber, or none.
//!
//! | standard error is | a line |
//! | --- | --- |
//! | a command's | `becket: DEVICE: MESSAGE` |
//! | a server's log or terminal | `TIME becket[PID]: LEVEL ROLE: DEVICE: MESSAGE`, where the time is UTC |
//! | the journal | `<PRIORITY>ROLE[PID]: DEVICE: MESSAGE` |
//!
//! The role is `supervisor`, `guard` or `worker`. The log is the file `log` in the runtime directory, unless
//! a service manager or a person has started the server. Supervisor, guard and workers write to it; the
//! supervisor keeps it short: of a log longer than [`LONGEST`] bytes the end is moved to `log.old`.

use std::fmt::{Debug, Write as _};
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{OnceLock, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::FileType;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::events::EVENTS;
use super::journal;
use crate::contract::Happened;

/// The level of a server and of its guard and workers, or of a command.
const VARIABLE: &str = "BECKET_LOG";
/// Bytes that a log may have. What a server says of a device is some hundred.
const LONGEST: u64 = 1 << 20;
/// Bytes of the end of a longer one that `log.old` has.
const KEPT: u64 = 512 << 10;

/// What standard error is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Command,
    /// A file, which may be the log.
    File,
    Journal,
    /// A terminal or a pipe.
    Other,
}

#[derive(Debug, Clone, Copy)]
struct Settings {
    form: Form,
    role: &'static str,
    level: Level,
    /// The user chose the level.
    chosen: bool,
}

static SETTINGS: RwLock<Settings> =
    RwLock::new(Settings { form: Form::Command, role: "", level: Level::WARN, chosen: false });
/// The log that this process keeps short.
static KEEPS: OnceLock<PathBuf> = OnceLock::new();

fn settings() -> Settings {
    *SETTINGS.read().unwrap_or_else(PoisonError::into_inner)
}

fn set(change: impl FnOnce(&mut Settings)) {
    change(&mut SETTINGS.write().unwrap_or_else(PoisonError::into_inner));
    // Another subscriber may be there already: that of a program that uses this crate.
    let _ = tracing::subscriber::set_global_default(Log);
    tracing::callsite::rebuild_interest_cache();
}

/// Writes the events of this process to standard error, as a command does: warnings and errors, or the level
/// that `BECKET_LOG` names (`error`, `warn`, `info`, `debug` or `trace`).
pub fn log_to_stderr() {
    let level = level_in_environment();
    set(|settings| {
        settings.level = level.unwrap_or(Level::WARN);
        settings.chosen = level.is_some();
    });
}

fn level_in_environment() -> Option<Level> {
    std::env::var(VARIABLE).ok()?.parse().ok()
}

/// This process is a server's: its standard error may be a log. A level that is not given is that of
/// [`VARIABLE`].
pub(crate) fn of_server(role: &'static str, level: Option<Level>) {
    let level = level.or_else(level_in_environment);
    set(|settings| {
        *settings =
            Settings { form: form(), role, level: level.unwrap_or(Level::INFO), chosen: level.is_some() };
    });
}

/// The process goes on as something else: the guard of a dead supervisor.
pub(crate) fn becomes(role: &'static str) {
    set(|settings| settings.role = role);
}

/// Gives a process that is started the level that the user chose for this one.
pub(crate) fn level_for(command: &mut Command) {
    let Settings { level, chosen, .. } = settings();
    if chosen {
        command.env(VARIABLE, level.as_str().to_ascii_lowercase());
    }
}

fn form() -> Form {
    let Ok(stat) = rustix::fs::fstat(rustix::stdio::stderr()) else { return Form::Other };
    let journal = format!("{}:{}", stat.st_dev, stat.st_ino);
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Form::File,
        _ if std::env::var("JOURNAL_STREAM").is_ok_and(|stream| stream == journal) => Form::Journal,
        _ => Form::Other,
    }
}

/// Prints becket's own events. It has no spans.
struct Log;

impl Subscriber for Log {
    fn enabled(&self, event: &Metadata<'_>) -> bool {
        let wanted = *event.level() <= settings().level || event.fields().field(EVENT).is_some();
        wanted && event.target().starts_with("becket")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        // What happens to devices is remembered, also where it is not written down.
        Some(settings().level.max(Level::INFO).into())
    }

    fn event(&self, event: &Event<'_>) {
        let mut message = Message::default();
        event.record(&mut message);
        let (settings, level, now) = (settings(), *event.metadata().level(), SystemTime::now());
        if !message.event.is_empty() {
            EVENTS.add(message.happened(level, now));
            if level > settings.level || (settings.form == Form::Journal && message.entry(settings, level)) {
                return;
            }
        }
        let line = line(settings, level, &message.text(), now);
        // At once: supervisor and worker write to one log. A closed standard error is no reason to fail.
        let _ = io::stderr().write_all(line.as_bytes());
        shorten();
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The field with an event's word: it is among those that `becket events` shows.
const EVENT: &str = "event";

/// What an event says, and of which device.
#[derive(Default)]
struct Message {
    event: String,
    device: String,
    message: String,
}

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let to = match field.name() {
            "device" => &mut self.device,
            EVENT => &mut self.event,
            _ => &mut self.message,
        };
        // Writing to a String cannot fail.
        let _ = write!(to, "{value:?}");
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

impl Message {
    /// On one line.
    fn text(&self) -> String {
        let Message { device, message, .. } = self;
        let text = if device.is_empty() { message.clone() } else { format!("{device}: {message}") };
        text.replace(char::is_control, " ")
    }
}

impl Message {
    /// As it is remembered.
    fn happened(&self, level: Level, now: SystemTime) -> Happened {
        Happened {
            number: 0,
            at: utc(now),
            event: self.event.clone(),
            level: level.as_str().to_ascii_lowercase(),
            device: Some(self.device.clone()).filter(|device| !device.is_empty()),
            message: self.message.replace(char::is_control, " "),
        }
    }

    /// As an entry of the journal; `false` if that did not take it.
    fn entry(&self, settings: Settings, level: Level) -> bool {
        let (text, priority) = (self.text(), priority(level).to_string());
        journal::send(&[
            ("MESSAGE", &format!("{}: {text}", settings.role)),
            ("PRIORITY", &priority),
            ("SYSLOG_IDENTIFIER", "becket"),
            ("BECKET_EVENT", &self.event),
            ("BECKET_DEVICE", &self.device),
        ])
    }
}

fn line(settings: Settings, level: Level, text: &str, now: SystemTime) -> String {
    let Settings { form, role, .. } = settings;
    let pid = std::process::id();
    match form {
        Form::Command => format!("becket: {text}\n"),
        Form::Journal => format!("<{}>{role}[{pid}]: {text}\n", priority(level)),
        Form::File | Form::Other => {
            format!("{} becket[{pid}]: {} {role}: {text}\n", utc(now), level.as_str().to_ascii_lowercase())
        }
    }
}

/// As syslog counts.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// This process keeps the log at that path short, if it is its own.
pub(crate) fn keep_short(path: PathBuf) {
    let _ = KEEPS.set(path);
}

/// Opens a new log if the one that this process writes was removed.
pub(crate) fn reopen() {
    let (Form::File, Some(path)) = (settings().form, KEEPS.get()) else { return };
    let mut options = File::options();
    if let Ok(log) = options.create(true).append(true).mode(0o600).open(path) {
        // Where it fails, what is said goes on to the old one.
        let _ = rustix::stdio::dup2_stderr(&log);
    }
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

/// A line of a log without its time, process, level and role. Servers of earlier versions wrote neither of
/// the last two.
pub(crate) fn words(line: &str) -> &str {
    let dated = line.split_once(" becket[").and_then(|(time, rest)| {
        let rest = rest.split_once("]: ")?.1;
        time.ends_with('Z').then_some(rest)
    });
    let Some(rest) = dated else { return line };
    let levelled = rest.split_once(' ').filter(|(level, _)| level.parse::<Level>().is_ok());
    levelled.and_then(|(_, rest)| rest.split_once(": ")).map_or(rest, |(_, words)| words)
}

/// The time now, as in the log.
pub(crate) fn now() -> String {
    utc(SystemTime::now())
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
        assert_eq!(words("2026-11-23T19:05:07.123Z becket[12]: warn supervisor: a: x"), "a: x");
        for plain in ["becket: x", "", "thread 'main' panicked", "a becket[1]: y"] {
            assert_eq!(words(plain), plain);
        }
    }

    #[test]
    fn a_line_is_of_the_form_that_its_reader_wants() {
        let pid = std::process::id();
        let line = |form, level| {
            let settings = Settings { form, role: "worker", level: Level::TRACE, chosen: false };
            line(settings, level, "a: x", UNIX_EPOCH)
        };
        assert_eq!(line(Form::Command, Level::WARN), "becket: a: x\n");
        assert_eq!(line(Form::Journal, Level::ERROR), format!("<3>worker[{pid}]: a: x\n"));
        for form in [Form::File, Form::Other] {
            let dated = line(form, Level::INFO);
            assert_eq!(dated, format!("1970-01-01T00:00:00.000Z becket[{pid}]: info worker: a: x\n"));
            assert_eq!(words(dated.trim()), "a: x");
        }
        assert_eq!([Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE].map(priority), [4, 6, 7, 7]);
    }

    #[test]
    fn an_event_is_one_line_with_its_device_in_front() {
        #[derive(Default)]
        struct Heard(std::sync::Mutex<Vec<String>>);
        impl Subscriber for Heard {
            fn enabled(&self, _: &Metadata<'_>) -> bool {
                true
            }
            fn event(&self, event: &Event<'_>) {
                let mut message = Message::default();
                event.record(&mut message);
                self.0.lock().unwrap().push(message.text());
            }
            fn new_span(&self, _: &Attributes<'_>) -> Id {
                Id::from_u64(1)
            }
            fn record(&self, _: &Id, _: &Record<'_>) {}
            fn record_follows_from(&self, _: &Id, _: &Id) {}
            fn enter(&self, _: &Id) {}
            fn exit(&self, _: &Id) {}
        }
        let heard = std::sync::Arc::new(Heard::default());
        tracing::subscriber::with_default(std::sync::Arc::clone(&heard), || {
            tracing::warn!("plain {}", 1);
            tracing::info!(device = "disk", "two\nlines\u{1b}[2J");
            tracing::error!(device = %7, "told");
        });
        assert_eq!(*heard.0.lock().unwrap(), ["plain 1", "disk: two lines [2J", "7: told"]);
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

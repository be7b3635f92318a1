//! `losetup`: util-linux's dialect, by that name or as `becket losetup`, on the kernel's loop devices.
//! Never keeps state and never needs a server; what it prints, scripts have learnt to read.
//!
//! The dialect is a contract with ten thousand scripts, so it has a parser of its own (`getopt`, `options`,
//! `size`) and lists of its own (`columns`, `table`). docs/losetup-compat.md lists where it differs from
//! util-linux, and why.

mod change;
mod columns;
mod device;
mod devices;
mod getopt;
mod list;
mod manual;
mod options;
mod overlap;
mod served;
mod setup;
mod size;
mod table;
mod trouble;

pub(crate) use manual::command;

use options::{Action, Settings, Stop};
use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use trouble::{Trouble, say, warn};

/// The words for losetup, when this program was called by its name or the first word is.
pub(crate) fn meant(mut words: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    let name = words.next()?;
    let mut words: Vec<OsString> = words.collect();
    if std::path::Path::new(&name).file_name() != Some(OsStr::new("losetup")) {
        if words.first().is_none_or(|first| first != "losetup") {
            return None;
        }
        words.remove(0);
    }
    Some(words)
}

/// Does what the words ask for; returns the exit status.
pub(crate) fn run(words: &[OsString]) -> u8 {
    let strict = std::env::var_os("POSIXLY_CORRECT").is_some();
    let outcome = match options::parse(words, strict) {
        Ok((action, settings)) => act(&action, &settings),
        Err(stop) => stopped(stop),
    };
    match outcome {
        Ok(well) => u8::from(!well),
        Err(trouble) => {
            trouble.tell();
            1
        }
    }
}

/// Whether a command line means something.
#[cfg(feature = "fuzzing")]
pub(crate) fn is_understood(words: &[OsString], strict: bool) -> bool {
    options::parse(words, strict).is_ok()
}

fn stopped(stop: Stop) -> Result<bool, Trouble> {
    match stop {
        Stop::Help => print(manual::help().as_bytes()),
        Stop::Version => print(format!("losetup from becket {}\n", env!("CARGO_PKG_VERSION")).as_bytes()),
        Stop::Refused(why) => Err(Trouble::new(why)),
        Stop::Misspelt(why) => {
            warn(&why);
            say("Try 'losetup --help' for more information.");
            Ok(false)
        }
        Stop::Silent => Ok(false),
    }
}

/// Says whether all went well.
fn act(action: &Action, settings: &Settings) -> Result<bool, Trouble> {
    let done = |outcome: Result<(), Trouble>| outcome.map(|()| true);
    match action {
        Action::Show { file } => print(&list::show(file.as_deref(), settings, utf8())?),
        Action::ShowOne(device) => print(&list::show_one(device, settings, utf8())?),
        Action::FindFree => print(&line(&setup::free()?)),
        Action::Create { device, file } => {
            let path = match device {
                None if served::wanted() => create_served(file, settings)?,
                device => setup::create(device.as_deref(), file, settings)?,
            };
            if settings.show { print(&line(&path)) } else { Ok(true) }
        }
        Action::Detach(devices) => Ok(change::detach(devices)),
        Action::DetachAll => Ok(change::detach_all()),
        Action::Remove(devices) => Ok(change::remove(devices)),
        Action::SetCapacity(device) => done(change::set_capacity(device)),
        Action::SetDirectIo(device, on) => done(change::set_direct_io(device, *on)),
        Action::SetSectorSize(device, bytes) => done(change::set_sector_size(device, *bytes)),
    }
}

fn create_served(file: &OsStr, settings: &Settings) -> Result<PathBuf, Trouble> {
    let other = if settings.no_overlap { overlap::reuse(file, settings)? } else { None };
    other.map_or_else(|| served::create(file, settings), Ok)
}

fn line(path: &std::path::Path) -> Vec<u8> {
    [path.as_os_str().as_bytes(), b"\n"].concat()
}

/// Results go out in one piece. A reader that went away is not an error, a full disk is.
fn print(text: &[u8]) -> Result<bool, Trouble> {
    let mut out = io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Trouble::because("write error", &error))
        }
        _ => Ok(true),
    }
}

/// Whether the reader's locale has letters beyond ASCII.
fn utf8() -> bool {
    let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
    let locale = locale.to_ascii_lowercase();
    locale.ends_with("utf-8") || locale.ends_with("utf8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_called_by_its_name_or_as_a_word() {
        let meant = |line: &str| {
            let words = meant(line.split_whitespace().map(OsString::from))?;
            Some(words.iter().map(|word| word.display().to_string()).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(meant("/sbin/losetup -a").as_deref(), Some("-a"));
        assert_eq!(meant("losetup losetup").as_deref(), Some("losetup"));
        assert_eq!(meant("becket losetup").as_deref(), Some(""));
        assert_eq!(meant("becket list losetup"), None);
        assert_eq!(meant("becket"), None);
        assert_eq!(meant(""), None);
    }
}

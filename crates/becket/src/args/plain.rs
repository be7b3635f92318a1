//! The command line that is called in loops, `attach` with few options, read without building a parser.
//! It never refuses: whatever it does not know, or has a doubt about, is for the parser that has the definitions.

use super::{Attach, Cli, Command, DeviceOptions, Global, Toggle, Via};
use crate::units::{parse_block_size, parse_size};
use clap::ValueEnum as _;
use std::{ffi::OsString, os::unix::ffi::OsStrExt as _, path::PathBuf};

/// What these words mean, if each of them is plain.
///
/// Building clap's parser for `attach` and tearing it down again takes a sixth of the instructions of a whole attach and a
/// quarter of its page faults. The tests hold this to what clap makes of the same words.
pub(super) fn read(words: &[OsString]) -> Option<Cli> {
    let [_, command, words @ ..] = words else { return None };
    if command != "attach" {
        return None;
    }
    let mut global = Global { json: false, verbose: false };
    let mut device = DeviceOptions::default();
    let mut images = Vec::new();
    let (mut via, mut from, mut offset, mut direct_io) = (None, None, None, None);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("--via") => once(&mut via, Via::from_str(text(words.next()?)?, false).ok()?)?,
            Some("--name") => once(&mut device.name, text(words.next()?)?.to_owned())?,
            Some("--offset") => once(&mut offset, parse_size(text(words.next()?)?).ok()?)?,
            Some("--size-limit") => once(&mut device.size_limit, parse_size(text(words.next()?)?).ok()?)?,
            Some("--block-size") => {
                once(&mut device.block_size, parse_block_size(text(words.next()?)?).ok()?)?
            }
            Some("--direct-io") => once(&mut direct_io, Toggle::from_str(text(words.next()?)?, false).ok()?)?,
            Some("--from") => once(&mut from, PathBuf::from(plain(words.next()?)?))?,
            Some("-r" | "--read-only") => flag(&mut device.read_only)?,
            Some("-v" | "--verbose") => flag(&mut global.verbose)?,
            Some("--json") => flag(&mut global.json)?,
            _ => images.push(PathBuf::from(plain(word)?)),
        }
    }
    if images.is_empty() == from.is_none() {
        return None;
    }
    device.via = via.unwrap_or(device.via);
    device.offset = offset.unwrap_or(device.offset);
    device.direct_io = direct_io.unwrap_or(device.direct_io);
    let command = Command::Attach(Attach { images, from, tab: None, atomic: false, device });
    Some(Cli { global, command })
}

/// The word, if it can only be a value.
pub(crate) fn plain(word: &OsString) -> Option<&OsString> {
    (!word.is_empty() && !word.as_bytes().starts_with(b"-")).then_some(word)
}

/// The same where it is to be understood, and not only passed on.
fn text(word: &OsString) -> Option<&str> {
    plain(word)?.to_str()
}

fn once<T>(place: &mut Option<T>, value: T) -> Option<()> {
    place.replace(value).is_none().then_some(())
}

fn flag(place: &mut bool) -> Option<()> {
    (!std::mem::replace(place, true)).then_some(())
}

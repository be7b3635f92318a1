//! Doors for fuzzers: any bytes to whatever reads what people and other programs write.
//! It never exists in a becket that is used: only `--features fuzzing` builds it.
//!
//! Each returns whether the bytes were valid.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use crate::{commands, losetup, mounts, tab};

/// A command line of losetup's, a word a line.
pub fn losetup(bytes: &[u8]) -> bool {
    let words: Vec<OsString> =
        bytes.split(|byte| *byte == b'\n').map(|word| OsString::from_vec(word.to_vec())).collect();
    let strict = losetup::is_understood(&words, true);
    losetup::is_understood(&words, false) || strict
}

/// A table of devices.
pub fn table(bytes: &[u8]) -> bool {
    let entries = tab::entries(bytes, &[]);
    !entries.is_empty() && entries.iter().all(Result::is_ok)
}

/// The file of `attach --from`.
pub fn from(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_ok_and(commands::is_understood)
}

/// A table of mounts.
pub fn mounts(bytes: &[u8]) -> bool {
    !mounts::parse(bytes).is_empty()
}

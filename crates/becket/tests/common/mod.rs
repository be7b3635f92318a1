//! What becket's own end-to-end tests share beyond the testkit: the binary that was just built, processes.
//! Never assumes a transport: `becket_testkit::via` says which one is tested.
#![allow(dead_code, reason = "every test file uses its own part")]

use becket_testkit::{Scratch, wait_until};
use serde_json::Value;
use std::{fs, path::Path, time::Duration};

/// A place of its own for one test, with the binary that was just built.
pub(crate) fn scratch() -> Scratch {
    Scratch::new(env!("CARGO_BIN_EXE_becket"))
}

/// A string of a JSON object.
#[track_caller]
pub(crate) fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no string {key:?} in {value:#}"))
}

/// Whether a process lives; one that only waits to be buried does not.
pub(crate) fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .and_then(|rest| rest.split_whitespace().next())
        .is_some_and(|state| !"ZX".contains(state))
}

/// The numbers in a file, once it has `count` of them; fails when they do not come.
#[track_caller]
pub(crate) fn numbers(path: &Path, count: usize) -> Vec<u32> {
    let read = || -> Vec<u32> {
        let text = fs::read_to_string(path).unwrap_or_default();
        // The last line may be half written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.split_whitespace().map(|word| word.parse().expect("a number")).collect()
    };
    assert!(
        wait_until(Duration::from_secs(20), || read().len() >= count),
        "{}: {:?}",
        path.display(),
        read()
    );
    read()
}

/// Whether a block device has a backing now. A loop node stays when its device is gone; its size does not.
pub(crate) fn bound(device: &Path) -> bool {
    let Some(name) = device.file_name().and_then(|name| name.to_str()) else { return false };
    let size = fs::read_to_string(format!("/sys/block/{name}/size")).unwrap_or_default();
    !matches!(size.trim(), "" | "0")
}

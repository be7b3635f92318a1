//! The hidden `becket complete-path WORD`: names inside images that begin like a word, for shells.
//! Never fetches, decodes into the store, attaches or complains: what takes long or fails has no names.

use super::{
    fetched::Local,
    inside::{self, Named, Node, Thing},
};
use crate::{
    args::{self, LookOptions},
    failure::Failure,
    ui::Ui,
};
use becket_image::{NodeKind, split};
use std::{
    ffi::OsString,
    io::Write as _,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::Path,
};

/// Nobody chooses among more.
const MOST: usize = 1000;

pub(crate) fn run(_ui: &Ui, args: &args::CompletePath) -> Result<u8, Failure> {
    let word = args.word.as_bytes();
    let Some(slash) = word.iter().rposition(|byte| *byte == b'/') else { return Ok(0) };
    let (dir, begun) = (word.get(..slash).unwrap_or_default(), word.get(slash + 1..).unwrap_or_default());
    // Patterns are the shell's then.
    if word.iter().any(|byte| b"*?[]\\".contains(byte)) {
        return Ok(0);
    }
    let dir = Path::new(std::ffi::OsStr::from_bytes(dir));
    if becket_fetch::is_remote(args.word.as_os_str()) || !split(dir).host.is_file() {
        return Ok(0);
    }
    let pattern = dir.join(OsString::from_vec([begun, b"*"].concat()));
    let asked = LookOptions::default();
    let Ok((_, found)) = inside::find_in(Local::new(pattern.as_path()), &pattern, &asked, "complete") else {
        return Ok(0);
    };
    let mut out = Vec::new();
    for named in found.iter().take(MOST) {
        let Some(name) = &named.name else { continue };
        // A shell reads lines.
        if name.iter().any(u8::is_ascii_control) {
            continue;
        }
        out.extend_from_slice(dir.join(std::ffi::OsStr::from_bytes(name)).as_os_str().as_bytes());
        out.extend_from_slice(if goes_on(named) { b"/\n" } else { b"\n" });
    }
    std::io::stdout().lock().write_all(&out)?;
    Ok(0)
}

/// Whether there is surely something in it: a directory, or a partition.
fn goes_on(named: &Named) -> bool {
    match &named.thing {
        Thing::Image(_) => true,
        Thing::Node(Node { fs, node, .. }) => {
            fs.stat(*node).is_ok_and(|stat| stat.kind == NodeKind::Directory)
        }
    }
}

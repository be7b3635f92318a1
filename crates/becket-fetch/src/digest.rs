//! Compares an object with the digest that names it, once all its bytes are there.
//! It never says that an object is whole which it has not read.
//!
//! `STORE/v1/ID/whole` says that it was compared; a chunk that comes afterwards takes that away.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use crate::store::Held;
use crate::version::Version;

/// How much is read at once.
const BUFFER: u64 = 256 << 10;

/// Where it is noted; nowhere for a process that does not know the store.
fn note(held: &Held) -> Option<PathBuf> {
    Some(held.path.parent()?.parent()?.join("whole"))
}

/// Whether the bytes are those of the version, if that is a digest.
pub(crate) fn is_right(held: &Held) -> io::Result<bool> {
    let Version::Digest(digest) = &held.meta.version else { return Ok(true) };
    let note = note(held);
    if note.as_ref().is_some_and(|note| note.exists()) {
        return Ok(true);
    }
    let mut context = ring::digest::Context::new(&ring::digest::SHA256);
    let mut buffer = vec![0; usize::try_from(BUFFER).unwrap_or(0)];
    let mut at = 0;
    while at < held.meta.size {
        let len = usize::try_from(BUFFER.min(held.meta.size - at)).unwrap_or(0);
        let part = buffer.get_mut(..len).unwrap_or_default();
        held.data.read_exact_at(part, at)?;
        context.update(part);
        at += len as u64;
    }
    let found: String = context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let right = digest.strip_prefix("sha256:") == Some(found.as_str());
    if right && let Some(note) = note {
        // Without it the object is compared again.
        let _ = File::create(note);
    }
    Ok(right)
}

/// A chunk has come: one that was damaged or lost is no longer what was compared.
///
/// # Errors
/// The note stays.
pub(crate) fn forget(held: &Held) -> io::Result<()> {
    let Version::Digest(_) = held.meta.version else { return Ok(()) };
    match note(held).map(fs::remove_file) {
        Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

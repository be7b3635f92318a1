//! Compares an object with the digest that names it, once all its bytes are there.
//! It never says that an object is whole which it has not read.
//!
//! The table notes that it was compared (`table`); a chunk that comes afterwards takes that away.

use std::io;
use std::os::unix::fs::FileExt as _;

use crate::store::Held;
use crate::version::Version;

/// How much is read at once.
const BUFFER: u64 = 256 << 10;

/// Whether all chunks are in the store, and nobody has compared them with their digest as a whole.
pub(crate) fn is_due(held: &Held) -> bool {
    let all = 0..held.meta.chunks();
    held.meta.has_digest() && !held.table.is_whole() && held.table.sums(all).all(|sum| sum.is_some())
}

/// Whether the bytes are those of the version, if that is a digest.
pub(crate) fn is_right(held: &Held) -> io::Result<bool> {
    let Version::Digest(digest) = &held.meta.version else { return Ok(true) };
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
    Ok(digest.strip_prefix("sha256:") == Some(found.as_str()))
}

/// Notes that they are.
pub(crate) fn note(held: &Held) -> io::Result<()> {
    // Who has brought them may not have done that yet.
    held.data.sync_data()?;
    held.table.set_whole(true)
}

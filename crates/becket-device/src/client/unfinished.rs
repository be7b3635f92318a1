//! What those left behind who were killed while they attached an image: a device of the kernel's without a
//! record, and files of records that were not in their place yet.
//! A device is known by the mark that its maker had noted. No other is touched.

use tracing::warn;

use crate::client::kernel_drivers;
use crate::record::mark;
use crate::record::store::{Note, Store};

/// Removes what is left behind; whether a device was.
pub(crate) fn clear(store: &Store) -> bool {
    let mut found = false;
    for left in store.left() {
        let done = |note: &Note| is_recorded(store, note.mark) || abandon(note, &mut found);
        if left.note.as_ref().is_none_or(done) {
            left.forget();
        }
    }
    found
}

/// Its maker may have died just after that.
fn is_recorded(store: &Store, mark: u64) -> bool {
    store.entries().iter().flatten().any(|(_, entry)| mark::recorded(entry) == Some(mark))
}

/// Whether that is done with.
fn abandon(note: &Note, found: &mut bool) -> bool {
    kernel_drivers::all().all(|driver| match driver.abandoned(note) {
        Ok(node) => {
            if let Some(node) = node {
                *found = true;
                warn!("{}: the command that attached it was killed; it is detached", node.display());
            }
            true
        }
        Err(error) => {
            warn!(
                "a device over {} may be left of a command that was killed: {error}",
                note.backing.display()
            );
            false
        }
    })
}

//! The end of a device, as who ends it and its targets speak of it.
//! Ends nothing itself.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

/// Whether a device is about to end for good, and what of its finished writes may be lost with it.
///
/// A device that goes to another server does not end: that one has the bytes flushed.
#[derive(Debug, Default)]
pub struct Ending {
    expected: AtomicBool,
    unsaved: Mutex<Option<String>>,
}

impl Ending {
    /// It ends for good once its last queue does, or does not after all.
    pub fn expect(&self, expected: bool) {
        self.expected.store(expected, Ordering::Release);
    }

    pub(crate) fn is_expected(&self) -> bool {
        self.expected.load(Ordering::Acquire)
    }

    pub(crate) fn loses(&self, why: String) {
        self.unsaved.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
    }

    /// Why finished writes may be lost, once the device has ended.
    pub fn unsaved(&self) -> Option<String> {
        self.unsaved.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

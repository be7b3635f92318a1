//! Mutexes as becket uses them.
//! It never hands a panic on: what one thread broke must not take the devices of all others along.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for a mutex.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

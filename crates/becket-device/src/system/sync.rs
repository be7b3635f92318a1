//! Mutexes as becket uses them, and the one order in which they are taken.
//! A panic is never propagated (what one thread broke must not take the devices of all others along), and a
//! debug build never takes a mutex out of order: it panics where a release build might one day deadlock.
//!
//! | rank | lock | held |
//! | --- | --- | --- |
//! | 1 | a device's state (`supervisor::owned`), never two at once | while something is done to that device |
//! | 2 | which worker new devices go to | for moments, and while that worker is started |
//! | 2 | in a worker: the giving of queues to I/O threads | while a device's are given |
//! | 3 | the list of devices, of the supervisor and of a worker | for moments |
//! | 4 | the guard, the number of calls under way, a worker's line to its supervisor | for moments |
//!
//! A thread that holds one may take those of a higher rank only. Below all of them are leaves, under which
//! nothing else is taken: a worker's answers as the supervisor waits for them (`supervisor::process`), the
//! driver's idle rings, a record's lock in the file system and the descriptors for such locks (`state`).

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) const DEVICE: u8 = 1;
pub(crate) const SHARED: u8 = 2;
pub(crate) const DEVICES: u8 = 3;
pub(crate) const LAST: u8 = 4;

/// A mutex with its place in the order.
#[derive(Debug, Default)]
pub(crate) struct Ranked<const RANK: u8, T>(Mutex<T>);

impl<const RANK: u8, T> Ranked<RANK, T> {
    pub(crate) const fn new(value: T) -> Ranked<RANK, T> {
        Ranked(Mutex::new(value))
    }
}

/// What can be waited for.
pub(crate) trait Lock {
    type Guard<'a>
    where
        Self: 'a;
    fn wait(&self) -> Self::Guard<'_>;
}

/// Waits for a mutex.
pub(crate) fn lock<L: Lock>(mutex: &L) -> L::Guard<'_> {
    mutex.wait()
}

/// A leaf: nothing is taken under it, so it may be taken under anything.
impl<T> Lock for Mutex<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;

    fn wait(&self) -> MutexGuard<'_, T> {
        take(self)
    }
}

impl<const RANK: u8, T> Lock for Ranked<RANK, T> {
    type Guard<'a>
        = Held<'a, T>
    where
        T: 'a;

    fn wait(&self) -> Held<'_, T> {
        let place = order::Place::take(RANK);
        Held { guard: take(&self.0), _place: place }
    }
}

/// A ranked mutex that is held.
#[derive(Debug)]
pub(crate) struct Held<'a, T> {
    // In this order: its place is left once it is free.
    guard: MutexGuard<'a, T>,
    _place: order::Place,
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Does something that is not waited for.
pub(crate) fn spawn(work: impl FnOnce() + Send + 'static) {
    #[cfg(test)]
    if tests::shuffled() {
        drop(shuttle::thread::spawn(work));
        return;
    }
    drop(std::thread::spawn(work));
}

#[cfg(not(test))]
fn take<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In tests of interleavings the threads are shuttle's, which takes turns among them at each lock.
#[cfg(test)]
fn take<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    use std::sync::TryLockError;
    if !tests::shuffled() {
        return mutex.lock().unwrap_or_else(PoisonError::into_inner);
    }
    loop {
        shuttle::thread::yield_now();
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {}
        }
    }
}

/// Which ranks a thread holds, one bit for each; in debug builds.
#[cfg(debug_assertions)]
mod order {
    #[derive(Debug)]
    pub(super) struct Place(u8);

    impl Place {
        pub(super) fn take(rank: u8) -> Place {
            change(|held| {
                assert!(held >> rank == 0, "a lock of rank {rank} is taken under those of {held:#b}");
                held | 1 << rank
            });
            Place(rank)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            change(|held| held & !(1 << self.0));
        }
    }

    #[cfg(not(test))]
    fn change(to: impl FnOnce(u32) -> u32) {
        thread_local!(static HELD: std::cell::Cell<u32> = const { std::cell::Cell::new(0) });
        HELD.set(to(HELD.get()));
    }

    #[cfg(test)]
    use super::tests::change;
}

#[cfg(not(debug_assertions))]
mod order {
    #[derive(Debug)]
    pub(super) struct Place;

    impl Place {
        pub(super) fn take(_: u8) -> Place {
            Place
        }
    }
}

#[cfg(test)]
#[path = "sync_tests.rs"]
pub(crate) mod tests;

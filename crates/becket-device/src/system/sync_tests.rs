use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::*;

thread_local! {
    static SHUFFLED: Cell<bool> = const { Cell::new(false) };
    /// shuttle's threads are all one of the system's, so each has an entry of its own.
    static HELD: RefCell<HashMap<Option<shuttle::thread::ThreadId>, u32>> = RefCell::default();
}

/// Whether the calling thread is one of shuttle's.
pub(crate) fn shuffled() -> bool {
    SHUFFLED.get()
}

pub(super) fn change(to: impl FnOnce(u32) -> u32) {
    let thread = shuffled().then(|| shuttle::thread::current().id());
    let held = HELD.with_borrow(|held| held.get(&thread).copied().unwrap_or_default());
    let held = to(held);
    HELD.with_borrow_mut(|all| if held == 0 { all.remove(&thread) } else { all.insert(thread, held) });
}

/// Runs a scenario so many times, each with other turns of its threads. It panics when they stand still.
pub(crate) fn shuffle(times: usize, scenario: impl Fn() + Send + Sync + 'static) {
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            SHUFFLED.set(false);
            HELD.with_borrow_mut(HashMap::clear);
        }
    }
    let _end = End;
    SHUFFLED.set(true);
    let mut config = shuttle::Config::new();
    // shuttle's own 32 KiB are too few for an attach, which writes and reads records.
    config.stack_size = 512 << 10;
    // Who waits for a lock takes turns until it is free, so standing still is to go on for ever.
    config.max_steps = shuttle::MaxSteps::FailAfter(20_000);
    shuttle::Runner::new(shuttle::scheduler::RandomScheduler::new(times), config).run(scenario);
}

fn panics(what: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(what)).is_err()
}

#[test]
fn locks_are_taken_in_their_order() {
    let device = Ranked::<DEVICE, u32>::new(1);
    let devices = Ranked::<DEVICES, u32>::new(2);
    let leaf = Mutex::new(3);
    let sum = || *lock(&device) + *lock(&devices) + *lock(&leaf);
    assert_eq!((sum(), sum()), (6, 6), "and left again");
    assert!(panics(|| {
        let _devices = lock(&devices);
        let _device = lock(&device);
    }));
    assert_eq!(sum(), 6, "a thread that panics holds nothing");
}

#[test]
fn no_two_devices_are_held_at_once() {
    let (one, two) = (Ranked::<DEVICE, ()>::new(()), Ranked::<DEVICE, ()>::new(()));
    assert!(panics(|| {
        let _one = lock(&one);
        let _two = lock(&two);
    }));
}

/// What the tests of interleavings rest on.
#[test]
fn two_threads_that_wait_for_each_other_are_found() {
    let found = panics(|| {
        shuffle(100, || {
            let locks = Arc::new((Mutex::new(()), Mutex::new(())));
            let others = Arc::clone(&locks);
            let other = shuttle::thread::spawn(move || {
                let _one = lock(&others.0);
                let _two = lock(&others.1);
            });
            let two = lock(&locks.1);
            let one = lock(&locks.0);
            drop((one, two));
            other.join().unwrap();
        });
    });
    assert!(found);
    assert!(!shuffled());
}

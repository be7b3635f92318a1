//! Which request sees which configuration, step by step on a ring of its own, over every kind of source.

use becket_image::DirectIo;
use rustix::io::Errno;

use super::*;
use crate::{
    Op,
    core::bench::{Bench, Image, KINDS, Kind, PAGE},
};

/// Every kind, in the place of every kind.
fn pairs() -> impl Iterator<Item = (Kind, Kind)> {
    KINDS.into_iter().flat_map(|old| KINDS.map(|new| (old, new)))
}

#[test]
fn what_has_begun_ends_in_the_old_image_and_what_comes_later_begins_in_the_new_one() {
    for (old, new) in pairs() {
        let (old, new) = (Image::new(old, b'o'), Image::new(new, b'n'));
        let serving = old.serving(false);
        let mut bench = Bench::new(&serving);
        bench.core.prepare(&mut bench.ring, new.serving(false)).unwrap();
        // Two operations, of which only the first is on its way when the queue is held.
        bench.fill(0, b'1');
        let is_drained = bench.hold();
        bench.fill(1, b'2');
        assert!(is_drained.try_recv().is_err(), "one has begun");
        assert_eq!(bench.await_all(&[0]), [Ok(2 * PAGE)]);
        assert_eq!(is_drained.try_recv(), Ok(true));
        assert!(
            old.holds(b'1') && new.holds(b'n'),
            "nothing of it is in the new image, and nothing else has begun"
        );
        assert!(bench.core.let_go(&mut bench.ring, true).unwrap());
        assert_eq!(bench.await_all(&[1]), [Ok(2 * PAGE)]);
        assert!(old.holds(b'1') && new.holds(b'2'));
        assert_eq!(Arc::strong_count(&serving), 1, "the queue has let go of the old one");
    }
}

#[test]
fn what_was_prepared_can_be_given_up() {
    for (old, new) in pairs() {
        let (old, new) = (Image::new(old, b'o'), Image::new(new, b'n'));
        let mut bench = Bench::new(&old.serving(false));
        let other = new.serving(false);
        bench.core.prepare(&mut bench.ring, Arc::clone(&other)).unwrap();
        assert_eq!(bench.hold().try_recv(), Ok(true), "nothing is under way");
        bench.fill(0, b'1');
        assert!(bench.core.let_go(&mut bench.ring, false).unwrap());
        assert_eq!(bench.await_all(&[0]), [Ok(2 * PAGE)]);
        assert!(old.holds(b'1') && new.holds(b'n'));
        assert_eq!(Arc::strong_count(&other), 1, "it is forgotten");
        // What was not held does not change.
        bench.core.prepare(&mut bench.ring, Arc::clone(&other)).unwrap();
        assert!(!bench.core.let_go(&mut bench.ring, true).unwrap());
        assert_eq!(Arc::strong_count(&other), 1);
    }
}

#[test]
fn a_device_that_becomes_read_only_refuses_what_was_held_back() {
    for kind in KINDS {
        let image = Image::new(kind, b'o');
        let serving = image.serving(false);
        let mut bench = Bench::new(&serving);
        let frozen = Arc::new(serving.otherwise(Image::map(), true, DirectIo::Auto));
        bench.core.prepare(&mut bench.ring, frozen).unwrap();
        bench.fill(0, b'1');
        let is_drained = bench.hold();
        bench.fill(1, b'2');
        assert_eq!(bench.await_all(&[0]), [Ok(2 * PAGE)], "it had begun");
        assert_eq!(is_drained.try_recv(), Ok(true));
        serving.sync_now().unwrap();
        bench.core.let_go(&mut bench.ring, true).unwrap();
        assert_eq!(bench.await_all(&[1]), [Err(Errno::ROFS)]);
        bench.begin(2, Op::Read);
        assert_eq!(bench.await_all(&[2]), [Ok(2 * PAGE)]);
        assert!(image.holds(b'1'));
    }
}

//! The core over every kind of source: what holds on a file holds on a target that is nothing like one.

use std::sync::{Arc, atomic::Ordering::SeqCst};
use std::time::Instant;

use becket_image::{Extent, Map, Place};
use rustix::io::Errno;

use super::bench::{Bench, Image, KINDS, Kind, PAGE, WRITE};
use crate::{
    Op, Serving,
    decode::Note,
    target::double::{Fate, LATE},
};

const ALL: u64 = 2 * PAGE;
const DURABLE: Op = Op::Write { durable: true };

fn both(byte: u8) -> impl Iterator<Item = (Image, Bench)> {
    KINDS.into_iter().map(move |kind| {
        let image = Image::new(kind, byte);
        let bench = Bench::new(&image.scripted());
        (image, bench)
    })
}

fn happens(image: &Image, fates: &[Fate]) {
    image.script.fates.lock().unwrap().extend(fates);
}

#[test]
fn what_is_written_is_read_from_both_places() {
    for (image, mut bench) in both(b'o') {
        assert_eq!(bench.does(Op::Read), Ok(ALL));
        assert!(bench.core.buffer(0).iter().all(|byte| *byte == b'o'));
        for (place, op) in [(b'1', WRITE), (b'2', DURABLE)] {
            let buffer = bench.core.buffer(0);
            buffer[..PAGE as usize].fill(place);
            buffer[PAGE as usize..].fill(place + 10);
            let written = buffer.to_vec();
            assert_eq!(bench.does(op), Ok(ALL));
            assert_eq!(image.script.now(), [&written[PAGE as usize..], &written[..PAGE as usize]].concat());
            bench.core.buffer(0).fill(0);
            assert_eq!(bench.does(Op::Read), Ok(ALL));
            assert_eq!(bench.core.buffer(0), written);
        }
    }
}

#[test]
fn what_is_given_back_or_zeroed_reads_as_zeroes() {
    for op in
        [Op::Discard, Op::WriteZeroes { keep_allocated: false }, Op::WriteZeroes { keep_allocated: true }]
    {
        for (image, mut bench) in both(b'o') {
            assert_eq!(bench.does(op), Ok(ALL));
            assert!(image.holds(0), "{op:?}");
        }
    }
}

#[test]
fn short_results_are_continued_until_the_request_is_whole() {
    for (image, mut bench) in both(b'o') {
        for op in [WRITE, Op::Read] {
            happens(&image, &[Fate::Short(512), Fate::Short(1024), Fate::Short(512)]);
            bench.core.buffer(0).fill(b'1');
            assert_eq!(bench.does(op), Ok(ALL));
            assert!(image.holds(b'1') && bench.core.buffer(0).iter().all(|byte| *byte == b'1'));
            assert!(image.script.fates.lock().unwrap().is_empty(), "all of it has happened");
        }
    }
}

#[test]
fn an_error_is_its_requests_alone() {
    for (image, mut bench) in both(b'o') {
        // The second piece of the first request, and nothing of the second request.
        happens(&image, &[Fate::Short(PAGE - 512), Fate::Fails]);
        bench.fill(0, b'1');
        assert_eq!(bench.await_all(&[0]), [Err(Errno::IO)]);
        assert_eq!(bench.does(Op::Read), Ok(ALL));
        let wanted = [vec![b'1'; PAGE as usize - 512], vec![b'o'; PAGE as usize + 512]].concat();
        assert_eq!(bench.core.buffer(0), wanted, "what failed has changed nothing");
        assert_eq!(bench.does(Op::Flush), Ok(0), "an error of a write says nothing of others");
    }
}

#[test]
fn what_is_late_holds_nothing_up() {
    for (image, mut bench) in both(b'o') {
        happens(&image, &[Fate::Late]);
        let began = Instant::now();
        bench.begin(1, Op::Read);
        assert_eq!(bench.does(Op::Read), Ok(ALL));
        assert!(bench.core.slab[1].busy, "after {:?}", began.elapsed());
        assert_eq!(bench.await_all(&[1]), [Ok(ALL)]);
        assert!(began.elapsed() >= LATE);
    }
}

#[test]
fn a_flush_syncs_what_no_sync_covers_and_nothing_else() {
    for (image, mut bench) in both(b'o') {
        let syncs = || image.script.syncs.load(SeqCst);
        assert_eq!((bench.does(Op::Flush), syncs()), (Ok(0), 1), "a server before may have written");
        assert_eq!((bench.does(Op::Read), bench.does(Op::Flush), syncs()), (Ok(ALL), Ok(0), 1));
        for (writes, op) in (2..).zip([WRITE, DURABLE, Op::Discard]) {
            bench.core.buffer(0).fill(writes);
            assert_eq!(bench.does(op), Ok(ALL));
            assert_eq!((bench.does(Op::Flush), syncs()), (Ok(0), writes.into()), "{op:?}");
            assert_eq!(*image.script.durable.lock().unwrap(), image.script.now());
        }
        // One that fails may have written.
        happens(&image, &[Fate::Short(512), Fate::Fails]);
        assert_eq!(bench.does(WRITE), Err(Errno::IO));
        assert_eq!((bench.does(Op::Flush), syncs()), (Ok(0), 5));
        assert_eq!(*image.script.durable.lock().unwrap(), image.script.now());
    }
}

#[test]
fn a_sync_covers_no_write_that_ends_beside_it() {
    for (image, mut bench) in both(b'o') {
        bench.begin(1, Op::Flush);
        bench.fill(2, b'1');
        assert_eq!(bench.await_all(&[1, 2]), [Ok(0), Ok(ALL)]);
        assert_eq!((bench.does(Op::Flush), image.script.syncs.load(SeqCst)), (Ok(0), 2));
        assert!(image.holds(b'1') && *image.script.durable.lock().unwrap() == image.script.now());
    }
}

#[test]
fn a_failed_sync_stays_failed_for_all_that_share_the_source() {
    for (image, _) in both(b'o') {
        let serving = image.scripted();
        let mut bench = Bench::new(&serving);
        image.script.sync_fails.store(true, SeqCst);
        assert_eq!(bench.does(Op::Flush), Err(Errno::IO));
        image.script.sync_fails.store(false, SeqCst);
        assert_eq!(bench.does(Op::Flush), Err(Errno::IO), "a later success would prove nothing");
        assert_eq!(serving.sync_now(), Err(Errno::IO));
        assert_eq!(Bench::new(&serving).does(Op::Flush), Err(Errno::IO));
        assert_eq!(image.script.syncs.load(SeqCst), 1);
    }
}

#[test]
fn a_queue_is_held_until_what_is_late_has_ended() {
    for (image, mut bench) in both(b'o') {
        happens(&image, &[Fate::Late]);
        bench.fill(0, b'1');
        let is_drained = bench.hold();
        bench.core.turn_ended(false);
        assert!(is_drained.try_recv().is_err());
        assert_eq!(bench.await_all(&[0]), [Ok(ALL)]);
        assert_eq!(is_drained.try_recv(), Ok(true));
        assert!(image.holds(b'1'));
    }
}

#[test]
fn what_is_not_there_yet_makes_its_request_wait_for_a_note() {
    let image = Image::new(Kind::Double, b'o');
    let mut bench = Bench::new(&image.scripted());
    // The second piece; another one behind it, whose note says that it cannot be had.
    happens(&image, &[Fate::Short(PAGE - 512), Fate::Waits]);
    bench.begin(1, Op::Read);
    bench.turn();
    assert_eq!(bench.does(Op::Read), Ok(ALL), "others go on");
    let is_drained = bench.hold();
    bench.core.close();
    assert!(is_drained.try_recv().is_err() && !bench.core.has_ended(), "it is under way");
    bench.core.note_came(&mut bench.ring, 1, Note::There(Ok(())));
    assert_eq!(bench.await_all(&[1]), [Ok(ALL)]);
    assert!(bench.core.buffer(1).iter().all(|byte| *byte == b'o'));
    assert_eq!(is_drained.try_recv(), Ok(true));
    assert!(bench.core.let_go(&mut bench.ring, false).unwrap() && bench.core.has_ended());

    // A queue that ends waits for nothing new.
    happens(&image, &[Fate::Waits]);
    assert_eq!(bench.does(WRITE), Err(Errno::IO));

    let mut bench = Bench::new(&image.scripted());
    happens(&image, &[Fate::Waits]);
    bench.begin(1, WRITE);
    bench.core.note_came(&mut bench.ring, 1, Note::There(Err(Errno::NOSPC)));
    assert_eq!(bench.await_all(&[1]), [Err(Errno::NOSPC)]);
    assert!(image.holds(b'o'));
}

#[test]
fn a_request_over_sources_of_two_kinds_goes_to_each_in_turn() {
    for kinds in [KINDS, [Kind::Double, Kind::File]] {
        let images = kinds.map(|kind| Image::new(kind, b'o'));
        let page = |source: u32| {
            let place = Place::Data { source, offset: 0 };
            Extent { start: PAGE * u64::from(source), len: PAGE, place }
        };
        let map = Map::from_extents(vec![page(0), page(1)]).unwrap();
        let targets = images.iter().map(Image::target).collect();
        let mut bench = Bench::new(&Arc::new(Serving::with_targets(map, targets, false)));
        bench.core.buffer(0)[..PAGE as usize].fill(b'1');
        bench.core.buffer(0)[PAGE as usize..].fill(b'2');
        assert_eq!(bench.does(WRITE), Ok(ALL));
        for (image, byte) in images.iter().zip([b'1', b'2']) {
            assert_eq!(image.script.now()[..PAGE as usize], [byte; PAGE as usize], "{kinds:?}");
        }
        assert_eq!(bench.does(Op::Flush), Ok(0));
        let double = &images[usize::from(kinds[1] == Kind::Double)].script;
        assert_eq!((double.syncs.load(SeqCst), &double.now()), (1, &*double.durable.lock().unwrap()));
        // One whose first source cannot be synced does not count the second as synced.
        double.sync_fails.store(true, SeqCst);
        assert_eq!(bench.does(WRITE), Ok(ALL));
        assert_eq!(bench.does(Op::Flush), Err(Errno::IO));
    }
}

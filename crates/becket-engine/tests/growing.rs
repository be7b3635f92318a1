//! What a queue promises of an image that gets room while it is written.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod script;

use std::io;
use std::sync::{Arc, Mutex};

use becket_engine::fault::{Fate, Interceptor, Operation};
use becket_engine::{IoThreads, Op, QueueStats, Serving};
use becket_image::{Extent, Grow, Map, Place, Wanted};
use script::{file_of, run_counted, source_of, step, write};

const UNIT: u64 = 4096;

/// Places units behind the image, one after another.
#[derive(Debug)]
struct Behind(u64);

impl Grow for Behind {
    fn unit(&self) -> u64 {
        UNIT
    }

    fn placed(&mut self, _: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
        Ok(())
    }

    fn place(&mut self, units: &[Wanted]) -> io::Result<Vec<u64>> {
        let first = self.0;
        self.0 += units.len() as u64 * UNIT;
        Ok((first..self.0).step_by(UNIT as usize).collect())
    }

    fn has_lost(&self) -> bool {
        false
    }

    fn close(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes down each operation that ended well.
#[derive(Debug, Default)]
struct Witness(Mutex<Vec<(Op, u64)>>);

impl Interceptor for Witness {
    fn fate(&self, _: &Operation<'_>) -> Fate {
        Fate::Pass
    }

    fn ended(&self, operation: &Operation<'_>, result: i32) {
        assert!(result >= 0, "{operation:?}: {result}");
        self.0.lock().unwrap().push((operation.op, operation.offset));
    }
}

fn zeroes(len: u64) -> Map {
    Map::from_extents(vec![Extent { start: 0, len, place: Place::Zero }]).unwrap()
}

#[test]
fn a_durable_write_is_durable_with_its_place() {
    let threads = IoThreads::start(1).unwrap();
    for direct in [false, true] {
        let file = file_of(&vec![0; 8 * UNIT as usize]);
        let witness = Arc::new(Witness::default());
        let serving = Serving::new(zeroes(4 * UNIT), vec![source_of(&file, direct).into()], false, 1);
        let serving = serving.growing_by(Box::new(Behind(4 * UNIT)), Box::new(())).unwrap();
        let serving = Arc::new(serving.intercepted_by(witness.clone()));
        let bytes = vec![7; UNIT as usize];
        let steps = vec![
            write(0, &bytes, false),
            write(0, &bytes, true),
            write(UNIT, &bytes, true),
            step(Op::Flush, 0, 0),
        ];
        let stats = Arc::new(QueueStats::default());
        let outcomes = run_counted(&threads, 0, &serving, vec![steps], &stats);
        let results: Vec<_> = outcomes.iter().map(|(_, result, _)| *result).collect();
        assert_eq!(results, [Ok(UNIT), Ok(UNIT), Ok(UNIT), Ok(0)]);
        let durable = Op::Write { durable: true };
        let wanted = [
            (Op::Write { durable: false }, 4 * UNIT),
            (durable, 4 * UNIT),
            (Op::Flush, 0),
            (durable, 5 * UNIT),
            (Op::Flush, 0),
        ];
        let seen = witness.0.lock().unwrap();
        let places: Vec<_> =
            seen.iter().map(|(op, offset)| (*op, if *op == Op::Flush { 0 } else { *offset })).collect();
        assert_eq!(places, wanted, "the mapping, too, and the flush behind it has nothing left to do");
    }
}

use becket_image::{
    Alignment, DirectIo, Extent, Facts, FileKind, FileSource, Map,
    encoded::{Block, Encoded},
};

use super::*;
use crate::decode::Decoding;

fn layer(below: Map, blocks: u32) -> Encoded {
    let block = |index: u32| Block {
        start: u64::from(index) * 4096,
        len: 4096,
        input: u64::from(index) * 1000,
        input_len: 1000,
        skip: 0,
        yields: 4096,
    };
    Encoded::new(becket_image::codec::Codec::Lz4, below, (0..blocks).map(block).collect()).unwrap()
}

fn serving(below: Map) -> Serving {
    let facts = Facts {
        direct: Some(Alignment { memory: 4, offset: 4096 }),
        ..Facts::unasked(FileKind::Regular, 0, false)
    };
    let file = FileSource::of(std::fs::File::open("/dev/null").unwrap().into(), None, facts);
    let decoding = Decoding::start(1, 0).unwrap();
    Serving::new(Map::default(), vec![file.into()], true, 1)
        .decoded_by(&decoding, vec![layer(below, 100)])
        .unwrap()
}

fn loads() -> Box<Loads> {
    Loads::new(&serving(Map::contiguous(0, 0, 1 << 20)), 16).unwrap().unwrap()
}

#[test]
fn sequential_readers_are_read_ahead_of_and_random_ones_not() {
    let mut loads = loads();
    let ahead: Vec<_> = (0..6).map(|block| loads.follow(0, block)).collect();
    assert_eq!(ahead, [0..0, 0..0, 3..6, 6..8, 8..9, 9..10]);
    assert_eq!(loads.follow(0, 5), 10..10, "the same block again brings nothing new");
    for block in [50, 9, 70, 31, 90, 12, 77] {
        assert!(loads.follow(0, block).is_empty(), "block {block}");
    }
    // Two readers side by side are both seen.
    for step in 0..3 {
        assert_eq!(loads.follow(0, 20 + step).is_empty(), step < 2);
        assert_eq!(loads.follow(0, 60 + step).is_empty(), step < 2);
    }
    assert!(loads.follow(0, u32::MAX).is_empty());
}

#[test]
fn stored_bytes_are_read_with_those_around_them_where_these_are_there() {
    let hole = Extent { start: 0, len: 1000, place: Place::Zero };
    let data = |start, len, offset| Extent { start, len, place: Place::Data { source: 0, offset } };
    let below = Map::from_extents(vec![hole, data(1000, 50_000, 10_000), data(51_000, 60_000, 500)]).unwrap();
    let serving = serving(below.clone());
    let encoded = layer(below, 1);
    let around = |input, len| around(&encoded, &serving, input, len);
    // Byte 20,000 is 29,000 of the file: 7 units and 328 bytes.
    assert_eq!(around(20_000, 1000), Some((328, 4096 - 1328)));
    assert_eq!(around(1000, 1000), None, "before it is another extent");
    assert_eq!(around(50_500, 500), None, "so it is behind it");
    assert_eq!(around(50_500, 1000), None, "it is of two");
    assert_eq!(around(0, 500), None, "nothing to read");
}

#[test]
fn each_layer_has_places_of_its_own() {
    let below = Map::contiguous(0, 0, 1 << 20);
    let file = serving(below.clone());
    let upper = {
        let extent = Extent { start: 0, len: 409_600, place: Place::Encoded { layer: 0, offset: 0 } };
        layer(Map::from_extents(vec![extent]).unwrap(), 100)
    };
    let decoding = Decoding::start(1, 0).unwrap();
    let both = |first: Encoded, second: Encoded| {
        let plain = serving(below.clone()).otherwise(Map::default(), true, DirectIo::On);
        plain.decoded_by(&decoding, vec![first, second])
    };
    let serving = both(layer(below.clone(), 100), upper.clone()).unwrap();
    let loads = Loads::new(&serving, 16).unwrap().unwrap();
    assert_eq!(usize::from(loads.count()), 2 * MOST);
    assert!(loads.places[0].free.iter().all(|tag| loads.places[1].free.iter().all(|other| other != tag)));
    assert!(
        both(upper.clone(), layer(below.clone(), 1)).is_err(),
        "the lower one may not need the upper one"
    );
    assert!(both(upper.clone(), upper).is_err(), "nor itself");
    let _ = file;
}

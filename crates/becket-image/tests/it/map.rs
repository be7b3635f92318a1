//! The map against a naive model: one entry for every byte.
//! It never touches a file.

use becket_image::{Extent, Map, MapError, Place};
use proptest::prelude::*;

/// Where one byte lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Byte {
    In(u32, u64),
    Zero,
    Encoded(u32, u64),
}

/// The model of a map: where each byte lives.
fn bytes(extents: &[Extent]) -> Vec<Byte> {
    let each = |extent: &Extent| {
        let Extent { len, place, .. } = *extent;
        (0..len).map(move |at| match place {
            Place::Data { source, offset } => Byte::In(source, offset + at),
            Place::Zero => Byte::Zero,
            Place::Encoded { layer, offset } => Byte::Encoded(layer, offset + at),
        })
    };
    extents.iter().flat_map(each).collect()
}

fn place() -> impl Strategy<Value = Place> {
    prop_oneof![
        // Few files and offsets, so that neighbours often continue each other.
        4 => (0..2_u32, 0..64_u64).prop_map(|(source, offset)| Place::Data { source, offset }),
        1 => Just(Place::Zero),
        1 => (0..2_u32, 0..64_u64).prop_map(|(layer, offset)| Place::Encoded { layer, offset }),
    ]
}

fn extents() -> impl Strategy<Value = Vec<Extent>> {
    prop::collection::vec((1..20_u64, place(), any::<bool>()), 0..12).prop_map(|parts| {
        let mut extents: Vec<Extent> = Vec::new();
        let mut start = 0;
        for (len, mut place, go_on) in parts {
            if let (true, Some(Extent { len, place: Place::Data { source, offset }, .. })) =
                (go_on, extents.last())
            {
                place = Place::Data { source: *source, offset: offset + len };
            }
            extents.push(Extent { start, len, place });
            start += len;
        }
        extents
    })
}

fn assert_sound(map: &Map) {
    let mut expected = 0;
    for extent in map.extents() {
        assert_eq!(extent.start, expected);
        assert!(extent.len > 0);
        expected += extent.len;
    }
    assert_eq!(map.len(), expected);
    assert_eq!(map.is_empty(), expected == 0);
    assert_eq!(Map::from_extents(map.extents().to_vec()).as_ref(), Ok(map), "merged once, merged for good");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn a_map_says_of_each_byte_what_its_extents_say(extents in extents()) {
        let model = bytes(&extents);
        let map = Map::from_extents(extents).unwrap();
        assert_sound(&map);
        prop_assert_eq!(bytes(map.extents()), &model[..]);
        for pos in 0..model.len() {
            let found = map.lookup(pos as u64).unwrap();
            prop_assert_eq!(found.start, pos as u64);
            prop_assert_eq!(bytes(&[found]), &model[pos..pos + found.len as usize]);
            prop_assert_eq!(map.extents().iter().filter(|e| e.start == found.start + found.len).count(),
                usize::from(found.start + found.len < map.len()), "up to the end of its extent");
        }
        prop_assert_eq!(map.lookup(model.len() as u64), None);
        prop_assert_eq!(map.lookup(u64::MAX), None);
    }

    #[test]
    fn a_slice_is_the_slice_of_the_bytes(extents in extents(), from in 0..250_u64, len in 0..250_u64) {
        let model = bytes(&extents);
        let map = Map::from_extents(extents).unwrap();
        let end = (from + len) as usize;
        match map.slice(from, len) {
            Ok(slice) => {
                assert_sound(&slice);
                prop_assert_eq!(bytes(slice.extents()), &model[from as usize..end]);
            }
            Err(error) => {
                prop_assert!(end > model.len());
                prop_assert_eq!(error, MapError::OutOfRange { offset: from, len, end: map.len() });
            }
        }
    }

    #[test]
    fn a_map_survives_being_written_down(extents in extents()) {
        let map = Map::from_extents(extents).unwrap();
        let json = serde_json::to_string(&map).unwrap();
        prop_assert_eq!(serde_json::from_str::<Map>(&json).unwrap(), map);
    }
}

#[test]
fn what_is_read_back_is_checked() {
    let parse = serde_json::from_str::<Map>;
    assert_eq!(parse("[]").unwrap().len(), 0);
    let gap = r#"[{"start":0,"len":5,"place":"zero"},{"start":6,"len":5,"place":"zero"}]"#;
    assert!(parse(gap).unwrap_err().to_string().contains("starts at byte 6"));
    let empty = r#"[{"start":0,"len":0,"place":"zero"}]"#;
    assert!(parse(empty).unwrap_err().to_string().contains("empty"));
    let too_far = r#"[{"start":0,"len":9,"place":{"data":{"file":0,"offset":18446744073709551610}}}]"#;
    assert!(parse(too_far).unwrap_err().to_string().contains("2^64"));
}

#[test]
fn the_ends_of_64_bits_are_no_trap() {
    let zero = |start, len| Extent { start, len, place: Place::Zero };
    let map = Map::from_extents(vec![zero(0, u64::MAX)]).unwrap();
    assert_eq!(map.len(), u64::MAX);
    assert_eq!(map.lookup(u64::MAX - 1), Some(zero(u64::MAX - 1, 1)));
    assert_eq!(map.lookup(u64::MAX), None);
    assert!(matches!(map.slice(1, u64::MAX), Err(MapError::OutOfRange { .. })));
    assert_eq!(Map::from_extents(vec![zero(0, 5), zero(5, u64::MAX)]), Err(MapError::Overflow { index: 1 }));
    assert_eq!(Map::contiguous(0, u64::MAX - 10, 100).len(), 10);
}

#[test]
fn one_range_is_recognised_also_in_pieces() {
    let data = |start, len, offset| Extent { start, len, place: Place::Data { source: 1, offset } };
    let pieces = Map::from_extents(vec![data(0, 512, 4096), data(512, 1024, 4608)]).unwrap();
    assert_eq!(pieces.single_range(), Some((1, 4096, 1536)));
    assert_eq!(pieces, Map::contiguous(1, 4096, 1536));
    assert_eq!(pieces.slice(512, 512).unwrap().single_range(), Some((1, 4608, 512)));
    let apart = Map::from_extents(vec![data(0, 512, 4096), data(512, 512, 0)]).unwrap();
    assert_eq!(apart.single_range(), None);
    assert_eq!(Map::contiguous(0, 0, 0).single_range(), None);
}

#[test]
fn encoded_bytes_are_sliced_like_others() {
    let encoded = |start, len, offset| Extent { start, len, place: Place::Encoded { layer: 3, offset } };
    let map = Map::from_extents(vec![encoded(0, 4096, 10), encoded(4096, 100, 4106)]).unwrap();
    assert_eq!(map.extents(), [encoded(0, 4196, 10)], "neighbours that continue each other are one");
    assert_eq!(map.slice(512, 512).unwrap().extents(), [encoded(0, 512, 522)]);
    let too_far = encoded(0, 10, u64::MAX - 5);
    assert_eq!(Map::from_extents(vec![too_far]), Err(MapError::Overflow { index: 0 }));
}

#[test]
fn a_map_is_written_as_before_sources_had_that_name() {
    let place = Place::Data { source: 1, offset: 4096 };
    let map = Map::from_extents(vec![Extent { start: 0, len: 512, place }]).unwrap();
    let text = r#"[{"start":0,"len":512,"place":{"data":{"file":1,"offset":4096}}}]"#;
    assert_eq!(serde_json::to_string(&map).unwrap(), text);
    assert_eq!(serde_json::from_str::<Map>(text).unwrap(), map);
}

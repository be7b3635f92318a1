//! Doors for fuzzers: a client's handshake and its requests, from any bytes.
//! Nothing is judged here but that reading ends, without a panic and within bounds.

use becket_uapi::nbd as uapi;

use super::handshake::{Handshake, Shown, Step};
use super::requests::{kind_of, payload};

/// What is held of a client's words and of the answers to one option at most, in bytes.
const MOST_HELD: usize = 64 << 10;

/// A client's words, of which the first byte says whether TLS is required and how many are heard at once.
/// Whether it has chosen an export.
pub fn handshake(bytes: &[u8]) -> bool {
    let Some((&first, rest)) = bytes.split_first() else { return false };
    let export = |name: &str, read_only| Shown {
        name: name.to_owned(),
        size: 1 << 30,
        read_only,
        rotational: false,
        trims: true,
        smallest: 1,
        preferred: 4096,
    };
    let mut handshake = Handshake::new(vec![export("a", false), export("b", true)], first & 1 == 1);
    for heard in rest.chunks(usize::from(first >> 1).max(1)) {
        handshake.hear(heard);
        let step = handshake.step();
        assert!(handshake.take_output().len() <= MOST_HELD, "answers have a bound");
        match step {
            Step::More => {}
            Step::StartTls => drop(handshake.secured()),
            Step::Agreed(..) => return true,
            Step::End(_) => return false,
        }
    }
    false
}

/// Requests, one after another; of the first byte two bits choose the style. Whether all make sense.
pub fn requests(bytes: &[u8]) -> bool {
    const SIZE: u64 = 1 << 30;
    let Some((&first, mut rest)) = bytes.split_first() else { return false };
    let extended = first & 1 == 1;
    while let Some(request) = uapi::Request::read(rest, extended) {
        let Ok(kind) = kind_of(&request, SIZE, first & 2 == 2, first & 4 == 4) else { return false };
        // What is carried out lies in the export.
        let inside = request.offset.checked_add(request.len).is_some_and(|end| end <= SIZE);
        let ranges = !matches!(request.command, uapi::CMD_DISC | uapi::CMD_FLUSH);
        assert!(inside || !ranges, "{kind:?}");
        let follow = usize::try_from(payload(&request, extended)).unwrap_or(usize::MAX);
        let behind = uapi::Request::size(extended).saturating_add(follow);
        rest = rest.get(behind..).unwrap_or_default();
    }
    rest.is_empty()
}

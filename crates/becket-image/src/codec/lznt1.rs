//! LZNT1, by which NTFS compresses files.
//! It never copies from before the start of a chunk.
//!
//! Our own: it is small, and no crate decodes into memory that it is given.
//!
//! Followed: [MS-XCA], section 2.5.

/// What each chunk yields, in bytes.
const CHUNK: usize = 4096;

/// Decodes chunks until a length of zero or the end of the input. What is missing of a chunk, and behind the
/// last, is zeroes. How many bytes that were: the whole room.
pub(super) fn decode(mut input: &[u8], output: &mut [u8]) -> Result<usize, &'static str> {
    let all = output.len();
    let mut chunks = output.chunks_mut(CHUNK);
    while let Some((head, rest)) = input.split_first_chunk() {
        let head = u16::from_le_bytes(*head);
        if head == 0 {
            break;
        }
        let len = usize::from(head & 0xfff) + 1;
        let data = rest.get(..len).ok_or("a chunk is cut short")?;
        let chunk = chunks.next().ok_or("it yields too much")?;
        let done = if head & 0x8000 == 0 { stored(data, chunk)? } else { unpack(data, chunk)? };
        chunk.get_mut(done..).unwrap_or_default().fill(0);
        input = rest.get(len..).unwrap_or_default();
    }
    chunks.for_each(|chunk| chunk.fill(0));
    Ok(all)
}

/// A chunk that is stored as it is.
fn stored(data: &[u8], chunk: &mut [u8]) -> Result<usize, &'static str> {
    chunk.get_mut(..data.len()).ok_or("a chunk yields too much")?.copy_from_slice(data);
    Ok(data.len())
}

/// A chunk of groups: a byte says of the eight behind it which are copies.
fn unpack(mut data: &[u8], chunk: &mut [u8]) -> Result<usize, &'static str> {
    let mut done = 0;
    while let Some((flags, rest)) = data.split_first() {
        data = rest;
        for bit in 0..8 {
            let Some((byte, rest)) = data.split_first() else { break };
            if flags >> bit & 1 == 0 {
                *chunk.get_mut(done).ok_or("a chunk yields too much")? = *byte;
                (done, data) = (done + 1, rest);
                continue;
            }
            let (word, rest) = data.split_first_chunk().ok_or("a copy is cut short")?;
            let word = usize::from(u16::from_le_bytes(*word));
            let shift = 16 - distance_bits(done);
            let (back, len) = ((word >> shift) + 1, (word & ((1 << shift) - 1)) + 3);
            let from = done.checked_sub(back).ok_or("a copy from before the chunk")?;
            if done + len > chunk.len() {
                return Err("a chunk yields too much");
            }
            // A copy may go on in what it has just written.
            for at in 0..len {
                let byte = chunk.get(from + at).copied().unwrap_or(0);
                if let Some(place) = chunk.get_mut(done + at) {
                    *place = byte;
                }
            }
            (done, data) = (done + len, rest);
        }
    }
    Ok(done)
}

/// How many of a copy's 16 bits are its distance: the more, the further on it is in its chunk.
fn distance_bits(done: usize) -> u32 {
    usize::BITS - done.saturating_sub(1).max(15).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unpacked(input: &[u8], room: usize) -> Result<Vec<u8>, &'static str> {
        let mut output = vec![0xa5; room];
        assert_eq!(decode(input, &mut output)?, room);
        Ok(output)
    }

    #[test]
    fn copies_go_on_in_themselves_and_chunks_are_filled_up() {
        // Three letters and a copy of seventeen from three before; then three that are stored.
        let input = b"\x05\xb0\x08abc\x0e\x20\x02\x30xyz\0\0what is behind the end";
        let output = unpacked(input, 3 * CHUNK).unwrap();
        assert_eq!(output[..21], *b"abcabcabcabcabcabcab\0");
        assert_eq!(output[CHUNK..CHUNK + 4], *b"xyz\0");
        assert!(output[CHUNK + 3..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn distances_are_as_wide_as_the_place_needs() {
        for (done, bits) in
            [(3, 4), (16, 4), (17, 5), (32, 5), (33, 6), (64, 6), (2048, 11), (2049, 12), (4095, 12)]
        {
            assert_eq!(distance_bits(done), bits, "{done}");
        }
    }

    #[test]
    fn what_is_damaged_is_an_error() {
        for (input, room) in [
            (&b"\x05\xb0\x08abc\x0e"[..], CHUNK),
            (b"\x05\xb0\x08abc\x0e\x30", CHUNK),
            (b"\x05\xb0\x08abc\xff\x2f", CHUNK),
            (b"\x05\xb0\x08abc\x0e\x20\x02\x30xyz", CHUNK),
            (b"\x05\xb0\x08abc\x0e\x20", 19),
            (b"\x02\xb0\x02ab", CHUNK),
        ] {
            assert!(unpacked(input, room).is_err(), "{input:x?}");
        }
    }
}

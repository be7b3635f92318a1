//! What EROFS compresses: one of four kinds of data, which ends where its clusters end, so that zeroes come
//! first; and of which more may be there than is wanted.
//! It never copies from before the start of what it has decoded.
//!
//! Followed: fs/erofs/decompressor*.c of Linux 7.3, and for LZ4 its "Block Format Description".

use flate2::{Decompress, FlushDecompress};
use liblzma::stream::{Action, Status, Stream};
use zstd::stream::raw::{DParameter, Decoder, Operation as _};

/// The data behind zeroes.
pub(super) fn data(input: &[u8]) -> &[u8] {
    let zeroes = input.iter().take_while(|byte| **byte == 0).count();
    input.get(zeroes..).unwrap_or_default()
}

/// Decodes a block of LZ4 as far as there is room. Our own, because lz4_flex fails where more is there.
pub(super) fn lz4(mut input: &[u8], output: &mut [u8]) -> Result<usize, &'static str> {
    let mut done = 0;
    while let Some((token, rest)) = input.split_first() {
        input = rest;
        let literals = length(usize::from(token >> 4), &mut input)?;
        let part = literals.min(output.len() - done);
        let from = input.get(..part).ok_or("literals are cut short")?;
        output.get_mut(done..done + part).unwrap_or_default().copy_from_slice(from);
        done += part;
        input = input.get(literals..).unwrap_or_default();
        // The last literals have no copy behind them.
        if done == output.len() || input.is_empty() {
            break;
        }
        let (back, rest) = input.split_first_chunk().ok_or("a copy is cut short")?;
        input = rest;
        let back = usize::from(u16::from_le_bytes(*back));
        let len = length(usize::from(token & 15), &mut input)?.saturating_add(4);
        let from = done.checked_sub(back).filter(|_| back > 0).ok_or("a copy from before the start")?;
        let part = len.min(output.len() - done);
        copy(output, from, done, part);
        done += part;
        if done == output.len() {
            break;
        }
    }
    Ok(done)
}

/// A length of four bits, which goes on in bytes while those are full.
fn length(short: usize, input: &mut &[u8]) -> Result<usize, &'static str> {
    let mut len = short;
    if short == 15 {
        loop {
            let (byte, rest) = input.split_first().ok_or("a length is cut short")?;
            *input = rest;
            len = len.saturating_add(usize::from(*byte));
            if *byte != 255 {
                break;
            }
        }
    }
    Ok(len)
}

/// Copies bytes further on; where they overlap, it goes on in what it has just written.
fn copy(bytes: &mut [u8], from: usize, mut to: usize, mut len: usize) {
    // Each round doubles what can be copied at once.
    while len > 0 {
        let part = len.min(to - from);
        bytes.copy_within(from..from + part, to);
        (to, len) = (to + part, len - part);
    }
}

/// Decodes as much as there is room for; how much that is.
pub(super) type Some = fn(&[u8], &mut [u8]) -> Result<usize, String>;

/// The start of what deflate yields.
pub(super) fn some_deflate(input: &[u8], output: &mut [u8]) -> Result<usize, String> {
    let mut state = Decompress::new(false);
    state.decompress(input, output, FlushDecompress::None).map_err(|error| error.to_string())?;
    usize::try_from(state.total_out()).map_err(|_| "it is too long".to_owned())
}

/// The longest window of a Zstandard frame that is decoded in part, as a power of two: of 16 MiB, where EROFS
/// has at most 12.
const ZSTD_WINDOW: u32 = 24;

/// The start of what a Zstandard frame yields.
pub(super) fn some_zstd(input: &[u8], output: &mut [u8]) -> Result<usize, String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut state = Decoder::new().map_err(failed)?;
    state.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW)).map_err(failed)?;
    let (mut read, mut done) = (0, 0);
    loop {
        let (rest, room) =
            (input.get(read..).unwrap_or_default(), output.get_mut(done..).unwrap_or_default());
        let status = state.run_on_buffers(rest, room).map_err(failed)?;
        (read, done) = (read + status.bytes_read, done + status.bytes_written);
        let stands = status.bytes_read == 0 && status.bytes_written == 0;
        if stands || status.remaining == 0 || done == output.len() {
            return Ok(done);
        }
    }
}

/// What a decoder of LZMA may take beside its dictionary.
const LZMA_MEMORY: u64 = 1 << 20;

/// Decodes LZMA whose first byte, which would be zero, is its inverted properties ("MicroLZMA").
pub(super) fn lzma(input: &[u8], output: &mut [u8]) -> Result<usize, String> {
    let (first, rest) = input.split_first().ok_or("it is empty")?;
    // The head of an .lzma file: the dictionary is all that is decoded, and the length is not known.
    let dictionary = u32::try_from(output.len()).unwrap_or(u32::MAX).max(4096);
    let mut head = vec![!first];
    head.extend(dictionary.to_le_bytes());
    head.extend([0xff; 8]);
    head.push(0);
    let memory = LZMA_MEMORY + u64::from(dictionary);
    let mut stream = Stream::new_lzma_decoder(memory).map_err(|error| error.to_string())?;
    for part in [&head[..], rest] {
        let done = usize::try_from(stream.total_out()).unwrap_or(usize::MAX);
        let room = output.get_mut(done..).unwrap_or_default();
        match stream.process(part, room, Action::Run).map_err(|error| error.to_string())? {
            Status::Ok | Status::StreamEnd | Status::MemNeeded => {}
            other => return Err(format!("{other:?}")),
        }
    }
    usize::try_from(stream.total_out()).map_err(|_| "it is too long".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_overlap() {
        // Three letters, and a copy of ten from three before.
        let mut output = [0; 13];
        assert_eq!(lz4(&[0x36, b'a', b'b', b'c', 3, 0], &mut output), Ok(13));
        assert_eq!(&output, b"abcabcabcabca");
    }
}

//! What EROFS compresses: one of four kinds of data, which ends where its clusters end, so that zeroes come
//! first; and of which more may be there than is wanted.
//! It never copies from before the start of what it has decoded.
//!
//! Followed: fs/erofs/decompressor*.c of Linux 7.3, and for LZ4 its "Block Format Description".

use liblzma::stream::{Action, Status, Stream};

use super::{Codec, Decode, DecodeError};

/// Decodes as one codec does, behind zeroes.
pub(super) struct Padded {
    pub(super) codec: Codec,
    /// What decodes the data itself, where that needs no more.
    pub(super) plain: Option<Box<dyn Decode>>,
}

impl Decode for Padded {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        let zeroes = input.iter().take_while(|byte| **byte == 0).count();
        let input = input.get(zeroes..).unwrap_or_default();
        match &mut self.plain {
            Some(plain) => plain.decode(input, output),
            None if self.codec == Codec::PaddedLzma => {
                lzma(input, output).map_err(|reason| self.codec.failed(reason))
            }
            None => lz4(input, output).map_err(|reason| self.codec.failed(reason)),
        }
    }
}

/// Decodes a block of LZ4 as far as there is room.
fn lz4(mut input: &[u8], output: &mut [u8]) -> Result<usize, &'static str> {
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

/// What a decoder of LZMA may take beside its dictionary.
const LZMA_MEMORY: u64 = 1 << 20;

/// Decodes LZMA whose first byte, which would be zero, is its inverted properties ("MicroLZMA").
fn lzma(input: &[u8], output: &mut [u8]) -> Result<usize, String> {
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

    fn plain() -> Vec<u8> {
        b"becket and becket and more of becket ".repeat(50)
    }

    /// As mkfs.erofs stores it: so many zeroes, and then the data.
    fn samples(zeroes: usize) -> Vec<(Codec, Vec<u8>)> {
        let text = plain();
        let mut deflate = vec![0; 4096];
        let mut compressor = libdeflater::Compressor::new(libdeflater::CompressionLvl::default());
        let len = compressor.deflate_compress(&text, &mut deflate).unwrap();
        deflate.truncate(len);
        let mut alone = Vec::with_capacity(4096);
        let options = liblzma::stream::LzmaOptions::new_preset(6).unwrap();
        let mut encoder = Stream::new_lzma_encoder(&options).unwrap();
        assert_eq!(encoder.process_vec(&text, &mut alone, Action::Finish).unwrap(), Status::StreamEnd);
        // Properties, and what follows the head and the byte that is always zero.
        let micro = [&[!alone[0]][..], &alone[14..]].concat();
        [
            (Codec::PaddedLz4, lz4_flex::block::compress(&text)),
            (Codec::PaddedLzma, micro),
            (Codec::PaddedDeflate, deflate),
            (Codec::PaddedZstd, zstd::bulk::compress(&text, 3).unwrap()),
        ]
        .map(|(codec, data)| (codec, [vec![0; zeroes], data].concat()))
        .to_vec()
    }

    #[test]
    fn what_is_behind_zeroes_is_decoded() {
        for (codec, encoded) in samples(0).into_iter().chain(samples(1000)) {
            let mut decoder = codec.decoder();
            for _ in 0..2 {
                let mut output = vec![0xff; plain().len()];
                assert_eq!(decoder.decode(&encoded, &mut output), Ok(plain().len()), "{codec}");
                assert!(output == plain(), "{codec}");
            }
        }
    }

    #[test]
    fn less_than_there_is_can_be_wanted() {
        for (codec, encoded) in samples(7).into_iter().take(2) {
            for wanted in [1, 100, 1000, plain().len() - 1] {
                let mut output = vec![0xff; wanted];
                assert_eq!(codec.decoder().decode(&encoded, &mut output), Ok(wanted), "{codec} {wanted}");
                assert_eq!(output, plain()[..wanted], "{codec} {wanted}");
            }
        }
    }

    #[test]
    fn what_is_damaged_is_an_error_or_short() {
        for (codec, encoded) in samples(3) {
            for len in [0, 4, encoded.len() / 2] {
                let mut output = vec![0; plain().len()];
                let cut = codec.decoder().decode(&encoded[..len], &mut output);
                assert!(cut != Ok(plain().len()), "{codec}: {cut:?}");
            }
        }
        for input in [&[0x10, b'a', 0, 0][..], &[0x10, b'a', 2, 0], &[0xf0, 255], &[0x10, b'a', 1]] {
            assert!(Codec::PaddedLz4.decoder().decode(input, &mut [0; 100]).is_err(), "{input:x?}");
        }
    }

    #[test]
    fn copies_overlap() {
        // Three letters, and a copy of ten from three before.
        let mut output = [0; 13];
        assert_eq!(lz4(&[0x36, b'a', b'b', b'c', 3, 0], &mut output), Ok(13));
        assert_eq!(&output, b"abcabcabcabca");
    }
}

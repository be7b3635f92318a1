//! How one encoded block becomes bytes.
//! It never writes more than the room it was given, and never keeps more memory than a block needs.
//!
//! A decoder is memory that one thread reuses ([`Codec::decoder`]): each thread of the engine has its own,
//! and so has a thread that parses an image.

mod lznt1;
mod padded;
mod sha256;
mod xz_block;

pub use sha256::sha256;

use std::fmt;

use liblzma::stream::{Action, Status, Stream};
use serde::{Deserialize, Serialize};

/// How blocks are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    /// Deflate with zlib's header and checksum.
    Gzip,
    /// Deflate and nothing else; what follows its end is not looked at.
    Deflate,
    /// An .xz stream.
    Xz,
    /// One LZ4 block without a frame.
    Lz4,
    /// One block of LZO1X.
    Lzo,
    /// Such blocks, each of which yields 4 KiB at most, as btrfs stores them. What they do not yield is
    /// zeroes.
    FilledLzo,
    /// As `Gzip`, the same.
    FilledGzip,
    /// As `Zstd`, the same.
    FilledZstd,
    /// Chunks of LZNT1, each of which yields 4 KiB, as NTFS stores them.
    Lznt1,
    /// A Zstandard frame; what follows it is not looked at.
    Zstd,
    /// One LZ4 block behind zeroes, of which more may be there than is wanted; the same for the next.
    PaddedLz4,
    /// LZMA in the form of EROFS ("MicroLZMA").
    PaddedLzma,
    /// Deflate behind zeroes, the same.
    PaddedDeflate,
    /// A Zstandard frame behind zeroes, the same.
    PaddedZstd,
    /// A member of a gzip file.
    GzipMember,
    /// A block of an .xz file, without the stream around it.
    XzBlock,
}

/// Why a block could not be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a block encoded with {codec} cannot be decoded: {reason}")]
pub struct DecodeError {
    /// How the block claims to be encoded.
    pub codec: Codec,
    /// What the decoder said.
    pub reason: String,
}

/// Turns one encoded block into bytes.
pub trait Decode: Send {
    /// Decodes the whole of `input` to the start of `output`; how many bytes it yielded.
    ///
    /// # Errors
    /// The input is damaged, or yields more than there is room for.
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError>;
}

impl Codec {
    /// A decoder for blocks of this kind, for one thread.
    pub fn decoder(self) -> Box<dyn Decode> {
        match self {
            Codec::Gzip | Codec::Deflate | Codec::GzipMember => {
                Box::new(Deflate { codec: self, decoder: libdeflater::Decompressor::new() })
            }
            Codec::Xz => Box::new(Xz),
            Codec::Lz4 => Box::new(Lz4),
            Codec::Lzo => Box::new(Lzo),
            Codec::FilledLzo => Box::new(Filled(Box::new(LzoSectors))),
            Codec::FilledGzip => Box::new(Filled(Codec::Gzip.decoder())),
            Codec::FilledZstd => Box::new(Filled(Codec::Zstd.decoder())),
            Codec::Lznt1 => Box::new(Lznt1),
            Codec::Zstd => Box::new(Zstd(zstd::bulk::Decompressor::new().ok())),
            Codec::PaddedLz4 => Box::new(PaddedLz4),
            Codec::PaddedLzma => Box::new(PaddedLzma),
            Codec::PaddedDeflate => Box::new(Padded(Codec::Deflate.decoder(), padded::some_deflate)),
            Codec::PaddedZstd => Box::new(Padded(Codec::Zstd.decoder(), padded::some_zstd)),
            Codec::XzBlock => Box::new(XzBlock),
        }
    }

    fn failed(self, reason: impl fmt::Display) -> DecodeError {
        DecodeError { codec: self, reason: reason.to_string() }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Codec::Gzip | Codec::GzipMember | Codec::FilledGzip => "gzip",
            Codec::Deflate | Codec::PaddedDeflate => "deflate",
            Codec::PaddedLzma => "lzma",
            Codec::Xz | Codec::XzBlock => "xz",
            Codec::Lz4 | Codec::PaddedLz4 => "lz4",
            Codec::Lzo | Codec::FilledLzo => "lzo",
            Codec::Lznt1 => "lznt1",
            Codec::Zstd | Codec::PaddedZstd | Codec::FilledZstd => "zstd",
        })
    }
}

/// What libdeflate decodes: one of three frames around the same data.
struct Deflate {
    codec: Codec,
    decoder: libdeflater::Decompressor,
}

impl Decode for Deflate {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        let decoded = match self.codec {
            Codec::Gzip => self.decoder.zlib_decompress(input, output),
            Codec::GzipMember => self.decoder.gzip_decompress(input, output),
            _ => self.decoder.deflate_decompress(input, output),
        };
        decoded.map_err(|error| self.codec.failed(error))
    }
}

/// Its state is as large as the block's dictionary, so it is made anew for each block.
struct Xz;

/// The same for one block of it.
struct XzBlock;

impl Decode for XzBlock {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        xz_block::decode(input, output).map_err(|reason| Codec::XzBlock.failed(reason))
    }
}

/// What a decoder of .xz may take: dictionaries are no larger than blocks, which are of 1 MiB at most.
const XZ_MEMORY: u64 = 16 << 20;

impl Decode for Xz {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        let failed = |error: liblzma::stream::Error| Codec::Xz.failed(error);
        let mut stream = Stream::new_stream_decoder(XZ_MEMORY, 0).map_err(failed)?;
        match stream.process(input, output, Action::Finish).map_err(failed)? {
            Status::StreamEnd => {
                usize::try_from(stream.total_out()).map_err(|_| Codec::Xz.failed("it is too long"))
            }
            _ => Err(Codec::Xz.failed("it does not end where it should")),
        }
    }
}

struct Lz4;

impl Decode for Lz4 {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        lz4_flex::block::decompress_into(input, output).map_err(|error| Codec::Lz4.failed(error))
    }
}

struct Lzo;

impl Decode for Lzo {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        lzokay::decompress::decompress(input, output).map_err(|error| Codec::Lzo.failed(error))
    }
}

/// The length of all, and then blocks, each behind its length. No length lies across a boundary of 4 KiB:
/// what is too short for one is skipped. What follows them is not looked at.
///
/// Followed: the comment at the start of fs/btrfs/lzo.c of Linux.
struct LzoSectors;

impl Decode for LzoSectors {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        const SECTOR: usize = 4096;
        let short = || Codec::FilledLzo.failed("it is cut short");
        let number = |at: usize| {
            let bytes = input.get(at..).and_then(|rest| rest.first_chunk());
            bytes.and_then(|bytes| usize::try_from(u32::from_le_bytes(*bytes)).ok())
        };
        let all = number(0).filter(|all| *all <= input.len()).ok_or_else(short)?;
        let (mut at, mut done) = (4, 0);
        while at < all {
            let left = SECTOR - at % SECTOR;
            if left < 4 {
                at += left;
                continue;
            }
            let len = number(at).ok_or_else(short)?;
            at += 4;
            let block = at.checked_add(len).and_then(|end| input.get(at..end.min(all))).ok_or_else(short)?;
            let room = output.len().min(done + SECTOR);
            let room = output.get_mut(done..room).unwrap_or_default();
            done += Lzo.decode(block, room)?;
            at += len;
        }
        Ok(done)
    }
}

/// What another decoder decodes, and zeroes up to the end of the room. The kernel leaves the end out of a
/// block of btrfs that was behind the end of its file when it was written.
struct Filled(Box<dyn Decode>);

impl Decode for Filled {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        let len = self.0.decode(input, output)?;
        output.get_mut(len..).unwrap_or_default().fill(0);
        Ok(output.len())
    }
}

struct PaddedLz4;

impl Decode for PaddedLz4 {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        padded::lz4(padded::data(input), output).map_err(|reason| Codec::PaddedLz4.failed(reason))
    }
}

struct PaddedLzma;

impl Decode for PaddedLzma {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        padded::lzma(padded::data(input), output).map_err(|reason| Codec::PaddedLzma.failed(reason))
    }
}

/// What another decoder decodes, behind zeroes; and what decodes as much as there is room for.
struct Padded(Box<dyn Decode>, padded::Some);

impl Decode for Padded {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        let data = padded::data(input);
        // The first is the faster one, and wants room for all.
        self.0.decode(data, output).or_else(|error| match (self.1)(data, output) {
            Ok(len) if len == output.len() => Ok(len),
            _ => Err(error),
        })
    }
}

struct Lznt1;

impl Decode for Lznt1 {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        lznt1::decode(input, output).map_err(|reason| Codec::Lznt1.failed(reason))
    }
}

/// Without memory for its state there is no decoder, and each block says so.
struct Zstd(Option<zstd::bulk::Decompressor<'static>>);

impl Decode for Zstd {
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecodeError> {
        let decoder = self.0.as_mut().ok_or_else(|| Codec::Zstd.failed("there is no memory for it"))?;
        // qcow2 counts in sectors, the last of which goes on behind the frame.
        let frame = zstd::zstd_safe::find_frame_compressed_size(input)
            .map_err(|code| Codec::Zstd.failed(zstd::zstd_safe::get_error_name(code)))?;
        let frame = input.get(..frame).unwrap_or(input);
        decoder.decompress_to_buffer(frame, output).map_err(|error| Codec::Zstd.failed(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "becket " twelve times, by each encoder's own tool.
    fn samples() -> Vec<(Codec, Vec<u8>)> {
        let text = plain();
        let mut gzip = vec![0; 256];
        let len = libdeflater::Compressor::new(libdeflater::CompressionLvl::default())
            .zlib_compress(&text, &mut gzip)
            .unwrap();
        gzip.truncate(len);
        let mut deflate = vec![0; 256];
        let len = libdeflater::Compressor::new(libdeflater::CompressionLvl::default())
            .deflate_compress(&text, &mut deflate)
            .unwrap();
        deflate.truncate(len);
        let mut xz = Vec::with_capacity(256);
        let mut encoder = Stream::new_easy_encoder(6, liblzma::stream::Check::Crc32).unwrap();
        assert_eq!(encoder.process_vec(&text, &mut xz, Action::Finish).unwrap(), Status::StreamEnd);
        vec![
            (Codec::Gzip, gzip),
            (Codec::Deflate, deflate),
            (Codec::Xz, xz),
            (Codec::Lz4, lz4_flex::block::compress(&text)),
            (Codec::Lzo, lzo()),
            (Codec::Zstd, zstd::bulk::compress(&text, 3).unwrap()),
        ]
    }

    /// Seven literals, and a match of 77 bytes at a distance of 7, and the end.
    fn lzo() -> Vec<u8> {
        let mut block = vec![17 + 7];
        block.extend(b"becket ");
        block.extend([0x20, 77 - 2 - 31, 6 << 2, 0, 0x11, 0, 0]);
        block
    }

    fn lzo_sectors() -> Vec<u8> {
        let block = lzo();
        let len = |len: usize| u32::try_from(len).unwrap().to_le_bytes();
        [&len(8 + block.len())[..], &len(block.len()), &block].concat()
    }

    #[test]
    fn no_length_of_a_block_lies_across_a_boundary() {
        let (block, end) = (lzo(), 4096 - 2);
        // Blocks that end two bytes before the boundary: the next length is behind it.
        let mut input = vec![0; 4];
        let mut blocks = 0;
        while end - input.len() > 60 {
            input.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
            input.extend(&block);
            blocks += 1;
        }
        let long = end - input.len() - 4;
        let literals = long - 1 - 3 - 1;
        // A run of literals of more than 15 + 3 bytes begins with 0 and what is more.
        assert!((19..=18 + 255).contains(&literals), "{literals}");
        input.extend(u32::try_from(long).unwrap().to_le_bytes());
        input.extend([0, u8::try_from(literals - 18).unwrap()]);
        input.extend(vec![b'x'; literals]);
        input.extend([0x11, 0, 0]);
        assert_eq!(input.len(), end);
        input.extend([0, 0]);
        input.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
        input.extend(&block);
        let all = u32::try_from(input.len()).unwrap().to_le_bytes();
        input[..4].copy_from_slice(&all);
        input.extend([0; 100]);
        let mut output = vec![0; 128 << 10];
        let len = LzoSectors.decode(&input, &mut output).unwrap();
        assert_eq!(len, (blocks + 1) * plain().len() + literals);
        assert_eq!(output[len - plain().len()..len], plain()[..]);
    }

    fn plain() -> Vec<u8> {
        b"becket ".repeat(12)
    }

    #[test]
    fn blocks_are_decoded_also_one_after_another() {
        for (codec, encoded) in samples() {
            let mut decoder = codec.decoder();
            for _ in 0..2 {
                let mut output = vec![0xff; 100];
                assert_eq!(decoder.decode(&encoded, &mut output), Ok(plain().len()), "{codec}");
                assert_eq!(output[..plain().len()], plain()[..], "{codec}");
            }
        }
    }

    #[test]
    fn what_counts_in_sectors_goes_on_behind_its_end() {
        for (codec, mut encoded) in
            samples().into_iter().filter(|(c, _)| matches!(c, Codec::Deflate | Codec::Zstd))
        {
            encoded.extend([0xa5; 300]);
            let mut output = vec![0; 100];
            assert_eq!(codec.decoder().decode(&encoded, &mut output), Ok(plain().len()), "{codec}");
            assert_eq!(output[..plain().len()], plain()[..], "{codec}");
        }
    }

    #[test]
    fn what_is_too_long_cut_or_damaged_is_an_error() {
        for (codec, encoded) in samples() {
            let mut decoder = codec.decoder();
            let short = decoder.decode(&encoded, &mut vec![0; plain().len() - 1]);
            assert!(short.is_err(), "{codec}: {short:?}");
            let cut = decoder.decode(&encoded[..encoded.len() - 6], &mut [0; 100]);
            assert!(cut != Ok(plain().len()), "{codec}: {cut:?}");
            assert!(decoder.decode(&[], &mut [0; 100]) != Ok(plain().len()), "{codec}");
            let garbage = decoder.decode(&[0xff; 40], &mut [0; 100]);
            assert!(garbage.is_err(), "{codec}: {garbage:?}");
            let mut output = vec![0; 100];
            assert_eq!(decoder.decode(&encoded, &mut output), Ok(plain().len()), "{codec} works again");
        }
    }

    #[test]
    fn behind_what_a_block_of_btrfs_yields_are_zeroes() {
        for (codec, encoded) in samples() {
            let (codec, encoded) = match codec {
                Codec::Gzip => (Codec::FilledGzip, encoded),
                Codec::Zstd => (Codec::FilledZstd, encoded),
                Codec::Lzo => (Codec::FilledLzo, lzo_sectors()),
                _ => continue,
            };
            let mut output = vec![0xff; 100];
            let mut decoder = codec.decoder();
            assert_eq!(decoder.decode(&encoded, &mut output), Ok(100), "{codec}");
            assert_eq!(output, [plain(), vec![0; 100 - plain().len()]].concat(), "{codec}");
            // One that is damaged is not a shorter block.
            assert!(decoder.decode(&encoded[..encoded.len() - 6], &mut output).is_err(), "{codec}");
            assert!(decoder.decode(&[0xff; 40], &mut output).is_err(), "{codec}");
            assert!(decoder.decode(&encoded, &mut vec![0; plain().len() - 1]).is_err(), "{codec}");
        }
    }

    fn long() -> Vec<u8> {
        b"becket and becket and more of becket ".repeat(50)
    }

    /// As mkfs.erofs stores it: so many zeroes, and then the data.
    fn padded_samples(zeroes: usize) -> Vec<(Codec, Vec<u8>)> {
        let text = long();
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
        for (codec, encoded) in padded_samples(0).into_iter().chain(padded_samples(1000)) {
            let mut decoder = codec.decoder();
            for _ in 0..2 {
                let mut output = vec![0xff; long().len()];
                assert_eq!(decoder.decode(&encoded, &mut output), Ok(long().len()), "{codec}");
                assert!(output == long(), "{codec}");
            }
        }
    }

    #[test]
    fn less_than_there_is_can_be_wanted() {
        for (codec, encoded) in padded_samples(7) {
            for wanted in [1, 100, 1000, long().len() - 1] {
                let mut output = vec![0xff; wanted];
                assert_eq!(codec.decoder().decode(&encoded, &mut output), Ok(wanted), "{codec} {wanted}");
                assert_eq!(output, long()[..wanted], "{codec} {wanted}");
            }
        }
    }

    #[test]
    fn what_is_padded_and_damaged_is_an_error_or_short() {
        for (codec, encoded) in padded_samples(3) {
            for len in [0, 4, encoded.len() / 2] {
                let mut output = vec![0; long().len()];
                let cut = codec.decoder().decode(&encoded[..len], &mut output);
                assert!(cut != Ok(long().len()), "{codec}: {cut:?}");
            }
        }
        for input in [&[0x10, b'a', 0, 0][..], &[0x10, b'a', 2, 0], &[0xf0, 255], &[0x10, b'a', 1]] {
            assert!(Codec::PaddedLz4.decoder().decode(input, &mut [0; 100]).is_err(), "{input:x?}");
        }
    }
}

//! Streams that can only be decoded from their start, with bounded memory: gzip, xz, zstd, bzip2 and lz4.
//! It never says that a stream is whole which is cut short, damaged, or followed by something else.

use std::io::{self, BufRead, Read};

use becket_image::zeroes;
use liblzma::stream::{CONCATENATED, Stream};
use serde::{Deserialize, Serialize};

/// What a decoder of .xz may need, in bytes. `xz -9` needs 65 MiB.
const XZ_MEMORY: u64 = 256 << 20;
/// The longest window of a .zst, as a power of two. `zstd --ultra -22` has 27, and `--long=31` more.
const ZSTD_WINDOW: u32 = 27;

/// How a stream is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Packing {
    Gzip,
    Xz,
    Zstd,
    Bzip2,
    Lz4,
}

impl Packing {
    const ALL: [Packing; 5] = [Packing::Gzip, Packing::Xz, Packing::Zstd, Packing::Bzip2, Packing::Lz4];

    /// The one that becket-image calls so.
    pub(crate) fn of(name: &str) -> Option<Packing> {
        Packing::ALL.into_iter().find(|packing| packing.name() == name)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Packing::Gzip => "gzip",
            Packing::Xz => "xz",
            Packing::Zstd => "zstd",
            Packing::Bzip2 => "bzip2",
            Packing::Lz4 => "lz4",
        }
    }

    /// The suffixes of such files.
    fn suffixes(self) -> &'static [&'static str] {
        match self {
            Packing::Gzip => &[".gz", ".z"],
            Packing::Xz => &[".xz"],
            Packing::Zstd => &[".zst", ".zstd"],
            Packing::Bzip2 => &[".bz2", ".bz"],
            Packing::Lz4 => &[".lz4"],
        }
    }

    /// The name of what is packed in a file with that name.
    pub(crate) fn unpacked_name(self, name: &str) -> &str {
        let lower = name.to_ascii_lowercase();
        let suffix = self.suffixes().iter().find(|suffix| lower.ends_with(**suffix));
        let len = suffix.map_or(name.len(), |suffix| name.len() - suffix.len());
        name.get(..len).filter(|name| !name.is_empty()).unwrap_or(name)
    }

    /// Whether a file may be such a stream, by its first bytes. Cheap, and not the last word.
    pub(crate) fn may_be(head: [u8; 8]) -> bool {
        let skippable = matches!(head, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..]);
        let magics: [&[u8]; 5] =
            [b"\x1f\x8b\x08", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"BZh", b"\x04\x22\x4d\x18"];
        skippable || magics.iter().any(|magic| head.starts_with(magic))
    }

    /// What the stream yields.
    ///
    /// # Errors
    /// There is no memory for a decoder.
    pub(crate) fn reader<'a>(self, input: impl BufRead + Send + 'a) -> io::Result<Box<dyn Read + Send + 'a>> {
        Ok(match self {
            Packing::Gzip => Box::new(Members { now: Some(flate2::bufread::GzDecoder::new(input)) }),
            Packing::Xz => {
                let stream = Stream::new_stream_decoder(XZ_MEMORY, CONCATENATED)?;
                Box::new(liblzma::bufread::XzDecoder::new_stream(input, stream))
            }
            Packing::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(input)?;
                decoder.window_log_max(ZSTD_WINDOW)?;
                Box::new(decoder)
            }
            Packing::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(input)),
            Packing::Lz4 => Box::new(Frames(Some(lz4_flex::frame::FrameDecoder::new(Seen::new(input))))),
        })
    }
}

fn behind() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "behind its end there is something else")
}

/// Whether another member begins. Zeroes behind the last one, up to the end, are what a tape or a device has.
fn goes_on(input: &mut impl BufRead, first: u8) -> io::Result<bool> {
    let mut padding = false;
    loop {
        let bytes = input.fill_buf()?;
        match bytes.first() {
            None => return Ok(false),
            Some(byte) if *byte == first && !padding => return Ok(true),
            Some(_) if zeroes::is_all(bytes) => {
                let len = bytes.len();
                input.consume(len);
                padding = true;
            }
            Some(_) => return Err(behind()),
        }
    }
}

/// The members of a gzip file, one after another.
struct Members<R: BufRead> {
    now: Option<flate2::bufread::GzDecoder<R>>,
}

impl<R: BufRead> Read for Members<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.now {
            let len = member.read(buf)?;
            if len > 0 || buf.is_empty() {
                return Ok(len);
            }
            let mut input = self.now.take().map(flate2::bufread::GzDecoder::into_inner);
            if let Some(input) = input.as_mut()
                && !goes_on(input, 0x1f)?
            {
                return Ok(0);
            }
            self.now = input.map(flate2::bufread::GzDecoder::new);
        }
        Ok(0)
    }
}

/// The frames of an lz4 file, one after another.
struct Frames<R: BufRead>(Option<lz4_flex::frame::FrameDecoder<Seen<R>>>);

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while let Some(frame) = &mut self.0 {
            let len = frame.read(buf)?;
            if len > 0 || buf.is_empty() {
                return Ok(len);
            }
            // The decoder takes a file that ends between two blocks for whole.
            let Some(mut seen) = self.0.take().map(lz4_flex::frame::FrameDecoder::into_inner) else { break };
            if !seen.is_whole() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if goes_on(&mut seen.input, 4)? {
                // A decoder of its own: one keeps the memory of its first frame, whatever the next one needs.
                self.0 = Some(lz4_flex::frame::FrameDecoder::new(Seen::new(seen.input)));
            }
        }
        Ok(0)
    }
}

/// The first and the last bytes of a frame that were read.
struct Seen<R> {
    input: R,
    /// Bytes of this frame.
    count: u64,
    /// Its fifth byte, which says what it has.
    flags: u8,
    last: [u8; 8],
}

impl<R> Seen<R> {
    fn new(input: R) -> Seen<R> {
        Seen { input, count: 0, flags: 0, last: [0; 8] }
    }

    /// Whether a frame has ended with its mark, which is four zeroes, and with its checksum if it has one.
    fn is_whole(&self) -> bool {
        let [a, b, c, d, e, f, g, h] = self.last;
        let mark = if self.flags & 4 == 0 { [e, f, g, h] } else { [a, b, c, d] };
        self.count > 8 && mark == [0; 4]
    }
}

impl<R: Read> Read for Seen<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.input.read(buf)?;
        let new = buf.get(..len).unwrap_or_default();
        let fifth = 4_u64.checked_sub(self.count).and_then(|at| new.get(usize::try_from(at).ok()?));
        self.flags = fifth.copied().unwrap_or(self.flags);
        self.count += len as u64;
        for byte in new.iter().skip(len.saturating_sub(self.last.len())) {
            self.last.rotate_left(1);
            self.last[7] = *byte;
        }
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;

    const TOOLS: [(Packing, &[&str]); 5] = [
        (Packing::Gzip, &["gzip", "-1", "-c"]),
        (Packing::Xz, &["xz", "-1", "-c"]),
        (Packing::Zstd, &["zstd", "-1", "-q", "-c"]),
        (Packing::Bzip2, &["bzip2", "-1", "-c"]),
        (Packing::Lz4, &["lz4", "-1", "-q", "-c"]),
    ];

    fn packed(words: &[&str], bytes: &[u8]) -> Vec<u8> {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{words:?}: {error}"));
        let mut stdin = child.stdin.take().unwrap();
        let bytes = bytes.to_vec();
        let writer = std::thread::spawn(move || stdin.write_all(&bytes));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        assert!(output.status.success(), "{words:?}");
        output.stdout
    }

    /// In small pieces, as a file may be read.
    fn unpacked(packing: Packing, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        packing.reader(io::BufReader::with_capacity(37, bytes))?.read_to_end(&mut all)?;
        Ok(all)
    }

    fn content() -> Vec<u8> {
        (0..300_000_u32).flat_map(|number| (number / 7).to_le_bytes()).collect()
    }

    #[test]
    fn streams_of_the_real_tools_are_decoded_also_several_one_after_another() {
        let (content, more) = (content(), b"and more".to_vec());
        for (packing, words) in TOOLS {
            let (one, two) = (packed(words, &content), packed(words, &more));
            let head: [u8; 8] = one[..8].try_into().unwrap();
            assert!(Packing::may_be(head), "{packing:?}");
            assert!(unpacked(packing, &one).unwrap() == content, "{packing:?}");
            let both = [one.clone(), packed(words, b""), two].concat();
            assert!(
                unpacked(packing, &both).unwrap() == [content.clone(), more.clone()].concat(),
                "{packing:?}"
            );
        }
        assert!(!Packing::may_be(*b"\0\0\0\0\0\0\0\0") && !Packing::may_be(*b"QFI\xfb\0\0\0\x03"));
    }

    #[test]
    fn what_is_cut_short_or_damaged_or_has_something_behind_it_is_no_whole_stream() {
        let content = content();
        for (packing, words) in TOOLS {
            let whole = packed(words, &content);
            for len in [0, 1, 9, whole.len() / 2, whole.len() - 5, whole.len() - 1] {
                let cut = unpacked(packing, &whole[..len]);
                // Nothing at all is an empty file of some formats.
                let nothing = len == 0 && cut.as_ref().is_ok_and(Vec::is_empty);
                assert!(
                    cut.is_err() || nothing,
                    "{packing:?} of {len} bytes: {:?}",
                    cut.map(|all| all.len())
                );
            }
            for at in [whole.len() / 3, whole.len() / 2] {
                let mut other = whole.clone();
                other[at] ^= 0x55;
                // lz4 and zstd of these tools have checksums, too.
                assert!(unpacked(packing, &other).is_err(), "{packing:?} with another byte {at}");
            }
            let behind = [whole.clone(), b"something else".to_vec()].concat();
            assert!(unpacked(packing, &behind).is_err(), "{packing:?}");
        }
        let padded = [packed(TOOLS[0].1, &content), vec![0; 100]].concat();
        assert!(unpacked(Packing::Gzip, &padded).unwrap() == content, "zeroes of a tape");
    }

    proptest::proptest! {
        /// Whatever a stranger packs has an end, and no panic.
        #[test]
        fn any_bytes_behind_a_good_start_are_decoded_or_refused(
            which in 0_usize..5,
            keep in 4_usize..200,
            noise in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..600),
            places in proptest::collection::vec((0_usize..2000, proptest::prelude::any::<u8>()), 0..6),
        ) {
            static GOOD: std::sync::LazyLock<Vec<Vec<u8>>> = std::sync::LazyLock::new(|| {
                let text: Vec<u8> = (0..40_000_u32).flat_map(|number| (number / 9).to_be_bytes()).collect();
                TOOLS.iter().map(|(_, words)| packed(words, &text)).collect()
            });
            let (packing, good) = (TOOLS[which].0, &GOOD[which]);
            let read = |bytes: &[u8]| {
                let mut yielded = packing.reader(bytes).unwrap().take(64 << 20);
                let _ = io::copy(&mut yielded, &mut io::sink());
            };
            read(&[&good[..keep.min(good.len())], &noise[..]].concat());
            let mut other = good.clone();
            for (at, byte) in places {
                let at = at % other.len();
                other[at] = byte;
            }
            read(&other);
        }
    }

    #[test]
    fn a_stream_that_needs_much_memory_is_refused() {
        // The window of a frame is said in its header, here 2 GiB.
        let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x00, (31 - 10) << 3, 0, 0, 0];
        assert!(unpacked(Packing::Zstd, &frame).is_err());
    }

    #[test]
    fn what_is_packed_has_the_name_without_the_suffix() {
        assert_eq!(Packing::Gzip.unpacked_name("disk.img.gz"), "disk.img");
        assert_eq!(Packing::Zstd.unpacked_name("disk.QCOW2.ZST"), "disk.QCOW2");
        assert_eq!(Packing::Gzip.unpacked_name("disk.img"), "disk.img");
        assert_eq!(Packing::Gzip.unpacked_name(".gz"), ".gz");
        assert_eq!(Packing::of("lz4"), Some(Packing::Lz4));
        assert_eq!(Packing::of("zip"), None);
    }
}

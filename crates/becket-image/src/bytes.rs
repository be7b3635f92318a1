//! Bytes that can be read anywhere, and numbers in them.
//! It never reads beyond what it was given: what is missing reads as zero or is an error.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

/// Bytes that can be read anywhere.
pub trait ReadAt: Send + Sync {
    /// Fills `buf` with the bytes from `offset` on.
    ///
    /// # Errors
    /// They are not all there ([`io::ErrorKind::UnexpectedEof`]), or cannot be read.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// How many bytes from `offset` on are stored, or else are known to be zeroes, up to `len`; what knows
    /// nothing of the latter stores all.
    fn stored(&self, offset: u64, len: u64) -> (u64, bool) {
        let _ = offset;
        (len, true)
    }

    /// What it takes to read some of them.
    fn reach(&self) -> Reach {
        Reach::Near
    }
}

/// What it takes to read some bytes of many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// No more than a system call.
    Near,
    /// A request to a server.
    Far,
    /// All bytes before them: the last ones take as long as all.
    InOrder,
}

impl ReadAt for OwnedFd {
    fn read_at(&self, mut buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut at = offset;
        while !buf.is_empty() {
            match rustix::io::pread(self, &mut *buf, at) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(done) => {
                    buf = buf.get_mut(done..).unwrap_or_default();
                    at = at.checked_add(done as u64).ok_or(Errno::OVERFLOW)?;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

impl ReadAt for File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, buf, offset)
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let there = self.get(from..).and_then(|rest| rest.get(..buf.len()));
        buf.copy_from_slice(there.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// The `N` bytes of `bytes` from `at` on; zeroes where it is shorter, which no caller lets happen.
pub(crate) fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

/// The byte at `at`.
pub(crate) fn u8_at(bytes: &[u8], at: usize) -> u8 {
    let [byte] = field(bytes, at);
    byte
}

/// The little-endian number at `at`.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(field(bytes, at))
}

/// The little-endian number at `at`.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(field(bytes, at))
}

/// The little-endian number at `at`.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(field(bytes, at))
}

/// The big-endian number at `at`.
pub(crate) fn be16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(field(bytes, at))
}

/// The big-endian number at `at`.
pub(crate) fn be32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(field(bytes, at))
}

/// The big-endian number at `at`.
pub(crate) fn be64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(field(bytes, at))
}

/// The part of `bytes` that is there of `len` bytes from `at` on.
pub(crate) fn part(bytes: &[u8], at: usize, len: usize) -> &[u8] {
    let rest = bytes.get(at..).unwrap_or_default();
    rest.get(..len).unwrap_or(rest)
}

/// Text in a field of fixed length, which ends at a NUL and is padded with spaces; `None` when it is empty.
pub(crate) fn padded_text(bytes: &[u8]) -> Option<String> {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text).trim_end().to_owned();
    (!text.is_empty()).then_some(text)
}

/// Text in UTF-16, less significant bytes first.
pub(crate) fn utf16_le(bytes: &[u8]) -> String {
    utf16(bytes.chunks_exact(2).map(|unit| u16_at(unit, 0)))
}

/// Text in UTF-16; what is not Unicode becomes U+FFFD.
pub(crate) fn utf16(units: impl Iterator<Item = u16>) -> String {
    char::decode_utf16(units).map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
}

/// A UUID whose bytes stand in the order in which they are written.
pub(crate) fn uuid(bytes: &[u8]) -> Option<String> {
    let number = u128::from_be_bytes(field(bytes, 0));
    let part = |shift: u32, bits: u32| (number >> shift) & ((1 << bits) - 1);
    (number != 0).then(|| {
        format!(
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            part(96, 32),
            part(80, 16),
            part(64, 16),
            part(48, 16),
            part(0, 48)
        )
    })
}

//! Cheap deterministic bytes: random numbers, patterns, aligned buffers, comparison.
//! Must never depend on the clock or on the machine: the same seed gives the same test everywhere.

use std::fmt;
use std::ops::Range;

/// Odd, so that the patterns' words do not repeat before 2^64 steps.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes 64 bits so that neighbouring inputs give unrelated outputs.
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let value = (value ^ (value >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    value ^ (value >> 32)
}

/// Fills `out` with the pattern of `key`; one addition a word, for emulated CPUs.
pub(crate) fn fill(out: &mut [u8], key: u64) {
    let mut word = mix(key.wrapping_add(STEP));
    let (words, rest) = out.as_chunks_mut::<8>();
    for slot in words {
        *slot = word.to_le_bytes();
        word = word.wrapping_add(STEP);
    }
    let last = word.to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// `len` bytes of the pattern of `key`.
pub(crate) fn pattern(len: usize, key: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(&mut bytes, key);
    bytes
}

/// A small random number generator with a printable state.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// Starts at `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// The next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `limit`; 0 when the limit is 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next().checked_rem(limit).unwrap_or(0)
    }

    /// True once in `n` times.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// A size from `least` to `most` whose logarithm is evenly spread.
    pub(crate) fn log_uniform(&mut self, least: u64, most: u64) -> u64 {
        let (low, high) = ((least as f64).log2(), (most as f64).log2());
        let exponent = low + (high - low) * (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        (exponent.exp2() as u64).clamp(least, most)
    }
}

/// A buffer whose first byte lies on a page boundary, as direct I/O wants it.
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    const ALIGN: usize = 4096;

    /// `len` zeroed bytes.
    pub(crate) fn new(len: usize) -> Self {
        let bytes = vec![0; len + Self::ALIGN];
        let start = bytes.as_ptr().align_offset(Self::ALIGN);
        Self { bytes, start, len }
    }

    /// `len` bytes of the pattern of `key`.
    pub(crate) fn pattern(len: usize, key: u64) -> Self {
        let mut buffer = Self::new(len);
        fill(buffer.as_mut(), key);
        buffer
    }

    /// The bytes.
    pub(crate) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    /// The bytes.
    pub(crate) fn as_ref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

/// Two byte strings that should be equal, and where they are not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// Where the first difference is, in bytes from the start of the device or file.
    pub(crate) at: u64,
    /// What should be there.
    pub(crate) expected: u8,
    /// What is there.
    pub(crate) found: u8,
    /// How many of the compared bytes differ.
    pub(crate) count: usize,
    /// The range that was compared.
    pub(crate) compared: Range<u64>,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, expected, found, count, compared } = self;
        write!(
            f,
            "byte {at} is {found:#04x} and should be {expected:#04x} ({count} bytes differ between {} and {})",
            compared.start, compared.end
        )
    }
}

impl std::error::Error for Mismatch {}

/// Compares; `at` is the position of the first byte.
pub(crate) fn compare(found: &[u8], expected: &[u8], at: u64) -> Result<(), Mismatch> {
    if found == expected {
        return Ok(());
    }
    let differs = |pair: &(usize, (&u8, &u8))| pair.1.0 != pair.1.1;
    let pairs = || found.iter().zip(expected).enumerate().filter(differs);
    let compared = at..at + expected.len() as u64;
    let count = pairs().count() + found.len().abs_diff(expected.len());
    let (index, (found, expected)) = pairs().next().unwrap_or((found.len().min(expected.len()), (&0, &0)));
    Err(Mismatch { at: at + index as u64, expected: *expected, found: *found, count, compared })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_differ_by_key_and_position() {
        let (one, two) = (pattern(1 << 16, 1), pattern(1 << 16, 2));
        let same = one.chunks(8).zip(two.chunks(8)).filter(|(a, b)| a == b).count();
        assert_eq!(same, 0);
        assert_ne!(one[..512], one[512..1024]);
        assert_eq!(pattern(13, 7)[..8], pattern(8, 7)[..]);
    }

    #[test]
    fn sizes_are_spread_over_their_logarithm() {
        let mut random = Random::new(3);
        let mut decades = [0u32; 11];
        for _ in 0..11_000 {
            let size = random.log_uniform(512, 1 << 20);
            assert!((512..=1 << 20).contains(&size));
            decades[(size.ilog2() as usize - 9).min(10)] += 1;
        }
        assert!(decades.iter().all(|&count| (800..1200).contains(&count)), "{decades:?}");
    }

    #[test]
    fn buffers_are_aligned() {
        let mut buffer = Buffer::pattern(8192, 1);
        assert_eq!(buffer.as_ref().as_ptr().align_offset(4096), 0);
        assert_eq!(buffer.as_mut().len(), 8192);
    }

    #[test]
    fn comparison_names_the_first_difference() {
        let mut found = vec![0u8; 100];
        assert_eq!(compare(&found, &[0; 100], 0), Ok(()));
        found[40] = 7;
        found[60] = 7;
        let mismatch = compare(&found, &[0; 100], 1000);
        let expected = Mismatch { at: 1040, expected: 0, found: 7, count: 2, compared: 1000..1100 };
        assert_eq!(mismatch, Err(expected));
        assert_eq!(compare(&[0; 3], &[0; 4], 0).map_err(|m| (m.at, m.count)), Err((3, 1)));
    }
}

//! Zeroes: some that can be written, and whether bytes are nothing else.

use std::io::{self, Write};

/// Zeroes.
pub static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// So many zeroes, or as many as there are in [`ZEROES`].
pub(crate) fn some(most: u64) -> &'static [u8] {
    ZEROES.get(..usize::try_from(most).unwrap_or(usize::MAX)).unwrap_or(&ZEROES)
}

/// Whether bytes are zeroes and nothing else.
pub fn is_all(bytes: &[u8]) -> bool {
    bytes.chunks(ZEROES.len()).all(|part| ZEROES.get(..part.len()) == Some(part))
}

/// Writes so many of them.
///
/// # Errors
/// Those of the writer.
pub fn write(out: &mut impl Write, mut count: u64) -> io::Result<()> {
    while count > 0 {
        let now = some(count);
        out.write_all(now)?;
        count -= now.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_written_as_are_wanted_and_one_other_byte_is_found() {
        for count in [0, 1, ZEROES.len() - 1, ZEROES.len(), 3 * ZEROES.len() + 7] {
            let mut bytes = Vec::new();
            write(&mut bytes, count as u64).unwrap();
            assert_eq!((bytes.len(), is_all(&bytes)), (count, true));
            if let Some(last) = bytes.last_mut() {
                *last = 1;
                assert!(!is_all(&bytes), "{count}");
            }
        }
    }
}

//! Numbers of seven bits a byte, as .xz files have them.
//! It never reads more than nine bytes.

/// Takes a number off the front of `bytes`; `None` when it is cut short, too long, or longer than it need be.
pub(crate) fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for (index, byte) in bytes.iter().take(9).enumerate() {
        number |= u64::from(byte & 0x7f) << (index * 7);
        if byte & 0x80 == 0 {
            *bytes = bytes.get(index + 1..).unwrap_or_default();
            return (*byte != 0 || index == 0).then_some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_whole_or_not_at_all() {
        for (mut bytes, expected) in [
            (&[0, 7][..], Some((0, 1))),
            (&[0x7f][..], Some((127, 0))),
            (&[0x80, 1, 9][..], Some((128, 1))),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f][..], Some(((1 << 63) - 1, 0))),
            (&[][..], None),
            (&[0x80][..], None),
            (&[0x80, 0][..], None),
            (&[0xff; 10][..], None),
        ] {
            let before = bytes;
            let number = take(&mut bytes);
            assert_eq!(number.map(|number| (number, bytes.len())), expected, "{before:x?}");
        }
    }
}

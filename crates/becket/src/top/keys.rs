//! Keys of a terminal, from the bytes that it sends.
//! Never waits: what is not complete is not a key.

/// A key that means something here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Letter(char),
    Up,
    Down,
    Left,
    Right,
    Enter,
    Backspace,
    Escape,
    /// Ctrl-C or Ctrl-D.
    Interrupt,
}

/// The keys in what one read of the terminal brought. Sequences that are not known are passed over.
pub(super) fn keys(bytes: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    let mut rest = bytes;
    while let Some((&first, behind)) = rest.split_first() {
        rest = behind;
        match first {
            3 | 4 => keys.push(Key::Interrupt),
            b'\r' | b'\n' => keys.push(Key::Enter),
            8 | 127 => keys.push(Key::Backspace),
            0x1b => match behind {
                // CSI or SS3, then parameters, then one final byte (ECMA-48, 5.4).
                [b'[' | b'O', sequence @ ..] => {
                    let end = sequence.iter().position(|byte| (0x40..=0x7e).contains(byte));
                    let Some(end) = end else { break };
                    keys.extend(match sequence[end] {
                        b'A' => Some(Key::Up),
                        b'B' => Some(Key::Down),
                        b'C' => Some(Key::Right),
                        b'D' => Some(Key::Left),
                        _ => None,
                    });
                    rest = &sequence[end + 1..];
                }
                _ => keys.push(Key::Escape),
            },
            b' '..=b'~' => keys.push(Key::Letter(first.into())),
            _ => {}
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrows_letters_and_a_lone_escape_are_different_keys() {
        assert_eq!(keys(b"q"), [Key::Letter('q')]);
        assert_eq!(keys(b"\x1b[A\x1bOBj\x1b[1;5C"), [Key::Up, Key::Down, Key::Letter('j'), Key::Right]);
        assert_eq!(keys(b"\x1b"), [Key::Escape]);
        assert_eq!(keys(b"\x03\r\x7f"), [Key::Interrupt, Key::Enter, Key::Backspace]);
    }

    #[test]
    fn what_is_unknown_or_cut_short_is_no_key() {
        assert_eq!(keys(b"\x1b[15~x"), [Key::Letter('x')]);
        assert!(keys(b"\x1b[1;").is_empty() && keys(b"\x00\xff").is_empty());
        for len in 0..4 {
            for seed in 0..=255_u8 {
                let bytes: Vec<u8> = (0..len).map(|at| seed.wrapping_mul(31).wrapping_add(at)).collect();
                assert!(keys(&bytes).len() <= bytes.len());
            }
        }
    }
}

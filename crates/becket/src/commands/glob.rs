//! Patterns for names, as in the shell: `*`, `?`, `[a-z]`, `[!a-z]`, and `\` before what stands for itself.
//! Never takes more time than the product of both lengths, whatever the pattern.

/// One part of a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Byte(u8),
    /// One letter of UTF-8, or one byte of what is none.
    Any,
    Many,
    /// One letter in these ranges, or in none of them.
    Set {
        ranges: Vec<(char, char)>,
        negated: bool,
    },
}

/// A pattern for one name.
#[derive(Debug)]
pub(super) struct Glob(Vec<Part>);

impl Glob {
    /// The pattern that a name is; `None` if nothing in it stands for anything else.
    pub(super) fn of(name: &[u8]) -> Option<Self> {
        let mut parts = Vec::new();
        let mut rest = name;
        while let Some((first, next)) = rest.split_first() {
            rest = next;
            match first {
                b'*' => parts.push(Part::Many),
                b'?' => parts.push(Part::Any),
                b'[' => match set(next) {
                    Some((part, behind)) => {
                        parts.push(part);
                        rest = behind;
                    }
                    None => parts.push(Part::Byte(b'[')),
                },
                b'\\' => {
                    let (escaped, behind) = next.split_first().unwrap_or((first, &[]));
                    parts.push(Part::Byte(*escaped));
                    rest = behind;
                }
                byte => parts.push(Part::Byte(*byte)),
            }
        }
        // Units of systemd have a backslash in their names: alone it makes no pattern.
        let quoted = name.windows(2).any(|two| matches!(two, [b'\\', b'*' | b'?' | b'[']));
        let special = parts.iter().any(|part| !matches!(part, Part::Byte(_)));
        (special || quoted).then_some(Self(parts))
    }

    /// Whether a name is one of those that are meant. Names with a dot in front are only by a dot.
    pub(super) fn matches(&self, name: &[u8]) -> bool {
        if name.starts_with(b".") && self.0.first() != Some(&Part::Byte(b'.')) {
            return false;
        }
        let parts = &self.0;
        let (mut part, mut at) = (0, 0);
        // Where the last `*` is, and how much of the name it has taken.
        let mut star: Option<(usize, usize)> = None;
        loop {
            match (parts.get(part), name.get(at..).filter(|rest| !rest.is_empty())) {
                (None, None) => return true,
                (Some(Part::Many), _) => {
                    star = Some((part, at));
                    part += 1;
                    continue;
                }
                (Some(wanted), Some(rest)) => {
                    if let Some(len) = wanted.takes(rest) {
                        part += 1;
                        at += len;
                        continue;
                    }
                }
                _ => {}
            }
            match star {
                Some((many, taken)) if taken < name.len() => {
                    star = Some((many, taken + 1));
                    (part, at) = (many + 1, taken + 1);
                }
                _ => return false,
            }
        }
    }
}

impl Part {
    /// How many bytes at the start of a name it stands for.
    fn takes(&self, rest: &[u8]) -> Option<usize> {
        let letter = letter(rest);
        let len = letter.map_or(1, char::len_utf8);
        match self {
            Self::Byte(byte) => (rest.first() == Some(byte)).then_some(1),
            Self::Any => Some(len),
            Self::Many => None,
            Self::Set { ranges, negated } => {
                let inside = letter
                    .is_some_and(|letter| ranges.iter().any(|(from, to)| (*from..=*to).contains(&letter)));
                (inside != *negated).then_some(len)
            }
        }
    }
}

/// The first letter, where there is one.
fn letter(bytes: &[u8]) -> Option<char> {
    let head = bytes.get(..bytes.len().min(4))?;
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(head.get(..error.valid_up_to())?).ok()?,
    };
    text.chars().next()
}

/// A set whose `[` was read, and what follows it; `None` if it does not end.
fn set(after: &[u8]) -> Option<(Part, &[u8])> {
    let (negated, mut rest) = match after.split_first() {
        Some((b'!' | b'^', rest)) => (true, rest),
        _ => (false, after),
    };
    let mut ranges = Vec::new();
    let take = |rest: &mut &[u8]| {
        if rest.first() == Some(&b'\\') {
            *rest = rest.get(1..)?;
        }
        let found = letter(rest)?;
        *rest = rest.get(found.len_utf8()..)?;
        Some(found)
    };
    // A `]` in front is one of the letters.
    while ranges.is_empty() || rest.first() != Some(&b']') {
        let from = take(&mut rest)?;
        let to = match rest {
            [b'-', next, ..] if *next != b']' => {
                rest = rest.get(1..)?;
                take(&mut rest)?
            }
            _ => from,
        };
        ranges.push((from, to));
    }
    Some((Part::Set { ranges, negated }, rest.get(1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, name: &str) -> bool {
        Glob::of(pattern.as_bytes()).unwrap().matches(name.as_bytes())
    }

    #[test]
    fn patterns_are_those_of_the_shell() {
        for (pattern, yes, no) in [
            ("*.conf", &["a.conf", "a.b.conf"][..], &["a.con", ".conf", ".a.conf", "a.conf2"][..]),
            (".*", &[".a", "."], &["a"]),
            ("a*b*c", &["abc", "axbxbxc", "abcc"], &["ab", "acb", "abcd"]),
            ("?", &["a", "ü"], &["", "ab", "."]),
            ("[a-cx]1", &["a1", "c1", "x1"], &["d1", "-1"]),
            ("[!a-c]", &["d", "é"], &["a", ""]),
            ("[]a]", &["]", "a"], &["b"]),
            ("[a-]", &["a", "-"], &["b"]),
            (r"a\*", &["a*"], &["ab"]),
            ("*[", &["["], &["a"]),
            ("a**", &["a", "ab"], &["b"]),
        ] {
            yes.iter().for_each(|name| assert!(matches(pattern, name), "{pattern} {name}"));
            no.iter().for_each(|name| assert!(!matches(pattern, name), "{pattern} {name}"));
        }
        for plain in ["a", "[", "[ab", r"dev-disk-by\x2duuid", "", "]"] {
            assert!(Glob::of(plain.as_bytes()).is_none(), "{plain}");
        }
        assert!(!Glob::of(b"*a*a*a*a*a*a*a*a*a*b").unwrap().matches(&[b'a'; 255]), "and that soon");
        assert!(Glob::of(b"?\xff").unwrap().matches(b"\xfe\xff"), "names need not be text");
    }
}

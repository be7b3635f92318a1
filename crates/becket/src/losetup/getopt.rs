//! A command line as getopt_long(3) reads it: clusters of letters, abbreviated words, options behind
//! operands. Never knows what an option means: that is in `options`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

/// Whether an option has an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    Nothing,
    Argument,
    /// Only behind `=`.
    MayBe,
}

/// How an option is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spelling {
    pub(super) long: &'static str,
    pub(super) short: Option<char>,
    pub(super) takes: Takes,
}

/// The options of a command line, one after another; operands gather meanwhile.
pub(super) struct Reader<'a> {
    spellings: &'a [Spelling],
    words: std::slice::Iter<'a, OsString>,
    /// What is left of a word of letters.
    cluster: &'a [u8],
    operands: Vec<OsString>,
    /// Options end with the first operand, as POSIX has it.
    strict: bool,
}

/// An option by its place among the spellings, and its argument.
type Parsed = (usize, Option<OsString>);

impl<'a> Reader<'a> {
    pub(super) fn new(spellings: &'a [Spelling], words: &'a [OsString], strict: bool) -> Self {
        Self { spellings, words: words.iter(), cluster: &[], operands: Vec::new(), strict }
    }

    /// The next option; the words of what is wrong with it are getopt_long's.
    pub(super) fn next(&mut self) -> Result<Option<Parsed>, String> {
        if let Some((&letter, rest)) = self.cluster.split_first() {
            return self.short(letter, rest).map(Some);
        }
        while let Some(word) = self.words.next() {
            match word.as_bytes() {
                b"--" => break,
                [b'-', b'-', name @ ..] => return self.long(name).map(Some),
                [b'-', letter, rest @ ..] => return self.short(*letter, rest).map(Some),
                _ => self.operands.push(word.clone()),
            }
            if self.strict {
                break;
            }
        }
        self.operands.extend(self.words.by_ref().cloned());
        Ok(None)
    }

    /// What is not an option, in its order; whole when [`Reader::next`] has found the end.
    pub(super) fn operands(self) -> Vec<OsString> {
        self.operands
    }

    fn short(&mut self, letter: u8, rest: &'a [u8]) -> Result<Parsed, String> {
        self.cluster = rest;
        let letter = char::from(letter);
        let known = self.spellings.iter().position(|one| one.short == Some(letter));
        let index = known.ok_or_else(|| format!("invalid option -- '{letter}'"))?;
        if self.spellings[index].takes != Takes::Argument {
            return Ok((index, None));
        }
        self.cluster = &[];
        let argument = match rest {
            [] => self.words.next().cloned(),
            rest => Some(OsStr::from_bytes(rest).to_owned()),
        };
        let missing = || format!("option requires an argument -- '{letter}'");
        Ok((index, Some(argument.ok_or_else(missing)?)))
    }

    fn long(&mut self, word: &[u8]) -> Result<Parsed, String> {
        let (name, value) = match word.iter().position(|&byte| byte == b'=') {
            Some(at) => (&word[..at], Some(OsString::from_vec(word[at + 1..].to_vec()))),
            None => (word, None),
        };
        let index = self.named(name, word)?;
        let Spelling { long, takes, .. } = self.spellings[index];
        match (takes, value) {
            (Takes::Nothing, Some(_)) => Err(format!("option '--{long}' doesn't allow an argument")),
            (Takes::Argument, None) => match self.words.next() {
                Some(word) => Ok((index, Some(word.clone()))),
                None => Err(format!("option '--{long}' requires an argument")),
            },
            (_, value) => Ok((index, value)),
        }
    }

    /// The option of that name, or the only one that begins with it.
    fn named(&self, name: &[u8], word: &[u8]) -> Result<usize, String> {
        let begin = |(_, one): &(usize, &Spelling)| one.long.as_bytes().starts_with(name);
        let candidates: Vec<_> = self.spellings.iter().enumerate().filter(begin).collect();
        let exact = candidates.iter().find(|(_, one)| one.long.as_bytes() == name);
        let shown = String::from_utf8_lossy(word);
        match (exact, &candidates[..]) {
            (Some((index, _)), _) | (None, [(index, _)]) => Ok(*index),
            (None, []) => Err(format!("unrecognized option '--{shown}'")),
            (None, several) => {
                let names: String = several.iter().map(|(_, one)| format!(" '--{}'", one.long)).collect();
                Err(format!("option '--{shown}' is ambiguous; possibilities:{names}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPELLINGS: [Spelling; 5] = [
        Spelling { long: "all", short: Some('a'), takes: Takes::Nothing },
        Spelling { long: "offset", short: Some('o'), takes: Takes::Argument },
        Spelling { long: "output", short: Some('O'), takes: Takes::Argument },
        Spelling { long: "output-all", short: None, takes: Takes::Nothing },
        Spelling { long: "direct-io", short: None, takes: Takes::MayBe },
    ];

    /// Options and operands, as text.
    fn read(line: &str, strict: bool) -> Result<String, String> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        let mut reader = Reader::new(&SPELLINGS, &words, strict);
        let mut reported = Vec::new();
        while let Some((index, argument)) = reader.next()? {
            let argument = argument.map(|text| format!("={}", text.display())).unwrap_or_default();
            reported.push(format!("{}{argument}", SPELLINGS[index].long));
        }
        reported.push("|".to_owned());
        reported.extend(reader.operands().iter().map(|word| word.display().to_string()));
        Ok(reported.join(" "))
    }

    #[test]
    fn every_way_to_write_an_option() {
        for (line, reported) in [
            ("", "|"),
            ("-a x -o 5 y", "all offset=5 | x y"),
            ("-ao5", "all offset=5 |"),
            ("-oa", "offset=a |"),
            ("-o -a", "offset=-a |"),
            ("--offset 5 --offset=6", "offset=5 offset=6 |"),
            ("--off=", "offset= |"),
            ("--output x --output-a", "output=x output-all |"),
            ("--direct-io on", "direct-io | on"),
            ("--direct-io=on --al", "direct-io=on all |"),
            ("x -- -a --all", "| x -a --all"),
            ("x - -a", "all | x -"),
        ] {
            assert_eq!(read(line, false).unwrap(), reported, "{line}");
        }
        assert_eq!(read("-a x -a", true).unwrap(), "all | x -a");
    }

    #[test]
    fn what_is_wrong_is_said_as_getopt_says_it() {
        for (line, reported) in [
            ("-Z", "invalid option -- 'Z'"),
            ("-aZ", "invalid option -- 'Z'"),
            ("-o", "option requires an argument -- 'o'"),
            ("--offset", "option '--offset' requires an argument"),
            ("--of", "option '--offset' requires an argument"),
            ("--all=1", "option '--all' doesn't allow an argument"),
            ("--nothing=1", "unrecognized option '--nothing=1'"),
            ("--o", "option '--o' is ambiguous; possibilities: '--offset' '--output' '--output-all'"),
        ] {
            assert_eq!(read(line, false).unwrap_err(), reported, "{line}");
        }
    }
}

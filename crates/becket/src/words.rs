//! A text of commands: lines of words, quoted as in a shell.
//! Never expands anything: no variable, no pattern, no home directory.

use std::fmt;

/// A line with its number, and its words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) number: usize,
    pub(crate) words: Vec<String>,
}

/// Where a text stops making sense; columns count characters from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unclosed {
    line: usize,
    column: usize,
    what: &'static str,
}

impl fmt::Display for Unclosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.line, self.column, self.what)
    }
}

/// The lines that have words. What is behind a `#` that begins a word is a comment.
pub(crate) fn lines(text: &str) -> Result<Vec<Line>, Unclosed> {
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let words = words(line).map_err(|(column, what)| Unclosed { line: number, column, what })?;
        if !words.is_empty() {
            lines.push(Line { number, words });
        }
    }
    Ok(lines)
}

/// The words of one line; where it stops making sense, the column and what is wrong there.
pub(crate) fn words(line: &str) -> Result<Vec<String>, (usize, &'static str)> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut letters = line.chars().zip(1..);
    while let Some((letter, column)) = letters.next() {
        match letter {
            '#' if word.is_none() => break,
            letter if letter.is_whitespace() => words.extend(word.take()),
            '\\' => {
                let (next, _) = letters.next().ok_or((column, "nothing follows the backslash"))?;
                word.get_or_insert_default().push(next);
            }
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match letters.next() {
                        Some((next, _)) if next == letter => break,
                        Some(('\\', at)) if letter == '"' => {
                            let (next, _) = letters.next().ok_or((at, "nothing follows the backslash"))?;
                            if !matches!(next, '"' | '\\') {
                                word.push('\\');
                            }
                            word.push(next);
                        }
                        Some((next, _)) => word.push(next),
                        None => return Err((column, "this quote is not closed")),
                    }
                }
            }
            letter => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_are_as_a_shell_reads_them() {
        for (text, expected) in [
            ("a b\t c ", &["a", "b", "c"][..]),
            ("# all of it", &[]),
            ("a#b 'c d'#e #f", &["a#b", "c d#e"]),
            (r#"'a "b' "c 'd" e\ f \# "#, &[r#"a "b"#, "c 'd", "e f", "#"]),
            (r#""a\"b\\c\d" ''"#, &[r#"a"b\c\d"#, ""]),
            ("--name=x ü.img", &["--name=x", "ü.img"]),
        ] {
            assert_eq!(words(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn what_is_not_closed_is_said_with_its_place() {
        let reported = |text| lines(text).unwrap_err().to_string();
        assert_eq!(reported("a\n\nü 'b\nc'"), "line 3, column 3: this quote is not closed");
        assert_eq!(reported("\"a"), "line 1, column 1: this quote is not closed");
        assert_eq!(reported("a \\"), "line 1, column 3: nothing follows the backslash");
        assert_eq!(reported("\"a \\"), "line 1, column 4: nothing follows the backslash");
    }

    proptest! {
        #[test]
        fn quoted_words_come_back(given in prop::collection::vec("[^\r\n]*", 1..5)) {
            let quoted: Vec<String> =
                given.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
            let lines = lines(&quoted.join(" ")).unwrap();
            prop_assert_eq!(&lines[0].words, &given);
        }

        #[test]
        fn any_text_is_read_or_refused(text in any::<String>()) {
            let _ = lines(&text);
        }
    }
}

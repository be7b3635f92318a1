//! The text in which LVM keeps its metadata: `key = value` and `name { ... }`.
//! It never nests deeper than [`DEPTH_MAX`], and holds memory for no more than it was given.

use crate::budget::{Budget, Held};
use crate::layer::{LayerError, corrupt};

/// LVM itself nests five deep: group, list of volumes, volume, segment.
const DEPTH_MAX: u32 = 16;
const METADATA: &str = "the metadata of LVM";

/// What stands behind a name.
#[derive(Debug)]
pub(super) enum Value<'a> {
    Number(u64),
    /// As it is written, with its backslashes: no name of LVM has one.
    Text(&'a [u8]),
    List(Vec<Value<'a>>),
    Section(Section<'a>),
    /// What becket asks for nowhere: a negative or a broken number.
    Other,
}

/// Names with their values, in the order in which they were written.
#[derive(Debug, Default)]
pub(super) struct Section<'a>(Vec<(&'a [u8], Value<'a>)>);

impl<'a> Section<'a> {
    /// What stands behind a name, the first time it is there.
    pub(super) fn get(&self, name: &str) -> Option<&Value<'a>> {
        self.0.iter().find(|(key, _)| *key == name.as_bytes()).map(|(_, value)| value)
    }

    /// A number that must be there.
    pub(super) fn number(&self, name: &str) -> Result<u64, LayerError> {
        match self.get(name) {
            Some(Value::Number(number)) => Ok(*number),
            _ => corrupt(format!("the metadata of LVM have no number {name:?} where they need one")),
        }
    }

    /// A text, where it is there.
    pub(super) fn text(&self, name: &str) -> Option<&'a [u8]> {
        match self.get(name) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// A list; an empty one where there is none.
    pub(super) fn list(&self, name: &str) -> &[Value<'a>] {
        match self.get(name) {
            Some(Value::List(list)) => list,
            _ => &[],
        }
    }

    /// Whether a list has this word.
    pub(super) fn has(&self, list: &str, word: &str) -> bool {
        self.list(list).iter().any(|value| matches!(value, Value::Text(text) if *text == word.as_bytes()))
    }

    /// The sections in it, with their names.
    pub(super) fn sections(&self) -> impl Iterator<Item = (&'a [u8], &Section<'a>)> {
        self.0.iter().filter_map(|(name, value)| match value {
            Value::Section(section) => Some((*name, section)),
            _ => None,
        })
    }

    /// The sections in the section of this name.
    pub(super) fn sections_of(&self, name: &str) -> impl Iterator<Item = (&'a [u8], &Section<'a>)> {
        let found = self.sections().find(|(key, _)| *key == name.as_bytes());
        found.into_iter().flat_map(|(_, section)| section.sections())
    }
}

/// What was written, and the memory that it takes.
pub(super) fn parse<'a>(text: &'a [u8], budget: &Budget) -> Result<(Section<'a>, Held), LayerError> {
    let mut reader = Reader { rest: text, budget, held: budget.hold(0, METADATA)? };
    let section = reader.section(0)?;
    Ok((section, reader.held))
}

struct Reader<'a, 'b> {
    rest: &'a [u8],
    budget: &'b Budget,
    held: Held,
}

impl<'a> Reader<'a, '_> {
    /// All up to the end of the section: its brace, or of the outermost the end of the text.
    fn section(&mut self, depth: u32) -> Result<Section<'a>, LayerError> {
        if depth > DEPTH_MAX {
            return corrupt(format!("the metadata of LVM are nested deeper than {DEPTH_MAX}"));
        }
        let mut section = Section::default();
        loop {
            match self.next() {
                None if depth == 0 => return Ok(section),
                Some(b'}') if depth > 0 => {
                    self.skip(1);
                    return Ok(section);
                }
                None | Some(b'}') => return corrupt("the metadata of LVM have a brace too many or too few"),
                Some(_) => {}
            }
            let name = self.word()?;
            let value = match self.next() {
                Some(b'{') => {
                    self.skip(1);
                    Value::Section(self.section(depth + 1)?)
                }
                Some(b'=') => {
                    self.skip(1);
                    self.value()?
                }
                _ => return self.strange(),
            };
            self.keep()?;
            section.0.push((name, value));
        }
    }

    fn value(&mut self) -> Result<Value<'a>, LayerError> {
        if self.next() != Some(b'[') {
            return self.scalar();
        }
        self.skip(1);
        let mut list = Vec::new();
        loop {
            match self.next() {
                Some(b']') => {
                    self.skip(1);
                    return Ok(Value::List(list));
                }
                Some(b',') => self.skip(1),
                _ => {
                    self.keep()?;
                    list.push(self.scalar()?);
                }
            }
        }
    }

    fn scalar(&mut self) -> Result<Value<'a>, LayerError> {
        if self.next() != Some(b'"') {
            let number = std::str::from_utf8(self.word()?).ok().and_then(|word| word.parse().ok());
            return Ok(number.map_or(Value::Other, Value::Number));
        }
        self.skip(1);
        let mut escaped = false;
        let end = self.rest.iter().position(|byte| {
            let ends = *byte == b'"' && !escaped;
            escaped = *byte == b'\\' && !escaped;
            ends
        });
        let Some(end) = end else { return corrupt("a text in the metadata of LVM has no end") };
        let text = self.rest.get(..end).unwrap_or_default();
        self.skip(end + 1);
        Ok(Value::Text(text))
    }

    /// A name or a number: all up to a space or a sign.
    fn word(&mut self) -> Result<&'a [u8], LayerError> {
        self.next();
        let ends = |byte: &u8| byte.is_ascii_whitespace() || b"{}[]=,\"#".contains(byte);
        let len = self.rest.iter().position(ends).unwrap_or(self.rest.len());
        if len == 0 {
            return self.strange();
        }
        let word = self.rest.get(..len).unwrap_or_default();
        self.skip(len);
        Ok(word)
    }

    /// The next byte that is neither space nor comment, which stays.
    fn next(&mut self) -> Option<u8> {
        loop {
            let space = self.rest.iter().position(|byte| !byte.is_ascii_whitespace());
            self.skip(space.unwrap_or(self.rest.len()));
            match self.rest.first() {
                Some(b'#') => {
                    let line = self.rest.iter().position(|byte| *byte == b'\n');
                    self.skip(line.unwrap_or(self.rest.len()));
                }
                other => return other.copied(),
            }
        }
    }

    fn skip(&mut self, count: usize) {
        self.rest = self.rest.get(count..).unwrap_or_default();
    }

    /// Counts one value. Lists double when they grow, so each is counted twice.
    fn keep(&mut self) -> Result<(), LayerError> {
        self.budget.steps(1, METADATA)?;
        self.held.grow(2 * size_of::<(&[u8], Value<'_>)>() as u64, METADATA)?;
        Ok(())
    }

    fn strange<T>(&self) -> Result<T, LayerError> {
        let shown = String::from_utf8_lossy(self.rest.get(..20).unwrap_or(self.rest)).into_owned();
        corrupt(format!("the metadata of LVM go on with {shown:?}, which has no meaning there"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_lists_texts_and_comments() {
        let text =
            b"# written by hand\nvg0 { id=\"a\\\"b\" # a \"comment\" }\n n = 12\nl = [\"x\", 3,\n\"y\"]\n\
            in { e = [] }\n}\nbelow = -1";
        let budget = Budget::default();
        let (top, _held) = parse(text, &budget).unwrap();
        let (name, vg) = top.sections().next().unwrap();
        assert_eq!((name, vg.text("id")), (&b"vg0"[..], Some(&b"a\\\"b"[..])));
        assert_eq!(vg.number("n").unwrap(), 12);
        assert!(vg.has("l", "x") && vg.has("l", "y") && !vg.has("l", "3"), "{vg:?}");
        assert_eq!(vg.sections().count(), 1);
        assert!(matches!(top.get("below"), Some(Value::Other)));
        assert!(vg.number("id").is_err() && vg.number("none").is_err());
    }

    #[test]
    fn what_has_no_meaning_is_an_error() {
        let deep = |depth: usize| ["a{".repeat(depth), "}".repeat(depth)].concat();
        assert!(parse(deep(16).as_bytes(), &Budget::default()).is_ok());
        for text in ["a", "a =", "a = [1", "a = \"b", "a {", "}", "a = 1 }", "= 1", "{}", "a [", &deep(17)] {
            assert!(
                matches!(parse(text.as_bytes(), &Budget::default()), Err(LayerError::Corrupt(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn a_long_list_is_counted_before_it_is_kept() {
        let text = ["l=[".to_owned(), "1,".repeat(3 << 20), "]".to_owned()].concat();
        assert!(matches!(parse(text.as_bytes(), &Budget::default()), Err(LayerError::Spent(_))));
    }
}

//! Reads interface descriptions, for tests that hold one to what is sent.
//! It accepts what is in becket's own files and panics at anything else.

use std::collections::{BTreeMap, BTreeSet};

/// The fields of each declaration of an interface.
pub(crate) struct Interface {
    pub(crate) name: String,
    /// Those of a type, an error (`error NAME`), a method's parameters or its reply (`-> NAME`).
    fields: BTreeMap<String, BTreeSet<String>>,
}

impl Interface {
    pub(crate) fn parse(text: &str) -> Interface {
        let code = text.lines().map(|line| line.split('#').next().unwrap_or_default());
        let code = code.collect::<Vec<_>>().join(" ").replace("->", " > ");
        let mut words = Vec::new();
        for word in code.split_whitespace() {
            // A bracket, a comma, a colon or a mark is a word of its own.
            for part in word.split_inclusive(MARKS) {
                let plain = part.trim_end_matches(MARKS);
                words.extend([plain, &part[plain.len()..]].into_iter().filter(|word| !word.is_empty()));
            }
        }
        let mut words = Words(words.into_iter());
        words.expect("interface");
        let name = words.next().to_owned();
        let mut fields = BTreeMap::new();
        while let Some(kind) = words.0.next() {
            let name = words.next();
            match kind {
                "type" => fields.insert(name.to_owned(), words.of_struct()),
                "error" => fields.insert(format!("error {name}"), words.of_struct()),
                "method" => {
                    fields.insert(name.to_owned(), words.of_struct());
                    words.expect(">");
                    fields.insert(format!("-> {name}"), words.of_struct())
                }
                other => panic!("{other:?} is no declaration"),
            };
        }
        Interface { name, fields }
    }

    fn of(&self, key: &str) -> BTreeSet<String> {
        self.fields.get(key).unwrap_or_else(|| panic!("{} has no {key}", self.name)).clone()
    }

    pub(crate) fn inputs(&self, method: &str) -> BTreeSet<String> {
        self.of(method)
    }

    pub(crate) fn outputs(&self, method: &str) -> BTreeSet<String> {
        self.of(&format!("-> {method}"))
    }

    /// The fields of a type that is not built in.
    pub(crate) fn custom(&self, name: &str) -> BTreeSet<String> {
        self.of(name)
    }

    /// The parameters of an error with this whole name.
    pub(crate) fn error(&self, whole: &str) -> BTreeSet<String> {
        let (interface, name) = whole.rsplit_once('.').unwrap();
        assert_eq!(interface, self.name);
        self.of(&format!("error {name}"))
    }
}

const MARKS: [char; 7] = ['(', ')', ',', ':', '?', '[', ']'];

struct Words<'a>(std::vec::IntoIter<&'a str>);

impl<'a> Words<'a> {
    fn next(&mut self) -> &'a str {
        self.0.next().expect("the description goes on")
    }

    fn expect(&mut self, word: &str) {
        assert_eq!(self.next(), word);
    }

    /// The names of the fields in brackets, or the words of an enumeration.
    fn of_struct(&mut self) -> BTreeSet<String> {
        self.expect("(");
        let mut names = BTreeSet::new();
        loop {
            match self.next() {
                ")" if names.is_empty() => return names,
                name => assert!(!name.starts_with(MARKS) && names.insert(name.to_owned()), "{name}"),
            }
            let mut next = self.next();
            if next == ":" {
                self.skip_type();
                next = self.next();
            }
            match next {
                "," => {}
                ")" => return names,
                other => panic!("{other:?} behind a field"),
            }
        }
    }

    fn skip_type(&mut self) {
        match self.0.as_slice().first() {
            Some(&"(") => drop(self.of_struct()),
            Some(&"?") => {
                self.expect("?");
                self.skip_type();
            }
            Some(&"[") => {
                self.expect("[");
                if self.next() == "string" {
                    self.expect("]");
                }
                self.skip_type();
            }
            _ => assert!(!self.next().starts_with(MARKS)),
        }
    }
}

#[test]
fn a_description_is_read() {
    let text = "# A.\ninterface a.b\ntype T (x: ?[]int, y:[string](one, two), # here, too\n z: (k: bool))\n\
                method M(t: T)->()\nerror E (why: string)\n";
    let interface = Interface::parse(text);
    let set = |names: &[&str]| -> BTreeSet<String> { names.iter().map(|name| (*name).to_owned()).collect() };
    assert_eq!(interface.name, "a.b");
    assert_eq!(interface.custom("T"), set(&["x", "y", "z"]));
    assert_eq!((interface.inputs("M"), interface.outputs("M")), (set(&["t"]), set(&[])));
    assert_eq!(interface.error("a.b.E"), set(&["why"]));
}

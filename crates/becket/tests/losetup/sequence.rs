//! Command sequences for losetup from a seed: attach, list in every form, change, detach, and all kinds of
//! mistakes.
//! Never names a device or file by itself: both tools get their own for the same placeholders.

use rand::{Rng as _, SeedableRng as _, rngs::SmallRng, seq::IndexedRandom as _};

/// Files that each tool has its own of.
pub(crate) const FILES: [&str; 5] = ["even.img", "odd.img", "tiny.img", "sp ace.img", "link.img"];
/// Devices that each tool has its own of, beside those that `-f` finds.
pub(crate) const SLOTS: usize = 2;

/// A word of a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    Text(String),
    /// One of [`FILES`]; with its whole path.
    File(usize, bool),
    /// A device of one's own.
    Device(usize),
    /// The device that `-f` found last.
    Found,
}

/// What is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// losetup runs; `whole` says that other people's devices are in its list, too.
    Run {
        words: Vec<Word>,
        whole: bool,
    },
    /// A file gets another size.
    Resize(usize, u64),
    /// A file is removed, and made again.
    Replace(usize),
    /// A device of one's own is opened, and closed.
    Hold(usize),
    Release(usize),
}

struct Maker {
    random: SmallRng,
    found: bool,
}

/// The sequence of a seed.
pub(crate) fn of(seed: u64) -> Vec<Step> {
    let mut maker = Maker { random: SmallRng::seed_from_u64(seed), found: false };
    let length = maker.random.random_range(3..8);
    let mut steps = vec![maker.attach()];
    steps.extend((1..length).map(|_| maker.step()));
    steps
}

fn text(word: &str) -> Word {
    Word::Text(word.to_owned())
}

impl Maker {
    fn one_in(&mut self, times: u32) -> bool {
        self.random.random_ratio(1, times)
    }

    fn pick(&mut self, words: &[&str]) -> String {
        words.choose(&mut self.random).map_or_else(String::new, |&word| word.to_owned())
    }

    fn file(&mut self) -> Word {
        // Most of the time the same one, so that things meet.
        let index = if self.one_in(2) { 0 } else { self.random.random_range(0..FILES.len()) };
        Word::File(index, self.one_in(3))
    }

    fn device(&mut self) -> Word {
        if self.found && self.one_in(4) {
            Word::Found
        } else {
            Word::Device(self.random.random_range(0..SLOTS))
        }
    }

    fn step(&mut self) -> Step {
        match self.random.random_range(0..100) {
            0..22 => self.attach(),
            22..27 => self.attach_free(),
            27..45 => self.list_one(),
            45..57 => self.list_of_file(),
            57..65 => self.list_all(),
            65..75 => self.change(),
            75..85 => self.detach(),
            85..92 => self.mistake(),
            92..95 => Step::Resize(self.random.random_range(0..2), self.random.random_range(1..5000) * 300),
            95..96 => Step::Replace(self.random.random_range(0..3)),
            96..98 => Step::Hold(self.random.random_range(0..SLOTS)),
            _ => Step::Release(self.random.random_range(0..SLOTS)),
        }
    }

    fn size(&mut self) -> String {
        self.pick(&[
            "0", "512", "1024", "4096", "0x200", "1KiB", "64K", "100KB", "1.5K", "0.3M", "700", "2M", "9G",
            "010",
        ])
    }

    fn set_up(&mut self, sectors: &[&str]) -> Vec<Word> {
        let mut words = Vec::new();
        let add = |words: &mut Vec<Word>, option: String| words.extend(option.split(' ').map(text));
        if self.one_in(3) {
            let (spelling, size) =
                (self.pick(&["-o ", "-o", "--offset ", "--offset=", "--off "]), self.size());
            add(&mut words, format!("{spelling}{size}"));
        }
        if self.one_in(3) {
            let (spelling, size) = (self.pick(&["--sizelimit ", "--sizelimit=", "--siz "]), self.size());
            add(&mut words, format!("{spelling}{size}"));
        }
        if self.one_in(5) {
            let read_only = self.pick(&["-r", "--read-only", "-rv"]);
            add(&mut words, read_only);
        }
        if self.one_in(8) {
            let scan = self.pick(&["-P", "--partscan", "-Pv"]);
            add(&mut words, scan);
        }
        if self.one_in(6) {
            let size = self.pick(sectors);
            let spelling = self.pick(&["-b ", "--sector-size=", "-b"]);
            add(&mut words, format!("{spelling}{size}"));
        }
        if self.one_in(5) {
            let direct = self.pick(&["--direct-io", "--direct-io=on", "--direct-io=off", "--dir=on"]);
            add(&mut words, direct);
        }
        if self.one_in(6) {
            let overlap = self.pick(&["-L", "--nooverlap"]);
            add(&mut words, overlap);
        }
        words
    }

    /// Operands may stand anywhere among the options, in their order.
    fn mixed(&mut self, options: Vec<Word>, operands: [Word; 2]) -> Step {
        let mut words = options;
        match self.random.random_range(0..3) {
            0 => words.extend(operands),
            1 => {
                words.splice(0..0, operands);
            }
            _ => {
                let [first, second] = operands;
                words.insert(0, first);
                words.push(second);
            }
        }
        Step::Run { words, whole: false }
    }

    fn attach(&mut self) -> Step {
        let mut options = self.set_up(&["512", "1024", "4096", "2K", "1000", "0", "8192", "256"]);
        if self.one_in(3) {
            options.push(text("--show"));
        }
        let operands = [Word::Device(self.random.random_range(0..SLOTS)), self.file()];
        self.mixed(options, operands)
    }

    fn attach_free(&mut self) -> Step {
        // The system's losetup binds a device before it learns that the kernel refuses a size, and then
        // releases it.
        let mut words = self.set_up(&["512", "1024", "4096", "2K", "0"]);
        words.push(text("--show"));
        self.found = true;
        if self.one_in(2) {
            words.extend([text("-f"), self.file()]);
        } else {
            words.extend([self.file(), text("--find")]);
        }
        Step::Run { words, whole: false }
    }

    fn form(&mut self, columns: bool) -> Vec<Word> {
        let form = self.pick(&["", "-n", "--raw", "-J", "--json", "--raw -n", "--noheadings"]);
        let mut words: Vec<Word> = form.split_whitespace().map(text).collect();
        if columns && self.one_in(2) {
            let known = [
                "NAME",
                "AUTOCLEAR",
                "BACK-FILE",
                "BACK-INO",
                "OFFSET",
                "PARTSCAN",
                "RO",
                "SIZELIMIT",
                "DIO",
                "LOG-SEC",
                "ro",
            ];
            let count = self.random.random_range(1..5);
            let names: Vec<String> = (0..count).map(|_| self.pick(&known)).collect();
            let plus = self.pick(&["", "", "+"]);
            words.extend([text("-O"), text(&format!("{plus}{}", names.join(",")))]);
        }
        words
    }

    fn list_one(&mut self) -> Step {
        let mut words = self.form(true);
        if self.one_in(2) {
            words.push(text("-l"));
        }
        words.push(self.device());
        Step::Run { words, whole: false }
    }

    fn list_of_file(&mut self) -> Step {
        let mut words = if self.one_in(2) { self.form(true) } else { Vec::new() };
        if !words.is_empty() && self.one_in(2) {
            words.push(text("-l"));
        }
        let (spelling, file) = (self.pick(&["-j", "--associated"]), self.file());
        words.extend([text(&spelling), file]);
        if self.one_in(3) {
            let size = self.size();
            words.extend([text("-o"), text(&size)]);
        }
        Step::Run { words, whole: false }
    }

    fn list_all(&mut self) -> Step {
        let line = self.pick(&[
            "",
            "-a",
            "--all",
            "-l",
            "-la",
            "-J",
            "--raw",
            "-l --raw -n",
            "-J -l -O NAME,RO,OFFSET",
            "-n -l",
        ]);
        Step::Run { words: line.split_whitespace().map(text).collect(), whole: true }
    }

    fn change(&mut self) -> Step {
        let line = self.pick(&[
            "-c",
            "--set-capacity",
            "-b 4096",
            "-b 512",
            "-b 1000",
            "--sector-size=1K",
            "--direct-io",
            "--direct-io=off",
            "--direct-io=on",
        ]);
        let mut words: Vec<Word> = line.split_whitespace().map(text).collect();
        words.push(self.device());
        Step::Run { words, whole: false }
    }

    fn detach(&mut self) -> Step {
        let mut words = vec![text(&self.pick(&["-d", "--detach", "--det"]))];
        words.push(self.device());
        if self.one_in(4) {
            // Never the same again: whether it is still there is a matter of who looks at it just then.
            let other = Word::Device(self.random.random_range(0..SLOTS));
            words.extend((!words.contains(&other)).then_some(other));
        }
        Step::Run { words, whole: false }
    }

    fn mistake(&mut self) -> Step {
        let line = self.pick(&[
            "-Z",
            "--nothing",
            "--o 1",
            "--s",
            "-o",
            "--offset",
            "-f a b",
            "-o 5 -a",
            "-a --show",
            "-n",
            "-r",
            "-D -a",
            "-a -d x",
            "--raw -J",
            "-O FOO",
            "-O ,NAME",
            "-O NAME,,RO",
            "-l -O",
            "--list=3",
            "--direct-io=maybe x",
            "/dev/null",
            "/nowhere",
            "-d /dev/null",
            "-d /nowhere",
            "-c /dev/null",
            "-l /nowhere",
            "-j /nowhere",
            "-j /nowhere -l",
            "-f /nowhere",
            "-o x -f f",
            "-o -5 -f f",
            "-o 1.5 -f f",
            "-b 16E -f f",
            "--sizelimit 1Ki -f f",
            "--show",
            "-o 1B -f f",
            "-d",
            "-P -a",
            "--direct-io",
            "--sizelimit 5 -j f",
            "-L",
        ]);
        let mut words: Vec<Word> = line.split_whitespace().map(text).collect();
        if self.one_in(8) {
            words = vec![Word::Device(0), text("/nowhere")];
        }
        Step::Run { words, whole: false }
    }
}

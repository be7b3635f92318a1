//! The options of losetup: what they are, which exclude each other, and the one action that a command line
//! means.
//! Never does anything, and never looks at the system.

use super::columns::{self, Column};
use super::getopt::{Reader, Spelling, Takes};
use super::size;
use super::table::Style;
use super::trouble::words;
use std::ffi::{OsStr, OsString};

/// An option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opt {
    All,
    SetCapacity,
    Detach,
    DetachAll,
    Find,
    NoOverlap,
    Help,
    Associated,
    Json,
    List,
    SectorSize,
    NoHeadings,
    Offset,
    Output,
    OutputAll,
    SizeLimit,
    PartScan,
    ReadOnly,
    DirectIo,
    Raw,
    LoopRef,
    Remove,
    Show,
    Verbose,
    Version,
}

/// The part of the help that an option stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Command,
    SetUp,
    List,
    General,
}

/// Everything about an option; parser, help, manual and completions are made of this.
#[derive(Clone, Copy, Debug)]
pub(super) struct About {
    pub(super) opt: Opt,
    pub(super) spelling: Spelling,
    /// The argument's name, empty where there is none.
    pub(super) value: &'static str,
    pub(super) part: Part,
    pub(super) help: &'static str,
}

const fn about(
    opt: Opt,
    long: &'static str,
    short: Option<char>,
    value: &'static str,
    part: Part,
    help: &'static str,
) -> About {
    let takes = if value.is_empty() {
        Takes::Nothing
    } else if value.as_bytes()[0] == b'[' {
        Takes::MayBe
    } else {
        Takes::Argument
    };
    About { opt, spelling: Spelling { long, short, takes }, value, part, help }
}

/// All options, in the order in which an ambiguous abbreviation names them.
#[rustfmt::skip]
pub(super) const OPTIONS: [About; 25] = [
    about(Opt::All, "all", Some('a'), "", Part::Command, "list all devices in use, one line each"),
    about(Opt::SetCapacity, "set-capacity", Some('c'), "DEVICE", Part::Command,
        "update the device to the changed size of the file"),
    about(Opt::Detach, "detach", Some('d'), "DEVICE", Part::Command,
        "detach this device and those that follow"),
    about(Opt::DetachAll, "detach-all", Some('D'), "", Part::Command, "detach all devices in use"),
    about(Opt::Find, "find", Some('f'), "", Part::Command, "print a free device; with FILE, attach it there"),
    about(Opt::NoOverlap, "nooverlap", Some('L'), "", Part::Command,
        "refuse a part of a file that another device has; -f reuses a device of the same part"),
    about(Opt::Help, "help", Some('h'), "", Part::General, "print this help"),
    about(Opt::Associated, "associated", Some('j'), "FILE", Part::Command, "list the devices of this file"),
    about(Opt::Json, "json", Some('J'), "", Part::List, "list as JSON"),
    about(Opt::List, "list", Some('l'), "", Part::List, "list as a table (the default without options)"),
    about(Opt::SectorSize, "sector-size", Some('b'), "SIZE", Part::SetUp,
        "logical sector size; alone with DEVICE, change it"),
    about(Opt::NoHeadings, "noheadings", Some('n'), "", Part::List, "list without the column names"),
    about(Opt::Offset, "offset", Some('o'), "SIZE", Part::SetUp,
        "skip this many bytes at the start of the file"),
    about(Opt::Output, "output", Some('O'), "COLUMNS", Part::List,
        "list these columns; +COLUMNS besides the usual ones"),
    about(Opt::OutputAll, "output-all", None, "", Part::List, "list all columns"),
    about(Opt::SizeLimit, "sizelimit", None, "SIZE", Part::SetUp, "limit the size of the device"),
    about(Opt::PartScan, "partscan", Some('P'), "", Part::SetUp,
        "create the partitions, and wait for their nodes"),
    about(Opt::ReadOnly, "read-only", Some('r'), "", Part::SetUp, "make the device read-only"),
    about(Opt::DirectIo, "direct-io", None, "[on|off]", Part::SetUp,
        "bypass the page cache; alone with DEVICE, change it"),
    about(Opt::Raw, "raw", None, "", Part::List, "list without alignment, blanks escaped"),
    about(Opt::LoopRef, "loop-ref", None, "TEXT", Part::SetUp,
        "keep this text with the device, 63 bytes at most"),
    about(Opt::Remove, "remove", None, "DEVICE", Part::Command,
        "remove the node of this unused device and those that follow"),
    about(Opt::Show, "show", None, "", Part::SetUp, "print the device's path once FILE is attached"),
    about(Opt::Verbose, "verbose", Some('v'), "", Part::General, "accepted, without effect"),
    about(Opt::Version, "version", Some('V'), "", Part::General, "print the version"),
];

/// Only one of each group may be given.
const GROUPS: [&[Opt]; 4] = [
    &[Opt::DetachAll, Opt::All, Opt::SetCapacity, Opt::Detach, Opt::Find, Opt::Associated, Opt::Remove],
    &[Opt::DetachAll, Opt::SetCapacity, Opt::Detach, Opt::Find, Opt::List, Opt::Remove],
    &[Opt::DetachAll, Opt::Output, Opt::SetCapacity, Opt::Detach, Opt::Find, Opt::Remove],
    &[Opt::Json, Opt::Raw],
];

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Attach a file; to this device, or to a free one.
    Create {
        device: Option<OsString>,
        file: OsString,
    },
    Detach(Vec<OsString>),
    DetachAll,
    Remove(Vec<OsString>),
    FindFree,
    /// All devices in use, or those of a file.
    Show {
        file: Option<OsString>,
    },
    ShowOne(OsString),
    SetCapacity(OsString),
    SetDirectIo(OsString, bool),
    SetSectorSize(OsString, u64),
}

/// A command line, understood.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
    /// A list with columns; without it, plain lines.
    pub(super) columns: Option<Vec<Column>>,
    pub(super) style: Style,
    pub(super) no_headings: bool,
    pub(super) offset: Option<u64>,
    pub(super) size_limit: Option<u64>,
    pub(super) sector_size: Option<u64>,
    pub(super) direct_io: Option<bool>,
    pub(super) read_only: bool,
    pub(super) partscan: bool,
    pub(super) no_overlap: bool,
    pub(super) show: bool,
    pub(super) reference: Option<OsString>,
}

/// Why there is nothing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    Help,
    Version,
    /// Wrong usage, in words.
    Refused(String),
    /// The same, with a hint where to find help.
    Misspelt(String),
    /// Wrong usage that nothing is said about.
    Silent,
}

fn refused<T>(why: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Refused(why.into()))
}

/// What has been read so far.
#[derive(Default)]
struct Seen {
    settings: Settings,
    action: Option<Opt>,
    list: bool,
    raw_or_json: bool,
    file: Option<OsString>,
    devices: Vec<OsString>,
    output: Option<OsString>,
    output_all: bool,
}

/// What a command line (without the program's name) means. `strict`: options end with the first operand.
pub(super) fn parse(words: &[OsString], strict: bool) -> Result<(Action, Settings), Stop> {
    let spellings = OPTIONS.map(|one| one.spelling);
    let mut reader = Reader::new(&spellings, words, strict);
    let mut seen = Seen::default();
    let mut groups = [None; GROUPS.len()];
    while let Some((index, argument)) = reader.next().map_err(Stop::Misspelt)? {
        let opt = OPTIONS[index].opt;
        for (group, first) in GROUPS.iter().zip(&mut groups) {
            if group.contains(&opt) && *first.get_or_insert(opt) != opt {
                let names = first.iter().chain([&opt]).map(|&opt| format!("--{}", long(opt)));
                let names: Vec<String> = names.collect();
                return refused(format!("options {} cannot be combined", names.join(" and ")));
            }
        }
        seen.take(opt, argument.unwrap_or_default())?;
    }
    seen.meaning(reader.operands(), words.len())
}

fn long(opt: Opt) -> &'static str {
    OPTIONS.iter().find(|one| one.opt == opt).map_or("", |one| one.spelling.long)
}

impl Seen {
    fn take(&mut self, opt: Opt, argument: OsString) -> Result<(), Stop> {
        let settings = &mut self.settings;
        match opt {
            Opt::Help => return Err(Stop::Help),
            Opt::Version => return Err(Stop::Version),
            Opt::Verbose => {}
            Opt::All | Opt::Find | Opt::DetachAll => self.action = Some(opt),
            Opt::SetCapacity => (self.action, self.devices) = (Some(opt), vec![argument]),
            Opt::Detach | Opt::Remove => {
                self.action = Some(opt);
                self.devices.push(argument);
            }
            Opt::Associated => (self.action, self.file) = (Some(opt), Some(argument)),
            Opt::List => self.list = true,
            Opt::Output => (self.list, self.output) = (true, Some(argument)),
            Opt::OutputAll => (self.list, self.output_all) = (true, true),
            Opt::Json => (settings.style, self.raw_or_json) = (Style::Json, true),
            Opt::Raw => (settings.style, self.raw_or_json) = (Style::Raw, true),
            Opt::NoHeadings => settings.no_headings = true,
            Opt::NoOverlap => settings.no_overlap = true,
            Opt::Offset => settings.offset = Some(bytes(&argument, "offset")?),
            Opt::SizeLimit => settings.size_limit = Some(bytes(&argument, "size")?),
            Opt::SectorSize => settings.sector_size = Some(bytes(&argument, "logical block size")?),
            Opt::PartScan => settings.partscan = true,
            Opt::ReadOnly => settings.read_only = true,
            Opt::Show => settings.show = true,
            Opt::LoopRef => settings.reference = Some(argument),
            Opt::DirectIo => {
                settings.direct_io = Some(match argument.to_str() {
                    Some("" | "on") => true,
                    Some("off") => false,
                    _ => return refused(format!("argument error: '{}'", argument.display())),
                });
            }
        }
        Ok(())
    }

    fn meaning(mut self, operands: Vec<OsString>, words: usize) -> Result<(Action, Settings), Stop> {
        if words == 0 || (words == 1 && self.raw_or_json) {
            (self.action, self.list) = (Some(Opt::All), true);
        }
        let mut settings = self.settings;
        let mut operands = operands.into_iter();
        let action = match self.action {
            Some(Opt::Find) => match (operands.next(), operands.next()) {
                (None, _) => Action::FindFree,
                (Some(file), None) => Action::Create { device: None, file },
                (Some(_), Some(_)) => return refused("unexpected arguments"),
            },
            Some(Opt::All | Opt::Associated) => Action::Show { file: self.file },
            Some(Opt::DetachAll) => Action::DetachAll,
            Some(opt @ (Opt::Detach | Opt::Remove)) => {
                let devices = self.devices.into_iter().chain(operands).collect();
                if opt == Opt::Detach { Action::Detach(devices) } else { Action::Remove(devices) }
            }
            Some(_) => Action::SetCapacity(self.devices.pop().unwrap_or_default()),
            None => match (operands.next(), operands.next()) {
                (None, _) if self.list => Action::Show { file: None },
                (None, _) => return refused("no loop device specified"),
                (Some(device), None) => match (settings.direct_io, settings.sector_size) {
                    (Some(on), _) => {
                        settings.direct_io = None;
                        Action::SetDirectIo(device, on)
                    }
                    (None, Some(size)) => Action::SetSectorSize(device, size),
                    (None, None) => Action::ShowOne(device),
                },
                (Some(device), Some(file)) => Action::Create { device: Some(device), file },
            },
        };
        let creates = matches!(action, Action::Create { .. });
        let for_set_up = settings.size_limit.is_some_and(|limit| limit > 0)
            || settings.partscan
            || settings.read_only
            || settings.direct_io == Some(true)
            || settings.show;
        if for_set_up && !creates {
            return refused(
                "the options --{sizelimit,partscan,read-only,show} are allowed during loop device setup only",
            );
        }
        if settings.offset.is_some() && !creates && !matches!(action, Action::Show { file: Some(_) }) {
            return refused("the option --offset is not allowed in this context");
        }
        if self.list {
            let all = || columns::ALL.map(|(column, ..)| column).to_vec();
            let usual = if self.output_all { all() } else { columns::DEFAULT.to_vec() };
            settings.columns = Some(match &self.output {
                None => usual,
                Some(list) => columns::parse(&list.to_string_lossy(), &usual)
                    .map_err(|why| why.map_or(Stop::Silent, Stop::Refused))?,
            });
        }
        Ok((action, settings))
    }
}

fn bytes(text: &OsStr, what: &str) -> Result<u64, Stop> {
    let shown = text.display();
    let size = text.to_str().map_or(Err(rustix::io::Errno::INVAL), size::parse);
    let why = |error| format!("failed to parse {what}: '{shown}': {}", words(&std::io::Error::from(error)));
    size.map_err(|error| Stop::Refused(why(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<(Action, Settings), Stop> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        parse(&words, false)
    }

    fn create(device: Option<&str>, file: &str) -> Action {
        Action::Create { device: device.map(Into::into), file: file.into() }
    }

    #[test]
    fn a_line_means_one_thing() {
        let (one, two) = (|| "/dev/loop1".into(), || vec!["/dev/loop1".into(), "/dev/loop2".into()]);
        for (line, action) in [
            ("", Action::Show { file: None }),
            ("-l", Action::Show { file: None }),
            ("--json", Action::Show { file: None }),
            ("--output-all", Action::Show { file: None }),
            ("-a ignored", Action::Show { file: None }),
            ("-j f -o 5", Action::Show { file: Some("f".into()) }),
            ("/dev/loop1", Action::ShowOne(one())),
            ("-l /dev/loop1", Action::ShowOne(one())),
            ("-f", Action::FindFree),
            ("-f x", create(None, "x")),
            ("x -Pf --show --sizelimit 1M", create(None, "x")),
            ("/dev/loop1 x ignored", create(Some("/dev/loop1"), "x")),
            ("-d /dev/loop1 /dev/loop2", Action::Detach(two())),
            ("-d /dev/loop1 -d /dev/loop2", Action::Detach(two())),
            ("--remove /dev/loop1 /dev/loop2", Action::Remove(two())),
            ("-D", Action::DetachAll),
            ("-c /dev/loop1", Action::SetCapacity(one())),
            ("--direct-io /dev/loop1", Action::SetDirectIo(one(), true)),
            ("-b 4K --direct-io=off /dev/loop1", Action::SetDirectIo(one(), false)),
            ("-b 4K /dev/loop1", Action::SetSectorSize(one(), 4096)),
        ] {
            assert_eq!(read(line).unwrap().0, action, "{line}");
        }
    }

    #[test]
    fn lists_have_columns_and_plain_lines_have_none() {
        let columns = |line| read(line).unwrap().1.columns;
        assert_eq!(columns(""), Some(columns::DEFAULT.to_vec()));
        assert_eq!(columns("-a"), None);
        assert_eq!(columns("-J /dev/loop1"), None, "JSON of one device wants -l");
        assert_eq!(columns("-O NAME"), Some(vec![Column::Name]));
        assert_eq!(columns("-O +NAME").unwrap().len(), 9);
        assert_eq!(columns("--output-all -O +NAME").unwrap().len(), 18);
        assert_eq!(read("-J -l").unwrap().1.style, Style::Json);
    }

    #[test]
    fn wrong_usage_is_reported() {
        for (line, why) in [
            ("-D -a", "options --detach-all and --all cannot be combined"),
            ("-l -f", "options --list and --find cannot be combined"),
            ("-O NAME --remove x", "options --output and --remove cannot be combined"),
            ("--raw -J", "options --raw and --json cannot be combined"),
            ("-n", "no loop device specified"),
            ("-f a b", "unexpected arguments"),
            ("-o 5 -a", "the option --offset is not allowed in this context"),
            ("-o 5", "no loop device specified"),
            ("-o x -f y", "failed to parse offset: 'x': Invalid argument"),
            ("-b 16E -f y", "failed to parse logical block size: '16E': Numerical result out of range"),
            ("--direct-io=maybe x", "argument error: 'maybe'"),
            ("-O FOO", "unknown column: FOO"),
            (
                "-a --show",
                "the options --{sizelimit,partscan,read-only,show} are allowed during loop device setup only",
            ),
        ] {
            assert_eq!(read(line), Err(Stop::Refused(why.to_owned())), "{line}");
        }
        assert_eq!(read("-O ,NAME"), Err(Stop::Silent));
        assert_eq!(read("-Z --help"), Err(Stop::Misspelt("invalid option -- 'Z'".to_owned())));
        assert_eq!(read("--help -Z"), Err(Stop::Help));
        assert_eq!(read("-a -V -l"), Err(Stop::Version));
        assert!(read("-a -a -l").is_ok() && read("-a --sizelimit 0").is_ok());
    }

    #[test]
    fn each_option_has_a_name_of_its_own() {
        for (at, one) in OPTIONS.iter().enumerate() {
            for other in &OPTIONS[..at] {
                assert_ne!(one.spelling.long, other.spelling.long);
                assert!(one.spelling.short.is_none() || one.spelling.short != other.spelling.short);
            }
        }
    }
}

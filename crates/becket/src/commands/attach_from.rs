//! `becket attach --from FILE`: a list of attachments, one image and its options a line.
//! Never attaches: a file with a mistake in it is refused as a whole.

use super::common::{self, Job};
use crate::{
    args::{AttachLine, Cli, DeviceOptions, LineParser},
    failure::Failure,
    words,
};
use clap::{Args as _, CommandFactory as _, parser::ValueSource};
use std::{
    collections::HashMap,
    ffi::OsString,
    fs::File,
    io::{self, Read as _},
    os::unix::ffi::OsStrExt as _,
    path::Path,
};

/// A table of a million images is not what this is for.
const LONGEST: u64 = 16 << 20;

/// The jobs of a file. What the command line says holds for each line that does not say otherwise.
pub(super) fn jobs(file: &Path, said: &DeviceOptions) -> Result<Vec<Job>, Failure> {
    read(file, &text(file)?, said, || given(std::env::args_os()))
}

/// Whether a file's text means something.
#[cfg(feature = "fuzzing")]
pub(crate) fn is_understood(text: &str) -> bool {
    read(Path::new("-"), text, &DeviceOptions::default(), Vec::new).is_ok()
}

fn text(file: &Path) -> Result<String, Failure> {
    let failed = |error: io::Error| Failure::io(format!("cannot read {}", file.display()), &error);
    let mut text = String::new();
    let read = if file == Path::new("-") {
        io::stdin().take(LONGEST + 1).read_to_string(&mut text)
    } else {
        File::open(file).map_err(failed)?.take(LONGEST + 1).read_to_string(&mut text)
    };
    match read.map_err(failed)? as u64 {
        0..=LONGEST => Ok(text),
        _ => Err(Failure::usage(format!("{}: longer than {LONGEST} bytes", file.display()))),
    }
}

/// The command line's options are passed twice: parsed, for a line that is only an image, and as words, for a
/// line with options. The words are made only if there is such a line: a parser costs more than ten attaches.
fn read(
    file: &Path,
    text: &str,
    said: &DeviceOptions,
    given: impl Fn() -> Vec<OsString>,
) -> Result<Vec<Job>, Failure> {
    let bad = |what: String| {
        Failure::usage(format!("{}: {what}", file.display())).hint(
            "a line is IMAGE and options of `becket attach`, quoted as in a shell; nothing was attached",
        )
    };
    let mut jobs = Vec::new();
    let mut parser = None;
    let mut names: HashMap<String, usize> = HashMap::new();
    for line in words::lines(text).map_err(|unclosed| bad(unclosed.to_string()))? {
        let words: Vec<OsString> = line.words.into_iter().map(OsString::from).collect();
        let AttachLine { image, device } = match &words[..] {
            [image] if !image.is_empty() && !image.as_bytes().starts_with(b"-") => {
                AttachLine { image: image.into(), device: said.clone() }
            }
            _ => {
                let (parser, given) = parser.get_or_insert_with(|| (LineParser::new(), given()));
                let words = given.iter().cloned().chain(words);
                parser.parse(words).map_err(|what| bad(format!("line {}: {what}", line.number)))?
            }
        };
        if let Some(name) = &device.name
            && let Some(first) = names.insert(name.clone(), line.number)
        {
            return Err(bad(format!("line {}: --name {name} is that of line {first} already", line.number)));
        }
        let origin = Some(format!("{} line {}", file.display(), line.number));
        jobs.push(Job {
            image,
            options: common::options(&device),
            store: device.image.store,
            trace: device.image.trace,
            key_file: device.key_file,
            export: None,
            origin,
        });
    }
    Ok(jobs)
}

/// The device options that were given on the command line, as words again.
pub(super) fn given(words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let Ok(matches) = Cli::command().try_get_matches_from(words) else { return Vec::new() };
    let Some(matches) = matches.subcommand_matches("attach") else { return Vec::new() };
    let options = DeviceOptions::augment_args(clap::Command::new("becket"));
    let mut given = Vec::new();
    for argument in options.get_arguments() {
        let id = argument.get_id().as_str();
        let Some(long) = argument.get_long() else { continue };
        if matches.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        if argument.get_action().takes_values() {
            for value in matches.get_raw(id).into_iter().flatten() {
                let mut word = OsString::from(format!("--{long}="));
                word.push(value);
                given.push(word);
            }
        } else {
            given.push(format!("--{long}").into());
        }
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::ImageOptions;

    fn reported(text: &str) -> String {
        read(Path::new("table"), text, &DeviceOptions::default(), Vec::new).unwrap_err().message
    }

    #[test]
    fn lines_are_as_on_the_command_line() {
        let text = "# system\n\na.img\n'b c.img' --name b -r --offset 1MiB # data\n";
        let said = DeviceOptions {
            image: ImageOptions { offset: 4096, shared: true, ..ImageOptions::default() },
            ..DeviceOptions::default()
        };
        let given = || vec!["--offset=4K".into(), "--shared".into()];
        let jobs = read(Path::new("t"), text, &said, given).unwrap();
        assert_eq!(jobs.len(), 2);
        assert_eq!((jobs[0].image.to_str(), jobs[0].options.open.offset), (Some("a.img"), 4096));
        assert_eq!((jobs[1].image.to_str(), jobs[1].options.open.offset), (Some("b c.img"), 1 << 20));
        assert!(jobs[0].options.open.shared && jobs[1].options.open.shared);
        assert!(!jobs[0].options.open.read_only && jobs[1].options.open.read_only);
        assert_eq!(jobs[1].options.name.as_deref(), Some("b"));
        assert_eq!(jobs[1].origin.as_deref(), Some("t line 4"));
    }

    #[test]
    fn mistakes_are_reported_with_their_place() {
        assert!(reported("a\nb --flat\n").starts_with("table: line 2: unexpected argument '--flat'"));
        assert!(reported("a b").starts_with("table: line 1: unexpected argument 'b'"), "{}", reported("a b"));
        assert!(
            reported("-r").starts_with("table: line 1: the following required arguments"),
            "{}",
            reported("-r")
        );
        assert!(reported("a --offset x").contains("'x' for '--offset"), "{}", reported("a --offset x"));
        assert!(reported("a --help").starts_with("table: line 1: unexpected argument '--help'"));
        assert!(reported("a --from b").starts_with("table: line 1: unexpected argument '--from'"));
        assert_eq!(reported("a 'b"), "table: line 1, column 3: this quote is not closed");
        assert_eq!(
            reported("a --name x\nb --name y\nc --name=x"),
            "table: line 3: --name x is that of line 1 already"
        );
    }

    #[test]
    fn the_command_line_s_options_hold_for_all_lines() {
        let words = ["becket", "attach", "-r", "--via", "loop", "--offset", "4K", "--from", "t", "--atomic"];
        let mut given = given(words.map(OsString::from));
        given.sort();
        assert_eq!(given, ["--offset=4K", "--read-only", "--via=loop"].map(OsString::from));
    }
}

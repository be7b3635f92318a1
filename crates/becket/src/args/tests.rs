//! What the parser takes, what it refuses, and that its help is true.

use super::*;
use clap::CommandFactory;
use std::path::Path;

#[test]
fn definitions_are_sound() {
    Cli::command().debug_assert();
}

/// The examples in the help are commands that this very parser accepts.
#[test]
fn every_command_has_examples_that_parse() {
    for mut command in Cli::command().get_subcommands().cloned() {
        let name = command.get_name().to_owned();
        if command.is_hide_set() && name != "man" {
            continue;
        }
        assert!(command.get_about().is_some(), "{name} has no purpose");
        let help = command.render_long_help().to_string();
        let examples: Vec<&str> = help
            .lines()
            .skip_while(|line| !line.starts_with("Examples:"))
            .skip(1)
            .filter(|line| line.contains("becket "))
            .collect();
        assert!(!examples.is_empty(), "{name} has no example:\n{help}");
        for example in examples {
            let from = example.find("becket ").unwrap_or(0);
            let until = example[from..].find(['#', '|', '>']).map_or(example.len(), |at| from + at);
            let words = example[from..until].split_whitespace();
            let parsed = Cli::try_parse_from(words);
            assert!(parsed.is_ok(), "{name}: the example `{example}` does not parse: {:?}", parsed.err());
            assert!(example.contains(&format!("becket {name}")), "{name}: foreign example `{example}`");
        }
    }
}

#[test]
fn every_argument_has_help() {
    for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
        for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
            assert!(argument.get_help().is_some(), "{} {}", command.get_name(), argument.get_id());
        }
    }
}

#[test]
fn run_wants_its_command_after_two_dashes() {
    assert!(Cli::try_parse_from(["becket", "run", "a.img"]).is_err());
    assert!(Cli::try_parse_from(["becket", "run", "a.img", "ls"]).is_err());
    let cli = Cli::try_parse_from(["becket", "run", "-r", "a.img", "--", "ls", "-r", "--json"]).unwrap();
    let Command::Run(run) = cli.command else { panic!("not run") };
    assert_eq!(run.command, ["ls", "-r", "--json"]);
    assert!(run.device.read_only && !cli.global.json, "the command's options are its own");
}

#[test]
fn wrong_usage_is_refused() {
    for words in [
        &["becket", "attach"][..],
        &["becket", "detach"],
        &["becket", "detach", "--all", "loop0"],
        &["becket", "list", "--all"],
        &["becket", "attach", "--queues", "0", "x"],
        &["becket", "attach", "--offset", "-1", "x"],
        &["becket", "attach", "--via", "nbd", "x"],
        &["becket", "set", "x"],
        &["becket", "set", "x", "--force"],
        &["becket", "set", "x", "--read-only", "auto"],
        &["becket", "set", "x", "--size-limit", "-1"],
    ] {
        assert_eq!(Cli::try_parse_from(words).unwrap_err().exit_code(), 2, "{words:?}");
    }
}

/// A command line of becket's.
fn words_of(line: &str) -> Vec<OsString> {
    format!("becket {line}").split(' ').map(OsString::from).collect()
}

/// What is read without the definitions of other commands is what they all together make of it.
#[test]
fn attaching_is_read_alike_by_both_parsers() {
    for line in [
        "attach a.img",
        "-v attach --json a.img b.img",
        "attach -r --via loop --name x --offset 1M -v -- -a.img",
        "attach --from list --atomic --size-limit 4K --depth 8 --queues 1",
        "attach --tab data",
    ] {
        let words = words_of(line);
        let quick = Cli::attaches(&words).unwrap_or_else(|| panic!("{line}"));
        assert_eq!(format!("{quick:?}"), format!("{:?}", Cli::try_parse_from(&words).unwrap()), "{line}");
    }
    for line in
        ["attach", "attach --help", "attach a --nope", "detach attach", "list", "--json", "attach --from l a"]
    {
        let words = words_of(line);
        assert!(Cli::attaches(&words).is_none(), "{line}");
    }
}

/// A word of a command line, right or wrong.
fn word() -> impl proptest::strategy::Strategy<Value = &'static str> {
    proptest::sample::select(vec![
        "a.img",
        "b",
        "loop",
        "auto",
        "nbd",
        "help",
        "attach",
        "--via",
        "--via=loop",
        "--name",
        "--from",
        "--offset",
        "--size-limit",
        "--block-size",
        "--direct-io",
        "4096",
        "1M",
        "9E",
        "on",
        "-r",
        "--read-only",
        "-v",
        "-vr",
        "--verbose",
        "--json",
        "--",
        "-",
        "",
        "--help",
        "--atomic",
        "--tab",
    ])
}

proptest::proptest! {
    /// Whatever is read without the definitions of other commands means the same with all of them.
    #[test]
    fn whatever_attaches_is_read_alike_by_both_parsers(words in proptest::collection::vec(word(), 0..8)) {
        let words: Vec<OsString> = ["becket", "attach"].into_iter().chain(words).map(OsString::from).collect();
        if let Some(quick) = Cli::attaches(&words) {
            let parsed = Cli::try_parse_from(&words).unwrap();
            proptest::prop_assert_eq!(format!("{quick:?}"), format!("{parsed:?}"));
        }
    }
}

/// The commands of the guide and of README that need a server of the reader's, which no test has: those that
/// need none are run (`tests/guide.rs`).
#[test]
fn commands_of_the_guide_that_are_not_run_parse() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![root.join("README.md")];
    pages.extend(std::fs::read_dir(root.join("docs/guide/src")).unwrap().map(|page| page.unwrap().path()));
    pages.retain(|page| page.extension().is_some_and(|kind| kind == "md"));
    let mut parsed = 0;
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap().replace("\\\n", " ");
        let mut fence = None;
        for line in text.lines() {
            if let Some(kind) = line.strip_prefix("```") {
                fence = if fence.is_some() { None } else { Some(kind) };
            } else if fence.is_some_and(|kind| kind != "console")
                && let Some(command) = line.find("becket ").and_then(|at| line.get(at..))
                && ["", "sudo ", "$ "].contains(&line.strip_suffix(command).unwrap_or("-"))
            {
                let words = crate::words::words(command).unwrap();
                let until = words.iter().position(|word| word.starts_with(['>', '|']) || word == "&&");
                let words = words.get(..until.unwrap_or(words.len())).unwrap();
                let error = Cli::try_parse_from(words).err();
                assert!(error.is_none(), "{}: `{command}`: {error:?}", page.display());
                parsed += 1;
            }
        }
    }
    assert!(parsed > 25, "{parsed}");
}

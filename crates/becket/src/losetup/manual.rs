//! The help, the manual page and the completions of losetup, all from the table that its parser reads.
//! Never says what an option does in a second place.

use super::columns;
use super::getopt::Takes;
use super::options::{About, OPTIONS, Part};
use std::fmt::Write as _;

const PARTS: [(Part, &str); 4] = [
    (Part::Command, "Commands"),
    (Part::SetUp, "Setting up"),
    (Part::List, "Lists"),
    (Part::General, "General"),
];

const USAGE: &str = "\
Usage:
  losetup [-l] [-a]                       devices in use
  losetup [OPTIONS] DEVICE                one device
  losetup [OPTIONS] -f | DEVICE FILE      attach FILE, to a free device or to this one
  losetup -d DEVICE...                    detach
";

/// `--help`.
pub(super) fn help() -> String {
    let mut text = format!("\n{USAGE}\nAttaches files as block devices, as util-linux's losetup does.\n");
    for (part, heading) in PARTS {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n{heading}:");
        for about in OPTIONS.iter().filter(|about| about.part == part) {
            let _ = writeln!(text, " {:<30} {}", spelled(about), about.help);
        }
    }
    text += "\nColumns:\n";
    for (_, name, _, meaning) in columns::ALL {
        let _ = writeln!(text, " {name:>12}  {meaning}");
    }
    text + "\nSizes: 512, 0x200, 4KiB or 4K (1024), 4KB (1000), 1.5G. More in losetup(8).\n"
}

fn spelled(about: &About) -> String {
    let short = about.spelling.short.map_or_else(|| "   ".to_owned(), |letter| format!("-{letter},"));
    let value = match about.spelling.takes {
        Takes::Nothing => String::new(),
        Takes::Argument => format!(" {}", about.value),
        Takes::MayBe => format!("[={}]", about.value.trim_matches(['[', ']'])),
    };
    format!("{short} --{}{value}", about.spelling.long)
}

/// The same options for clap, whose generators write completions and the manual page. Its parser is not used:
/// it knows neither abbreviations nor groups as getopt has them.
pub(crate) fn command() -> clap::Command {
    let argument = |about: &About| {
        let arg = clap::Arg::new(about.spelling.long).long(about.spelling.long).help(about.help);
        let arg = match about.spelling.short {
            Some(letter) => arg.short(letter),
            None => arg,
        };
        let heading = PARTS.iter().find(|(part, _)| *part == about.part).map_or("", |(_, heading)| heading);
        let arg = arg.help_heading(heading);
        let value = about.value.trim_matches(['[', ']']);
        let hint = match value {
            "DEVICE" | "FILE" => clap::ValueHint::FilePath,
            _ => clap::ValueHint::Other,
        };
        match about.spelling.takes {
            Takes::Nothing => arg.action(clap::ArgAction::SetTrue),
            Takes::Argument => arg.value_name(value).value_hint(hint),
            Takes::MayBe => {
                arg.value_name(value).num_args(0..=1).require_equals(true).value_parser(["on", "off"])
            }
        }
    };
    clap::Command::new("losetup")
        .version(env!("CARGO_PKG_VERSION"))
        .about("attach files as block devices")
        .long_about(
            "Attaches files as loop devices, lists them, changes them and detaches them, with the options, output and \
             exit status of util-linux's losetup. It works on the kernel's /dev/loopN, also on those of others, keeps no \
             state and needs no server. Called as losetup (by a link to becket) or as `becket losetup`.",
        )
        .after_help(after())
        .override_usage("losetup [OPTIONS] [-f | DEVICE] [FILE]")
        .disable_help_flag(true)
        .disable_version_flag(true)
        .args(OPTIONS.iter().map(argument))
        .arg(clap::Arg::new("DEVICE").value_hint(clap::ValueHint::FilePath).help("/dev/loopN or loopN"))
        .arg(clap::Arg::new("FILE").value_hint(clap::ValueHint::FilePath).help("the file, or block device, behind it"))
}

fn after() -> String {
    let mut text = String::from("Columns: ");
    let reported = columns::ALL.map(|(_, name, _, meaning)| format!("{name} ({meaning})"));
    text += &reported.join(", ");
    text += ".\n\nA device in use is detached when its last user closes it: -d then ends well, and says on standard error who \
             that is. Missing nodes are made, where this process may.\n\n\
             Exit status: 0 done, 1 not. With several devices, 1 when one of them failed.\n\n\
             Environment: BECKET_LOSETUP_VIA=ublk makes -f FILE attach over ublk, and lists becket's ublk devices, too. \
             POSIXLY_CORRECT ends the options at the first word that is none.\n\n\
             Examples: losetup -f --show disk.img; losetup -P -f --show disk.img; losetup -j disk.img; losetup -lJ; \
             losetup -d /dev/loop0.";
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_has_each_option_and_column() {
        let help = help();
        for about in OPTIONS {
            assert!(help.contains(&format!("--{}", about.spelling.long)), "{}", about.spelling.long);
        }
        for (_, name, ..) in columns::ALL {
            assert!(help.contains(name), "{name}");
        }
        assert!(help.lines().all(|line| line.chars().count() <= 120), "{help}");
    }

    #[test]
    fn the_generators_get_what_they_need() {
        command().debug_assert();
    }
}

//! What becket says: help with examples, JSON that parses, completions, man pages, the reference in docs.
//! Nothing here looks at what is attached, but for its names in completions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{image, require_device, require_tools};
use common::scratch;
use std::{collections::BTreeSet, fs, path::Path, process::Command};

const COMMANDS: [&str; 23] = [
    "attach",
    "export",
    "detach",
    "run",
    "mount",
    "umount",
    "list",
    "inspect",
    "ls",
    "cat",
    "cp",
    "copy",
    "map",
    "refresh",
    "stat",
    "store",
    "top",
    "metrics",
    "events",
    "why",
    "doctor",
    "serve",
    "completions",
];

/// Words of a text that begin with two dashes.
fn long_options(text: &str) -> BTreeSet<String> {
    text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '-'))
        .filter(|word| word.len() > 3 && word.starts_with("--") && !word.starts_with("---"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn help_teaches() {
    let place = scratch();
    let overview = place.ok(["--help"]);
    for command in COMMANDS {
        assert!(overview.lines().any(|line| line.trim_start().starts_with(command)), "{command}: {overview}");
        let help = place.ok([command, "--help"]);
        let (_, examples) =
            help.split_once("\nExamples:\n").unwrap_or_else(|| panic!("{command} has no example"));
        assert!(examples.contains(&format!("becket {command}")), "{command}: {examples}");
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{command} --help is too wide");
        let short = place.ok([command, "-h"]);
        assert!(short.len() <= help.len());
    }
    let ran = place.run(["--json"]);
    let said = ran.json()["error"]["message"].as_str().expect("a message").to_owned();
    assert!(ran.code == 2 && said.contains("attach, export, detach"), "{ran:?}");
    for hidden in ["worker", "run-guard", "run-exec", "generator", "man"] {
        assert!(!overview.contains(&format!("  {hidden} ")), "{hidden} is nobody's business");
        assert!(!said.contains(&format!(" {hidden}")), "{hidden}: {said}");
    }
    assert_eq!(place.ok(["--version"]), format!("becket {}\n", env!("CARGO_PKG_VERSION")));
}

/// The reference and the help say the same, both ways.
#[test]
fn the_reference_holds_every_option_and_no_other() {
    let place = scratch();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/COMMANDS.md");
    let reference = fs::read_to_string(&path).expect("docs/COMMANDS.md");
    let section = |heading: &str| -> String {
        let from =
            reference.find(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no section {heading}"));
        let rest = &reference[from + 4..];
        rest[..rest.find("\n## ").unwrap_or(rest.len())].to_owned()
    };
    let shared = long_options(&section("Device options"));
    let everywhere = long_options(&section("General options"));
    for command in COMMANDS {
        let mut reported = long_options(&section(&format!("becket {command}")));
        reported.extend(everywhere.clone());
        if ["attach", "run", "mount"].contains(&command) {
            reported.extend(shared.clone());
        }
        let mut help = place.ok([command, "--help"]);
        let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
        let list = list.take_while(|line| line.starts_with("  "));
        let list = list
            .filter_map(|line| line.strip_prefix("  ")?.split(' ').next().filter(|name| !name.is_empty()));
        let below: Vec<_> = list.filter(|name| *name != "help").map(str::to_owned).collect();
        below.iter().for_each(|name| help.insert_str(0, &place.ok([command, name, "--help"])));
        // Only the options' own lines: prose and examples may name those of others.
        let own: String = help
            .lines()
            .filter(|line| line.trim_start().starts_with('-'))
            .map(|line| format!("{line}\n"))
            .collect();
        assert_eq!(long_options(&own), reported, "becket {command}: left --help, right docs/COMMANDS.md");
    }
}

#[test]
fn nothing_attached_is_no_error() {
    let place = scratch();
    let ran = place.run(["list"]);
    assert_eq!((ran.code, ran.out.as_str()), (0, ""));
    assert!(ran.err.contains("nothing is attached"), "{ran:?}");
    assert_eq!(place.json(["list"])["devices"], serde_json::json!([]));
    assert_eq!(place.json(["detach", "--all"]), serde_json::json!({ "devices": [], "errors": [] }));
}

#[test]
fn doctor_reports_every_transport() {
    let place = scratch();
    let reported = place.json(["doctor"]);
    let transports = reported["transports"].as_array().unwrap();
    let kinds: Vec<&str> = transports.iter().map(|report| common::text(report, "transport")).collect();
    assert!(kinds.contains(&"ublk") && kinds.contains(&"loop"), "{kinds:?}");
    for report in transports {
        assert!(report["works"].is_boolean() && !common::text(report, "reason").is_empty(), "{report:#}");
    }
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(common::text(&reported, "kernel"), release.trim());

    let ran = place.run(["doctor"]);
    assert_eq!(ran.code, 0);
    for (kind, report) in kinds.iter().zip(transports) {
        let verdict = if report["works"] == true { "works" } else { "does not work here" };
        assert!(ran.out.contains(&format!("\n{kind}: {verdict}\n")), "{kind}: {ran:?}");
        if let Some(fix) = report["fix"].as_str() {
            assert!(ran.out.contains(&format!("to fix: {fix}\n")), "{kind}: {ran:?}");
        }
    }
}

#[test]
fn completions_and_man_pages() {
    let place = scratch();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = place.ok(["completions", shell]);
        assert!(script.contains("becket") && script.contains("direct-io"), "{shell}");
    }
    assert_eq!(place.run(["completions", "csh"]).code, 2);
    for shell in ["bash", "zsh", "fish"] {
        let script = place.ok(["completions", shell]);
        assert!(script.contains("becket complete-path"), "{shell} asks for names inside images");
        for internal in ["run-guard", "run-exec", "ublk-give", "generator", "worker"] {
            assert!(!script.contains(internal), "{shell} offers {internal}");
        }
        assert!(script.contains("becket list"), "{shell} asks for the devices that are attached");
        assert!(["iso9660", "squashfs"].iter().all(|format| script.contains(format)), "{shell}");
    }
    place.ok(["man", "man1"]);
    for command in COMMANDS {
        let page = fs::read_to_string(place.path(&format!("man1/becket-{command}.1"))).unwrap();
        assert!(page.starts_with(".") && page.contains("Examples:"), "{command}");
    }
    assert!(place.path("man1/becket.1").exists());
    let page = fs::read_to_string(place.path("man1/losetup.8")).unwrap();
    let help = place.ok(["losetup", "--help"]);
    let script = place.ok(["completions", "--losetup", "bash"]);
    assert!(script.contains("_losetup"), "{script}");
    for option in long_options(&help) {
        assert!(script.contains(&option), "{option} is not completed");
        assert!(page.contains(&option.replace('-', "\\-")), "{option} is not in losetup(8)");
    }
    assert!(!place.path("man1/becket-worker.1").exists());
    let ran = place.run(["man", "man1/becket.1/x"]);
    assert_eq!(ran.code, 1);
    assert!(ran.err.starts_with("becket: cannot write the man pages"), "{ran:?}");
}

/// `becket ... | head` is no reason to complain.
#[test]
fn a_closed_pipe_is_taken_quietly() {
    let place = scratch();
    let mut command = std::process::Command::new("sh");
    place.prepare(&mut command);
    command.args([
        "-c",
        "for words in 'completions bash' doctor '--json list' --help; do \"$BECKET\" $words; done | :",
    ]);
    let ran = place.finish(&mut command);
    assert_eq!(ran.err, "", "{ran:?}");
}

/// bash, with the script that is printed, asked what may come next on a line.
#[test]
fn bash_completes_devices_and_no_internal_command() {
    let name = "words::bash_completes_devices_and_no_internal_command";
    if !require_device(name) || !require_tools(name, &["bash", "awk"]) {
        return;
    }
    let place = scratch();
    image::sparse(&place.path("disk.img"), 1 << 20);
    let device = place.attach(&place.path("disk.img"), &["--name", "mine"]);
    let script = r#"
        mkdir bin; ln -s "$BECKET" bin/becket; PATH=$PWD/bin:$PATH
        source <(becket completions bash)
        try() {
            COMP_WORDS=(becket "$@") COMP_CWORD=$# COMPREPLY=()
            _becket_operands becket "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}" 2>/dev/null
            echo " ${COMPREPLY[*]} "
        }
        try ''; try detach ''; try stat /dev/; try attach di; try set mine --read-only ''; try mount --format s
    "#;
    let mut bash = Command::new("bash");
    place.prepare(&mut bash);
    bash.env("BECKET", env!("CARGO_BIN_EXE_becket")).args(["-c", script]);
    let ran = place.finish(&mut bash);
    let lines: Vec<&str> = ran.out.lines().collect();
    let [commands, targets, nodes, files, values, formats] = lines[..] else { panic!("{ran:?}") };
    assert!(commands.contains(" detach ") && !commands.contains("guard"), "{commands}");
    let node = format!(" {} ", device.display());
    assert!(targets.contains(" mine ") && targets.contains(&node), "{targets}");
    assert!(nodes.contains(&node), "{nodes}");
    assert_eq!((files, values, formats), (" disk.img ", " on off ", " squashfs "));
    place.ok(["detach", "mine"]);
}

/// Names inside an image, as the scripts ask for them.
#[test]
fn bash_completes_names_inside_images() {
    let name = "words::bash_completes_names_inside_images";
    if !require_tools(name, &["bash", "mke2fs"]) {
        return;
    }
    let place = scratch();
    fs::create_dir_all(place.path("tree/etc/ssh")).unwrap();
    for file in ["etc/fstab", "etc/fs.conf", "etc/a b", "etc/two\nlines"] {
        fs::write(place.path("tree").join(file), "x").unwrap();
    }
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-t", "ext4", "-d"]).arg(place.path("tree")).arg(place.path("disk.img")).arg("4M");
    becket_testkit::tool(&mut mke2fs);
    let ask = |word: &str| place.ok(["complete-path", word]);
    assert_eq!(ask("disk.img/e"), "disk.img/etc/\n");
    assert_eq!(ask("disk.img/etc/fs"), "disk.img/etc/fs.conf\ndisk.img/etc/fstab\n");
    assert_eq!(
        ask("./disk.img/etc/"),
        "./disk.img/etc/a b\n./disk.img/etc/fs.conf\n./disk.img/etc/fstab\n./disk.img/etc/ssh/\n"
    );
    for nothing in
        ["disk.img/nothing", "disk.img", "no.img/x", "", "/", "http://127.0.0.1:1/x#e", "disk.img/*"]
    {
        assert_eq!(ask(nothing), "", "{nothing}");
    }
    let script = r#"
        mkdir bin; ln -s "$BECKET" bin/becket; PATH=$PWD/bin:$PATH
        source <(becket completions bash)
        try() {
            COMP_WORDS=(becket "$@") COMP_CWORD=$# COMPREPLY=()
            _becket_operands becket "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}" 2>/dev/null
            printf '%s|' "${COMPREPLY[@]}"; echo
        }
        try cat disk.img/etc/fs; try ls disk.img/e; try cat di
    "#;
    let mut bash = Command::new("bash");
    place.prepare(&mut bash);
    bash.env("BECKET", env!("CARGO_BIN_EXE_becket")).args(["-c", script]);
    let ran = place.finish(&mut bash);
    assert_eq!(ran.out, "disk.img/etc/fs.conf|disk.img/etc/fstab|\ndisk.img/etc/|\ndisk.img|\n", "{ran:?}");
}

#[test]
fn a_manual_page_names_the_values_of_options() {
    let place = scratch();
    place.ok(["man", "pages"]);
    let page = fs::read_to_string(place.path("pages/becket-mount.1")).unwrap();
    let synopsis = page.lines().skip_while(|line| *line != ".SH SYNOPSIS").nth(1).unwrap();
    for words in
        ["\\-\\-offset\\fR \\fISIZE\\fR]", "\\-\\-type\\fR \\fIFSTYPE\\fR]", "\\fIIMAGE\\fR \\fIDIR\\fR"]
    {
        assert!(synopsis.contains(words), "{words} is not in {synopsis}");
    }
}

/// Commands that are processes of becket's own are nobody's to call.
#[test]
fn a_wrong_command_is_corrected_by_one_that_users_have() {
    let place = scratch();
    let wrong = |word: &str| place.run([word]).err;
    assert!(wrong("atach").contains("'attach'"), "{}", wrong("atach"));
    for word in ["reporte", "run-exe", "worke", "supervis"] {
        let err = wrong(word);
        assert!(err.contains("unrecognized subcommand"), "{err}");
        assert!(!err.contains("reporter") && !err.contains("run-exec") && !err.contains("worker"), "{err}");
    }
}

//! `becket completions SHELL` and the hidden `becket man DIR`: generated from the definitions in `args`.
//! What shells complete beyond options (attached devices, files) is added here; hidden commands are left out.

use crate::{
    args::{self, Cli},
    failure::Failure,
    losetup,
};
use clap::{Arg, ArgAction, Command, CommandFactory as _};
use clap_complete::Shell;
use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write as _},
    path::Path,
};

pub(crate) fn run(args: &args::Completions) -> Result<u8, Failure> {
    // Into memory first: the generator panics when its writer fails, as with `| head`.
    let mut script = Vec::new();
    let (mut command, name) =
        if args.losetup { (losetup::command(), "losetup") } else { (visible(), "becket") };
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    if !args.losetup {
        let text = String::from_utf8_lossy(&script).into_owned();
        script = with_targets(args.shell, &command, text).into_bytes();
    }
    io::stdout().lock().write_all(&script)?;
    Ok(0)
}

/// becket without the commands that only becket itself, or a package, calls.
fn visible() -> Command {
    let all = Cli::command();
    let shown = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    Command::new("becket")
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_subcommand(true)
        .args(all.get_arguments().cloned())
        .subcommands(shown.collect::<Vec<_>>())
}

/// Commands whose targets are devices that are attached.
const OF_TARGETS: &str = "detach|list|refresh|set|stat|why";
/// Commands whose operands are files.
const OF_FILES: &str = "attach|cat|copy|cp|export|inspect|ls|map|mount|run";

/// The script, with what the generator cannot know: which devices there are. Shells ask `becket list`.
fn with_targets(shell: Shell, command: &Command, script: String) -> String {
    match shell {
        Shell::Bash => {
            let values = options_with_values(command).join("|");
            let ours = BASH.replace("VALUES", &values).replace("TARGETS", OF_TARGETS);
            script + &ours.replace("FILES", OF_FILES)
        }
        Shell::Zsh => {
            let mut text = String::new();
            for line in script.lines() {
                match line {
                    "_becket() {" => text.push_str(ZSH),
                    line if is_of_images(line) => {
                        text.push_str(&line.replace(":_files'", ":_becket_inside'"));
                        text.push('\n');
                        continue;
                    }
                    line if line.starts_with("'*::targets") => {
                        text.push_str(&line.replace(":_default'", ":_becket_attached'"));
                        text.push('\n');
                        continue;
                    }
                    _ => {}
                }
                text.push_str(line);
                text.push('\n');
            }
            text
        }
        Shell::Fish => {
            let ours = FISH.replace("TARGETS", &OF_TARGETS.replace('|', " "));
            script + &ours.replace("FILES", &OF_FILES.replace('|', " "))
        }
        _ => script,
    }
}

/// Whether a line of zsh's script is of an operand that can be a path through an image.
fn is_of_images(line: &str) -> bool {
    ["':image", "'*::images", "':path", "'*::paths", "':source"].iter().any(|start| line.starts_with(start))
        && line.contains(":_files'")
}

/// All options of all commands that take a value, in both spellings.
fn options_with_values(command: &Command) -> Vec<String> {
    let arguments = command.get_subcommands().flat_map(Command::get_arguments);
    let mut words = BTreeSet::new();
    for argument in arguments.filter(|argument| argument.get_action().takes_values()) {
        words.extend(argument.get_long().map(|long| format!("--{long}")));
        words.extend(argument.get_short().map(|short| format!("-{short}")));
    }
    words.into_iter().collect()
}

const BASH: &str = r#"
# Operands: devices that are attached, mount points, files.
_becket_operands() {
    _becket "$@"
    local cur=$2 command= word
    [[ $cur == -* ]] && return 0
    case $3 in
        VALUES) return 0 ;;
    esac
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        [[ $word == -- && $command == run ]] && return 0
        [[ $word == -* || -n $command ]] || command=$word
    done
    case $command in
        TARGETS)
            local names
            names=$(becket list 2>/dev/null | awk 'NR > 1 { print $1; print $2 }')
            compopt -o filenames 2>/dev/null
            COMPREPLY=($(compgen -W "$names" -- "$cur") $(compgen -f -- "$cur"))
            ;;
        umount)
            compopt -o filenames 2>/dev/null
            COMPREPLY=($(compgen -d -- "$cur"))
            ;;
        FILES)
            compopt -o filenames 2>/dev/null
            COMPREPLY=($(compgen -f -- "$cur"))
            # Names inside an image: disk.img/p1/etc/...
            if [[ ${#COMPREPLY[@]} == 0 && $cur == */* ]]; then
                mapfile -t COMPREPLY < <(becket complete-path "$cur" 2>/dev/null)
                [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == */ ]] && compopt -o nospace 2>/dev/null
            fi
            ;;
    esac
}
complete -F _becket_operands -o bashdefault -o default becket
"#;

const ZSH: &str = r#"# Names inside an image, behind those of files: disk.img/p1/etc/...
_becket_inside() {
    local -a names
    _files && return
    names=(${(f)"$(becket complete-path ${(Q)PREFIX} 2>/dev/null)"})
    compadd -f -S '' -a names
}

# Devices that are attached, by name and by node; and files.
_becket_attached() {
    local -a names
    names=(${(f)"$(becket list 2>/dev/null | awk 'NR > 1 { print $1; print $2 }')"})
    _alternative 'attached:attached device:compadd -a names' 'files:image:_files'
}

"#;

const FISH: &str = r#"
# Devices that are attached, by name and by node.
function __fish_becket_attached
    becket list 2>/dev/null | awk 'NR > 1 { print $1 "\t" $NF; print $2 "\t" $NF }'
end
complete -c becket -n "__fish_becket_using_subcommand TARGETS" -a "(__fish_becket_attached)"
# Names inside an image: disk.img/p1/etc/...
complete -c becket -n "__fish_becket_using_subcommand FILES" -a "(becket complete-path (commandline -ct) 2>/dev/null)"
"#;

pub(crate) fn man(args: &args::Man) -> Result<u8, Failure> {
    let dir = args.dir.display();
    let failed = |error: io::Error| Failure::io(format!("cannot write the man pages into {dir}"), &error);
    fs::create_dir_all(&args.dir).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), &args.dir).map_err(failed)?;
    for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
        let page = args.dir.join(format!("becket-{}.1", command.get_name()));
        with_synopsis(&page, command).map_err(failed)?;
    }
    let page = clap_mangen::Man::new(losetup::command()).section("8").manual("System Administration");
    let mut text = Vec::new();
    page.render(&mut text).and_then(|()| fs::write(args.dir.join("losetup.8"), text)).map_err(failed)?;
    Ok(0)
}

/// Puts a synopsis into a page that names the values of options, which the generator's does not.
fn with_synopsis(page: &Path, command: &Command) -> io::Result<()> {
    const HEADING: &str = ".SH SYNOPSIS\n";
    let text = fs::read_to_string(page)?;
    let Some((before, after)) = text.split_once(HEADING) else { return Ok(()) };
    let (_, after) = after.split_once('\n').unwrap_or_default();
    fs::write(page, format!("{before}{HEADING}{}\n{after}", synopsis(command)))
}

fn synopsis(command: &Command) -> String {
    let mut words = vec![format!("\\fBbecket {}\\fR", command.get_name())];
    let shown = || command.get_arguments().filter(|argument| !argument.is_hide_set());
    words.extend(shown().filter(|argument| !argument.is_positional()).map(|option| {
        let long = option.get_long().map(|long| format!("--{long}"));
        let short = option.get_short().map(|short| format!("-{short}"));
        let names: Vec<String> = short
            .into_iter()
            .chain(long)
            .map(|name| format!("\\fB{}\\fR", name.replace('-', "\\-")))
            .collect();
        let value =
            if option.get_action().takes_values() { format!(" {}", value_of(option)) } else { String::new() };
        let again = if matches!(option.get_action(), ArgAction::Append) { "..." } else { "" };
        format!("[{}{value}]{again}", names.join("|"))
    }));
    words.extend(shown().filter(|argument| argument.is_positional()).map(|operand| {
        let many = operand.get_num_args().is_some_and(|count| count.max_values() > 1);
        let again = if many || matches!(operand.get_action(), ArgAction::Append) { "..." } else { "" };
        let dashes = if operand.is_last_set() { "\\-\\- " } else { "" };
        match operand.is_required_set() {
            true => format!("{dashes}{}{again}", value_of(operand)),
            false => format!("[{dashes}{}{again}]", value_of(operand)),
        }
    }));
    words.join(" ")
}

/// The name of an argument's value.
fn value_of(argument: &Arg) -> String {
    let names = argument.get_value_names().unwrap_or_default();
    let name = names.first().map_or_else(|| argument.get_id().as_str().to_uppercase(), ToString::to_string);
    let optional = argument.get_num_args().is_some_and(|count| count.min_values() == 0);
    let name = format!("\\fI{}\\fR", name.replace('-', "\\-"));
    if optional && !argument.is_positional() { format!("[{name}]") } else { name }
}

//! One file per subcommand: from parsed arguments to the device room, and back to words.
//! Nothing here parses arguments or images, and nothing here knows a transport.

mod ahead;
mod attach;
mod attach_from;
mod attach_tab;
mod bytes;
mod cat;
mod common;
mod complete;
mod completions;
mod copy;
mod copy_move;
mod copy_target;
mod cp;
mod cp_host;
mod cp_new;
mod cp_tar;
mod detach;
mod doctor;
mod events;
mod export;
mod fetched;
mod foresee;
mod generator;
mod glob;
mod inside;
mod inspect;
mod interrupts;
mod list;
mod ls;
mod luks;
mod map;
mod map_svg;
mod metrics;
mod mount;
mod mount_hints;
mod parallel;
mod refresh;
mod run;
mod run_exec;
mod run_guard;
mod serve;
mod set;
mod sink;
mod stat;
mod storage_provider;
mod store;
mod tool;
mod tree;
mod umount;
mod why;

#[cfg(feature = "fuzzing")]
pub(crate) use attach_from::is_understood;

use crate::{args::Command, failure::Failure, ui::Ui};

/// Does what was asked for; the exit status comes back when it is not a matter of failing.
pub(crate) fn dispatch(ui: &Ui, command: &Command) -> Result<u8, Failure> {
    match command {
        Command::Attach(args) => attach::run(ui, args),
        Command::Export(args) => export::run(ui, args),
        Command::Detach(args) => detach::run(ui, args),
        Command::Run(args) => run::run(ui, args),
        Command::Mount(args) => mount::run(ui, args),
        Command::Umount(args) => umount::run(ui, args),
        Command::List(args) => list::run(ui, args),
        Command::Inspect(args) => inspect::run(ui, args),
        Command::Ls(args) => ls::run(ui, args),
        Command::Cat(args) => cat::run(ui, args),
        Command::Cp(args) => cp::run(ui, args),
        Command::Copy(args) => copy::run(ui, args),
        Command::Map(args) => map::run(ui, args),
        Command::Refresh(args) => refresh::run(ui, args),
        Command::Set(args) => set::run(ui, args),
        Command::Store(args) => store::run(ui, args),
        Command::Stat(args) => stat::run(ui, args),
        Command::Metrics(args) => metrics::run(ui, args),
        Command::StorageProvider(args) => storage_provider::run(ui, args),
        Command::Top(args) => crate::top::run(ui, args),
        Command::Events(args) => events::run(ui, args),
        Command::Why(args) => why::run(ui, args),
        Command::Doctor(args) => doctor::run(ui, args),
        // Only with options of ours in front; else `main` has seen to it.
        Command::Losetup(args) => Ok(crate::losetup::run(&args.words)),
        Command::Serve(args) => serve::run(args),
        Command::Completions(args) => completions::run(args),
        Command::CompletePath(args) => complete::run(ui, args),
        Command::Man(args) => completions::man(args),
        Command::Worker(args) => serve::worker(args),
        Command::Doorman(_) => serve::doorman(),
        Command::Connector(_) => serve::connector(),
        Command::Fetcher(_) => serve::fetcher(),
        Command::Reporter(_) => serve::reporter(),
        Command::RunGuard(args) => run_guard::run(ui, args),
        Command::RunExec(args) => run_exec::run(args),
        Command::Generator(args) => generator::run(args),
        Command::UblkGive(args) => serve::give(args),
    }
}

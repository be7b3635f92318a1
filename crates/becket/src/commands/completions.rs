//! `becket completions SHELL` and the hidden `becket man DIR`: generated from the definitions in `args`.
//! Nothing is written by hand here, so nothing can disagree with the parser.

use crate::{
    args::{self, Cli},
    failure::Failure,
    losetup,
};
use clap::CommandFactory as _;
use std::{
    fs,
    io::{self, Write as _},
};

pub(crate) fn run(args: &args::Completions) -> Result<u8, Failure> {
    // Into memory first: the generator panics when its writer fails, as with `| head`.
    let mut script = Vec::new();
    let (mut command, name) =
        if args.losetup { (losetup::command(), "losetup") } else { (Cli::command(), "becket") };
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    io::stdout().lock().write_all(&script)?;
    Ok(0)
}

pub(crate) fn man(args: &args::Man) -> Result<u8, Failure> {
    let dir = args.dir.display();
    let failed = |error: io::Error| Failure::io(format!("cannot write the man pages into {dir}"), &error);
    fs::create_dir_all(&args.dir).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), &args.dir).map_err(failed)?;
    let page = clap_mangen::Man::new(losetup::command()).section("8").manual("System Administration");
    let mut text = Vec::new();
    page.render(&mut text).and_then(|()| fs::write(args.dir.join("losetup.8"), text)).map_err(failed)?;
    Ok(0)
}

//! `cargo xtask versions COMMIT`: live devices go from this build to that of another commit and back, under
//! load.
//! It is a test of becket's (`crates/becket/tests/recovery.rs`) with a second build beside the first.

use std::process::Command;

use anyhow::{Result, bail};

use crate::exec;

/// Arguments of `cargo xtask versions`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The commits or tags to build beside this checkout, one after another
    #[arg(required = true)]
    commits: Vec<String>,
}

/// Builds each commit in a worktree of its own below the target directory and runs the test with it.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let place = exec::target_dir().join("versions");
    let tree = place.join("tree");
    let git = |words: &[&str]| {
        let mut git = Command::new("git");
        git.current_dir(exec::workspace()).args(words);
        git
    };
    let path = tree.display().to_string();
    for commit in &args.commits {
        // One that an interrupted run has left.
        let _ = exec::quietly(&mut git(&["worktree", "remove", "--force", &path]));
        exec::quietly(&mut git(&["worktree", "add", "--detach", "--force", &path, commit]))?;
        let mut build = exec::cargo();
        build.current_dir(&tree).env("CARGO_TARGET_DIR", place.join("target"));
        let built = build.args(["build", "--release", "--locked", "-p", "becket"]).status();
        exec::quietly(&mut git(&["worktree", "remove", "--force", &path]))?;
        if !built?.success() {
            bail!("{commit} cannot be built");
        }
        let mut test = exec::cargo();
        test.args([
            "test",
            "--locked",
            "-p",
            "becket",
            "--test",
            "recovery",
            "between_two_builds",
            "--",
            "--nocapture",
        ]);
        let code = test.env("BECKET_TEST_OTHER", place.join("target/release/becket")).status()?;
        if !code.success() {
            eprintln!("xtask: devices do not move between {commit} and this checkout");
            return Ok(1);
        }
        println!("devices moved between {commit} and this checkout, both ways, twice");
    }
    Ok(0)
}

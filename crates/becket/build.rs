//! Links the unwinder into the program where the C compiler has it as an archive (`libgcc_eh.a`, a part of GCC).
//!
//! Rust's standard library asks for `libgcc_s.so`, which each start of the program would have to find, map and bind: of the
//! start of a command that does little, a tenth. A linker takes a name from the first who offers it (seen with lld and GNU ld), so the
//! archive is offered before the shared library. Where there is no archive nothing changes.

use std::env;
use std::path::Path;
use std::process::Command;

const ARCHIVE: &str = "libgcc_eh.a";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    let native = env::var_os("HOST") == env::var_os("TARGET");
    // Sanitizers and fuzzers bring runtimes of their own, which unwind by the shared one.
    let instrumented =
        ["CARGO_CFG_SANITIZED", "CARGO_CFG_FUZZING"].iter().any(|name| env::var_os(name).is_some());
    if !native || instrumented || !is("CARGO_CFG_TARGET_OS", "linux") || !is("CARGO_CFG_TARGET_ENV", "gnu") {
        return;
    }
    let Ok(answer) = Command::new("cc").arg(format!("-print-file-name={ARCHIVE}")).output() else { return };
    let answer = String::from_utf8_lossy(&answer.stdout);
    let archive = Path::new(answer.trim());
    // A compiler that has none answers with the bare name.
    if let Some(dir) = archive.parent().filter(|_| archive.is_absolute() && archive.exists()) {
        println!("cargo::rustc-link-search=native={}", dir.display());
        println!("cargo::rustc-link-lib=static:-bundle=gcc_eh");
    }
}

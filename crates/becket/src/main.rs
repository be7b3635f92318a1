//! The command `becket`, which is all in the library beside it.
//! Nothing is here, so that tests and fuzzers reach everything.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    becket::main()
}

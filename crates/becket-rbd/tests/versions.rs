//! The program as becket starts it, without a cluster.
//! That this is a test of the program also has cargo build it, for the tests of becket that use it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

use std::process::Command;

use becket_image::link::helper::PROTOCOL;

#[test]
fn a_becket_of_another_version_is_refused() {
    let program = env!("CARGO_BIN_EXE_becket-rbd");
    let said = Command::new(program).args(["client", "0", "read", "rbd:rbd/x"]).output().unwrap();
    assert!(!said.status.success());
    let said = String::from_utf8(said.stderr).unwrap();
    assert!(said.contains(&format!("speaks version {PROTOCOL}, and becket version 0")), "{said}");
    let alone = Command::new(program).output().unwrap();
    assert!(String::from_utf8(alone.stderr).unwrap().contains("becket attach rbd:"));
}

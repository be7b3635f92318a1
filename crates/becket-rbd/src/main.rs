//! `becket-rbd`: images of Ceph clusters, for becket. It loads librbd when it starts, so it is built without
//! it, and becket itself needs neither.
//! It is started by becket alone, serves one image, and ends with those who use it.
//!
//! Uses go down this list: `device` and `client` for the two ways in which it is started, `serve` for
//! connections, `lock` for who may write, `cluster` for an open image, `library` for librbd.

mod client;
mod cluster;
mod device;
mod library;
mod lock;
mod serve;

use std::process::ExitCode;

use becket_image::link::helper::{CLIENT, PROTOCOL};

fn main() -> ExitCode {
    let words: Vec<String> =
        std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["helper", PROTOCOL] => ended(device::main()),
        [CLIENT, PROTOCOL, way, name] => ended(way.parse().and_then(|way| client::main(name, way))),
        ["helper" | CLIENT, other, ..] if *other != PROTOCOL => {
            // What has started it reads a greeting or a report, and shows neither of another version.
            client::refuse_version(other);
            eprintln!("becket-rbd speaks version {PROTOCOL}, and becket version {other}");
            ExitCode::FAILURE
        }
        _ => {
            eprintln!("becket-rbd is started by becket: becket attach rbd:POOL/IMAGE");
            ExitCode::FAILURE
        }
    }
}

fn ended(outcome: Result<(), String>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("becket-rbd: {why}");
            ExitCode::FAILURE
        }
    }
}

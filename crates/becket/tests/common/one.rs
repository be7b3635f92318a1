//! The only device of a place, its processes, and numbered blocks for it.

use std::{fmt::Display, process::Command, time::Duration};

use becket_testkit::{Scratch, tool, wait_until};
use serde_json::Value;

use super::alive;

pub(crate) fn only(place: &Scratch) -> Value {
    place.devices().remove(0)
}

/// Kills a process, and waits until it is dead.
pub(crate) fn kill(pid: impl Display) {
    let pid = pid.to_string();
    tool(Command::new("kill").args(["-KILL", &pid]));
    let pid = pid.parse().unwrap();
    assert!(wait_until(Duration::from_secs(20), || !alive(pid)));
}

/// A block that is aligned for direct I/O, filled with a number.
#[repr(align(4096))]
pub(crate) struct Block(pub(crate) [u8; 4096]);

impl Block {
    pub(crate) fn of(number: u64) -> Box<Self> {
        let mut block = Box::new(Self([0; 4096]));
        block.0.chunks_exact_mut(8).for_each(|place| place.copy_from_slice(&number.to_le_bytes()));
        block
    }
}

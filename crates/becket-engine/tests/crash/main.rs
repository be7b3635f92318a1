//! What a power cut may leave: after each event of a run, each possible state of the disk holds what was
//! promised.
//!
//! A recorder between becket and its file keeps every write, length and sync, and the port every request's
//! beginning and end, in one order ([`record`]). A write is *safe* from the end of a sync that began after
//! the write had ended, or from its own end when it was durable (FUA). What is not safe may be on the disk or
//! not, sector by sector, so states are torn and reordered ([`file`]); only among writes to one sector an
//! earlier one is never lost when a later one is kept, because they went through one page. A write was
//! *promised* once it was acknowledged as durable, or once a flush was acknowledged that was submitted after
//! the write's acknowledgement ([`client`]).
//!
//! BECKET_CRASH_RUNS says how many random runs are made of each kind, for more than CI has.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod client;
mod counts;
mod file;
mod qcow2;
mod raw;
mod record;
#[path = "../script/mod.rs"]
mod script;

use client::Rights;
use file::{Keep, Recorded, State};
use record::Event;

const SECTOR: usize = 512;
const LANES: u64 = 4;
/// Bytes of the image that one lane has to itself.
const LANE: u64 = 16 << 10;
/// Bytes that are written to: all lanes.
const LEN: usize = (LANES * LANE) as usize;

/// How many runs a property is tried with: few in a guest, where looking at states is slow and the kernel
/// plays no part.
fn runs(usually: u32) -> u32 {
    let asked = std::env::var("BECKET_CRASH_RUNS")
        .ok()
        .map(|text| text.parse().expect("BECKET_CRASH_RUNS is a number"));
    asked.unwrap_or(if becket_testkit::in_a_guest() { usually.div_ceil(8) } else { usually })
}

/// Looks at states that a power cut could leave at any time of a run on a file that began as `before`. `read`
/// says what lies in the lanes then, or what is wrong with the file. Returns the first loss, if there is one.
fn losses(
    before: &[u8],
    events: &[Event],
    seed: u64,
    mut read: impl FnMut(&State) -> Result<Vec<u8>, String>,
) -> Option<String> {
    let mut file = Recorded::new(before);
    let lanes = read(&file.state(Keep::All, &mut script::Random(seed))).expect("it was whole before");
    let mut rights = Rights::new(lanes);
    let mut random = script::Random(seed);
    for (number, event) in events.iter().enumerate() {
        file.take(event);
        let promises = rights.take(event);
        // Other events leave no new states, and promise nothing.
        if !promises && !matches!(event, Event::Writes(..) | Event::Lengthens(..)) {
            continue;
        }
        for keep in [Keep::Safe, Keep::All, Keep::Last, Keep::AllButOne, Keep::AllButOne, Keep::Chance] {
            let state = file.state(keep, &mut random);
            let lost = match read(&state) {
                Ok(lanes) => rights.missing(&lanes),
                Err(broken) => Some(broken),
            };
            if let Some(lost) = lost {
                return Some(format!("after event {number}, {}, keeping {keep:?}: {lost}", event.brief()));
            }
        }
    }
    None
}

//! The system's losetup and becket's take the same steps, each with its own devices, and must not differ.
//! Never lets a difference pass that docs/losetup-compat.md does not name.

use crate::sequence::{self, SLOTS, Step, Word};
use crate::side::{EMPTY, Seen, Side, WARNING, squeezed};
use crate::{Numbers, links};
use becket_testkit::{require_loop, require_tools};
use std::env;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Sequences that one run takes; a machine that emulates its processor takes fewer.
const SEQUENCES: u64 = 500;
/// Another number of them.
const COUNT: &str = "BECKET_LOSETUP_SEQUENCES";
/// Sequences side by side.
const LANES: usize = 4;
/// The first seed, and how many, instead: to see one again.
const SEED: &str = "BECKET_LOSETUP_SEED";

#[test]
fn no_sequence_tells_the_two_apart() {
    if !require_loop("losetup_differential") || !require_tools("losetup_differential", &["losetup"]) {
        return;
    }
    // Who asks for a free device, and there are few, may be given one of ours between two steps.
    let _alone = crate::DEVICES.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let place = crate::scratch();
    let tools = links(&place);
    let chosen =
        env::var(SEED).ok().map(|text| text.parse::<u64>().expect("BECKET_LOSETUP_SEED is a number"));
    let count = if chosen.is_some() {
        1
    } else if becket_testkit::via() == "auto" {
        env::var(COUNT).map_or(SEQUENCES, |text| text.parse().expect("BECKET_LOSETUP_SEQUENCES is a number"))
    } else {
        SEQUENCES / 10
    };
    let first = chosen.unwrap_or(1);
    println!("seeds {first} to {}; {SEED}=N runs one", first + count - 1);
    let numbers = Numbers::take(LANES * 2 * SLOTS);
    let next = AtomicU64::new(first);
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for lane in 0..LANES {
            let (tools, next, failures, place) = (&tools, &next, &failures, &place);
            let own = &numbers.0[lane * 2 * SLOTS..][..2 * SLOTS];
            scope.spawn(move || {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    // Names of the same length: lists are aligned by them.
                    let mut sides = [0, 1].map(|side| {
                        let dir = place.path(&format!("{seed:06}{}", ["s", "b"][side]));
                        Side::new(&tools[side], &dir, [own[side * SLOTS], own[side * SLOTS + 1]])
                    });
                    let outcome = compare(seed, &mut sides);
                    sides.iter_mut().for_each(Side::reset);
                    if let Err(reported) = outcome {
                        failures.lock().expect("no lane panics").push(reported);
                    }
                }
            });
        }
    });
    let left = crate::bound_below(&place.path("run").with_file_name(""));
    let failures = failures.into_inner().expect("no lane panics");
    println!("{} of {count} sequences equal", count - failures.len() as u64);
    assert_eq!(left, Vec::<std::path::PathBuf>::new(), "devices are left");
    assert!(
        failures.is_empty(),
        "{} sequences differ:\n{}",
        failures.len(),
        failures[..failures.len().min(12)].join("\n")
    );
}

fn compare(seed: u64, [system, becket]: &mut [Side; 2]) -> Result<(), String> {
    let mut before = Vec::new();
    for step in sequence::of(seed) {
        let mut seen = [system.step(&step), becket.step(&step)];
        // A program that lists all devices has ours open for a moment, and a detached one goes after that.
        becket_testkit::wait_until(Duration::from_secs(5), || match &mut seen {
            [Some(one), Some(other)] if one.kernel != other.kernel => {
                (one.kernel, other.kernel) = (system.kernel(), becket.kernel());
                false
            }
            _ => true,
        });
        let [system, becket] = &seen;
        if takes_the_same(system.as_ref(), becket.as_ref()) {
            return Ok(());
        }
        if !same(&step, system.as_ref(), becket.as_ref()) {
            let line = line(&step);
            return Err(format!(
                "seed {seed}, after {before:?}: {line}\n  system {system:#?}\n  becket {becket:#?}"
            ));
        }
        before.push(line(&step));
    }
    Ok(())
}

fn same(step: &Step, system: Option<&Seen>, becket: Option<&Seen>) -> bool {
    let (Some(system), Some(becket)) = (system, becket) else { return system.is_none() && becket.is_none() };
    let found = matches!(step, Step::Run { words, .. } if words.contains(&Word::Found))
        || system.out.contains("FOUND");
    let out = if found { squeezed(&system.out) == squeezed(&becket.out) } else { system.out == becket.out };
    // The system's losetup counts from the end backwards there.
    let past = becket.err.contains(EMPTY);
    let warnings = |err: &str| {
        err.lines()
            .filter(|line| !past || ![WARNING, EMPTY].contains(line))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    out && warnings(&system.err) == warnings(&becket.err)
        && (system.code, &system.kernel) == (becket.code, &becket.kernel)
}

/// The one difference that a line alone does not show: of a device with the same bytes and one with some of
/// them, becket takes the first and the system's losetup whichever it comes to. Nothing can be compared after
/// it.
fn takes_the_same(system: Option<&Seen>, becket: Option<&Seen>) -> bool {
    let (Some(system), Some(becket)) = (system, becket) else { return false };
    let known = "overlapping loop device exists";
    let read_only = "overlapping read-only loop device exists";
    system.err.contains(known)
        && !becket.err.contains(known)
        && (becket.code == Some(0) || becket.err.contains(read_only))
}

fn line(step: &Step) -> String {
    match step {
        Step::Run { words, .. } => {
            let reported = words.iter().map(|word| match word {
                Word::Text(text) => text.clone(),
                other => format!("{other:?}"),
            });
            reported.collect::<Vec<_>>().join(" ")
        }
        other => format!("{other:?}"),
    }
}

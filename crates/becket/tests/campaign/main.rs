//! Everything at once: devices under loads while their servers are killed, stopped, starved and replaced.
//!
//! CI does a part of it a few times. `cargo xtask campaign` does it for as long as BECKET_CAMPAIGN says, and
//! stores what the test writes into the file named by BECKET_CAMPAIGN_REPORT; `cargo xtask soak` is [`soak`],
//! by BECKET_SOAK.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

#[path = "../common/mod.rs"]
mod common;
mod course;
mod held;
mod script;
mod soak;

use std::{fs, sync::atomic::Ordering, time::Duration};

use becket_testkit::{image, in_a_guest, require_device, require_fuse, require_tools, skip, wait_until};
use common::disturb::{PATIENCE, WORKER, await_device};
use common::load::{SIZE, Seen, under_load};
use common::scratch;
use course::{Course, RAW};
use held::{held, no_leak, processes};
use script::{Script, TRANSACTIONS};
use serde_json::{Value, json};

#[test]
fn a_campaign_is_not_noticed() {
    let name = "campaign::a_campaign_is_not_noticed";
    if require_device(name) && require_tools(name, &script::TOOLS) {
        campaign(name, &becket_testkit::via(), 10);
    }
}

#[test]
fn a_campaign_over_fuse_is_not_noticed() {
    let name = "campaign::a_campaign_over_fuse_is_not_noticed";
    if require_fuse(name) && require_tools(name, &script::TOOLS) {
        campaign(name, "fuse", 4);
    }
}

/// A number that the environment tells.
fn reported(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

fn kernel() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim().to_owned()
}

/// Says what came of it, and keeps it where that is wanted.
fn report(word: &str, report: &Value) {
    println!("{word}: {report}");
    if let Some(file) = std::env::var_os("BECKET_CAMPAIGN_REPORT") {
        fs::write(file, report.to_string()).unwrap();
    }
}

fn campaign(name: &str, via: &str, usual: usize) {
    let reported = reported("BECKET_CAMPAIGN");
    if in_a_guest() && reported.is_none() {
        skip(name, "cargo xtask campaign runs it");
        return;
    }
    let rounds = reported.map_or(usual, |rounds| rounds as usize);
    let place = scratch();
    let attach = |name: &str, size: u64| {
        image::sparse(&place.path(name), size);
        place.ok(["attach", "--via", via, "--name", name, name]);
        place.links().join(name)
    };
    let raw = attach(RAW, SIZE as u64);
    if place.devices()[0][WORKER].is_null() {
        skip(name, "this transport has no server");
        return;
    }
    let mut scripts = script::start(&place, attach);
    let mut course = Course::new(0);
    let seen = Seen::default();
    let sizes = || held(&await_device(&place, RAW, |_| true));
    let mut first = None;
    let ((), model) = under_load(&raw, &seen, || {
        for round in 0..rounds {
            std::thread::sleep(course.moment());
            course.next(&place, &seen, &mut scripts);
            // After one of each: what is once more there after each is a leak.
            if round + 1 == course.kinds() {
                first = Some(sizes());
            }
        }
    });
    let [clones, turns, fio] = scripts.each_mut().map(Script::end);
    // Leaks of many faults would add up to far more than a single recovery's resources, which may be in use
    // now.
    let mut last = sizes();
    let settled = wait_until(Duration::from_secs(20), || {
        last = sizes();
        first.as_ref().is_none_or(|first| no_leak(first, &last))
    });
    seen.compare(&fs::read(&raw).unwrap(), &model, 0);
    place.ok(["detach", "--all"]);
    seen.compare(&fs::read(place.path(RAW)).unwrap(), &model, 0);
    let devices = place.devices().len();
    wait_until(PATIENCE, || processes(&place.runtime()).is_empty());
    let processes = processes(&place.runtime()).len();
    let [pause, faults] = course.pauses();
    report(
        "campaign",
        &json!({
            "via": via,
            "kernel": kernel(),
            "rounds": rounds,
            "operations": seen.operations.load(Ordering::Relaxed),
            "errors": seen.errors.load(Ordering::Relaxed),
            "wrong_bytes": seen.wrong_bytes.load(Ordering::Relaxed),
            "clones": clones,
            "transactions": TRANSACTIONS * turns,
            "fio_runs": fio,
            "devices_left": devices,
            "processes_left": processes,
            "descriptors_threads_kib": { "after_one_of_each": first, "at_the_end": last },
            "pause": pause,
            "faults": faults,
        }),
    );
    assert!(seen.nothing_wrong(), "{:?}", seen.first.lock().unwrap());
    assert_eq!((devices, processes), (0, 0), "left behind");
    assert!(settled, "{first:?} became {last:?}");
}

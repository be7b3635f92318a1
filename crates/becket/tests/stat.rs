//! What `becket stat` counts is what was done.
//! Everything here runs over whichever transport is tested.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Scratch, image, require_device, require_loop, wait_until};
use common::{scratch, text};
use serde_json::{Value, json};
use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    thread,
    time::Duration,
};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 100;

/// What the device has done once it rests: programs that look at new disks have done so.
fn at_rest(place: &Scratch, device: &Path) -> Value {
    let ask = || place.json(["stat", device.to_str().unwrap()])["devices"][0].clone();
    let mut last = ask();
    let rests = wait_until(Duration::from_secs(30), || {
        thread::sleep(Duration::from_millis(200));
        let before = std::mem::replace(&mut last, ask());
        before == last && last["in_flight"] == json!(0)
    });
    assert!(rests, "{last:#}");
    last
}

/// Calls `step` with an aligned block, for a file that was opened past the page cache.
fn direct(device: &Path, mut step: impl FnMut(&mut fs::File, &mut [u8])) {
    let flags = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
    let mut file = fs::OpenOptions::new().read(true).write(true).custom_flags(flags).open(device).unwrap();
    let mut memory = vec![0x5a; 2 * BLOCK];
    let from = memory.as_ptr().align_offset(BLOCK);
    for _ in 0..BLOCKS {
        step(&mut file, &mut memory[from..from + BLOCK]);
    }
}

#[test]
fn every_block_is_counted() {
    if !require_device("stat::every_block_is_counted") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 1 << 20, 1);
    let device = place.attach(&image, &[]);
    let more = |before: &Value, after: &Value, kind: &str, what: &str| {
        after[kind][what].as_u64().unwrap() - before[kind][what].as_u64().unwrap()
    };

    let before = at_rest(&place, &device);
    assert_eq!(text(&before, "device"), device.to_str().unwrap());
    direct(&device, |file, block| file.read_exact(block).unwrap());
    let read = at_rest(&place, &device);
    let changed = ["read", "write"].map(|kind| more(&before, &read, kind, "operations"));
    assert_eq!(changed, [BLOCKS, 0], "{before:#} {read:#}");
    assert_eq!(more(&before, &read, "read", "bytes"), BLOCKS * BLOCK as u64);

    direct(&device, |file, block| file.write_all(block).unwrap());
    let written = at_rest(&place, &device);
    assert_eq!(more(&read, &written, "write", "operations"), BLOCKS);
    assert_eq!(more(&read, &written, "write", "bytes"), BLOCKS * BLOCK as u64);

    let ours = text(&written, "transport") == "ublk";
    for kind in ["read", "write"] {
        let number = |what: &str| written[kind][what].as_u64();
        assert!(number("mean_ns").is_some(), "{written:#}");
        if ours {
            let order = ["p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns"].map(|what| number(what).unwrap());
            assert!(order.is_sorted() && order[4] > 0, "{order:?}");
            assert_eq!(number("errors"), Some(0));
        } else {
            assert_eq!((number("p99_ns"), number("errors")), (None, None), "nobody measures these");
            assert!(text(&written, "note").contains("the kernel's loop driver keeps no latencies"));
        }
    }

    let table = place.ok(["stat", "a.img"]);
    let line = |first: &str| -> Vec<&str> {
        let words = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        words.into_iter().find(|words| words.first() == Some(&first)).unwrap_or_else(|| panic!("{table}"))
    };
    let head = ["OPS", "BYTES", "ERRORS", "MEAN", "P50", "P90", "P99", "P99.9", "MAX", "WINDOW"];
    assert_eq!(line("KIND")[1..], head);
    assert_eq!(line("read")[1], written["read"]["operations"].to_string());
    assert_eq!(line("read")[5] == "-", !ours, "{table}");
}

/// The kernel goes on counting where it stopped for the image before.
#[test]
fn what_the_image_before_did_is_not_counted() {
    if !require_loop("stat::what_the_image_before_did_is_not_counted") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 1 << 20, 1);
    // Others may take the node in between.
    for _ in 0..20 {
        let first = place.attach(&image, &["--via", "loop"]);
        direct(&first, |file, block| file.read_exact(block).unwrap());
        let before = at_rest(&place, &first);
        place.ok(["detach", first.to_str().unwrap()]);
        let second = place.attach(&image, &["--via", "loop"]);
        let after = at_rest(&place, &second);
        if first == second {
            let reads = |stat: &Value| stat["read"]["operations"].as_u64().unwrap();
            let (one, two) = (reads(&before), reads(&after));
            assert!(one >= BLOCKS && two <= one - BLOCKS, "{one} reads, and {two} after the next attach");
            assert!(place.devices()[0]["counted_before"]["read"]["operations"].as_u64().unwrap() >= one);
            direct(&second, |file, block| file.read_exact(block).unwrap());
            assert_eq!(reads(&at_rest(&place, &second)), two + BLOCKS);
            return;
        }
        place.ok(["detach", second.to_str().unwrap()]);
    }
    panic!("another node each time");
}

#[test]
fn one_that_is_not_there_hides_no_other() {
    if !require_device("stat::one_that_is_not_there_hides_no_other") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 64 << 10, 1);
    place.attach(&image, &["--name", "one"]);
    let ran = place.run(["stat", "--json", "nothing", "one"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_eq!(text(&ran.json()["devices"][0], "name"), "one");
    assert_eq!(text(&ran.json()["errors"][0], "target"), "nothing");
}

#[test]
fn top_shows_the_rates_of_an_interval() {
    if !require_device("stat::top_shows_the_rates_of_an_interval") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 1 << 20, 1);
    let device = place.attach(&image, &["--name", "busy"]);
    at_rest(&place, &device);
    let reader = thread::spawn(move || {
        for _ in 0..40 {
            direct(&device, |file, block| file.read_exact(block).unwrap());
            thread::sleep(Duration::from_millis(50));
        }
    });
    let words = ["top", "--once", "--interval", "1s", "busy"];
    let top = place.json(words);
    let (shown, seconds) = (&top["devices"][0], top["interval_s"].as_f64().unwrap());
    assert!((1.0..1.9).contains(&seconds), "{top:#}");
    let rate = |what: &str| shown["rates"]["read"][what].as_f64().unwrap();
    // 100 reads each twentieth of a second at the most, and some in each interval.
    assert!((1.0..=2000.0).contains(&rate("operations_per_s")), "{top:#}");
    assert!((rate("bytes_per_s") / rate("operations_per_s") - BLOCK as f64).abs() < 1.0, "{top:#}");
    assert_eq!((text(shown, "name"), text(shown, "state")), ("busy", "live"));
    assert_eq!(place.json(["top", "--once", "--interval", "50ms", "no-such"])["devices"], json!([]));
    let table = place.ok(words);
    assert!(table.lines().any(|line| line.starts_with("busy ")), "{table}");
    reader.join().unwrap();
}

/// With a terminal of its own it takes keys one by one, and leaves the terminal as it was.
#[test]
fn top_quits_by_a_key_and_leaves_the_terminal_as_it_was() {
    let place = scratch();
    if !becket_testkit::require_tools(
        "stat::top_quits_by_a_key_and_leaves_the_terminal_as_it_was",
        &["script"],
    ) {
        return;
    }
    let becket = place.becket().get_program().to_owned();
    let mut script = std::process::Command::new("script");
    let command = format!("stty -a; {} top no-such; echo exit $?; stty -a", becket.to_str().unwrap());
    place.prepare(&mut script);
    script.args(["-qec", &command, "/dev/null"]).env("TERM", "xterm").stdin(std::process::Stdio::piped());
    script.stdout(std::process::Stdio::piped());
    let mut ran = script.spawn().unwrap();
    // A key is pressed when what comes before it is shown: a slow machine takes its time.
    let (mut out, mut stdout) = (Vec::new(), ran.stdout.take().unwrap());
    for (awaited, key) in [("0 devices", b"h"), ("select a device", b"q")] {
        let mut piece = [0; 4096];
        while !String::from_utf8_lossy(&out).contains(awaited) {
            let len = stdout.read(&mut piece).unwrap();
            assert!(len > 0, "{awaited}: {:?}", String::from_utf8_lossy(&out));
            out.extend_from_slice(&piece[..len]);
        }
        ran.stdin.as_mut().unwrap().write_all(key).unwrap();
    }
    stdout.read_to_end(&mut out).unwrap();
    assert!(ran.wait().unwrap().success());
    let out = String::from_utf8_lossy(&out).replace('\r', "");
    let (before, rest) = out.split_once("\x1b[?1049h").unwrap_or_else(|| panic!("{out:?}"));
    let (shown, after) = rest.split_once("\x1b[?1049l").unwrap_or_else(|| panic!("{out:?}"));
    assert!(shown.contains("0 devices") && shown.contains("select a device"), "{shown:?}");
    assert_eq!(after.trim_start().strip_prefix("exit 0\n").map(str::trim), Some(before.trim()), "{out:?}");
}

#[test]
fn metrics_are_the_counters_of_stat() {
    if !require_device("stat::metrics_are_the_counters_of_stat") {
        return;
    }
    let place = scratch();
    let image = place.path("odd\"name.img");
    image::random(&image, 1 << 20, 1);
    let device = place.attach(&image, &["--name", "measured"]);
    direct(&device, |file, block| file.read_exact(block).unwrap());
    let stat = at_rest(&place, &device);
    let text = place.ok(["metrics"]);
    let value = |metric: &str| -> f64 {
        let start = format!("becket_device_{metric}{{name=\"measured\"");
        let line =
            text.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{metric}: {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(value("reads_completed_total"), stat["read"]["operations"].as_f64().unwrap());
    assert_eq!(value("read_bytes_total"), stat["read"]["bytes"].as_f64().unwrap());
    assert_eq!((value("live"), value("info"), value("size_bytes")), (1.0, 1.0, f64::from(1 << 20)));
    assert!(text.contains("odd\\\"name.img\""), "{text}");
    let file = place.path("becket.prom");
    assert_eq!(place.ok(["metrics", "--textfile", file.to_str().unwrap()]), "");
    let lines = |text: &str| text.lines().filter(|line| line.starts_with('#')).count();
    assert_eq!(lines(&fs::read_to_string(&file).unwrap()), lines(&text));
}

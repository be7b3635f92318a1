//! `becket events` tells what happens to served devices, across the ends of servers, and holds up nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{
    Scratch, image,
    origin::{Origin, Reply},
    require_fuse, require_tools, wait_until,
};
use common::one::{kill, only};
use common::{alive, scratch, text, web::run};
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

/// A `becket events --json` that runs.
struct Listener {
    child: Child,
    events: Receiver<Value>,
}

impl Listener {
    fn new(place: &Scratch, words: &[&str]) -> Self {
        let mut command = place.becket();
        command.args(["events", "--json"]).args(words).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (sender, events) = channel();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = sender.send(serde_json::from_str(&line).unwrap());
            }
        });
        Self { child, events }
    }

    /// The next event of that word; what comes before it is passed over.
    #[track_caller]
    fn next(&self, word: &str) -> Value {
        let mut seen = Vec::new();
        loop {
            let Ok(event) = self.events.recv_timeout(Duration::from_secs(20)) else {
                panic!("no {word} after {seen:#?}")
            };
            if event["event"] == word {
                return event;
            }
            seen.push(event);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn fuse_events_are_reported_as_they_happen_and_across_servers() {
    let name = "events::fuse_events_are_reported_as_they_happen_and_across_servers";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 2 << 20, 1);
    // Before there is a server: it starts none, and misses nothing of the first one.
    let listener = Listener::new(&place, &[]);
    thread::sleep(Duration::from_millis(400));
    assert!(!place.runtime().join("control").exists(), "it starts no server");
    place.ok(["attach", "--via", "fuse", "--name", "a", "a.img"]);
    let attached = listener.next("attached");
    assert_eq!((text(&attached, "device"), text(&attached, "level")), ("a", "info"));
    assert!(text(&attached, "message").contains("a.img"), "{attached:#}");
    assert!(text(&attached, "at").starts_with("20") && text(&attached, "at").ends_with('Z'));

    place.ok(["set", "a", "--read-only", "on"]);
    assert!(text(&listener.next("changed"), "message").contains("refuses writes"));
    place.ok(["set", "a", "--size-limit", "1M"]);
    assert_eq!(text(&listener.next("resized"), "message"), "had 2097152 bytes and has 1048576 now");

    kill(&only(&place)["worker_pid"]);
    let died = listener.next("worker_died");
    assert_eq!((text(&died, "device"), text(&died, "level")), ("a", "warn"));
    let recovered = listener.next("recovered");
    assert!(recovered["number"].as_u64() > died["number"].as_u64());

    // The next server tells from its first event on.
    let first = only(&place)["server_pid"].clone();
    kill(&first);
    assert_eq!(text(&listener.next("taken_over"), "device"), "a");
    let live = || text(&only(&place), "state") == "live" && only(&place)["server_pid"] != first;
    assert!(wait_until(Duration::from_secs(20), live), "{:#}", only(&place));

    let failed = place.run(["attach", "--via", "fuse", "--name", "a", "a.img", "--shared"]);
    assert_eq!(failed.code, 1, "{failed:?}");
    assert!(text(&listener.next("attach_failed"), "message").contains("in use"));

    let server = u32::try_from(only(&place)["server_pid"].as_u64().unwrap()).unwrap();
    place.ok(["detach", "a"]);
    assert_eq!(text(&listener.next("detached"), "device"), "a");
    assert!(wait_until(Duration::from_secs(20), || !alive(server)), "a listener keeps no server from ending");

    place.ok(["attach", "--via", "fuse", "--name", "b", "a.img"]);
    assert_eq!(text(&listener.next("attached"), "device"), "b");

    // What is remembered, by one call, of one device.
    place.ok(["attach", "--via", "fuse", "--name", "c", "--shared", "-r", "a.img"]);
    let lines = place.ok(["events", "--no-follow", "b"]);
    assert_eq!(lines.lines().count(), 1, "{lines}");
    assert!(lines.contains("Z attached b: attached as "), "{lines}");
    assert_eq!(place.ok(["events", "--no-follow", "none"]), "");
    let late = Listener::new(&place, &["--recent"]);
    assert_eq!(text(&late.next("attached"), "device"), "b");
    assert_eq!(text(&late.next("attached"), "device"), "c");
    place.ok(["detach", "--all"]);
    late.next("detached");
}

#[test]
fn fuse_events_say_that_a_server_of_an_image_is_away_or_has_another() {
    let name = "events::fuse_events_say_that_a_server_of_an_image_is_away_or_has_another";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("far"), 16 << 20, 3);
    let origin = Origin::start(fs::read(place.path("far")).unwrap());
    let words =
        ["attach", "--via", "fuse", "--partitions", "off", "--origin-timeout", "60s", "--name", "far"];
    let listener = Listener::new(&place, &[]);
    let ran = run(&place, &[&words[..], &[&origin.url("/d.img")]].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    let disk = ran.out.trim().to_owned();
    let read = |skip: &str| {
        let mut dd = Command::new("dd");
        dd.args([
            &format!("if={disk}"),
            "of=/dev/null",
            "bs=4k",
            "count=1",
            "iflag=direct",
            &format!("skip={skip}"),
        ]);
        dd.stderr(Stdio::null());
        dd
    };
    origin.trick(|_, _| Reply::status(503));
    let mut waits = read("2000").spawn().unwrap();
    let away = listener.next("origin_away");
    assert_eq!((text(&away, "device"), text(&away, "level")), ("far", "warn"));
    origin.honest();
    listener.next("origin_back");
    assert!(waits.wait().unwrap().success());
    origin.replace(vec![9; 16 << 20], "\"two\"");
    assert!(!read("3000").status().unwrap().success());
    assert_eq!(text(&listener.next("source_changed"), "device"), "far");
    place.ok(["detach", "far"]);
}

/// A program that asks and does not read.
#[test]
fn fuse_a_listener_that_does_not_read_holds_up_nothing() {
    let name = "events::fuse_a_listener_that_does_not_read_holds_up_nothing";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    place.ok(["attach", "--via", "fuse", "--name", "a", "a.img"]);
    let call = |more: bool, after: u64| {
        let mut stream = UnixStream::connect(place.runtime().join("control")).unwrap();
        let parameters = json!({ "after": after });
        let call = json!({ "method": "org.becket.Becket1.Events", "parameters": parameters, "more": more });
        stream.write_all(format!("{call}\0").as_bytes()).unwrap();
        stream
    };
    let deaf: Vec<UnixStream> = (0..64).map(|_| call(true, 0)).collect();
    // Each has had its first answer, so that all are counted.
    thread::sleep(Duration::from_millis(500));
    let refused = reply(&mut call(true, 0));
    assert_eq!(refused["error"], "org.becket.Becket1.Failed", "{refused:#}");
    let began = Instant::now();
    for switch in ["on", "off"].repeat(10) {
        place.ok(["set", "a", "--read-only", switch]);
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let past = reply(&mut call(false, 0));
    let events = past["parameters"]["events"].as_array().unwrap();
    assert!(events.iter().filter(|event| event["event"] == "changed").count() == 20, "{past:#}");
    assert!(past.get("continues").is_none(), "one reply to a call without `more`");
    let none = reply(&mut call(false, 1 << 60));
    assert_eq!((&none["parameters"]["events"], &none["parameters"]["lost"]), (&json!([]), &json!(0)));
    drop(deaf);
    let again = || reply(&mut call(true, 0))["continues"] == true;
    assert!(wait_until(Duration::from_secs(20), again), "the places of those that are gone are free");
    place.ok(["detach", "a"]);
}

/// The first reply on a connection.
fn reply(stream: &mut UnixStream) -> Value {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut bytes = Vec::new();
    let mut byte = [0];
    while stream.read_exact(&mut byte).is_ok() && byte != [0] {
        bytes.push(byte[0]);
    }
    serde_json::from_slice(&bytes).unwrap()
}

#[test]
fn events_end_with_their_reader() {
    let name = "events::events_end_with_their_reader";
    if !require_tools(name, &["sh", "timeout"]) {
        return;
    }
    let place = scratch();
    assert_eq!(place.ok(["events", "--no-follow"]), "", "no server, no events");
    let mut command = Command::new("sh");
    place.prepare(&mut command);
    command.args(["-c", "timeout 20 \"$BECKET\" events | :; echo ${PIPESTATUS:-ended}"]);
    let began = Instant::now();
    let ran = place.finish(&mut command);
    assert!(began.elapsed() < Duration::from_secs(15), "{ran:?}");
}

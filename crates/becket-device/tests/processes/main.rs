//! Real processes and real loop devices: the supervisor, its worker, and commands that are killed.
//!
//! The program is its own supervisor and worker (`/proc/self/exe serve`), so it has a harness of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod attacks;
mod deaths;
mod devices;
mod origin;
mod place;
mod server;

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use becket_device::{AttachOptions, DetachOptions, ServeOptions, Via};

use attacks::*;
use deaths::*;
use devices::*;
use origin::*;
use place::Place;
use server::*;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["serve", "--ready-fd", number] => {
            serve(ServeOptions { ready_fd: Some(inherited(number)), ..ServeOptions::default() })
        }
        ["serve", "--after-fd", number] => {
            serve(ServeOptions { after_fd: Some(inherited(number)), ..ServeOptions::default() })
        }
        ["serve", "--takeover"] => {
            serve(ServeOptions { stay: true, takeover: true, ..ServeOptions::default() })
        }
        ["serve"] => serve(ServeOptions { stay: true, ..ServeOptions::default() }),
        ["worker"] => becket_device::worker_main(None).map_err(|error| error.to_string()),
        ["hostile", image, dir] => Err(hostile(image, dir).to_string()),
        ["attach", image, more @ ..] => attach(image, more),
        ["lease", image, via] => lease(image, via),
        ["detach", target, more @ ..] => detach(target, more),
        ["refresh", target] => show(becket_device::refresh(target)),
        ["list"] => show(becket_device::list()),
        ["status"] => show(becket_device::server_status()),
        ["talk", socket, call] => talk(Path::new(socket), call).map(|answer| println!("{answer}")),
        ["storm", socket, connections] => {
            storm(Path::new(socket), connections.parse().unwrap());
            Ok(())
        }
        ["eavesdrop", socket] => {
            eavesdrop(Path::new(socket));
            Ok(())
        }
        ["--list", ..] => {
            TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
            Ok(())
        }
        filters => return run_tests(filters),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

type Test = (&'static str, fn(&Place));

const TESTS: [Test; 27] = [
    ("worker_gives_up_its_rights", worker_gives_up_its_rights),
    ("worker_answers_within_tight_limits", worker_answers_within_tight_limits),
    ("a_server_begins_as_init_would_begin_it", a_server_begins_as_init_would_begin_it),
    ("worker_is_not_started_by_hand", worker_is_not_started_by_hand),
    ("supervisor_describes_itself_and_ends", supervisor_describes_itself_and_ends),
    ("varlinkctl_reads_and_calls_it", varlinkctl_reads_and_calls_it),
    ("supervisor_refuses_nonsense_and_goes_on", supervisor_refuses_nonsense_and_goes_on),
    ("supervisor_pins_nobody_s_mounts", supervisor_pins_nobodys_mounts),
    ("of_two_supervisors_one_stays", of_two_supervisors_one_stays),
    ("another_user_is_refused", another_user_is_refused),
    ("a_stranger_can_ask_for_nothing", a_stranger_can_ask_for_nothing),
    ("a_storm_of_strangers_passes", a_storm_of_strangers_passes),
    ("a_mad_client_harms_nobody_else", a_mad_client_harms_nobody_else),
    ("what_others_prepared_is_not_used", what_others_prepared_is_not_used),
    ("a_planted_socket_hears_nothing", a_planted_socket_hears_nothing),
    ("told_to_end_it_ends", told_to_end_it_ends),
    ("a_service_manager_s_server_speaks_and_leaves", a_service_managers_server_speaks_and_leaves),
    ("a_device_comes_and_goes", a_device_comes_and_goes),
    ("a_device_in_use_stays", a_device_in_use_stays),
    ("a_killed_keeper_s_device_goes", a_killed_keepers_device_goes),
    ("a_failed_attach_leaves_nothing", a_failed_attach_leaves_nothing),
    ("a_death_does_not_end_the_device", a_death_does_not_end_the_device),
    ("a_death_with_all_others_is_reported_and_cleaned", a_death_with_all_others_is_reported_and_cleaned),
    ("a_death_keeps_the_lease", a_death_keeps_the_lease),
    ("an_upgrade_replaces_server_and_worker", an_upgrade_replaces_server_and_worker),
    ("an_isolated_device_has_a_worker_of_its_own", an_isolated_device_has_a_worker_of_its_own),
    ("a_served_device_goes_with_its_keeper", a_served_device_goes_with_its_keeper),
];

fn run_tests(filters: &[&str]) -> ExitCode {
    let filters: Vec<&&str> = filters.iter().filter(|word| !word.starts_with('-')).collect();
    let mut failed = Vec::new();
    let chosen =
        TESTS.iter().filter(|(name, _)| filters.is_empty() || filters.iter().any(|f| name.contains(**f)));
    for (name, test) in chosen {
        let place = Place::new(name);
        let ok = catch_unwind(AssertUnwindSafe(|| test(&place))).is_ok();
        println!("test {name} ... {}", if ok { "ok" } else { "FAILED" });
        if !ok {
            eprintln!(
                "--- the server's log:\n{}",
                fs::read_to_string(place.runtime().join("log")).unwrap_or_default()
            );
            failed.push(name);
        }
    }
    println!("test result: {}. {} failed", if failed.is_empty() { "ok" } else { "FAILED" }, failed.len());
    ExitCode::from(u8::from(!failed.is_empty()))
}

// What the started copies do.

fn inherited(number: &str) -> OwnedFd {
    becket_device::inherited_fd(number.parse().unwrap()).unwrap()
}

fn serve(options: ServeOptions) -> Result<(), String> {
    becket_device::serve(options).map_err(|error| error.to_string())
}

fn show<T: serde::Serialize>(result: Result<T, becket_device::Error>) -> Result<(), String> {
    match result {
        Ok(value) => {
            println!("{}", serde_json::to_string(&value).unwrap());
            Ok(())
        }
        Err(error) => Err(format!("{:?}: {error}", error.kind())),
    }
}

fn attach(image: &str, more: &[&str]) -> Result<(), String> {
    let mut options = AttachOptions { via: Via::Loop, ..AttachOptions::default() };
    for word in more {
        match word.split_once('=').unwrap() {
            ("name", name) => options.name = Some(name.to_owned()),
            ("offset", offset) => options.open.offset = offset.parse().unwrap(),
            ("via", via) => options.via = via.parse().unwrap(),
            ("isolate", isolate) => options.isolate = isolate.parse().unwrap(),
            ("partitions", partitions) => options.partitions = partitions.parse().unwrap(),
            other => panic!("{other:?}"),
        }
    }
    show(becket_device::attach(Path::new(image), &options))
}

fn lease(image: &str, via: &str) -> Result<(), String> {
    let options = AttachOptions { via: via.parse().unwrap(), ..AttachOptions::default() };
    let (info, lease) =
        becket_device::attach_leased(Path::new(image), &options).map_err(|error| error.to_string())?;
    println!("{}", serde_json::to_string(&info).unwrap());
    // Until asked to let go, or killed.
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(lease);
    println!("{}", becket_device::list().unwrap().len());
    Ok(())
}

fn detach(target: &str, more: &[&str]) -> Result<(), String> {
    let options =
        DetachOptions { lazy: more.contains(&"lazy"), force: false, timeout: Duration::from_secs(5) };
    show(becket_device::detach(target, &options))
}

/// One varlink call, as any client could write it.
fn talk(socket: &Path, call: &str) -> Result<String, String> {
    let text = |error: std::io::Error| error.to_string();
    let mut stream = UnixStream::connect(socket).map_err(text)?;
    stream.set_read_timeout(Some(Duration::from_secs(120))).map_err(text)?;
    match stream.write_all(call.as_bytes()).and_then(|()| stream.write_all(&[0])) {
        // The server answers a caller that it refuses before it has read the call, and hangs up; the answer
        // can be read.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
        other => other.map_err(text)?,
    }
    let mut answer = Vec::new();
    BufReader::new(stream).read_until(0, &mut answer).map_err(text)?;
    answer.pop();
    String::from_utf8(answer).map_err(|error| error.to_string())
}

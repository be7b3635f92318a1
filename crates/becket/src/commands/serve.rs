//! `becket serve`, the hidden `becket worker`, and udev's helper: the long-lived processes themselves are in
//! `becket-device`.
//! Nothing is decided here.

use crate::{args, failure::Failure};
use becket_device::ServeOptions;

pub(crate) fn run(args: &args::Serve) -> Result<u8, Failure> {
    let inherited = |option: &str, number: Option<_>| {
        let taken = number.map(becket_device::inherited_fd).transpose();
        taken.map_err(|error| Failure::io(format!("cannot use the descriptor of {option}"), &error))
    };
    let ready_fd = inherited("--ready-fd", args.ready_fd)?;
    let after_fd = inherited("--after-fd", args.after_fd)?;
    // One that a client started, or that follows one that died, is there for its devices only.
    let stay = ready_fd.is_none() && after_fd.is_none() && !args.until_idle;
    let args::Serve { cache_size, log_level, .. } = *args;
    becket_device::serve(ServeOptions {
        stay,
        ready_fd,
        takeover: args.takeover,
        after_fd,
        cache_size,
        log_level,
    })
    .map_err(|error| Failure::device("serve", "devices", &error))?;
    Ok(0)
}

pub(crate) fn worker(args: &args::Worker) -> Result<u8, Failure> {
    becket_device::worker_main(args.cache_size).map_err(|error| Failure::device("move", "bytes", &error))?;
    Ok(0)
}

pub(crate) fn doorman() -> Result<u8, Failure> {
    becket_device::doorman_main().map_err(|error| Failure::device("attend to", "clients", &error))?;
    Ok(0)
}

pub(crate) fn connector() -> Result<u8, Failure> {
    becket_device::connector_main().map_err(|error| Failure::device("connect to", "a server", &error))?;
    Ok(0)
}

pub(crate) fn fetcher() -> Result<u8, Failure> {
    becket_device::fetcher_main(becket_fetch::fetch)
        .map_err(|error| Failure::device("fetch", "an image", &error))?;
    Ok(0)
}

pub(crate) fn reporter() -> Result<u8, Failure> {
    becket_device::reporter_main()
        .map_err(|error| Failure::device("answer", "requests for metrics", &error))?;
    Ok(0)
}

pub(crate) fn give(args: &args::UblkGive) -> Result<u8, Failure> {
    becket_device::give_to_owner(args.number)
        .map_err(|error| Failure::device("give away", format!("ublk device {}", args.number), &error))?;
    Ok(0)
}

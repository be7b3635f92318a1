//! Picks the transport for an image, and says why that one and why not the others.
//! It attaches nothing and knows no transport by more than its probe and its answer to one image.

use std::path::Path;
use std::sync::OnceLock;

use becket_image::{DirectIo, Opened};
use becket_transport::dm::{self, DmTransport};
use becket_transport::fuse::{self, FuseTransport};
use becket_transport::loop_::{self, LoopTransport};
use becket_transport::ublk::UblkTransport;
use becket_transport::{Kind, Probe, Transport};

use crate::contract::{AttachOptions, Choice, Error, Plan, TransportReport};

/// The transports that are built, the preferred ones first.
static TRANSPORTS: [&dyn Transport; 4] = [&DM, &UBLK, &LOOP, &FUSE];
static DM: Remembered = Remembered::new(&DmTransport);
static UBLK: Remembered = Remembered::new(&UblkTransport);
static LOOP: Remembered = Remembered::new(&LoopTransport);
static FUSE: Remembered = Remembered::new(&FuseTransport);

/// A transport that once works is not probed again: a probe costs about as much as a device, and many images
/// need one. A transport that has gone meanwhile fails when it is used.
struct Remembered {
    transport: &'static dyn Transport,
    works: OnceLock<Probe>,
}

impl Remembered {
    const fn new(transport: &'static dyn Transport) -> Remembered {
        Remembered { transport, works: OnceLock::new() }
    }
}

impl Transport for Remembered {
    fn kind(&self) -> Kind {
        self.transport.kind()
    }

    fn probe(&self) -> Probe {
        if let Some(probe) = self.works.get() {
            return probe.clone();
        }
        let probe = self.transport.probe();
        if probe.works {
            // Another thread may have been faster, with the same answer.
            let _ = self.works.set(probe.clone());
        }
        probe
    }

    fn fits(&self, opened: &Opened) -> Result<(), String> {
        self.transport.fits(opened)
    }
}

/// Picks the transport for an open image.
///
/// # Errors
/// None of them can take it, or the one insisted on cannot; with the reasons and what would fix it.
pub fn plan(opened: &Opened, options: &AttachOptions) -> Result<Plan, Error> {
    pick(&TRANSPORTS, opened, options, false)
}

/// The same for a device that its caller keeps open (a lease).
pub(crate) fn plan_for(opened: &Opened, options: &AttachOptions, leased: bool) -> Result<Plan, Error> {
    pick(&TRANSPORTS, opened, options, leased)
}

/// The same once a transport that was planned has failed, which only its trying could show.
///
/// # Errors
/// As [`plan_for`]; none when that transport was insisted on, which is for the caller to see.
pub(crate) fn plan_without(
    failed: (Kind, String),
    opened: &Opened,
    options: &AttachOptions,
    leased: bool,
) -> Result<Plan, Error> {
    let left: Vec<_> = TRANSPORTS.into_iter().filter(|transport| transport.kind() != failed.0).collect();
    without(failed, pick(&left, opened, options, leased))
}

/// Puts what was tried in front of what was merely looked at.
fn without(failed: (Kind, String), plan: Result<Plan, Error>) -> Result<Plan, Error> {
    match plan {
        Ok(mut plan) => {
            plan.reason =
                format!("{}; {} would have been the first choice, but {}", plan.reason, failed.0, failed.1);
            plan.rejected.insert(0, failed);
            Ok(plan)
        }
        Err(Error::NoTransport { image, mut rejected, fix }) => {
            rejected.insert(0, failed);
            Err(Error::NoTransport { image, rejected, fix })
        }
        Err(error) => Err(error),
    }
}

/// What each transport would say to an open image, the preferred ones first; none is taken.
pub(crate) fn choices(opened: &Opened, options: &AttachOptions, leased: bool) -> Vec<Choice> {
    weigh(&TRANSPORTS, |transport| judge(transport, opened, options, leased))
}

/// The same where the image is not open: only the machine is asked, and `served_only` says why the kernel's
/// own drivers cannot take the image, if they cannot.
pub(crate) fn choices_of_machine(served_only: Option<&str>) -> Vec<Choice> {
    weigh(&TRANSPORTS, |transport| match served_only.filter(|_| !transport.kind().is_served()) {
        Some(why) => Err(No { reason: why.to_owned(), fix: None }),
        None => probed(transport),
    })
}

/// Whether a device with these options may be one that becket serves itself, on this machine.
pub fn may_be_served(options: &AttachOptions) -> bool {
    match options.via.kind() {
        Some(kind) => kind.is_served(),
        None => TRANSPORTS.iter().any(|one| one.kind().is_served() && one.probe().works),
    }
}

fn weigh(
    transports: &[&dyn Transport],
    judged: impl Fn(&dyn Transport) -> Result<String, No>,
) -> Vec<Choice> {
    let of = |transport: &&dyn Transport| {
        let transport_kind = transport.kind();
        match judged(*transport) {
            Ok(reason) => Choice { transport: transport_kind, possible: true, reason, fix: None },
            Err(No { reason, fix }) => Choice { transport: transport_kind, possible: false, reason, fix },
        }
    };
    transports.iter().map(of).collect()
}

/// Which transports work on this machine, the preferred ones first.
pub fn doctor() -> Vec<TransportReport> {
    TRANSPORTS
        .iter()
        .map(|transport| TransportReport {
            kind: transport.kind(),
            probe: match transport.kind() {
                Kind::Loop => loop_::examine(),
                Kind::Dm => dm::examine(),
                Kind::Fuse => fuse::examine(),
                Kind::Ublk | Kind::Nbd | Kind::VhostUser => transport.probe(),
            },
        })
        .collect()
}

fn pick(
    transports: &[&dyn Transport],
    opened: &Opened,
    options: &AttachOptions,
    leased: bool,
) -> Result<Plan, Error> {
    match options.via.kind() {
        Some(kind) => insist(transports, kind, opened, options, leased),
        None => prefer(transports, opened, options, leased),
    }
}

fn prefer(
    transports: &[&dyn Transport],
    opened: &Opened,
    options: &AttachOptions,
    leased: bool,
) -> Result<Plan, Error> {
    let mut rejected = Vec::new();
    let mut first_fix = None;
    for transport in transports {
        match judge(*transport, opened, options, leased) {
            Ok(reason) => {
                let kind = transport.kind();
                let reason = if rejected.is_empty() { format!("the first choice: {reason}") } else { reason };
                return Ok(Plan { kind, reason, rejected });
            }
            Err(No { reason, fix }) => {
                // For a user who is not root, a fix that needs no root is best.
                first_fix = match transport.kind() {
                    Kind::Fuse if !rustix::process::geteuid().is_root() => fix.or(first_fix),
                    _ => first_fix.or(fix),
                };
                rejected.push((transport.kind(), reason));
            }
        }
    }
    Err(Error::NoTransport { image: opened.path.clone(), rejected, fix: first_fix })
}

fn insist(
    transports: &[&dyn Transport],
    kind: Kind,
    opened: &Opened,
    options: &AttachOptions,
    leased: bool,
) -> Result<Plan, Error> {
    let image = opened.path.clone();
    let Some(transport) = transports.iter().find(|transport| transport.kind() == kind) else {
        let reason = "it is not in this version of becket".to_owned();
        return Err(Error::Transport { image, kind, reason, fix: None });
    };
    match judge(*transport, opened, options, leased) {
        Ok(_) => Ok(Plan { kind, reason: format!("--via {kind}"), rejected: Vec::new() }),
        Err(No { reason, fix }) => Err(Error::Transport { image, kind, reason, fix }),
    }
}

/// Why a transport is not taken.
struct No {
    reason: String,
    fix: Option<String>,
}

fn judge(
    transport: &dyn Transport,
    opened: &Opened,
    options: &AttachOptions,
    leased: bool,
) -> Result<String, No> {
    // The cheap questions come first: the image and the options are known, the machine must be asked.
    transport.fits(opened).map_err(|reason| No { reason, fix: None })?;
    suits(transport.kind(), options, leased)?;
    probed(transport)
}

fn probed(transport: &dyn Transport) -> Result<String, No> {
    let probe = transport.probe();
    if probe.works { Ok(probe.reason) } else { Err(No { reason: probe.reason, fix: probe.fix }) }
}

/// What the options ask of a transport beyond the image.
fn suits(kind: Kind, options: &AttachOptions, leased: bool) -> Result<(), No> {
    let no = |reason: &str, fix: &str| {
        Err(No { reason: reason.to_owned(), fix: Some(fix.to_owned()).filter(|fix| !fix.is_empty()) })
    };
    let (driver, leaves) = match kind {
        Kind::Loop => ("the kernel's loop driver", "clear"),
        Kind::Dm => ("device-mapper", "remove"),
        Kind::Ublk | Kind::Nbd | Kind::VhostUser => return Ok(()),
        Kind::Fuse if options.spec.mode.is_some() => {
            return no("FUSE has no mode to choose", "leave --mode away");
        }
        Kind::Fuse if options.spec.autoclear && !leased && !rustix::process::geteuid().is_root() => {
            return no(
                "without root FUSE gives a file, whose last user nobody tells",
                "use `becket run`, or detach it by hand",
            );
        }
        Kind::Fuse => return Ok(()),
    };
    // The kernel removes such a device at its last close, and the first last close is the attaching command's
    // own.
    if options.spec.autoclear && !leased {
        return no(
            &format!("{driver} would {leaves} an autoclear device as soon as this command ends"),
            "use `becket run` or `becket mount`, which hold the device until it has a user",
        );
    }
    if options.spec.faults.is_some() {
        return no(
            &format!("{driver} moves the bytes itself, so no operation can be spoiled on its way"),
            "use --fault where becket serves (ublk, fuse), or leave it away",
        );
    }
    if options.spec.queues.is_some() || options.spec.depth.is_some() || options.spec.mode.is_some() {
        return no(
            &format!("{driver} has no queues, depth or mode to choose"),
            "leave --queues and --depth away",
        );
    }
    if kind == Kind::Dm && options.open.direct_io == DirectIo::Off {
        return no("device-mapper always goes past the page cache", "leave --direct-io off away");
    }
    Ok(())
}

/// One line for each choice that was made, for `-v`.
impl Plan {
    /// What was taken and why, then the others and why not.
    pub fn explain(&self, image: &Path) -> Vec<String> {
        let taken = format!("{}: {}: {}", image.display(), self.kind, self.reason);
        let others =
            self.rejected.iter().map(|(kind, reason)| format!("{}: not {kind}: {reason}", image.display()));
        std::iter::once(taken).chain(others).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use becket_image::{Identity, Map, OpenOptions};

    use super::*;
    use crate::contract::{DataMode, ErrorKind, Spec, Via};

    /// A transport as the planner sees it.
    struct Double {
        kind: Kind,
        works: bool,
        fits: bool,
    }

    impl Transport for Double {
        fn kind(&self) -> Kind {
            self.kind
        }
        fn probe(&self) -> Probe {
            assert!(self.fits, "a machine need not be asked about an image that does not fit");
            Probe {
                works: self.works,
                reason: if self.works { "the driver is there".into() } else { "no driver".into() },
                fix: (!self.works).then(|| format!("modprobe {}", self.kind)),
                details: Vec::new(),
            }
        }
        fn fits(&self, _: &Opened) -> Result<(), String> {
            if self.fits { Ok(()) } else { Err("two extents".to_owned()) }
        }
    }

    fn opened() -> Opened {
        Opened {
            outer: Vec::new(),
            grows: false,
            path: "/i.img".into(),
            map: Map::contiguous(0, 0, 4096),
            sources: Vec::new(),
            encoded: Vec::new(),
            nested: false,
            read_only: false,
            read_only_reason: None,
            block_size: 512,
            identity: Identity { dev: 1, ino: 1 },
            partitions: Vec::new(),
            overlay: None,
            range: None,
            below: None,
            warnings: Vec::new(),
        }
    }

    fn try_with(
        (ublk_works, ublk_fits): (bool, bool),
        (loop_works, loop_fits): (bool, bool),
        options: &AttachOptions,
        leased: bool,
    ) -> Result<Plan, Error> {
        let ublk = Double { kind: Kind::Ublk, works: ublk_works, fits: ublk_fits };
        let loop_ = Double { kind: Kind::Loop, works: loop_works, fits: loop_fits };
        pick(&[&ublk, &loop_], &opened(), options, leased)
    }

    fn with(spec: Spec) -> AttachOptions {
        AttachOptions { spec, ..AttachOptions::default() }
    }

    const YES: (bool, bool) = (true, true);
    const NO_DRIVER: (bool, bool) = (false, true);
    const NO_FIT: (bool, bool) = (true, false);

    #[test]
    fn the_first_that_works_and_fits_is_taken() {
        let auto = AttachOptions::default();
        let plan = try_with(YES, YES, &auto, false).unwrap();
        assert_eq!((plan.kind, plan.rejected), (Kind::Ublk, vec![]));

        let plan = try_with(NO_DRIVER, YES, &auto, false).unwrap();
        assert_eq!(plan.kind, Kind::Loop);
        assert_eq!(plan.rejected, [(Kind::Ublk, "no driver".to_owned())]);
        let lines = plan.explain(Path::new("/i.img"));
        assert!(
            lines[0].contains("loop: the driver is there") && lines[1].contains("not ublk: no driver"),
            "{lines:?}"
        );

        let plan = try_with(NO_FIT, YES, &auto, false).unwrap();
        assert_eq!(plan.rejected, [(Kind::Ublk, "two extents".to_owned())]);
    }

    #[test]
    fn when_none_is_left_all_reasons_and_the_first_fix_are_given() {
        let error = try_with(NO_DRIVER, NO_FIT, &AttachOptions::default(), false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let text = error.to_string();
        assert!(text.contains("ublk: no driver") && text.contains("loop: two extents"), "{text}");
        assert_eq!(error.hint().as_deref(), Some("modprobe ublk"));
    }

    #[test]
    fn insisting_never_falls_back() {
        let via = |via| AttachOptions { via, ..AttachOptions::default() };
        let error = try_with(NO_DRIVER, YES, &via(Via::Ublk), false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("no driver"), "{error}");
        assert_eq!(error.hint().as_deref(), Some("modprobe ublk"));
        assert_eq!(try_with(YES, YES, &via(Via::Loop), false).unwrap().kind, Kind::Loop);
        let error = try_with(YES, YES, &via(Via::Dm), false).unwrap_err();
        assert!(error.to_string().contains("not in this version"), "{error}");
    }

    #[test]
    fn device_mapper_is_first_and_keeps_its_own_rules() {
        let dm = Double { kind: Kind::Dm, works: true, fits: true };
        let ublk = Double { kind: Kind::Ublk, works: true, fits: true };
        let pick = |options: &AttachOptions, leased| pick(&[&dm, &ublk], &opened(), options, leased).unwrap();
        let auto = AttachOptions::default();
        assert_eq!(pick(&auto, false).kind, Kind::Dm);
        let clear = with(Spec { autoclear: true, ..Spec::default() });
        assert_eq!(pick(&clear, true).kind, Kind::Dm);
        assert_eq!(pick(&clear, false).kind, Kind::Ublk);
        let open = OpenOptions { direct_io: DirectIo::Off, ..OpenOptions::default() };
        let cached = pick(&AttachOptions { open, ..auto.clone() }, false);
        assert_eq!(cached.kind, Kind::Ublk);
        assert!(cached.rejected[0].1.contains("past the page cache"), "{cached:?}");
        assert_eq!(pick(&with(Spec { depth: Some(2), ..Spec::default() }), false).kind, Kind::Ublk);
        assert_eq!(TRANSPORTS[0].kind(), Kind::Dm);
    }

    #[test]
    fn what_failed_when_it_was_tried_is_said_first() {
        let failed = || (Kind::Dm, "it is claimed".to_owned());
        let plan = without(failed(), try_with(NO_DRIVER, YES, &AttachOptions::default(), false)).unwrap();
        assert_eq!(plan.kind, Kind::Loop);
        assert!(plan.reason.contains("dm would have been the first choice, but it is claimed"), "{plan:?}");
        assert_eq!(plan.rejected[0], failed());
        assert_eq!(plan.rejected[1].0, Kind::Ublk);
        let error = without(failed(), try_with(NO_DRIVER, NO_FIT, &AttachOptions::default(), false));
        let text = error.unwrap_err().to_string();
        assert!(text.contains("dm: it is claimed; ublk: no driver"), "{text}");
    }

    /// Works from the second question on, and counts them.
    struct Late(AtomicU32);

    impl Transport for Late {
        fn kind(&self) -> Kind {
            Kind::Ublk
        }
        fn probe(&self) -> Probe {
            let works = self.0.fetch_add(1, Ordering::Relaxed) > 0;
            Probe { works, reason: "it says so".into(), fix: None, details: Vec::new() }
        }
        fn fits(&self, _: &Opened) -> Result<(), String> {
            Ok(())
        }
    }

    #[test]
    fn only_what_works_is_remembered() {
        static LATE: Late = Late(AtomicU32::new(0));
        static REMEMBERED: Remembered = Remembered::new(&LATE);
        let answers: Vec<bool> = (0..4).map(|_| REMEMBERED.probe().works).collect();
        assert_eq!(answers, [false, true, true, true], "a driver may have been loaded since it was missing");
        assert_eq!(LATE.0.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn options_that_loop_cannot_keep_rule_it_out() {
        let clear = with(Spec { autoclear: true, ..Spec::default() });
        assert!(try_with(NO_DRIVER, YES, &clear, false).is_err());
        assert_eq!(try_with(NO_DRIVER, YES, &clear, true).unwrap().kind, Kind::Loop);
        assert_eq!(try_with(YES, YES, &clear, false).unwrap().kind, Kind::Ublk);

        for spec in [
            Spec { queues: Some(2), ..Spec::default() },
            Spec { depth: Some(2), ..Spec::default() },
            Spec { mode: Some(DataMode::Copy), ..Spec::default() },
        ] {
            let error = try_with(NO_DRIVER, YES, &with(spec), false).unwrap_err();
            assert!(error.to_string().contains("no queues, depth or mode"), "{error}");
        }
        let spoiled = with(Spec { faults: Some(Default::default()), ..Spec::default() });
        let error = try_with(NO_DRIVER, YES, &spoiled, false).unwrap_err();
        assert!(error.to_string().contains("no operation can be spoiled"), "{error}");
        assert_eq!(try_with(YES, YES, &spoiled, false).unwrap().kind, Kind::Ublk);
    }
}

//! The steps of a run: which there are, and which are wanted.
//! It never runs one.

use anyhow::{Result, bail};

use crate::vm::Series;

/// One thing that is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A command of cargo's that is one check.
    Cargo(&'static [&'static str]),
    /// A part of `Test`, which needs neither root nor devices: runs only when it is named.
    Unit,
    Test,
    /// `make install`, and then `make uninstall`.
    Install,
    /// Debian packages: made twice, installed, upgraded below a load and removed.
    Packages,
    /// The conformance suite over a transport of this machine; each image over NBD, if that is said.
    HostConformance {
        via: &'static str,
        over_nbd: bool,
    },
    LosetupSuite,
    Guest {
        series: Series,
        load: Load,
    },
}

impl Step {
    /// Whether it attaches devices of this machine. Not while the guests' root file system is made, in a
    /// mount namespace: that would keep a copy of each mount of a device, and so keep the device in use.
    pub(super) fn attaches(self) -> bool {
        !matches!(self, Step::Cargo(_) | Step::Unit)
    }
}

/// What a guest is booted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// The conformance suite over a transport, and how that moves data.
    Conformance { via: &'static str, mode: Option<&'static str> },
    /// The tests of the packages that use ublk.
    Tests,
    /// What users without privileges have.
    Users,
    /// A start of the machine with systemd and so many images in /etc/beckettab.
    Boot { images: u32 },
    /// Disks that becket serves over vhost-user from this machine.
    Disks,
}

const fn guest(series: Series, load: Load) -> Step {
    Step::Guest { series, load }
}

const fn suite(series: Series, via: &'static str, mode: Option<&'static str>) -> Step {
    guest(series, Load::Conformance { via, mode })
}

/// All steps, in their order: what is quick and likely to fail first; of the guests, what takes longest.
pub(super) const STEPS: [(&str, Step); 22] = [
    ("fmt", Step::Cargo(&["fmt", "--all", "--check"])),
    ("clippy", Step::Cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])),
    ("doc", Step::Cargo(&DOC)),
    ("unit", Step::Unit),
    ("test", Step::Test),
    ("install", Step::Install),
    ("packages", Step::Packages),
    ("conformance-host", Step::HostConformance { via: "loop", over_nbd: false }),
    ("conformance-host-fuse", Step::HostConformance { via: "fuse", over_nbd: false }),
    ("conformance-host-nbd", Step::HostConformance { via: "fuse", over_nbd: true }),
    ("losetup-suite", Step::LosetupSuite),
    ("guest-7.x-tests", guest(Series::V7, Load::Tests)),
    ("guest-7.x-zero-copy", suite(Series::V7, "ublk", Some("zero-copy"))),
    ("guest-7.x-copy", suite(Series::V7, "ublk", Some("copy"))),
    ("guest-7.x-batch-zero-copy", suite(Series::V7, "ublk", Some("batch-zero-copy"))),
    ("guest-7.x-batch-copy", suite(Series::V7, "ublk", Some("batch-copy"))),
    ("guest-7.x-dm", suite(Series::V7, "dm", None)),
    ("guest-7.x-boot", guest(Series::V7, Load::Boot { images: 8 })),
    ("guest-6.12", suite(Series::V6_12, "ublk", Some("copy"))),
    ("guest-6.12-users", guest(Series::V6_12, Load::Users)),
    ("guest-6.1", suite(Series::V6_1, "loop", None)),
    ("guest-6.1-disks", guest(Series::V6_1, Load::Disks)),
];

/// Steps that run only when they are named: what is a part of another step, and two modes. Each half of them
/// is in another step, and both together are in `guest-7.x-tests` and `guest-6.12`.
pub(super) const NAMED_ONLY: [&str; 3] = ["unit", "guest-7.x-copy", "guest-7.x-batch-zero-copy"];

/// With `--examples` cargo chooses the features that the tests have: no dependency is checked twice.
const DOC: [&str; 7] =
    ["doc", "--workspace", "--no-deps", "--document-private-items", "--lib", "--bins", "--examples"];

/// Those whose names, or groups, are wanted; all but [`NAMED_ONLY`] if none is named.
///
/// # Errors
/// There is no such step.
pub(super) fn choose(only: &[String]) -> Result<Vec<(&'static str, Step)>> {
    for wanted in only {
        if !STEPS.iter().any(|(name, _)| is_or_begins(name, wanted)) {
            let names: Vec<&str> = STEPS.iter().map(|(name, _)| *name).collect();
            bail!("there is no step `{wanted}`; there are {}", names.join(", "));
        }
    }
    let chosen = |(name, _): &(&str, Step)| {
        let named = only.iter().any(|wanted| is_or_begins(name, wanted));
        named || (only.is_empty() && !NAMED_ONLY.contains(name))
    };
    Ok(STEPS.into_iter().filter(chosen).collect())
}

/// Whether a step is the wanted one, or belongs to the wanted group: `guest-6.1` is no part of `guest-6.12`.
fn is_or_begins(name: &str, wanted: &str) -> bool {
    name.strip_prefix(wanted).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_chosen_by_name_or_group() {
        let names = |only: &[&str]| -> Vec<&str> {
            let only: Vec<String> = only.iter().map(|&word| word.to_owned()).collect();
            choose(&only).unwrap().into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(&["guest-6.1"]), ["guest-6.1", "guest-6.1-disks"]);
        let all: Vec<_> =
            STEPS.iter().map(|(name, _)| *name).filter(|name| name.starts_with("guest-7.x-")).collect();
        assert_eq!(names(&["guest-7.x"]), all);
        assert!(all.len() > 1);
        assert_eq!(names(&["fmt", "doc"]), ["fmt", "doc"]);
        assert_eq!(names(&["unit"]), ["unit"]);
        assert_eq!(names(&[]).len(), STEPS.len() - NAMED_ONLY.len());
        assert!(NAMED_ONLY.iter().all(|name| names(&[name]) == [*name]));
        assert!(choose(&["nothing".to_owned()]).is_err());
    }
}

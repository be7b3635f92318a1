//! Which versions of its records and of the worker protocol this becket writes, and which it understands.
//! It never guesses: what is not understood in full is left alone by all who read it.
//!
//! A record and a device on its way to a worker name the features without which they cannot be handled
//! (`needs`). A new field that may be ignored needs no feature. `docs/ARCHITECTURE.md`, "Versions", has the
//! rules.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// The version that records are written in. It changes only when the place of `version`, `boot_id`, `name`
/// or `needs` in a record would change its meaning: everything else is a feature.
const RECORD: u32 = 1;
/// The versions of the worker protocol that are spoken.
const PROTOCOL: RangeInclusive<u32> = 3..=3;
/// The features of records and of devices on their way to a worker that are understood.
const FEATURES: &[&str] = &[
    FEATURE_EXPORTS,
    FEATURE_FRONT_ENDS,
    FEATURE_ENDS,
    becket_image::heard::FEATURE,
    becket_image::link::FEATURE,
    becket_image::link::TLS_FEATURE,
    becket_image::link::FEATURE_RBD,
    becket_image::link::FEATURE_BELOW,
    becket_image::filled::FEATURE,
    becket_image::filled::FEATURE_OLD,
    becket_image::filled::FEATURE_PACKED,
];
/// Devices without a disk, which users reach at a socket: exports over NBD and vhost-user.
pub(crate) const FEATURE_EXPORTS: &str = "exports";
/// Front-ends of virtual machines that go from worker to worker.
pub(crate) const FEATURE_FRONT_ENDS: &str = "front-ends";
/// Workers that are asked before a device ends, and say what of its bytes may be lost. No device needs it.
pub(crate) const FEATURE_ENDS: &str = "ends";
/// The artificial feature of a later version, in tests.
#[cfg(debug_assertions)]
const LATER: &str = "test-later";

/// Variables that a server and its workers get from the command that starts them, in tests.
pub(crate) const TEST_VARIABLES: &[&str] = if cfg!(debug_assertions) { &["BECKET_TEST_LATER"] } else { &[] };

/// What one becket speaks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Speech {
    /// The newest version of the worker protocol.
    pub(crate) version: u32,
    /// The oldest one. One that says nothing of it speaks one version only.
    #[serde(default)]
    pub(crate) oldest: Option<u32>,
    /// The features that it understands.
    #[serde(default)]
    pub(crate) features: Vec<String>,
}

impl Speech {
    /// What this becket speaks.
    pub(crate) fn ours() -> Speech {
        let mut features: Vec<String> = FEATURES.iter().map(|&name| name.to_owned()).collect();
        features.extend(later().map(|later| later.feature.to_owned()));
        Speech { version: *protocol().end(), oldest: Some(*protocol().start()), features }
    }

    /// The newest version that both speak.
    pub(crate) fn common(&self, other: &Speech) -> Option<u32> {
        let oldest = |one: &Speech| one.oldest.unwrap_or(one.version);
        let version = self.version.min(other.version);
        (version >= oldest(self).max(oldest(other))).then_some(version)
    }

    /// Whether it understands all of these features.
    pub(crate) fn understands(&self, needs: &[String]) -> bool {
        all_known(needs, &self.features)
    }
}

/// Whether all that is needed is among what is known.
pub(crate) fn all_known(needs: &[String], features: &[String]) -> bool {
    needs.iter().all(|need| features.contains(need))
}

/// The versions of the worker protocol that are spoken.
pub(crate) fn protocol() -> RangeInclusive<u32> {
    later().map_or(PROTOCOL, |later| later.protocol.clone())
}

/// The version that records are written in.
pub(crate) fn record() -> u32 {
    later().map_or(RECORD, |later| later.record)
}

/// Whether a record of that version with those needs is understood.
pub(crate) fn understood(version: u32, needs: &[String]) -> bool {
    let known = |need: &String| {
        FEATURES.contains(&need.as_str()) || later().is_some_and(|later| later.feature == *need)
    };
    version <= record() && needs.iter().all(known)
}

/// What a device that is made now needs of all who handle it, beside these `features` of its own.
pub(crate) fn needs_of_new_devices(features: impl IntoIterator<Item = &'static str>) -> Vec<String> {
    let later = later().filter(|later| later.used).map(|later| later.feature);
    features.into_iter().chain(later).map(str::to_owned).collect()
}

/// A later version, for tests: this becket then speaks as that would.
struct Later {
    feature: &'static str,
    record: u32,
    protocol: RangeInclusive<u32>,
    /// Devices need the feature.
    used: bool,
}

#[cfg(debug_assertions)]
fn later() -> Option<&'static Later> {
    static LATER_ONE: std::sync::OnceLock<Option<Later>> = std::sync::OnceLock::new();
    let read = || {
        let (record, protocol, used) = match std::env::var("BECKET_TEST_LATER").ok()?.as_str() {
            // One more version, which is spoken with those who know it.
            "speaks" => (1, 3..=4, false),
            // The same, and its devices cannot do without.
            "needs" => (1, 3..=4, true),
            // It has left this version behind.
            "only" => (2, 4..=4, false),
            _ => return None,
        };
        Some(Later { feature: LATER, record, protocol, used })
    };
    LATER_ONE.get_or_init(read).as_ref()
}

#[cfg(not(debug_assertions))]
fn later() -> Option<&'static Later> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_speak_the_newest_version_that_both_know() {
        let speech = |oldest, version| Speech { version, oldest, features: Vec::new() };
        let common = |a: &Speech, b: &Speech| {
            assert_eq!(a.common(b), b.common(a));
            a.common(b)
        };
        assert_eq!(common(&speech(Some(3), 5), &speech(Some(2), 4)), Some(4));
        assert_eq!(common(&speech(None, 3), &speech(Some(3), 4)), Some(3));
        assert_eq!(common(&speech(None, 3), &speech(Some(4), 5)), None);
        assert_eq!(common(&speech(None, 3), &speech(None, 4)), None);
        assert_eq!(common(&speech(Some(1), 9), &speech(Some(9), 12)), Some(9));
    }

    #[test]
    fn what_is_newer_or_needs_more_is_not_understood() {
        assert!(understood(RECORD, &[]));
        assert!(!understood(RECORD + 1, &[]));
        assert!(!understood(RECORD, &["of-a-later-version".to_owned()]));
        assert!(!Speech::ours().understands(&["of-a-later-version".to_owned()]));
        assert!(Speech::ours().understands(&[]));
    }

    /// The first words of a successor and the last of a worker's introduction keep their shape for ever.
    #[test]
    fn the_words_of_older_and_later_ones_are_read() {
        let old: Speech = serde_json::from_str("{\"version\":3}").unwrap();
        assert_eq!(old, Speech { version: 3, oldest: None, features: Vec::new() });
        let text = "{\"version\":9,\"oldest\":7,\"features\":[\"x\"],\"mood\":\"fine\"}";
        let later: Speech = serde_json::from_str(text).unwrap();
        assert_eq!((later.version, later.oldest), (9, Some(7)));
    }
}

//! The number that the kernel keeps with each ublk device of becket's: it distinguishes a device from the
//! next one with its number, and becket's own from those of other programs.
//! It is no secret and gives no rights.

use std::hash::{BuildHasher, RandomState};

use crate::record::runtime::Runtime;
use crate::record::store::{Entry, hash};

/// How many of its bits are the device's own. The others identify the becket that made it by the directory of
/// its records, because there may be several.
const OWN: u32 = 40;

/// One that no other device has.
pub(crate) fn new(runtime: &Runtime) -> u64 {
    // Its keys are random.
    let own = RandomState::new().hash_one(std::process::id()) >> (u64::BITS - OWN);
    whose(runtime) << OWN | own
}

/// Whether a device is one of the becket that has its records there.
pub(crate) fn is_of(runtime: &Runtime, mark: u64) -> bool {
    mark >> OWN == whose(runtime)
}

fn whose(runtime: &Runtime) -> u64 {
    // Zero is what those have that say nothing.
    (hash(&runtime.dir().to_string_lossy()) >> OWN).max(1)
}

/// The mark of a record.
pub(crate) fn recorded(entry: &Entry) -> Option<u64> {
    match entry {
        Entry::Device(device) => Some(device.mark),
        Entry::Unknown(unknown) => unknown.mark,
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_has_its_own_and_each_becket_knows_its() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = |name: &str| Runtime::at(temp.path().join(name), temp.path().join("links")).unwrap();
        let (one, other) = (runtime("one"), runtime("other"));
        let marks = [new(&one), new(&one), new(&other)];
        assert_ne!(marks[0], marks[1]);
        assert_eq!(marks.map(|mark| is_of(&one, mark)), [true, true, false]);
        assert_eq!(marks.map(|mark| is_of(&other, mark)), [false, false, true]);
        // What other servers keep there are flags or nothing.
        assert!([0, 1, 2, 0xffff_ffff].iter().all(|flags| !is_of(&one, *flags)));
    }
}

//! libFuzzer with one of becket's readers, which `BECKET_FUZZ` names. `cargo xtask fuzz` builds and runs it.
//! It never knows what a reader does: that is becket-fuzz's business.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

static READ: LazyLock<fn(&[u8]) -> bool> = LazyLock::new(|| {
    let name = std::env::var("BECKET_FUZZ").unwrap_or_default();
    let known = || becket_fuzz::TARGETS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    match becket_fuzz::target(&name) {
        Some((_, read)) => read,
        None => panic!("BECKET_FUZZ is {name:?}, none of {}", known()),
    }
});

fuzz_target!(|bytes: &[u8]| {
    READ(bytes);
});

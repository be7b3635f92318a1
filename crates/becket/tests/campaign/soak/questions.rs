//! Those who only ask: list, stat, inspect, ls, map, doctor, all the time.
//! Each has to answer, whichever process has just died.

use std::time::Duration;

use becket_testkit::image;

use super::Soak;
use crate::common::load::Random;
use crate::course::RAW;

pub(super) fn ask(soak: &Soak<'_>) {
    let tree = soak.place.dir("asked");
    image::random(&tree.join("file"), 4096, soak.seed);
    image::partitioned(&soak.place.path("asked.img"), &tree);
    let mut random = Random::new(soak.seed + 4000);
    soak.again_and_again(Duration::from_millis(200), || {
        let words: &[&str] = match random.below(6) {
            0 => &["list", "--json"],
            1 => &["stat", "--json", RAW],
            2 => &["inspect", "--json", "asked.img"],
            3 => &["ls", "--json", "asked.img/p1"],
            4 => &["map", "--json", "asked.img/p1/file"],
            _ => &["doctor", "--json"],
        };
        let reported = soak.ok(words).json();
        assert!(reported.get("error").is_none(), "{words:?}: {reported:#}");
        soak.count("questions answered");
    });
}

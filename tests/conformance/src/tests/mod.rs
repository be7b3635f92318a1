//! The tests themselves, by what they are about.
//! Must never assume a transport: where transports may differ, the test says what each promises.

mod data;
mod durability;
mod filesystems;
mod geometry;
mod lifecycle;
mod limits;
mod live;
mod partitions;
mod space;
mod trouble;

use crate::suite::Test;

/// All tests, in the order in which they run: what everything stands on comes first.
pub(crate) fn all() -> Vec<Test> {
    let groups: [&[Test]; 10] = [
        geometry::TESTS,
        data::TESTS,
        durability::TESTS,
        space::TESTS,
        limits::TESTS,
        partitions::TESTS,
        trouble::TESTS,
        lifecycle::TESTS,
        live::TESTS,
        filesystems::TESTS,
    ];
    groups.concat()
}

/// A test that any block device can pass.
const fn device(name: &'static str, body: fn(&crate::bench::Bench) -> anyhow::Result<()>) -> Test {
    Test { name, needs: crate::suite::Needs::Device, body }
}

/// A test of what becket promises beyond the kernel's own tool.
const fn becket(name: &'static str, body: fn(&crate::bench::Bench) -> anyhow::Result<()>) -> Test {
    Test { name, needs: crate::suite::Needs::Becket, body }
}

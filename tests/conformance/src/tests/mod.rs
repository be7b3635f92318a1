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

/// All tests by group, in the order in which they run: what everything stands on comes first.
pub(crate) const GROUPS: [(&str, &[Test]); 10] = [
    ("geometry", geometry::TESTS),
    ("data", data::TESTS),
    ("durability", durability::TESTS),
    ("space", space::TESTS),
    ("limits", limits::TESTS),
    ("partitions", partitions::TESTS),
    ("trouble", trouble::TESTS),
    ("lifecycle", lifecycle::TESTS),
    ("live", live::TESTS),
    ("filesystems", filesystems::TESTS),
];

/// A test that any block device can pass.
const fn device(name: &'static str, body: fn(&crate::bench::Bench) -> anyhow::Result<()>) -> Test {
    Test { name, needs: crate::suite::Needs::Device, body }
}

/// A test of what becket promises beyond the kernel's own tool.
const fn becket(name: &'static str, body: fn(&crate::bench::Bench) -> anyhow::Result<()>) -> Test {
    Test { name, needs: crate::suite::Needs::Becket, body }
}

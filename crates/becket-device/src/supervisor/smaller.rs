//! How deep queues are, and how a device becomes smaller when the worker's tables have no room for it.
//! It never gives up what was insisted on: a way of carrying data that was forced stays.

use becket_transport::ublk::DataMode;

use crate::contract::messages::Attach;

/// More queues than this have not helped a file or disk behind them.
const MOST_QUEUES: u16 = 4;
pub(super) const DEPTH_WITH_BUFFERS: u16 = 64;
/// With fewer requests under way, copying them is the smaller loss.
const FEWEST: u16 = 4;

/// Queues, and requests of each, of a device about which nothing was said; `owned` others are there already.
///
/// A queue for each CPU and 128 requests are enough for an NVMe disk, and more tags than are in use make one
/// quicker to find; but a thousand disks are never busy together, the rings' tables of requests that are not
/// copied have no more than 16,384 places each, and each place costs the kernel memory (docs/decisions/0023
/// has the figures). Two rings have places for 4,096 devices (one for 3,000), and a sixteenth more: for those
/// that come at once, before they are counted, and for holes into which nothing fits. Requests that are
/// copied have a buffer of a quarter of a MiB each, which is locked in memory.
pub(super) fn usual(owned: usize, mode: DataMode, cpus: usize) -> (u16, u16) {
    // One ring has half the places.
    let owned = if cpus < 2 { owned.saturating_mul(2) } else { owned };
    let (most, depth) = match (mode.is_zero_copy(), owned) {
        (true, 0..32) => (MOST_QUEUES, 128),
        (true, 32..128) => (1, 64),
        (true, 128..256) => (1, 32),
        (true, 256..512) => (1, 16),
        (true, 512..1024) => (1, 4),
        (true, _) => (1, 2),
        (false, 0..8) => (MOST_QUEUES, DEPTH_WITH_BUFFERS),
        (false, 8..32) => (1, 32),
        (false, 32..128) => (1, 16),
        (false, _) => (1, 4),
    };
    (u16::try_from(cpus).map_or(most, |cpus| cpus.clamp(1, most)), depth)
}

/// What to ask for instead of `asked`, when `tried` was too much and queues that copy nothing can be `room`
/// deep.
///
/// Each answer is less than `tried`, so asking again and again ends.
pub(super) fn smaller(asked: &Attach, tried: &Attach, room: u16, copying: DataMode) -> Option<Attach> {
    if asked.spec.mode != tried.spec.mode {
        // It copies already, which takes no room.
        return None;
    }
    // Powers of two leave no holes in the table that nothing fits into.
    let depth = room.checked_ilog2().map_or(0, |log| 1 << log);
    let fewest = if asked.spec.mode.is_some() { 1 } else { FEWEST };
    let mut less = asked.clone();
    let how = if depth >= fewest && tried.spec.depth.is_none_or(|tried| depth < tried) {
        less.spec.depth = Some(depth);
        format!("{depth} requests in flight in each queue")
    } else if asked.spec.mode.is_none() {
        less.spec.mode = Some(copying);
        less.spec.depth = asked.spec.depth.map(|depth| depth.min(DEPTH_WITH_BUFFERS));
        "data is copied".to_owned()
    } else {
        return None;
    };
    let why = "since the server's table for requests that are not copied is nearly full";
    less.spec.reason = format!("{}; {how}, {why}", asked.spec.reason);
    if less.spec.depth != asked.spec.depth && asked.spec.depth.is_some() {
        less.warnings.push(format!("the depth that was asked for cannot be had: {how}, {why}"));
    }
    Some(less)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::doubles::{Bench, with};

    /// Depth and mode after each attempt while there is room for `room` requests, until one succeeds or none
    /// is left.
    fn attempts(
        depth: Option<u16>,
        mode: Option<DataMode>,
        room: u16,
    ) -> Vec<(Option<u16>, Option<DataMode>)> {
        let asked = with(Bench::new().request(None), |it| (it.spec.depth, it.spec.mode) = (depth, mode));
        let mut tried = asked.clone();
        let mut all = Vec::new();
        while let Some(less) = smaller(&asked, &tried, room, DataMode::BatchCopy) {
            all.push((less.spec.depth, less.spec.mode));
            tried = less;
        }
        all
    }

    #[test]
    fn fewer_requests_come_before_copying_and_there_is_an_end() {
        let copy = Some(DataMode::BatchCopy);
        assert_eq!(attempts(None, None, 100), [(Some(64), None), (None, copy)]);
        assert_eq!(attempts(None, None, 4), [(Some(4), None), (None, copy)]);
        assert_eq!(attempts(None, None, 3), [(None, copy)]);
        assert_eq!(attempts(None, None, 0), [(None, copy)]);
        assert_eq!(attempts(Some(4096), None, 4095), [(Some(2048), None), (Some(64), copy)]);
        assert_eq!(attempts(Some(8), None, 4), [(Some(4), None), (Some(8), copy)]);
    }

    #[test]
    fn a_device_among_many_is_smaller_than_one_among_few() {
        let zero = |owned| usual(owned, DataMode::BatchZeroCopy, 8);
        assert_eq!((zero(0), zero(31)), ((4, 128), (4, 128)));
        let all: Vec<_> = (0..2000).map(zero).collect();
        assert!(all.windows(2).all(|two| two[0].0 >= two[1].0 && two[0].1 >= two[1].1));
        // So many fit into the tables of two rings, and some places are left.
        let places = |owned| {
            let (queues, depth) = usual(owned, DataMode::ZeroCopy, 2);
            u32::from(queues) * u32::from(depth)
        };
        assert_eq!((0..4096).map(places).sum::<u32>(), 2 * 16_384 * 15 / 16);
        let of_one_ring = |owned| u32::from(usual(owned, DataMode::ZeroCopy, 1).1);
        assert!((0..3000).map(of_one_ring).sum::<u32>() <= 16_384 * 15 / 16);
        let copied = |owned| usual(owned, DataMode::Copy, 8);
        assert_eq!((copied(0), copied(5000)), ((4, DEPTH_WITH_BUFFERS), (1, 4)));
        assert_eq!(usual(0, DataMode::Copy, 1).0, 1);
    }

    #[test]
    fn a_mode_that_was_forced_stays() {
        let zero = Some(DataMode::ZeroCopy);
        assert_eq!(attempts(Some(64), zero, 3), [(Some(2), zero)]);
        assert_eq!(attempts(None, zero, 0), []);
    }

    #[test]
    fn a_depth_that_was_asked_for_and_not_had_is_a_warning() {
        let bench = Bench::new();
        let usual = bench.request(None);
        let asked = with(usual.clone(), |it| it.spec.depth = Some(4096));
        let warnings = |asked: &Attach| smaller(asked, asked, 1000, DataMode::Copy).unwrap().warnings;
        assert!(warnings(&usual).is_empty());
        assert!(warnings(&asked)[0].contains("512 requests"), "{:?}", warnings(&asked));
        let reason = smaller(&usual, &usual, 1000, DataMode::Copy).unwrap().spec.reason;
        assert!(reason.starts_with("test; 512 requests"), "{reason}");
    }
}

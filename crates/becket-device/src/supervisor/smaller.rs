//! How deep queues are, and how a device becomes smaller when the worker's tables have no room for it.
//! It never gives up what was insisted on: a way of carrying data that was forced stays.

use becket_transport::ublk::DataMode;

use crate::control::Attach;

/// Requests of a queue, unless the user says otherwise: enough for an NVMe disk, and more tags than are in use make one
/// quicker to find. Where each needs a buffer of its own, fewer.
pub(super) const DEPTH: u16 = 128;
pub(super) const DEPTH_WITH_BUFFERS: u16 = 64;
/// With fewer requests under way, copying them is the smaller loss.
const FEWEST: u16 = 16;

/// What to ask for instead of `asked`, when `tried` was too much and queues that copy nothing can be `room` deep.
///
/// Each answer is less than `tried`, so asking again and again ends.
pub(super) fn smaller(asked: &Attach, tried: &Attach, room: u16, copying: DataMode) -> Option<Attach> {
    if asked.mode != tried.mode {
        // It copies already, which takes no room.
        return None;
    }
    // Powers of two leave no holes in the table that nothing fits into.
    let depth = room.checked_ilog2().map_or(0, |log| 1 << log);
    let fewest = if asked.mode.is_some() { 1 } else { FEWEST };
    let mut less = asked.clone();
    let how = if depth >= fewest && tried.depth.is_none_or(|tried| depth < tried) {
        less.depth = Some(depth);
        format!("{depth} requests in flight in each queue")
    } else if asked.mode.is_none() {
        less.mode = Some(copying);
        less.depth = asked.depth.map(|depth| depth.min(DEPTH_WITH_BUFFERS));
        "data is copied".to_owned()
    } else {
        return None;
    };
    let why = "since the server's table for requests that are not copied is nearly full";
    less.reason = format!("{}; {how}, {why}", asked.reason);
    if less.depth != asked.depth && asked.depth.is_some() {
        less.warnings.push(format!("the depth that was asked for cannot be had: {how}, {why}"));
    }
    Some(less)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::doubles::Bench;

    /// Depth and mode after each attempt while there is room for `room` requests, until one succeeds or nothing is left.
    fn attempts(
        depth: Option<u16>,
        mode: Option<DataMode>,
        room: u16,
    ) -> Vec<(Option<u16>, Option<DataMode>)> {
        let asked = Attach { depth, mode, ..Bench::new().request(None) };
        let mut tried = asked.clone();
        let mut all = Vec::new();
        while let Some(less) = smaller(&asked, &tried, room, DataMode::BatchCopy) {
            all.push((less.depth, less.mode));
            tried = less;
        }
        all
    }

    #[test]
    fn fewer_requests_come_before_copying_and_there_is_an_end() {
        let copy = Some(DataMode::BatchCopy);
        assert_eq!(attempts(None, None, 100), [(Some(64), None), (None, copy)]);
        assert_eq!(attempts(None, None, 16), [(Some(16), None), (None, copy)]);
        assert_eq!(attempts(None, None, 15), [(None, copy)]);
        assert_eq!(attempts(None, None, 0), [(None, copy)]);
        assert_eq!(attempts(Some(4096), None, 4095), [(Some(2048), None), (Some(64), copy)]);
        assert_eq!(attempts(Some(8), None, 4), [(Some(8), copy)]);
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
        let asked = Attach { depth: Some(4096), ..usual.clone() };
        let warnings = |asked: &Attach| smaller(asked, asked, 1000, DataMode::Copy).unwrap().warnings;
        assert!(warnings(&usual).is_empty());
        assert!(warnings(&asked)[0].contains("512 requests"), "{:?}", warnings(&asked));
        let reason = smaller(&usual, &usual, 1000, DataMode::Copy).unwrap().reason;
        assert!(reason.starts_with("test; 512 requests"), "{reason}");
    }
}

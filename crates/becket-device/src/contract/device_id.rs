//! What a device is called where devices of all offers meet: its kind and its own number.
//! It says nothing of a device that changes while it lives.

use std::fmt;

use becket_transport::Kind;
use serde::{Deserialize, Serialize};

use crate::contract::DeviceInfo;

/// The served offers, and where the numbers of each begin in orders, reports and what the guard keeps: there
/// a device is one number. ublk has no number beyond the first twenty bits (its minors end there). These
/// never change, because processes of other versions read them. Each has as many as the one below has.
const FIRST: [(Kind, u32); 4] =
    [(Kind::VhostUser, 3 << 20), (Kind::Nbd, 2 << 20), (Kind::Fuse, 1 << 20), (Kind::Ublk, 0)];

/// A device that becket serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "u32", into = "u32")]
pub(crate) struct DeviceId {
    pub(crate) kind: Kind,
    pub(crate) number: u32,
}

impl DeviceId {
    /// A device that there never is: the largest number of all.
    pub(crate) const NONE: DeviceId = DeviceId { kind: FIRST[0].0, number: u32::MAX - FIRST[0].1 };

    /// That of a recorded device.
    pub(crate) fn of(info: &DeviceInfo) -> DeviceId {
        DeviceId { kind: info.transport, number: info.number }
    }
}

impl From<u32> for DeviceId {
    fn from(one: u32) -> DeviceId {
        let [.., lowest] = FIRST;
        let (kind, first) = FIRST.into_iter().find(|(_, first)| *first <= one).unwrap_or(lowest);
        DeviceId { kind, number: one - first }
    }
}

impl From<DeviceId> for u32 {
    fn from(DeviceId { kind, number }: DeviceId) -> u32 {
        let first = FIRST.iter().find(|(its, _)| *its == kind);
        // A device that nobody serves is in no message.
        first.map_or(u32::MAX, |(_, first)| first.saturating_add(number))
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} device {}", self.kind, self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::protocol::{Order, Report};

    #[test]
    fn devices_are_spoken_of_by_their_own_numbers() {
        assert_eq!(DeviceId { kind: Kind::Ublk, number: 3 }.to_string(), "ublk device 3");
        assert_eq!(DeviceId { kind: Kind::Fuse, number: 0 }.to_string(), "fuse device 0");
    }

    /// Processes of other versions read and write these bytes.
    #[test]
    fn a_message_has_one_number_for_a_device() {
        for (kind, number, one) in [
            (Kind::Ublk, 0, "0"),
            (Kind::Ublk, 3, "3"),
            (Kind::Ublk, (1 << 20) - 1, "1048575"),
            (Kind::Fuse, 0, "1048576"),
            (Kind::Fuse, 5, "1048581"),
            (Kind::Fuse, (1 << 20) - 1, "2097151"),
            (Kind::Nbd, 0, "2097152"),
            (Kind::Nbd, (1 << 20) - 1, "3145727"),
            (Kind::VhostUser, 0, "3145728"),
            (Kind::VhostUser, u32::MAX - (3 << 20), "4294967295"),
        ] {
            let id = DeviceId { kind, number };
            let order = format!("{{\"stat\":{{\"id\":{one}}}}}");
            assert_eq!(serde_json::to_string(&Order::Stat { id }).unwrap(), order);
            let Order::Stat { id: again } = serde_json::from_str(&order).unwrap() else { panic!() };
            assert_eq!(again, id);
            let report = format!("{{\"closed\":{{\"id\":{one}}}}}");
            assert_eq!(serde_json::to_string(&Report::Closed { id }).unwrap(), report);
        }
        assert_eq!(serde_json::to_string(&DeviceId::NONE).unwrap(), "4294967295");
        // Never a number of another device.
        let not_served = DeviceId { kind: Kind::Loop, number: 3 };
        assert_eq!(u32::from(not_served), u32::MAX);
        assert_eq!(u32::from(DeviceId { kind: Kind::Fuse, number: u32::MAX }), u32::MAX);
        assert!(serde_json::from_str::<DeviceId>("-1").is_err());
    }
}

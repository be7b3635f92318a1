//! What a served device can do, as a value that is explained here alone.
//! It decides nothing: a device has what its driver granted when it was added.

use becket_image::Map;
use becket_uapi::ublk as uapi;
use serde::{Deserialize, Serialize};

use crate::serve::ServeError;
use crate::ublk::{DataMode, flags_for};

/// What a driver can do, or one of its devices. Orders and records of all versions have it as one number,
/// whose bits are those of ublk (`UBLK_F_*`); other transports use the bits that mean the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Abilities(u64);

impl Abilities {
    /// It can be served at all.
    pub const SERVED: Abilities = Abilities(uapi::UBLK_F_CMD_IOCTL_ENCODE);
    /// It waits for another worker when its worker dies, and no request is lost.
    pub const RECOVERS: Abilities = Abilities(uapi::UBLK_F_USER_RECOVERY);
    /// It can have another length while it lives.
    pub const RESIZES: Abilities = Abilities(uapi::UBLK_F_UPDATE_SIZE);
    /// Its requests can be held back, and its driver sees at once that a worker died.
    pub const QUIESCES: Abilities = Abilities(uapi::UBLK_F_QUIESCE);
    /// The requester's pages need not be copied.
    pub const ZERO_COPY: Abilities = Abilities(uapi::UBLK_F_AUTO_BUF_REG);
    /// Commands carry many requests.
    pub const BATCH: Abilities = Abilities(uapi::UBLK_F_BATCH_IO);

    /// Those of ublk's flags.
    pub const fn of_flags(flags: u64) -> Abilities {
        Abilities(flags)
    }

    /// As ublk's flags.
    pub const fn flags(self) -> u64 {
        self.0
    }

    /// These and those.
    pub const fn with(self, others: Abilities) -> Abilities {
        Abilities(self.0 | others.0)
    }

    /// These without those.
    pub const fn without(self, others: Abilities) -> Abilities {
        Abilities(self.0 & !others.0)
    }

    /// Whether all of those are among these.
    pub const fn has(self, others: Abilities) -> bool {
        self.0 & others.0 == others.0
    }

    /// Whether a live device can be taken from its worker without a request being lost or failing.
    pub const fn quiesces(self) -> bool {
        // With batch commands at least Linux 7.0 to 7.3 fail the requests that come after QUIESCE_DEV (it
        // sets `force_abort`, as for a device that is stopped).
        self.has(Abilities::QUIESCES) && !self.has(Abilities::BATCH)
    }

    /// How requests carry their bytes.
    pub fn data_mode(self) -> DataMode {
        DataMode::of(self.0)
    }

    /// The best way to carry bytes of those that copy, by what the driver can do.
    pub fn copying(self) -> DataMode {
        DataMode::copying(self.0)
    }

    /// Of what a driver can do, what a new device for this image is to have; see [`flags_for`].
    ///
    /// # Errors
    /// [`ServeError::NoMode`] when the wish cannot be met.
    pub fn for_device(self, wish: Option<DataMode>, map: &Map) -> Result<Abilities, ServeError> {
        flags_for(self.0, wish, map).map(Abilities)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes of other versions read and write this number.
    #[test]
    fn abilities_are_one_number_and_its_bits_are_those_of_ublk() {
        let all = [
            (Abilities::RECOVERS, 1 << 3),
            (Abilities::SERVED, 1 << 6),
            (Abilities::RESIZES, 1 << 10),
            (Abilities::ZERO_COPY, 1 << 11),
            (Abilities::QUIESCES, 1 << 12),
            (Abilities::BATCH, 1 << 15),
        ];
        for (ability, bits) in all {
            assert_eq!(ability.flags(), bits, "{ability:?}");
        }
        let any = Abilities::of_flags(u64::MAX);
        assert!(all.iter().all(|(ability, _)| any.has(*ability)), "unknown bits are kept and do no harm");
        assert_eq!(any.flags(), u64::MAX);
        assert!(!any.quiesces() && any.without(Abilities::BATCH).quiesces());
    }
}

//! How data and commands travel between driver and server, and which way is taken.
//! Asks nothing of the kernel itself: what it has was asked before.

use becket_image::{Map, Place};
use becket_uapi::ublk as uapi;
use serde::{Deserialize, Serialize};

use crate::serve::ServeError;

/// How a device's requests carry their bytes, and how requests and results travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataMode {
    /// The kernel copies between the requester's pages and the server's buffers; each tag has its own
    /// commands.
    Copy,
    /// The requester's pages go to the backing as they are (`UBLK_F_AUTO_BUF_REG`, Linux 6.16).
    ZeroCopy,
    /// As `Copy`, with commands for many tags at once (`UBLK_F_BATCH_IO`, Linux 7.0).
    BatchCopy,
    /// As `ZeroCopy`, with commands for many tags at once.
    BatchZeroCopy,
}

impl DataMode {
    /// All of them.
    pub const ALL: [DataMode; 4] =
        [DataMode::Copy, DataMode::ZeroCopy, DataMode::BatchCopy, DataMode::BatchZeroCopy];

    /// The mode that a device's flags, as the kernel returned them, stand for.
    pub fn of(flags: u64) -> DataMode {
        match (flags & uapi::UBLK_F_BATCH_IO != 0, flags & uapi::UBLK_F_AUTO_BUF_REG != 0) {
            (false, false) => DataMode::Copy,
            (false, true) => DataMode::ZeroCopy,
            (true, false) => DataMode::BatchCopy,
            (true, true) => DataMode::BatchZeroCopy,
        }
    }

    /// The best of those that copy, by what the kernel says it has.
    pub fn copying(features: u64) -> DataMode {
        if features & uapi::UBLK_F_BATCH_IO != 0 { DataMode::BatchCopy } else { DataMode::Copy }
    }

    /// The requester's pages are not copied.
    pub fn is_zero_copy(self) -> bool {
        matches!(self, DataMode::ZeroCopy | DataMode::BatchZeroCopy)
    }

    /// Commands carry many tags.
    pub fn is_batch(self) -> bool {
        matches!(self, DataMode::BatchCopy | DataMode::BatchZeroCopy)
    }

    /// Longest request, in bytes.
    pub fn max_io(self) -> u32 {
        if self.is_zero_copy() { MAX_IO_ZERO_COPY } else { MAX_IO_COPY }
    }

    /// The word used on the command line and in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            DataMode::Copy => "copy",
            DataMode::ZeroCopy => "zero-copy",
            DataMode::BatchCopy => "batch-copy",
            DataMode::BatchZeroCopy => "batch-zero-copy",
        }
    }
}

impl std::fmt::Display for DataMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

impl std::str::FromStr for DataMode {
    type Err = String;

    fn from_str(word: &str) -> Result<DataMode, String> {
        DataMode::ALL
            .into_iter()
            .find(|mode| mode.as_str() == word)
            .ok_or_else(|| format!("'{word}' is none of copy, zero-copy, batch-copy, batch-zero-copy"))
    }
}

/// Longest request in copy mode, in bytes: every tag has a buffer of this size.
const MAX_IO_COPY: u32 = 256 << 10;
/// Longest request in zero-copy mode, in bytes.
const MAX_IO_ZERO_COPY: u32 = 1 << 20;

/// Flags that all modes ask for; the kernel masks what it does not know.
///
/// Without its server a disk stays: requests wait, and those that the server had are issued again to the next
/// one.
const COMMON: u64 = uapi::UBLK_F_CMD_IOCTL_ENCODE
    | uapi::UBLK_F_USER_RECOVERY
    | uapi::UBLK_F_USER_RECOVERY_REISSUE
    | uapi::UBLK_F_QUIESCE
    | uapi::UBLK_F_UPDATE_SIZE
    | uapi::UBLK_F_SAFE_STOP_DEV
    | uapi::UBLK_F_NO_AUTO_PART_SCAN;

/// The flags to ask for when a device is added.
///
/// `features` is what the kernel says it has (0 if it cannot say). By default the device copies nothing if
/// the kernel can register the requester's pages and most of the image's bytes are stored as they are read.
/// What must be decoded is copied in any case, and more simply if the server has buffers of its own. Commands
/// for many requests at once are always used: they cost less (docs/decisions/0025).
///
/// # Errors
/// [`ServeError::NoMode`] when the wish cannot be met.
pub fn flags_for(features: u64, wish: Option<DataMode>, map: &Map) -> Result<u64, ServeError> {
    let has = |flag| features & flag != 0;
    let registers = has(uapi::UBLK_F_AUTO_BUF_REG);
    let best = match (registers && is_mostly_stored(map), has(uapi::UBLK_F_BATCH_IO)) {
        (true, true) => DataMode::BatchZeroCopy,
        (true, false) => DataMode::ZeroCopy,
        (false, true) => DataMode::BatchCopy,
        (false, false) => DataMode::Copy,
    };
    let mode = wish.unwrap_or(best);
    let lacking = if !has(uapi::UBLK_F_CMD_IOCTL_ENCODE) {
        Some("this kernel's ublk driver does not say that it takes ioctl-encoded commands (Linux 6.5 does)")
    } else if mode.is_zero_copy() && !registers {
        Some("this kernel cannot register request buffers (Linux 6.16 can)")
    } else if mode.is_batch() && !has(uapi::UBLK_F_BATCH_IO) {
        Some("this kernel has no commands for many requests at once (Linux 7.0 has)")
    } else {
        None
    };
    if let Some(why) = lacking {
        return Err(ServeError::NoMode { mode: mode.to_string(), why: why.to_owned() });
    }
    let mut flags = COMMON & features;
    if mode.is_zero_copy() {
        flags |= uapi::UBLK_F_AUTO_BUF_REG | (uapi::UBLK_F_SUPPORT_ZERO_COPY & features);
    }
    if mode.is_batch() {
        flags |= uapi::UBLK_F_BATCH_IO;
    }
    Ok(flags)
}

/// Whether at least half of an image's bytes, without holes, are stored as they are read. An image that has
/// none yet is going to be written, or reads as zeroes.
fn is_mostly_stored(map: &Map) -> bool {
    let (mut stored, mut encoded) = (0_u64, 0_u64);
    for extent in map.extents() {
        match extent.place {
            Place::Data { .. } => stored += extent.len,
            Place::Encoded { .. } => encoded += extent.len,
            Place::Zero => {}
        }
    }
    stored >= encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_negotiated_from_features_and_map() {
        let plain = Map::contiguous(0, 0, 4096);
        let old = uapi::UBLK_F_CMD_IOCTL_ENCODE | uapi::UBLK_F_USER_COPY;
        let new = old | uapi::UBLK_F_AUTO_BUF_REG | uapi::UBLK_F_SUPPORT_ZERO_COPY | uapi::UBLK_F_UPDATE_SIZE;
        assert_eq!(DataMode::of(flags_for(old, None, &plain).unwrap()), DataMode::Copy);
        assert_eq!(DataMode::of(flags_for(new, None, &plain).unwrap()), DataMode::ZeroCopy);
        assert_eq!(DataMode::of(flags_for(new, Some(DataMode::Copy), &plain).unwrap()), DataMode::Copy);
        assert!(flags_for(old, Some(DataMode::ZeroCopy), &plain).is_err());
        assert!(flags_for(0, None, &plain).is_err());
        let newest = new | uapi::UBLK_F_BATCH_IO;
        assert_eq!(DataMode::of(flags_for(newest, None, &plain).unwrap()), DataMode::BatchZeroCopy);
        for mode in DataMode::ALL {
            assert_eq!(DataMode::of(flags_for(newest, Some(mode), &plain).unwrap()), mode);
            assert_eq!(flags_for(new, Some(mode), &plain).is_err(), mode.is_batch(), "{mode}");
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
    }

    #[test]
    fn what_is_mostly_decoded_is_copied() {
        let features = uapi::UBLK_F_CMD_IOCTL_ENCODE | uapi::UBLK_F_AUTO_BUF_REG;
        let data = Place::Data { source: 0, offset: 0 };
        let encoded = Place::Encoded { layer: 0, offset: 0 };
        for (parts, wanted) in [
            (vec![(4096, Place::Zero)], DataMode::ZeroCopy),
            (vec![(1 << 30, Place::Zero), (4096, data)], DataMode::ZeroCopy),
            (vec![(4096, encoded), (1 << 20, Place::Zero), (4096, data)], DataMode::ZeroCopy),
            (vec![(8192, encoded), (1 << 20, Place::Zero), (4096, data)], DataMode::Copy),
            (vec![(512, encoded)], DataMode::Copy),
        ] {
            let mut start = 0;
            let extents = parts.into_iter().map(|(len, place)| {
                start += len;
                becket_image::Extent { start: start - len, len, place }
            });
            let map = Map::from_extents(extents.collect()).unwrap();
            assert_eq!(DataMode::of(flags_for(features, None, &map).unwrap()), wanted, "{map:?}");
            let wish = Some(DataMode::ZeroCopy);
            assert_eq!(DataMode::of(flags_for(features, wish, &map).unwrap()), DataMode::ZeroCopy, "{map:?}");
        }
    }
}

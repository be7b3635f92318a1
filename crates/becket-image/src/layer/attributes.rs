//! What readers share of attributes: the names of extended ones, access control lists, devices' numbers.
//! It never takes more of them than a kernel would.

use super::error::{LayerError, corrupt};
use super::filesystem::{NAME_MAX, Xattrs};
use crate::bytes::{u16_at, u32_at};

/// The longest value of an extended attribute, in bytes: what the kernel takes.
pub(super) const VALUE_MAX: usize = 64 << 10;
/// The most bytes of names and values that a file's extended attributes have together, with some room.
const XATTRS_MAX: usize = 1 << 20;

/// Extended attributes as a reader finds them.
#[derive(Debug, Default)]
pub(super) struct FoundXattrs {
    all: Xattrs,
    bytes: usize,
}

impl FoundXattrs {
    /// Takes one more, whose name has a `prefix`.
    pub(super) fn push(&mut self, prefix: &[u8], name: &[u8], value: Vec<u8>) -> Result<(), LayerError> {
        self.bytes += prefix.len() + name.len() + value.len();
        if self.bytes > XATTRS_MAX || value.len() > VALUE_MAX {
            return Err(LayerError::Limit("the extended attributes of a file".to_owned()));
        }
        if name.contains(&0) || prefix.len() + name.len() > NAME_MAX {
            return corrupt("an impossible name of an extended attribute");
        }
        self.all.push(([prefix, name].concat(), value));
        Ok(())
    }

    pub(super) fn all(self) -> Xattrs {
        self.all
    }
}

/// The prefix that ext and EROFS write as a number, which few others share.
pub(super) fn prefix(number: u8) -> Option<&'static [u8]> {
    Some(match number {
        0 => b"",
        1 => b"user.",
        2 => b"system.posix_acl_access",
        3 => b"system.posix_acl_default",
        4 => b"trusted.",
        6 => b"security.",
        7 => b"system.",
        _ => return None,
    })
}

/// An access control list as ext stores it, in the form in which the kernel takes it.
pub(super) fn acl_of_ext(stored: &[u8]) -> Result<Vec<u8>, LayerError> {
    const USER: u16 = 2;
    const GROUP: u16 = 8;
    let mut acl = 2_u32.to_le_bytes().to_vec();
    if stored.len() < 4 || u32_at(stored, 0) != 1 {
        return corrupt("an impossible access control list");
    }
    let mut at = 4;
    while at + 4 <= stored.len() {
        let (tag, permissions) = (u16_at(stored, at), u16_at(stored, at + 2));
        let named = matches!(tag, USER | GROUP);
        let id = if named { u32_at(stored, at + 4) } else { u32::MAX };
        acl.extend(tag.to_le_bytes().into_iter().chain(permissions.to_le_bytes()).chain(id.to_le_bytes()));
        at += if named { 8 } else { 4 };
    }
    Ok(acl)
}

/// Major and minor number in the kernel's encoding of 32 bits.
pub(super) fn device(number: u32) -> (u32, u32) {
    ((number >> 8) & 0xfff, number & 0xff | number >> 12 & 0xf_ff00)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_two_numbers() {
        assert_eq!(device(0x0801), (8, 1));
        assert_eq!(device(0x1000_0300 | 0x42), (3, 0x1_0042));
    }
}

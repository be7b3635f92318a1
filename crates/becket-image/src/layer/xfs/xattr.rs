//! Extended attributes of XFS: in the inode, in leaves, and large values in blocks of their own.
//! It never follows the chain of leaves further than the fork has blocks.

use super::fork::{Extent, lay_out, walk};
use super::metadata::{Fork, Inode, Xfs, form};
use crate::bytes::{be16_at, be32_at, be64_at, part, u8_at};
use crate::image::Image;
use crate::layer::attributes::{FoundXattrs, VALUE_MAX};
use crate::layer::{LayerError, Xattrs, corrupt};

/// Flags of an attribute.
const LOCAL: u8 = 0x01;
const TRUSTED: u8 = 0x02;
const SECURITY: u8 = 0x04;
/// Neither of the user's: pointers to parents, and what is just being written.
const HIDDEN: u8 = 0x88;
/// Length of the head of a block of a value, in bytes.
const VALUE_HEAD: usize = 56;
/// The most levels above the leaves.
const LEVELS_MAX: usize = 5;

/// The extended attributes of a file.
pub(super) fn read(xfs: &Xfs, inode: &Inode) -> Result<Xattrs, LayerError> {
    let mut found = FoundXattrs::default();
    match &inode.attributes {
        None => {}
        Some(fork) if fork.form == form::LOCAL => short(&fork.bytes, &mut found)?,
        Some(fork) if fork.form == form::EXTENTS && fork.extents == 0 => {}
        Some(fork) => Leaves::of(xfs, inode, fork)?.read(&mut found)?,
    }
    Ok(found.all())
}

/// Takes one attribute; an access control list in the form in which the kernel takes it.
fn push(found: &mut FoundXattrs, flags: u8, name: &[u8], value: Vec<u8>) -> Result<(), LayerError> {
    if flags & HIDDEN != 0 {
        return Ok(());
    }
    match (flags & (TRUSTED | SECURITY), name) {
        (TRUSTED, b"SGI_ACL_FILE") => found.push(b"system.", b"posix_acl_access", acl(&value)?),
        (TRUSTED, b"SGI_ACL_DEFAULT") => found.push(b"system.", b"posix_acl_default", acl(&value)?),
        (TRUSTED, name) => found.push(b"trusted.", name, value),
        (SECURITY, name) => found.push(b"security.", name, value),
        (_, name) => found.push(b"user.", name, value),
    }
}

/// An access control list: a count, then tag, number and permissions of each entry.
fn acl(stored: &[u8]) -> Result<Vec<u8>, LayerError> {
    const USER: u32 = 2;
    const GROUP: u32 = 8;
    let mut acl = 2_u32.to_le_bytes().to_vec();
    let entries = stored.get(4..).unwrap_or_default().as_chunks::<12>().0;
    if usize::try_from(be32_at(stored, 0)).is_ok_and(|count| count > entries.len()) {
        return corrupt("an impossible access control list");
    }
    for entry in entries.iter().take(usize::try_from(be32_at(stored, 0)).unwrap_or(0)) {
        let (tag, id, permissions) = (be32_at(entry, 0), be32_at(entry, 4), be16_at(entry, 8));
        let id = if matches!(tag, USER | GROUP) { id } else { u32::MAX };
        let tag = u16::try_from(tag).unwrap_or(0);
        acl.extend(tag.to_le_bytes().into_iter().chain(permissions.to_le_bytes()).chain(id.to_le_bytes()));
    }
    Ok(acl)
}

/// The attributes in an inode.
fn short(bytes: &[u8], found: &mut FoundXattrs) -> Result<(), LayerError> {
    let bytes = part(bytes, 0, be16_at(bytes, 0).into());
    let mut at = 4;
    for _ in 0..u8_at(bytes, 2) {
        let (name_len, value_len) = (usize::from(u8_at(bytes, at)), usize::from(u8_at(bytes, at + 1)));
        let (name, value) = (at + 3, at + 3 + name_len);
        if value + value_len > bytes.len() {
            return corrupt("an extended attribute does not fit its inode");
        }
        let flags = u8_at(bytes, at + 2);
        push(found, flags, part(bytes, name, name_len), part(bytes, value, value_len).to_vec())?;
        at = value + value_len;
    }
    Ok(())
}

/// The blocks of an attribute fork.
struct Leaves<'a> {
    xfs: &'a Xfs,
    owner: u64,
    fork: Image,
    /// Blocks that it has at most.
    blocks: u64,
}

impl Leaves<'_> {
    fn of<'a>(xfs: &'a Xfs, inode: &Inode, fork: &Fork) -> Result<Leaves<'a>, LayerError> {
        let mut blocks = 0;
        walk(xfs, fork, &mut |Extent { logical, count, .. }| {
            blocks = blocks.max(logical.saturating_add(count));
            Ok(())
        })?;
        let image = xfs.image.compose(lay_out(xfs, fork, blocks.saturating_mul(xfs.block_size))?)?;
        Ok(Leaves { xfs, owner: inode.number, fork: image, blocks })
    }

    fn block(&self, number: u32) -> Result<Vec<u8>, LayerError> {
        let size = self.xfs.block_size;
        let block = self.fork.read_vec(u64::from(number) * size, usize::try_from(size).unwrap_or(0))?;
        if self.xfs.summed {
            self.xfs.check(&block, 12, "a block of extended attributes")?;
            if be64_at(&block, 48) != self.owner {
                return corrupt("a block of extended attributes belongs to another file");
            }
        }
        Ok(block)
    }

    /// Goes down to the first leaf and along the chain of all of them.
    fn read(&self, found: &mut FoundXattrs) -> Result<(), LayerError> {
        // Magic numbers of nodes and leaves; where counts and entries are.
        let (node, leaf, count_at, node_head, leaf_head) = match self.xfs.summed {
            true => (0x3ebe, 0x3bee, 56, 64, 80),
            false => (0xfebe, 0xfbee, 12, 16, 32),
        };
        let mut block = self.block(0)?;
        for _ in 0..LEVELS_MAX {
            if be16_at(&block, 8) != node {
                break;
            }
            block = self.block(be32_at(&block, node_head + 4))?;
        }
        for _ in 0..self.blocks {
            if be16_at(&block, 8) != leaf {
                return corrupt("an impossible block of extended attributes");
            }
            for index in 0..usize::from(be16_at(&block, count_at)) {
                let at = leaf_head + index * 8;
                if at + 8 > block.len() {
                    return corrupt("the entries of extended attributes do not fit their block");
                }
                let (place, flags) = (usize::from(be16_at(&block, at + 4)), u8_at(&block, at + 6));
                self.entry(&block, place, flags, found)?;
            }
            match be32_at(&block, 0) {
                0 => return Ok(()),
                next => block = self.block(next)?,
            }
        }
        corrupt("the chain of extended attributes does not end")
    }

    /// The attribute whose name is at byte `at` of a leaf.
    fn entry(&self, leaf: &[u8], at: usize, flags: u8, found: &mut FoundXattrs) -> Result<(), LayerError> {
        let cut = || corrupt("an extended attribute does not fit its block");
        if flags & LOCAL != 0 {
            let (value_len, name_len) = (usize::from(be16_at(leaf, at)), usize::from(u8_at(leaf, at + 2)));
            let (name, value) = (part(leaf, at + 3, name_len), part(leaf, at + 3 + name_len, value_len));
            if name.len() < name_len || value.len() < value_len {
                return cut();
            }
            return push(found, flags, name, value.to_vec());
        }
        let (start, len) = (be32_at(leaf, at), usize::try_from(be32_at(leaf, at + 4)).unwrap_or(usize::MAX));
        let name_len = usize::from(u8_at(leaf, at + 8));
        let name = part(leaf, at + 9, name_len);
        if name.len() < name_len {
            return cut();
        }
        // What was not finished has no value yet.
        if flags & HIDDEN != 0 {
            return Ok(());
        }
        if len > VALUE_MAX {
            return corrupt(format!("an extended attribute of {len} bytes"));
        }
        push(found, flags, name, self.value(start, len)?)
    }

    /// A value in blocks of its own, each of which has a head in version 5.
    fn value(&self, start: u32, len: usize) -> Result<Vec<u8>, LayerError> {
        let (size, from) = (self.xfs.block_size, u64::from(start) * self.xfs.block_size);
        if !self.xfs.summed {
            return self.fork.read_vec(from, len);
        }
        let mut value = Vec::with_capacity(len);
        let mut at = from;
        while value.len() < len {
            let block = self.fork.read_vec(at, usize::try_from(size).unwrap_or(0))?;
            let bytes = part(&block, VALUE_HEAD, usize::try_from(be32_at(&block, 8)).unwrap_or(0));
            if !block.starts_with(b"XARM") || bytes.is_empty() || be64_at(&block, 32) != self.owner {
                return corrupt("an impossible block of the value of an extended attribute");
            }
            self.xfs.check(&block, 12, "the value of an extended attribute")?;
            value.extend_from_slice(bytes);
            at += size;
        }
        value.truncate(len);
        Ok(value)
    }
}

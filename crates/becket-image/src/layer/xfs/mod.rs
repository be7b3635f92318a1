//! XFS, versions 4 and 5: the file system of RHEL and Fedora.
//! It never replays a log and never writes: what a crash has left in the log is not seen.
//!
//! Our own, because no crate reports where a file's blocks are. Checksums of version 5 are verified, also
//! those of directories, and so is whose block a block is.
//!
//! Followed: "XFS Algorithms & Data Structures", 3rd edition, and fs/xfs/libxfs/xfs_format.h and
//! xfs_da_format.h of Linux.

mod directory;
mod fork;
mod metadata;
mod xattr;

use std::sync::Arc;

use fork::{Extent, walk};
use metadata::{Inode, Xfs, form};

use super::{
    About, Attributes, Entry, FileSystem, LayerError, NodeKind, Stat, Xattrs, corrupt, link_is_short,
    same_but_for_case, unsupported,
};
use crate::bytes::{be32_at, be64_at, part};
use crate::image::{Image, Layout};

/// Length of the head of a block of a symbolic link, in bytes.
const LINK_HEAD: u64 = 56;

/// Opens the file system in `image`, when there is one.
pub(super) fn open(image: &Image) -> Result<Option<Arc<dyn FileSystem>>, LayerError> {
    Ok(Xfs::open(image)?.map(|xfs| Arc::new(xfs) as Arc<dyn FileSystem>))
}

impl Xfs {
    /// The target of a link that does not fit its inode. In version 5 each run of blocks has a head.
    fn remote_link(&self, inode: &Inode) -> Result<Vec<u8>, LayerError> {
        let size = usize::try_from(inode.size).unwrap_or(usize::MAX);
        let mut target = Vec::with_capacity(size);
        walk(self, &inode.data, &mut |Extent { start, count, .. }| {
            let (at, left) = (self.byte_of(start, count)?, size - target.len());
            if !self.summed {
                let len = (count * self.block_size).min(left as u64);
                target.extend(self.image.read_vec(at, usize::try_from(len).unwrap_or(0))?);
                return Ok(());
            }
            let run =
                (count * self.block_size).min(LINK_HEAD + super::LINK_MAX).next_multiple_of(self.block_size);
            let run = self.image.read_vec(at, usize::try_from(run).unwrap_or(0))?;
            let len = usize::try_from(be32_at(&run, 8)).unwrap_or(usize::MAX).min(left);
            if !run.starts_with(b"XSLM") || be64_at(&run, 32) != inode.number {
                return corrupt("an impossible block of a symbolic link");
            }
            target.extend_from_slice(part(&run, usize::try_from(LINK_HEAD).unwrap_or(0), len));
            Ok(())
        })?;
        if target.len() == size { Ok(target) } else { corrupt("a symbolic link is shorter than it says") }
    }
}

impl FileSystem for Xfs {
    fn about(&self) -> &About {
        &self.about
    }

    fn root(&self) -> u64 {
        self.root
    }

    fn stat(&self, node: u64) -> Result<Stat, LayerError> {
        let inode = self.inode(node)?;
        Ok(Stat { kind: NodeKind::of_mode(inode.mode), size: inode.size })
    }

    fn attributes(&self, node: u64) -> Result<Attributes, LayerError> {
        let inode = self.inode(node)?;
        let kind = NodeKind::of_mode(inode.mode);
        let is_device = matches!(inode.mode & 0xf000, 0x2000 | 0x6000) && inode.data.form == form::DEVICE;
        // Fourteen bits of major number, eighteen of minor number.
        let device = be32_at(&inode.data.bytes, 0);
        Ok(Attributes {
            mode: Some(inode.mode),
            owner: Some(inode.owner),
            links: Some(inode.links),
            identity: (inode.links > 1 && kind != NodeKind::Directory).then_some(node),
            modified: Some(inode.modified),
            device: is_device.then_some((device >> 18 & 0x3fff, device & 0x3_ffff)),
            ..Attributes::of(kind, inode.size)
        })
    }

    fn xattrs(&self, node: u64) -> Result<Xattrs, LayerError> {
        xattr::read(self, &self.inode(node)?)
    }

    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
        directory::list(self, &self.inode_of(dir, NodeKind::Directory, "directory")?, entry)
    }

    fn same_name(&self, one: &[u8], other: &[u8]) -> bool {
        one == other || self.folds && same_but_for_case(one, other)
    }

    fn read_link(&self, node: u64) -> Result<Vec<u8>, LayerError> {
        let inode = self.inode_of(node, NodeKind::Symlink, "symbolic link")?;
        link_is_short(inode.size)?;
        if inode.data.form != form::LOCAL {
            return self.remote_link(&inode);
        }
        let size = usize::try_from(inode.size).unwrap_or(usize::MAX);
        match inode.data.bytes.get(..size) {
            Some(target) => Ok(target.to_vec()),
            None => corrupt("a symbolic link does not fit its inode"),
        }
    }

    fn lay_out(&self, node: u64) -> Result<Layout, LayerError> {
        let inode = self.inode_of(node, NodeKind::File, "regular file")?;
        if inode.realtime {
            return unsupported("files of XFS on a device for real-time data");
        }
        fork::lay_out(self, &inode.data, inode.size)
    }

    fn writable(&self, _: u64) -> Result<(), String> {
        Err("becket only reads files in XFS".to_owned())
    }
}

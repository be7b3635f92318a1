//! ext2, ext3 and ext4: superblock, group descriptors and inodes.
//! It never replays a journal and never writes.
//!
//! Our own, because no crate reports where a file's blocks are: ext4-view reads files and keeps the extents
//! to itself.
//! Checksums (`metadata_csum`) of the superblock, of inodes and of extent blocks are verified; those of
//! directories, group descriptors and bitmaps are not: bounds checks catch what they would catch, or it does
//! not matter here.
//!
//! Followed: Documentation/filesystems/ext4 of Linux 7.3.

mod blocks;
mod directory;
mod metadata;
mod xattr;

use std::sync::Arc;

use metadata::{Ext, Inode, ROOT, feature, flag};

use super::{
    About, Attributes, Entry, FileSystem, LayerError, NodeKind, Stat, Xattrs, corrupt, directory_len,
    link_is_short, link_target, unsupported,
};
use crate::Place;
use crate::bytes::part;
use crate::image::{Image, Layout};

/// Opens the file system in `image`, when there is one.
pub(super) fn open(image: &Image) -> Result<Option<Arc<dyn FileSystem>>, LayerError> {
    Ok(Ext::open(image)?.map(|ext| Arc::new(ext) as Arc<dyn FileSystem>))
}

impl Ext {
    /// Where the bytes of an inode are, and whether all of them have blocks that were written.
    fn blocks_of(&self, inode: &Inode) -> Result<Layout, LayerError> {
        for (flag, what) in [
            (flag::INLINE, "bytes inside the inode (inline_data)"),
            (flag::ENCRYPTED, "encrypted files"),
            (flag::COMPRESSED, "compressed files"),
        ] {
            if inode.flags & flag != 0 {
                return unsupported(what);
            }
        }
        blocks::lay_out(self, inode)
    }
}

impl FileSystem for Ext {
    fn about(&self) -> &About {
        &self.about
    }

    fn root(&self) -> u64 {
        ROOT
    }

    fn stat(&self, node: u64) -> Result<Stat, LayerError> {
        let inode = self.inode(node)?;
        Ok(Stat { kind: NodeKind::of_mode(inode.mode), size: inode.size })
    }

    fn attributes(&self, node: u64) -> Result<Attributes, LayerError> {
        Ok(xattr::attributes_of(&self.inode(node)?, node))
    }

    fn xattrs(&self, node: u64) -> Result<Xattrs, LayerError> {
        xattr::read(self, &self.inode(node)?)
    }

    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
        let inode = self.inode_of(dir, NodeKind::Directory, "directory")?;
        let len = directory_len(inode.size)?;
        let layout = self.blocks_of(&inode)?;
        // What reads as zeroes would read as empty.
        if layout.extents().iter().any(|extent| extent.place == Place::Zero) {
            return corrupt("a directory has blocks that were never written");
        }
        let bytes = self.image.compose(layout)?;
        directory::list(&bytes, len, usize::try_from(self.block_size).unwrap_or(0), entry)
    }

    fn same_name(&self, one: &[u8], other: &[u8]) -> bool {
        one == other || self.incompat & feature::CASEFOLD != 0 && super::same_but_for_case(one, other)
    }

    fn read_link(&self, node: u64) -> Result<Vec<u8>, LayerError> {
        let inode = self.inode_of(node, NodeKind::Symlink, "symbolic link")?;
        if inode.size < inode.block.len() as u64 && inode.flags & (flag::EXTENTS | flag::ENCRYPTED) == 0 {
            return Ok(part(&inode.block, 0, usize::try_from(inode.size).unwrap_or(0)).to_vec());
        }
        link_is_short(inode.size)?;
        link_target(&self.image, inode.size, self.blocks_of(&inode)?)
    }

    fn lay_out(&self, node: u64) -> Result<Layout, LayerError> {
        self.blocks_of(&self.inode_of(node, NodeKind::File, "regular file")?)
    }

    fn writable(&self, node: u64) -> Result<(), String> {
        if let Some(reason) = self.unclean {
            return Err(reason.to_owned());
        }
        let inode = self.inode(node).map_err(|error| error.to_string())?;
        for (flag, what) in [
            (flag::IMMUTABLE, "immutable"),
            (flag::APPEND, "append-only"),
            (flag::JOURNALLED, "written through the journal"),
            (flag::VERITY, "verified at each read (fs-verity)"),
        ] {
            if inode.flags & flag != 0 {
                return Err(format!("the file in the ext file system is {what}"));
            }
        }
        Ok(())
    }
}

//! btrfs, as far as it is on this device alone: single, DUP, and whole copies of RAID 1.
//! It never writes, and never replays a log: what a crash has left in the log is not seen.
//!
//! The root directory is that of the top-level subvolume (5), where all others are directories. Their files
//! are known by numbers that begin with that of the subvolume, in the order in which they were met.
//!
//! Our own, because no crate reports where a file's blocks are. Checksums of metadata are verified, those of
//! data are not: becket maps data and does not read them.
//!
//! Followed: the "On-disk Format" of btrfs.readthedocs.io, and include/uapi/linux/btrfs_tree.h of Linux.

mod inode;
mod superblock;
mod tree;

use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use inode::Inode;
use superblock::TOP;
use tree::{Key, Root, Trees, kind};

use super::{
    About, Attributes, Entry, FileSystem, LayerError, NodeKind, Stat, Xattrs, corrupt, link_is_short,
    link_target, unsupported,
};
use crate::bytes::{part, u8_at, u16_at, u64_at};
use crate::image::{Image, Layout};

/// The number of the root directory of each subvolume.
const ROOT_DIR: u64 = 256;
/// Bits of a node that are the number of a file in its subvolume; those above are the subvolume's.
const INODE_BITS: u32 = 48;
/// Where a snapshot has a subvolume that is none of its own there is an empty directory.
const EMPTY: u64 = u64::MAX;
/// Length of an entry of a directory before its name, in bytes.
const ENTRY: usize = 30;

/// An open btrfs.
struct Btrfs {
    about: About,
    trees: Trees,
    /// The tree of the roots of all others.
    roots: Root,
    /// The subvolumes that were met.
    volumes: Mutex<Vec<(u64, Root)>>,
}

impl fmt::Debug for Btrfs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Btrfs").field("about", &self.about).finish_non_exhaustive()
    }
}

/// Opens the file system in `image`, when there is one.
pub(super) fn open(image: &Image) -> Result<Option<Arc<dyn FileSystem>>, LayerError> {
    let Some((about, trees, roots)) = superblock::open(image)? else { return Ok(None) };
    let fs = Btrfs { about, trees, roots, volumes: Mutex::new(Vec::new()) };
    match fs.volume(TOP)? {
        Some(_) => Ok(Some(Arc::new(fs))),
        None => corrupt("a btrfs without its first subvolume"),
    }
}

impl Btrfs {
    /// The place of a subvolume among those that were met; `None` if there is none of this number.
    fn volume(&self, number: u64) -> Result<Option<u64>, LayerError> {
        let volumes = || self.volumes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = volumes().iter().position(|(known, _)| *known == number) {
            return Ok(Some(known as u64));
        }
        let mut root = None;
        self.trees.items(self.roots, Key::new(number, kind::ROOT, 0), &mut |item| {
            root = Some(Root { address: u64_at(item.bytes, 176), level: u8_at(item.bytes, 238) });
            Ok(ControlFlow::Break(()))
        })?;
        let Some(root) = root else { return Ok(None) };
        let mut volumes = volumes();
        if volumes.len() as u64 >= EMPTY >> INODE_BITS {
            return Err(LayerError::Limit("a btrfs with more than 65,535 subvolumes".to_owned()));
        }
        volumes.push((number, root));
        Ok(Some(volumes.len() as u64 - 1))
    }

    /// The subvolume of a node: its number and its tree; and the node's number there.
    fn place(&self, node: u64) -> Result<(u64, Root, u64), LayerError> {
        let index = usize::try_from(node >> INODE_BITS).unwrap_or(usize::MAX);
        let volumes = self.volumes.lock().unwrap_or_else(PoisonError::into_inner);
        match volumes.get(index) {
            Some((number, root)) => Ok((*number, *root, node & ((1 << INODE_BITS) - 1))),
            None => corrupt("this is not a file of the btrfs"),
        }
    }

    /// The node that an entry of a directory means, by the entry's first bytes.
    fn meant(&self, dir: u64, name: &[u8], entry: &[u8]) -> Result<u64, LayerError> {
        let key = Key::at(entry, 0);
        if key.kind == kind::INODE {
            if key.object >> INODE_BITS != 0 {
                return unsupported(format!("a btrfs with the file number {}", key.object));
            }
            return Ok(dir >> INODE_BITS << INODE_BITS | key.object);
        }
        if key.kind != kind::ROOT {
            return corrupt("an entry of a directory that is neither a file nor a subvolume");
        }
        // A snapshot has the entries of the subvolumes that were below its origin, but not those.
        let (parent, _, inode) = self.place(dir)?;
        let there = self.trees.find(self.roots, Key::new(parent, kind::ROOT_REF, key.object))?;
        let ours = there.is_some_and(|there| {
            u64_at(&there, 0) == inode && part(&there, 18, usize::from(u16_at(&there, 16))) == name
        });
        match ours {
            true => match self.volume(key.object)? {
                Some(index) => Ok(index << INODE_BITS | ROOT_DIR),
                None => corrupt(format!("there is no subvolume {}", key.object)),
            },
            false => Ok(EMPTY),
        }
    }

    fn inode(&self, node: u64) -> Result<(Root, u64, Inode), LayerError> {
        let (_, root, number) = self.place(node)?;
        match self.trees.find(root, Key::new(number, kind::INODE, 0))? {
            Some(bytes) => Ok((root, number, Inode::parse(&bytes)?)),
            None => corrupt(format!("file {number} has no inode")),
        }
    }

    fn inode_of(&self, node: u64, kind: NodeKind, what: &str) -> Result<(Root, u64, Inode), LayerError> {
        let found = self.inode(node)?;
        if found.2.kind() == kind { Ok(found) } else { corrupt(format!("this is not a {what}")) }
    }
}

impl FileSystem for Btrfs {
    fn about(&self) -> &About {
        &self.about
    }

    fn root(&self) -> u64 {
        ROOT_DIR
    }

    fn stat(&self, node: u64) -> Result<Stat, LayerError> {
        if node == EMPTY {
            return Ok(Stat { kind: NodeKind::Directory, size: 0 });
        }
        let (_, _, inode) = self.inode(node)?;
        Ok(Stat { kind: inode.kind(), size: inode.size })
    }

    fn attributes(&self, node: u64) -> Result<Attributes, LayerError> {
        if node == EMPTY {
            let attributes = Attributes::of(NodeKind::Directory, 0);
            return Ok(Attributes { mode: Some(0x4000 | 0o755), ..attributes });
        }
        Ok(self.inode(node)?.2.attributes(node))
    }

    fn xattrs(&self, node: u64) -> Result<Xattrs, LayerError> {
        let mut found = Xattrs::new();
        if node == EMPTY {
            return Ok(found);
        }
        let (_, root, number) = self.place(node)?;
        self.trees.items(root, Key::new(number, kind::XATTR, 0), &mut |item| {
            // Names with one hash share an item.
            let mut rest = item.bytes;
            while !rest.is_empty() {
                let (value, name) = (usize::from(u16_at(rest, 25)), usize::from(u16_at(rest, 27)));
                let Some(both) = rest.get(ENTRY..ENTRY + name + value) else {
                    return corrupt("an extended attribute is cut short");
                };
                let (name, value) = both.split_at(name);
                found.push((name.to_vec(), value.to_vec()));
                rest = rest.get(ENTRY + both.len()..).unwrap_or_default();
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
        if dir == EMPTY {
            return Ok(());
        }
        let (root, number, _) = self.inode_of(dir, NodeKind::Directory, "directory")?;
        self.trees.items(root, Key::new(number, kind::DIR_INDEX, 0), &mut |item| {
            let len = usize::from(u16_at(item.bytes, 27));
            let name = match item.bytes.get(ENTRY..ENTRY + len) {
                Some(name) if !name.is_empty() && len <= super::NAME_MAX => name,
                _ => return corrupt("an entry of a directory is cut short"),
            };
            Ok(entry(name, self.meant(dir, name, item.bytes)?))
        })
    }

    fn read_link(&self, node: u64) -> Result<Vec<u8>, LayerError> {
        let (root, number, inode) = self.inode_of(node, NodeKind::Symlink, "symbolic link")?;
        link_is_short(inode.size)?;
        link_target(&self.trees.image, inode.size, inode::lay_out(&self.trees, root, number, inode.size)?)
    }

    fn lay_out(&self, node: u64) -> Result<Layout, LayerError> {
        let (root, number, inode) = self.inode_of(node, NodeKind::File, "regular file")?;
        inode::lay_out(&self.trees, root, number, inode.size)
    }

    fn writable(&self, _: u64) -> Result<(), String> {
        Err("becket only reads files in btrfs".to_owned())
    }
}

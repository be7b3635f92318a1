//! SquashFS 4: superblock, inodes, directories and the blocks of files.
//! It never reads a table as a whole, and decodes no data: where a file's blocks are is all that it says.
//!
//! Our own, because backhand reads all inodes when it opens an image, and a path needs a handful.
//! A file is known by its inode reference: where the inode's metadata block starts in the inode table, and
//! where in it.
//!
//! Followed: Documentation/filesystems/squashfs.rst of Linux 7.3.

mod attributes;
mod metadata;

use std::ops::ControlFlow;
use std::sync::Arc;

use super::{
    About, Attributes, Entry, FileSystem, LayerError, NodeKind, Stat, Xattrs, corrupt, directory_len,
    link_is_short, unsupported,
};
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::codec::Codec;
use crate::encoded::Block;
use crate::image::{Image, Layout};
use attributes::{Head, Tables};
use metadata::{Cursor, Metadata};

const MAGIC: &[u8] = b"hsqs";
const SUPERBLOCK_LEN: usize = 96;
/// A file without a fragment.
const NO_FRAGMENT: u32 = !0;
/// A data block that is stored as it is.
const STORED: u32 = 1 << 24;
/// Entries of the fragment table in a metadata block, and their length.
const FRAGMENTS_PER_BLOCK: u32 = 512;
const FRAGMENT_LEN: u64 = 16;
/// The longest name in a directory, in bytes: one more than elsewhere.
const NAME_MAX: usize = 256;
/// The kernel's limits.
const BLOCK_SHIFT: std::ops::RangeInclusive<u16> = 12..=20;

/// An open SquashFS.
#[derive(Debug)]
struct Squash {
    image: Image,
    about: About,
    metadata: Metadata,
    codec: Codec,
    block_size: u64,
    root: u64,
    inodes: u64,
    directories: u64,
    fragments: u32,
    fragment_table: u64,
    tables: Tables,
}

/// What an inode says, by its type.
#[derive(Debug)]
enum Inode {
    Directory { block: u32, offset: u16, len: u32 },
    File { start: u64, size: u64, fragment: u32, offset: u32, sizes: Cursor },
    Link { len: u32, target: Cursor },
    Other,
}

impl Inode {
    fn stat(&self) -> Stat {
        let (kind, size) = match *self {
            Inode::Directory { len, .. } => (NodeKind::Directory, len.into()),
            Inode::File { size, .. } => (NodeKind::File, size),
            Inode::Link { len, .. } => (NodeKind::Symlink, len.into()),
            Inode::Other => (NodeKind::Other, 0),
        };
        Stat { kind, size }
    }
}

/// Opens the file system in `image`, when there is one.
pub(super) fn open(image: &Image) -> Result<Option<Arc<dyn FileSystem>>, LayerError> {
    let sb = image.read_some(0, SUPERBLOCK_LEN)?;
    if !sb.starts_with(MAGIC) || sb.len() < SUPERBLOCK_LEN {
        return Ok(None);
    }
    let (major, minor) = (u16_at(&sb, 28), u16_at(&sb, 30));
    if (major, minor) != (4, 0) {
        return unsupported(format!("SquashFS {major}.{minor}"));
    }
    let (codec, compression) = match u16_at(&sb, 20) {
        1 => (Codec::Gzip, "gzip"),
        4 => (Codec::Xz, "xz"),
        5 => (Codec::Lz4, "lz4"),
        6 => (Codec::Zstd, "zstd"),
        3 => (Codec::Lzo, "lzo"),
        2 => return unsupported("SquashFS compressed with lzma"),
        other => return corrupt(format!("a SquashFS compressed with method {other}")),
    };
    let (block_size, shift) = (u32_at(&sb, 12), u16_at(&sb, 22));
    if !BLOCK_SHIFT.contains(&shift) || block_size != 1 << shift {
        return corrupt(format!("a SquashFS with blocks of {block_size} bytes"));
    }
    let used = u64_at(&sb, 40);
    if used > image.len() {
        return corrupt(format!("a SquashFS of {used} bytes in {} (is the image cut short?)", image.len()));
    }
    let about = About {
        format: "squashfs",
        label: None,
        uuid: None,
        compression: Some(compression),
        notes: vec![format!("blocks of {block_size}"), format!("{} inodes", u32_at(&sb, 4))],
    };
    Ok(Some(Arc::new(Squash {
        image: image.clone(),
        about,
        metadata: Metadata::new(image.clone(), codec),
        codec,
        block_size: block_size.into(),
        root: u64_at(&sb, 32),
        inodes: u64_at(&sb, 64),
        directories: u64_at(&sb, 72),
        fragments: u32_at(&sb, 16),
        fragment_table: u64_at(&sb, 80),
        tables: Tables { ids: u16_at(&sb, 26), id_table: u64_at(&sb, 48), xattr_table: u64_at(&sb, 56) },
    })))
}

impl Squash {
    fn tables(&self) -> attributes::Reader<'_> {
        attributes::Reader { image: &self.image, metadata: &self.metadata, tables: self.tables }
    }

    fn inode(&self, reference: u64) -> Result<Inode, LayerError> {
        self.whole_inode(reference).map(|(_, inode)| inode)
    }

    fn whole_inode(&self, reference: u64) -> Result<(Head, Inode), LayerError> {
        let mut cursor = Cursor::new(self.inodes, reference >> 16, reference & 0xffff)?;
        let raw = self.metadata.read(&mut cursor, 16)?;
        let mut head = Head { raw, links: 1, device: None, xattrs: None };
        let mut body = |len: usize| self.metadata.read(&mut cursor, len);
        let inode = match u16_at(&head.raw, 0) {
            1 => {
                let body = body(16)?;
                head.links = u32_at(&body, 4);
                let len = u16_at(&body, 8).into();
                Inode::Directory { block: u32_at(&body, 0), offset: u16_at(&body, 10), len }
            }
            8 => {
                let body = body(24)?;
                (head.links, head.xattrs) = (u32_at(&body, 0), Some(u32_at(&body, 20)));
                let len = u32_at(&body, 4);
                Inode::Directory { block: u32_at(&body, 8), offset: u16_at(&body, 18), len }
            }
            2 => {
                let body = body(16)?;
                Inode::File {
                    start: u32_at(&body, 0).into(),
                    size: u32_at(&body, 12).into(),
                    fragment: u32_at(&body, 4),
                    offset: u32_at(&body, 8),
                    sizes: cursor,
                }
            }
            9 => {
                let body = body(40)?;
                (head.links, head.xattrs) = (u32_at(&body, 24), Some(u32_at(&body, 36)));
                Inode::File {
                    start: u64_at(&body, 0),
                    size: u64_at(&body, 8),
                    fragment: u32_at(&body, 28),
                    offset: u32_at(&body, 32),
                    sizes: cursor,
                }
            }
            kind @ (3 | 10) => {
                let body = body(8)?;
                (head.links, head.xattrs) = (u32_at(&body, 0), self.link_xattrs(kind, &body, cursor)?);
                Inode::Link { len: u32_at(&body, 4), target: cursor }
            }
            kind @ (4..=7 | 11..=14) => {
                let device = matches!(kind, 4 | 5 | 11 | 12);
                let body = body(4 + 4 * (usize::from(device) + usize::from(kind > 10)))?;
                head.links = u32_at(&body, 0);
                head.device = device.then(|| u32_at(&body, 4));
                head.xattrs = (kind > 10).then(|| u32_at(&body, body.len() - 4));
                Inode::Other
            }
            other => return corrupt(format!("an inode of type {other}")),
        };
        Ok((head, inode))
    }

    /// The extended attributes of a symbolic link, which follow its target.
    fn link_xattrs(&self, kind: u16, body: &[u8], target: Cursor) -> Result<Option<u32>, LayerError> {
        if kind == 3 {
            return Ok(None);
        }
        let (len, mut cursor) = (u32_at(body, 4), target);
        link_is_short(len.into())?;
        self.metadata.read(&mut cursor, usize::try_from(len).unwrap_or(0))?;
        Ok(Some(u32_at(&self.metadata.read(&mut cursor, 4)?, 0)))
    }

    /// Where the fragment block of that number is, and its size field.
    fn fragment(&self, number: u32) -> Result<(u64, u32), LayerError> {
        if number >= self.fragments {
            return corrupt(format!("fragment {number} of {}", self.fragments));
        }
        let pointer = u64::from(number / FRAGMENTS_PER_BLOCK) * 8;
        let at = self.fragment_table.checked_add(pointer);
        let at = at.ok_or_else(|| LayerError::Corrupt("a place beyond 2^64 bytes".to_owned()))?;
        let block = u64_at(&self.image.read_vec(at, 8)?, 0);
        let offset = u64::from(number % FRAGMENTS_PER_BLOCK) * FRAGMENT_LEN;
        let mut cursor = Cursor { block, offset };
        let entry = self.metadata.read(&mut cursor, 16)?;
        Ok((u64_at(&entry, 0), u32_at(&entry, 8)))
    }

    /// Adds `len` bytes, `skip` bytes into what the stored block at `start` with this size field holds.
    fn add(
        &self,
        layout: &mut Layout,
        start: u64,
        field: u32,
        skip: u64,
        len: u64,
    ) -> Result<(), LayerError> {
        let size = field & (STORED - 1);
        let end = skip.saturating_add(len);
        if end > self.block_size || u64::from(size) > self.block_size {
            return corrupt("a block of a file is larger than the block size");
        }
        if field & STORED != 0 {
            if end > size.into() {
                return corrupt("a stored block of a file is too short");
            }
            return layout.data(start.saturating_add(skip), len);
        }
        // All of these fit: none is larger than a block.
        let small = |number: u64| u32::try_from(number).unwrap_or(0);
        let block = Block {
            start: 0,
            len: small(len),
            input: start,
            input_len: size,
            skip: small(skip),
            yields: small(self.block_size),
        };
        layout.encoded(self.codec, block)
    }
}

impl FileSystem for Squash {
    fn about(&self) -> &About {
        &self.about
    }

    fn root(&self) -> u64 {
        self.root
    }

    fn stat(&self, node: u64) -> Result<Stat, LayerError> {
        self.inode(node).map(|inode| inode.stat())
    }

    fn attributes(&self, node: u64) -> Result<Attributes, LayerError> {
        let (head, inode) = self.whole_inode(node)?;
        attributes::of_inode(self.tables(), &head, inode.stat())
    }

    fn xattrs(&self, node: u64) -> Result<Xattrs, LayerError> {
        attributes::xattrs(self.tables(), &self.whole_inode(node)?.0)
    }

    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
        let Inode::Directory { block, offset, len } = self.inode(dir)? else {
            return corrupt("this is not a directory");
        };
        // Three bytes stand for `.` and `..`, which are not stored.
        let mut left = directory_len(u64::from(len).saturating_sub(3))?;
        let mut cursor = Cursor::new(self.directories, block.into(), offset.into())?;
        let mut take = |len: usize| {
            left = left
                .checked_sub(len)
                .ok_or_else(|| LayerError::Corrupt("a directory is too short".into()))?;
            Ok::<_, LayerError>((self.metadata.read(&mut cursor, len)?, left))
        };
        loop {
            let (head, mut left) = match take(0)? {
                (_, 0) => return Ok(()),
                _ => take(12)?,
            };
            let count = u32_at(&head, 0);
            if count >= 256 {
                return corrupt(format!("a directory's header announces {count} entries"));
            }
            for _ in 0..=count {
                let (fixed, _) = take(8)?;
                let name_len = usize::from(u16_at(&fixed, 6)) + 1;
                if name_len > NAME_MAX {
                    return corrupt(format!("a name of {name_len} bytes"));
                }
                let (name, rest) = take(name_len)?;
                left = rest;
                let node = u64::from(u32_at(&head, 4)) << 16 | u64::from(u16_at(&fixed, 0));
                if entry(&name, node) == ControlFlow::Break(()) {
                    return Ok(());
                }
            }
            if left == 0 {
                return Ok(());
            }
        }
    }

    fn read_link(&self, node: u64) -> Result<Vec<u8>, LayerError> {
        let Inode::Link { len, mut target } = self.inode(node)? else {
            return corrupt("this is not a symbolic link");
        };
        link_is_short(len.into())?;
        self.metadata.read(&mut target, usize::try_from(len).unwrap_or(0))
    }

    fn lay_out(&self, node: u64) -> Result<Layout, LayerError> {
        let Inode::File { start, size, fragment, offset, mut sizes } = self.inode(node)? else {
            return corrupt("this is not a regular file");
        };
        let whole = size / self.block_size;
        let tail = size % self.block_size;
        let listed = if fragment == NO_FRAGMENT && tail > 0 { whole + 1 } else { whole };
        let mut layout = Layout::of(&self.image)?;
        let mut at = start;
        // Read in parts, so that a size that is not true costs no memory.
        let mut left = listed;
        while left > 0 {
            let some = left.min(1024);
            let fields = self.metadata.read(&mut sizes, usize::try_from(some * 4).unwrap_or(0))?;
            for field in fields.chunks_exact(4).map(|field| u32_at(field, 0)) {
                let len = self.block_size.min(size - layout.len());
                let stored = u64::from(field & (STORED - 1));
                match stored {
                    0 => layout.zero(len)?,
                    _ => self.add(&mut layout, at, field, 0, len)?,
                }
                at = at.saturating_add(stored);
            }
            left -= some;
        }
        if fragment != NO_FRAGMENT && tail > 0 {
            let (at, field) = self.fragment(fragment)?;
            self.add(&mut layout, at, field, offset.into(), tail)?;
        }
        Ok(layout)
    }

    fn writable(&self, _: u64) -> Result<(), String> {
        Err("SquashFS is read-only".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_only_the_magic_is_damaged() {
        let mut bytes = vec![0; 4096];
        bytes[..4].copy_from_slice(MAGIC);
        let image = Image::raw(Arc::new(bytes.clone()), 4096, 512);
        assert!(matches!(open(&image), Err(LayerError::Unsupported(_))));
        bytes[28] = 4;
        let image = Image::raw(Arc::new(bytes.clone()), 4096, 512);
        assert!(matches!(open(&image), Err(LayerError::Corrupt(_))));
        assert!(open(&Image::raw(Arc::new(bytes[..50].to_vec()), 50, 512)).unwrap().is_none());
    }
}

//! EROFS: plain, inline, chunked and compressed files.
//! It never looks for a file on another device.
//!
//! A file is known by its number, the place of its inode in units of 32 bytes.
//!
//! Followed: Documentation/filesystems/erofs.rst and fs/erofs/erofs_fs.h of Linux 7.3.

mod compressed;
mod index;

use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use super::attributes::{self, FoundXattrs};
use super::{
    About, Attributes, Entry, FileSystem, LayerError, NAME_MAX, NodeKind, Stat, Time, Xattrs, corrupt,
    directory_len, link_is_short, link_target, unsupported,
};
use crate::bytes::{padded_text, part, u8_at, u16_at, u32_at, u64_at, uuid};
use crate::image::{Image, Layout};

const SUPERBLOCK: u64 = 1024;
const MAGIC: u32 = 0xe0f5_e1e2;
const SLOT: u64 = 32;
/// Length of a directory entry without its name.
const DIRENT: usize = 12;
/// Features that are read here: zero padding, compression configurations, chunks, a second algorithm, packed
/// tails, fragments, prefixes of attributes' names. The device table shares a bit with the fourth.
const KNOWN: u32 = 0x7f;

/// How the bytes of a file lie.
const PLAIN: u16 = 0;
const LONG_INDEX: u16 = 1;
const INLINE: u16 = 2;
const SHORT_INDEX: u16 = 3;
const CHUNKS: u16 = 4;

/// Length of an extended attribute without its name and value.
const XATTR: usize = 4;

/// An open EROFS.
#[derive(Debug)]
struct Erofs {
    image: Image,
    about: About,
    block_shift: u32,
    meta: u64,
    root: u64,
    /// Where shared extended attributes start, in bytes.
    shared: u64,
    /// What the times of short inodes count from.
    epoch: Time,
    /// The file whose parts are the ends of others, by its number; and where it lies.
    fragments: (u64, OnceLock<Layout>),
}

/// What is needed of an inode.
#[derive(Debug)]
struct Inode {
    mode: u16,
    size: u64,
    layout: u16,
    /// Block address, or how chunks are made.
    place: u32,
    /// Where what follows inode and attributes starts, in bytes.
    behind: u64,
    /// Bytes of extended attributes before that.
    xattrs: u64,
    links: u32,
    owner: (u32, u32),
    modified: Time,
}

/// Opens the file system in `image`, when there is one.
pub(super) fn open(image: &Image) -> Result<Option<Arc<dyn FileSystem>>, LayerError> {
    let sb = image.read_some(SUPERBLOCK, 128)?;
    if sb.len() < 128 || u32_at(&sb, 0) != MAGIC {
        return Ok(None);
    }
    let unknown = u32_at(&sb, 80) & !KNOWN;
    if unknown != 0 {
        return unsupported(format!("EROFS with the incompatible features {unknown:#x}"));
    }
    let block_shift = u32::from(u8_at(&sb, 12));
    if !(9..=16).contains(&block_shift) {
        return corrupt(format!("an EROFS with blocks of 2^{block_shift} bytes"));
    }
    let about = About {
        format: "erofs",
        label: padded_text(part(&sb, 64, 16)),
        uuid: uuid(part(&sb, 48, 16)),
        compression: compression(u32_at(&sb, 80), u16_at(&sb, 84)),
        notes: vec![format!("blocks of {}", 1_u32 << block_shift)],
    };
    Ok(Some(Arc::new(Erofs {
        image: image.clone(),
        about,
        block_shift,
        meta: u64::from(u32_at(&sb, 40)) << block_shift,
        root: u16_at(&sb, 14).into(),
        shared: u64::from(u32_at(&sb, 44)) << block_shift,
        epoch: Time { seconds: u64_at(&sb, 24).cast_signed(), nanoseconds: u32_at(&sb, 32).min(999_999_999) },
        fragments: (u64_at(&sb, 96), OnceLock::new()),
    })))
}

/// By what files are compressed, where any are: by the features, and by a field that has a bit for each
/// method where those say so.
fn compression(features: u32, field: u16) -> Option<&'static str> {
    const METHODS: u32 = 2;
    match field {
        0 => None,
        1 => Some("lz4"),
        _ if features & METHODS == 0 => Some("lz4"),
        2 => Some("lzma"),
        4 => Some("deflate"),
        8 => Some("zstd"),
        _ => Some("several methods"),
    }
}

impl Erofs {
    fn inode(&self, nid: u64) -> Result<Inode, LayerError> {
        let at = nid.checked_mul(SLOT).and_then(|at| at.checked_add(self.meta));
        let at = at.ok_or_else(|| LayerError::Corrupt("an inode beyond 2^64 bytes".to_owned()))?;
        // As long as the longer kind: one read for both.
        let raw = self.image.read_some(at, 64)?;
        let format = u16_at(&raw, 0);
        let extended = format & 1 != 0;
        let Some(raw) = raw.get(..if extended { 64 } else { 32 }) else {
            return corrupt("an inode beyond the end of the image");
        };
        let attributes = match u64::from(u16_at(raw, 2)) {
            0 => 0,
            count => 12 + (count - 1) * 4,
        };
        let (links, owner, modified) = if extended {
            let time = Time {
                seconds: u64_at(raw, 32).cast_signed(),
                nanoseconds: u32_at(raw, 40).min(999_999_999),
            };
            (u32_at(raw, 44), (u32_at(raw, 24), u32_at(raw, 28)), time)
        } else {
            let seconds = self.epoch.seconds.saturating_add(u32_at(raw, 12).into());
            let owner = (u16_at(raw, 24).into(), u16_at(raw, 26).into());
            (u16_at(raw, 6).into(), owner, Time { seconds, ..self.epoch })
        };
        Ok(Inode {
            links,
            owner,
            modified,
            xattrs: attributes,
            mode: u16_at(raw, 4),
            size: if extended { u64_at(raw, 8) } else { u32_at(raw, 8).into() },
            layout: format >> 1 & 7,
            place: u32_at(raw, 16),
            behind: at + raw.len() as u64 + attributes,
        })
    }

    fn blocks_of(&self, inode: &Inode) -> Result<Layout, LayerError> {
        self.blocks_with(inode, &|| self.fragments())
    }

    /// The same where the file of fragments is found in another way.
    fn blocks_with<'a>(
        &self,
        inode: &Inode,
        fragments: &compressed::Fragments<'a>,
    ) -> Result<Layout, LayerError> {
        let mut layout = Layout::of(&self.image)?;
        let start = u64::from(inode.place) << self.block_shift;
        match inode.layout {
            PLAIN => layout.data(start, inode.size)?,
            INLINE => {
                // All but the last block, which follows the inode.
                let whole = inode.size.saturating_sub(1) >> self.block_shift << self.block_shift;
                layout.data(start, whole)?;
                layout.data(inode.behind, inode.size - whole)?;
            }
            CHUNKS => self.chunks(inode, &mut layout)?,
            LONG_INDEX | SHORT_INDEX => {
                let file = compressed::File {
                    image: &self.image,
                    block_shift: self.block_shift,
                    behind: inode.behind,
                    size: inode.size,
                    compact: inode.layout == SHORT_INDEX,
                };
                return compressed::lay_out(&file, fragments);
            }
            other => return unsupported(format!("files of EROFS that lie in the way {other}")),
        }
        Ok(layout)
    }

    /// Where the file of fragments lies.
    fn fragments(&self) -> Result<&Layout, LayerError> {
        let (number, known) = &self.fragments;
        if let Some(known) = known.get() {
            return Ok(known);
        }
        let circle = || corrupt("the file of fragments has a fragment");
        let layout = self.blocks_with(&self.inode(*number)?, &circle)?;
        Ok(known.get_or_init(|| layout))
    }

    /// A file in chunks of equal size, each with a place of its own or none.
    fn chunks(&self, inode: &Inode, layout: &mut Layout) -> Result<(), LayerError> {
        const INDEXES: u32 = 0x20;
        const HOLE: u32 = !0;
        let shift = self.block_shift + (inode.place & 0x1f);
        let unit = if inode.place & INDEXES != 0 { 8 } else { 4 };
        let mut at = inode.behind.next_multiple_of(unit);
        let unit = usize::try_from(unit).unwrap_or(8);
        while layout.len() < inode.size {
            // Read in parts, so that a size that is not true costs no memory.
            let left = ((inode.size - layout.len() - 1) >> shift).saturating_add(1).min(1024);
            let entries = self.image.read_vec(at, usize::try_from(left).unwrap_or(0) * unit)?;
            for entry in entries.chunks_exact(unit) {
                let device = if unit == 8 { u16_at(entry, 2) } else { 0 };
                if device != 0 {
                    return unsupported("EROFS over several devices");
                }
                let block = u32_at(entry, unit - 4);
                let len = (inode.size - layout.len()).min(1 << shift);
                match block {
                    HOLE => layout.zero(len)?,
                    block => layout.data(u64::from(block) << self.block_shift, len)?,
                }
            }
            at += entries.len() as u64;
        }
        Ok(())
    }

    /// The extended attribute at byte `at` of `area`.
    fn xattr(&self, area: &[u8], at: usize, found: &mut FoundXattrs) -> Result<(), LayerError> {
        let (name_len, number) = (usize::from(u8_at(area, at)), u8_at(area, at + 1));
        let value_len = usize::from(u16_at(area, at + 2));
        let Some(prefix) = attributes::prefix(number).filter(|prefix| !prefix.is_empty()) else {
            return unsupported(format!("extended attributes of kind {number}"));
        };
        let name = part(area, at + XATTR, name_len);
        let value = part(area, at + XATTR + name_len, value_len);
        if name.len() < name_len || value.len() < value_len {
            return corrupt("an extended attribute does not fit its place");
        }
        found.push(prefix, name, value.to_vec())
    }

    fn inode_of(&self, nid: u64, kind: NodeKind, what: &str) -> Result<Inode, LayerError> {
        let inode = self.inode(nid)?;
        if NodeKind::of_mode(inode.mode) == kind {
            Ok(inode)
        } else {
            corrupt(format!("this is not a {what}"))
        }
    }
}

impl FileSystem for Erofs {
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
        let is_device = matches!(inode.mode & 0xf000, 0x2000 | 0x6000);
        Ok(Attributes {
            mode: Some(inode.mode),
            owner: Some(inode.owner),
            links: Some(inode.links),
            identity: (inode.links > 1 && kind != NodeKind::Directory).then_some(node),
            modified: Some(inode.modified),
            device: is_device.then(|| attributes::device(inode.place)),
            ..Attributes::of(kind, inode.size)
        })
    }

    fn xattrs(&self, node: u64) -> Result<Xattrs, LayerError> {
        let inode = self.inode(node)?;
        let len = usize::try_from(inode.xattrs).unwrap_or(0);
        let mut found = FoundXattrs::default();
        if len > 0 {
            let area = self.image.read_vec(inode.behind - inode.xattrs, len)?;
            let shared = usize::from(u8_at(&area, 4));
            for at in (0..shared).map(|index| 12 + 4 * index) {
                if at + 4 > area.len() {
                    return corrupt("shared extended attributes do not fit their inode");
                }
                let at = self.shared.saturating_add(u64::from(u32_at(&area, at)) * 4);
                let fixed = self.image.read_vec(at, XATTR)?;
                self.xattr(&self.image.read_some(at, xattr_len(&fixed, 0))?, 0, &mut found)?;
            }
            let mut at = 12 + 4 * shared;
            // What is left of the area is padding.
            while at + XATTR <= area.len() && part(&area, at, XATTR) != [0; XATTR] {
                self.xattr(&area, at, &mut found)?;
                at += xattr_len(&area, at).next_multiple_of(4);
            }
        }
        Ok(found.all())
    }

    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
        let inode = self.inode_of(dir, NodeKind::Directory, "directory")?;
        let len = directory_len(inode.size)?;
        let bytes = self.image.compose(self.blocks_of(&inode)?)?;
        let block_size = 1 << self.block_shift;
        for start in (0..len).step_by(block_size) {
            let block = bytes.read_vec(start as u64, block_size.min(len - start))?;
            // Names start behind the entries, so the first one's place shows how many there are.
            let names = usize::from(u16_at(&block, 8));
            if names % DIRENT != 0 || names == 0 || names > block.len() {
                return corrupt("an impossible block of a directory");
            }
            for at in (0..names).step_by(DIRENT) {
                let from = usize::from(u16_at(&block, at + 8));
                let last = at + DIRENT >= names;
                let to = if last { block.len() } else { usize::from(u16_at(&block, at + DIRENT + 8)) };
                let Some(name) = block.get(from..to).filter(|_| from >= names) else {
                    return corrupt("an impossible name in a directory");
                };
                let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
                if name.len() > NAME_MAX {
                    return corrupt(format!("a name of {} bytes", name.len()));
                }
                let listed = !name.is_empty() && name != b"." && name != b"..";
                if listed && entry(name, u64_at(&block, at)) == ControlFlow::Break(()) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn read_link(&self, node: u64) -> Result<Vec<u8>, LayerError> {
        let inode = self.inode_of(node, NodeKind::Symlink, "symbolic link")?;
        link_is_short(inode.size)?;
        link_target(&self.image, inode.size, self.blocks_of(&inode)?)
    }

    fn lay_out(&self, node: u64) -> Result<Layout, LayerError> {
        self.blocks_of(&self.inode_of(node, NodeKind::File, "regular file")?)
    }

    fn writable(&self, _: u64) -> Result<(), String> {
        Err("EROFS is read-only".to_owned())
    }
}

/// Length of the extended attribute at byte `at`.
fn xattr_len(area: &[u8], at: usize) -> usize {
    XATTR + usize::from(u8_at(area, at)) + usize::from(u16_at(area, at + 2))
}

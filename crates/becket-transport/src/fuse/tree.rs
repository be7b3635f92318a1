//! The one small tree that a connection shows: the image and its partitions as files in a root directory.
//! It answers what needs no byte of the image, and keeps no state: what the kernel forgets or repeats does
//! not matter.

use becket_uapi::fuse as uapi;
use rustix::io::Errno;
use uapi::Wire;

/// The file of the whole image.
pub(super) const IMAGE: u64 = 2;
/// The name of the image's file.
pub const IMAGE_NAME: &str = "image";
/// Most partitions that are shown, as many as a table can name.
const MOST_PARTITIONS: usize = 128;
/// Modes of the files and of the directory, without their type.
const WRITABLE: u32 = 0o600;
const READABLE: u32 = 0o400;
const DIRECTORY: u32 = 0o500;

/// A range of the image. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) len: u64,
}

/// The tree. Nodes are numbered: the root, the image, then the partitions in the order of their table.
#[derive(Debug, Clone)]
pub(super) struct Tree {
    partitions: Vec<(String, Range)>,
    block: u64,
    discard_unit: u32,
    owner: (u32, u32),
    since: u64,
}

impl Tree {
    /// A tree with files of blocks of `block` bytes, for the calling user.
    pub(super) fn new(
        partitions: impl Iterator<Item = (u32, u64, u64)>,
        block: u32,
        discard_unit: u32,
    ) -> Tree {
        let named = partitions
            .take(MOST_PARTITIONS)
            .map(|(number, start, len)| (format!("p{number}"), Range { start, len }));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Tree {
            partitions: named.collect(),
            block: block.max(1).into(),
            discard_unit: discard_unit.max(block).max(512),
            owner: (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
            since: now.map_or(0, |since| since.as_secs()),
        }
    }

    /// The part of an image of `length` bytes that a file shows: whole blocks, none behind the image's end.
    pub(super) fn range(&self, node: u64, length: u64) -> Option<Range> {
        let length = length / self.block * self.block;
        if node == IMAGE {
            return Some(Range { start: 0, len: length });
        }
        let index = usize::try_from(node.checked_sub(IMAGE + 1)?).ok()?;
        let (_, range) = self.partitions.get(index)?;
        Some(Range { len: range.len.min(length.saturating_sub(range.start)), ..*range })
    }

    /// A node by its name in the root directory, which ends at the first zero byte.
    fn find(&self, name: &[u8]) -> Option<u64> {
        let name = name.split(|byte| *byte == 0).next()?;
        if name == IMAGE_NAME.as_bytes() {
            return Some(IMAGE);
        }
        let index = self.partitions.iter().position(|(known, _)| known.as_bytes() == name)?;
        Some(IMAGE + 1 + index as u64)
    }

    fn attr(&self, node: u64, length: u64, read_only: bool) -> Option<uapi::Attr> {
        let attr = uapi::Attr {
            ino: node,
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            nlink: 1,
            uid: self.owner.0,
            gid: self.owner.1,
            blksize: self.discard_unit,
            ..uapi::Attr::default()
        };
        if node == uapi::FUSE_ROOT_ID {
            return Some(uapi::Attr { mode: libc::S_IFDIR | DIRECTORY, nlink: 2, ..attr });
        }
        let size = self.range(node, length)?.len;
        let rights = if read_only { READABLE } else { WRITABLE };
        Some(uapi::Attr { size, blocks: size / 512, mode: libc::S_IFREG | rights, ..attr })
    }

    /// Answers a request that is not about the image's bytes: writes the answer and returns its length.
    ///
    /// `body` is what came behind the header; the length and the rights are those of the image. Attributes
    /// and names expire at once, so that changed ones are seen.
    pub(super) fn answer(
        &self,
        header: &uapi::InHeader,
        body: &[u8],
        (length, read_only): (u64, bool),
        answer: &mut [u8],
    ) -> Result<usize, Errno> {
        let attr_of = |node| self.attr(node, length, read_only).ok_or(Errno::NOENT);
        match header.opcode {
            uapi::FUSE_LOOKUP if header.nodeid != uapi::FUSE_ROOT_ID => Err(Errno::NOTDIR),
            uapi::FUSE_LOOKUP => {
                let nodeid = self.find(body).ok_or(Errno::NOENT)?;
                put(answer, &uapi::EntryOut { nodeid, attr: attr_of(nodeid)?, ..Default::default() })
            }
            uapi::FUSE_GETATTR => {
                put(answer, &uapi::AttrOut { attr: attr_of(header.nodeid)?, ..Default::default() })
            }
            uapi::FUSE_SETATTR => {
                let attr = attr_of(header.nodeid)?;
                let wish = uapi::SetattrIn::read(body).ok_or(Errno::INVAL)?;
                let length = wish.valid & uapi::FATTR_SIZE != 0 && wish.size != attr.size;
                // A file as long as its image stays so, and rights are the directory's business.
                if length || wish.valid & !(uapi::FATTR_SIZE | uapi::FATTR_HARMLESS) != 0 {
                    return Err(Errno::PERM);
                }
                put(answer, &uapi::AttrOut { attr, ..Default::default() })
            }
            uapi::FUSE_OPEN => {
                attr_of(header.nodeid)?;
                // No process may have to wait for a server to close a file: a process that is forked to
                // become its successor closes what it inherited, and would wait for itself.
                let open_flags =
                    uapi::FOPEN_DIRECT_IO | uapi::FOPEN_NOFLUSH | uapi::FOPEN_PARALLEL_DIRECT_WRITES;
                put(answer, &uapi::OpenOut { open_flags, ..Default::default() })
            }
            uapi::FUSE_STATFS => {
                let statfs = uapi::Statfs {
                    blocks: length / self.block,
                    files: 1 + self.partitions.len() as u64,
                    // The loop driver takes this for the unit of discards.
                    bsize: self.discard_unit,
                    frsize: u32::try_from(self.block).unwrap_or(512),
                    namelen: 255,
                    ..Default::default()
                };
                put(answer, &statfs)
            }
            uapi::FUSE_READDIR if header.nodeid == uapi::FUSE_ROOT_ID => {
                let asked = uapi::TransferIn::read(body).ok_or(Errno::INVAL)?;
                let room = answer.len().min(asked.size as usize);
                Ok(self.entries(asked.offset, &mut answer[..room]))
            }
            uapi::FUSE_READDIR => Err(Errno::NOTDIR),
            uapi::FUSE_RELEASE | uapi::FUSE_RELEASEDIR | uapi::FUSE_DESTROY => Ok(0),
            _ => Err(Errno::NOSYS),
        }
    }

    /// As many entries of the root directory from `offset` on as there is room for.
    fn entries(&self, offset: u64, answer: &mut [u8]) -> usize {
        let names = self.partitions.iter().map(|(name, _)| name.as_str());
        let files = [IMAGE_NAME].into_iter().chain(names).zip(IMAGE..);
        let dots = [(".", uapi::FUSE_ROOT_ID), ("..", uapi::FUSE_ROOT_ID)];
        let mut used = 0;
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, (name, ino)) in dots.into_iter().chain(files).enumerate().skip(from) {
            let kind = if ino == uapi::FUSE_ROOT_ID { libc::S_IFDIR } else { libc::S_IFREG };
            let entry = uapi::Dirent {
                ino,
                off: index as u64 + 1,
                namelen: u32::try_from(name.len()).unwrap_or(0),
                kind: kind >> 12,
            };
            let len = (uapi::Dirent::SIZE + name.len()).next_multiple_of(8);
            let Some(place) = answer.get_mut(used..used + len) else { break };
            place.fill(0);
            if entry.write(place).is_none() {
                break;
            }
            place[uapi::Dirent::SIZE..][..name.len()].copy_from_slice(name.as_bytes());
            used += len;
        }
        used
    }
}

fn put<T: Wire>(answer: &mut [u8], what: &T) -> Result<usize, Errno> {
    what.write(answer).ok_or(Errno::IO)?;
    Ok(T::SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Tree {
        Tree::new([(1, 4096, 8192), (5, 12288, 1 << 40)].into_iter(), 512, 4096)
    }

    fn ask(tree: &Tree, opcode: u32, nodeid: u64, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let header = uapi::InHeader { opcode, nodeid, ..Default::default() };
        let mut answer = vec![0; 8192];
        let len = tree.answer(&header, body, (20 * 1024 + 100, false), &mut answer)?;
        answer.truncate(len);
        Ok(answer)
    }

    #[test]
    fn files_are_found_and_end_with_the_image() {
        let tree = tree();
        let size = |name: &[u8]| {
            let entry = uapi::EntryOut::read(&ask(&tree, uapi::FUSE_LOOKUP, 1, name).unwrap()).unwrap();
            assert_eq!(ask(&tree, uapi::FUSE_GETATTR, entry.nodeid, &[]).unwrap().len(), 104);
            entry.attr.size
        };
        assert_eq!(size(b"image\0garbage"), 20 * 1024, "whole blocks only");
        assert_eq!(size(b"p1\0"), 8192);
        assert_eq!(size(b"p5\0"), 20 * 1024 - 12288, "a partition is no longer than the image");
        for name in [&b"p2\0"[..], b"images\0", b"\0", b""] {
            assert_eq!(ask(&tree, uapi::FUSE_LOOKUP, 1, name), Err(Errno::NOENT), "{name:?}");
        }
        assert_eq!(ask(&tree, uapi::FUSE_LOOKUP, 2, b"image\0"), Err(Errno::NOTDIR));
        for node in [0, 5, 99, u64::MAX] {
            assert_eq!(ask(&tree, uapi::FUSE_GETATTR, node, &[]), Err(Errno::NOENT), "{node}");
        }
    }

    #[test]
    fn a_directory_is_read_in_pieces() {
        let tree = tree();
        let mut names = Vec::new();
        let mut offset = 0;
        loop {
            let asked = uapi::TransferIn { offset, size: 70, ..Default::default() };
            let mut body = [0; uapi::TransferIn::SIZE];
            asked.write(&mut body).unwrap();
            let answer = ask(&tree, uapi::FUSE_READDIR, 1, &body).unwrap();
            if answer.is_empty() {
                break;
            }
            let mut rest = &answer[..];
            while let Some(entry) = uapi::Dirent::read(rest) {
                let len = entry.namelen as usize;
                names.push(String::from_utf8(rest[uapi::Dirent::SIZE..][..len].to_vec()).unwrap());
                offset = entry.off;
                rest = &rest[(uapi::Dirent::SIZE + len).next_multiple_of(8)..];
            }
        }
        assert_eq!(names, [".", "..", "image", "p1", "p5"]);
    }

    #[test]
    fn rights_are_those_of_the_moment() {
        let header = uapi::InHeader { opcode: uapi::FUSE_GETATTR, nodeid: IMAGE, ..Default::default() };
        let mut answer = [0; 8192];
        for (read_only, rights) in [(true, READABLE), (false, WRITABLE)] {
            tree().answer(&header, &[], (4096, read_only), &mut answer).unwrap();
            assert_eq!(uapi::AttrOut::read(&answer).unwrap().attr.mode & 0o777, rights);
        }
    }

    #[test]
    fn the_length_is_the_images_own() {
        let tree = tree();
        let set = |valid, size| {
            let mut body = [0; uapi::SetattrIn::SIZE];
            uapi::SetattrIn { valid, size, ..Default::default() }.write(&mut body).unwrap();
            ask(&tree, uapi::FUSE_SETATTR, 2, &body).map(drop)
        };
        assert_eq!(set(uapi::FATTR_SIZE, 20 * 1024), Ok(()));
        assert_eq!(set(uapi::FATTR_SIZE, 0), Err(Errno::PERM));
        assert_eq!(set(1, 0), Err(Errno::PERM), "modes");
        assert_eq!(set(uapi::FATTR_HARMLESS, 0), Ok(()));
        assert_eq!(ask(&tree, uapi::FUSE_SETATTR, 2, &[0; 8]), Err(Errno::INVAL), "cut");
    }

    #[test]
    fn what_is_not_offered_is_said_so() {
        for opcode in [uapi::FUSE_OPENDIR, 9, 35, 45, 46, 47, 4096, u32::MAX] {
            assert_eq!(ask(&tree(), opcode, 1, &[]), Err(Errno::NOSYS), "{opcode}");
        }
    }
}

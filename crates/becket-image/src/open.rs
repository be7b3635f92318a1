//! Opens an image: one path lookup, then only descriptors.
//! It never blocks on a FIFO and never follows the path a second time.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::{BackingKind, DirectIo, Error, Facts, Map, Partition};

/// How an image is to be opened. All sizes are bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OpenOptions {
    /// Never write, even where it would be possible.
    pub read_only: bool,
    /// Whether to go past the page cache.
    pub direct_io: DirectIo,
    /// Where the image starts in the file.
    pub offset: u64,
    /// Longest image, for a file that goes on behind it.
    pub size_limit: Option<u64>,
    /// Logical block size; chosen by the rules of [`open`] when not given.
    pub block_size: Option<u32>,
    /// Take no locks that would exclude other programs.
    pub shared: bool,
    /// Read the partition table.
    pub partitions: bool,
}

/// An image that is open.
#[derive(Debug)]
pub struct Opened {
    /// Where the file is: absolute, without symbolic links.
    pub path: PathBuf,
    /// Which byte of the image lives where.
    pub map: Map,
    /// The backings that the map speaks of.
    pub files: Vec<Backing>,
    /// Whether writes must be refused.
    pub read_only: bool,
    /// Why, for people.
    pub read_only_reason: Option<String>,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Which file it is, whatever its path.
    pub identity: Identity,
    /// What the partition table names; empty when none was asked for or found.
    pub partitions: Vec<Partition>,
    /// What the user should know although it went well.
    pub warnings: Vec<String>,
}

/// Device and inode of the file; of a block device, those of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// Number of the device that the file is on (`st_dev`).
    pub dev: u64,
    /// Number of the inode.
    pub ino: u64,
}

/// A file or device that holds bytes of the image.
#[derive(Debug)]
pub struct Backing {
    /// Goes through the page cache; carries the locks.
    pub buffered: OwnedFd,
    /// The same inode with `O_DIRECT`, where that is used.
    pub direct: Option<OwnedFd>,
    /// What it can do.
    pub facts: Facts,
}

/// Opens the image at `path`.
pub fn open(path: &Path, options: &OpenOptions) -> Result<Opened, Error> {
    let io =
        |what, source: rustix::io::Errno| Error::Io { path: path.to_owned(), what, source: source.into() };
    let flags = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let fd = rustix::fs::open(path, flags | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())
        .map_err(|source| io("open", source))?;
    let stat = rustix::fs::fstat(&fd).map_err(|source| io("stat", source))?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let facts = Facts {
        kind: BackingKind::Regular,
        size,
        writable: !options.read_only,
        direct: None,
        direct_reason: "not asked yet".to_owned(),
        physical_block_size: 512,
        io_min: 512,
        io_opt: 0,
        rotational: false,
        discard: false,
        discard_granularity: 0,
        write_zeroes: false,
    };
    Ok(Opened {
        path: path.to_owned(),
        map: Map::contiguous(0, options.offset, size.saturating_sub(options.offset)),
        files: vec![Backing { buffered: fd, direct: None, facts }],
        read_only: options.read_only,
        read_only_reason: None,
        block_size: options.block_size.unwrap_or(512),
        identity: Identity { dev: stat.st_dev, ino: stat.st_ino },
        partitions: Vec::new(),
        warnings: Vec::new(),
    })
}

//! How to open an image.
//! It never looks at one.

use std::path::PathBuf;
use std::time::Duration;

use crate::backing_url::Allowed;
use crate::{BackingUrl, Budget, DirectIo, Fillers, Format};

/// How to open an image. All sizes are bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OpenOptions {
    /// Never write, even where it would be possible.
    pub read_only: bool,
    /// Why it cannot be written, where the file itself does not say so.
    pub unwritable: Option<String>,
    /// Whether to go past the page cache.
    pub direct_io: DirectIo,
    /// Where the image starts in the file.
    pub offset: u64,
    /// Longest image, for a file that goes on behind it.
    pub size_limit: Option<u64>,
    /// Logical block size; chosen by the rules of [`crate::open()`] when not given.
    pub block_size: Option<u32>,
    /// Exclude no other user, and ignore the locks of others.
    pub shared: bool,
    /// Read the partition table.
    pub partitions: bool,
    /// What becomes of bytes at the end that fill no block.
    pub tail: Tail,
    /// What the file is, for paths that go on inside it.
    pub format: Format,
    /// Where backing files may lie, beside the directory of the image that names them.
    pub backing_dirs: Vec<PathBuf>,
    /// The URLs below the image that the user allows, open already: see [`crate::wanted_url`].
    pub backing_urls: Vec<BackingUrl>,
    /// Open a qcow2 for writing although that removes its persistent bitmaps; without this it is opened for
    /// reading.
    pub drop_bitmaps: bool,
    /// The qcow2 over the image that receives the writes, created if it does not exist: the image is only
    /// read then.
    pub cow: Option<PathBuf>,
    /// What an overlay says of the image below it, where its file only keeps what comes from elsewhere.
    pub below: Option<Below>,
    /// Parse it whatever that costs: see [`crate::budget`].
    pub no_limits: bool,
    /// Nothing is to come of it: no file is created, and none is marked. The rest is as for a real opening.
    pub rehearsal: bool,
    /// What brings the bytes of files that are filled while they are read.
    pub fillers: Fillers,
    /// How long a server may not answer that has an image which is opened by its URI; a time of becket's own
    /// if it is not given.
    pub patience: Option<Duration>,
}

/// An image whose bytes are kept in a file that is not what the user knows it by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Below {
    /// Its URL, or its path on this host (absolute, without symbolic links), with the way inside it.
    pub name: PathBuf,
    /// Which contents it has: letters and digits, others for other contents.
    pub version: String,
}

/// What becomes of the bytes at the end of an image that fill no block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tail {
    /// They are left out.
    #[default]
    Cut,
    /// Zeroes fill their block, in an image that is only read; else they are left out.
    Pad,
    /// They are the end: for programs that read the image and make no device of it.
    Keep,
}

impl OpenOptions {
    pub(crate) fn allowed(&self, to_serve: bool) -> Allowed<'_> {
        let OpenOptions { backing_dirs: dirs, backing_urls: urls, fillers, patience, .. } = self;
        Allowed { dirs, urls, fillers, to_serve, patience: *patience }
    }

    pub(crate) fn budget(&self) -> Budget {
        if self.no_limits { Budget::unlimited() } else { Budget::default() }
    }
}

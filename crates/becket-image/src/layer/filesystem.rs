//! What every file system answers, and what their readers share.
//! It never follows what it reads without a bound.

use std::fmt::Debug;
use std::ops::ControlFlow;

use super::error::{LayerError, corrupt};
use super::format::About;
use crate::bytes::ReadAt as _;
use crate::image::{Image, Layout};

/// The most bytes that a directory may have.
const DIRECTORY_MAX: u64 = 64 << 20;
/// The longest name in a directory, in bytes: what the kernel takes.
pub(super) const NAME_MAX: usize = 255;
/// The longest target of a symbolic link, in bytes.
pub(super) const LINK_MAX: u64 = 4096;

/// What kind of thing a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, FIFO or socket.
    Other,
}

impl NodeKind {
    /// Of the mode bits that Unix file systems keep.
    pub(super) fn of_mode(mode: u16) -> NodeKind {
        match mode & 0xf000 {
            0x8000 => NodeKind::File,
            0x4000 => NodeKind::Directory,
            0xa000 => NodeKind::Symlink,
            _ => NodeKind::Other,
        }
    }
}

/// What a file system says of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// What it is.
    pub kind: NodeKind,
    /// Length in bytes; of no meaning for directories.
    pub size: u64,
}

/// What a file system says of a file beside its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// What it is.
    pub kind: NodeKind,
    /// Length in bytes; of no meaning for directories.
    pub size: u64,
    /// Type and permission bits, as in `st_mode`.
    pub mode: Option<u16>,
    /// User and group by their numbers.
    pub owner: Option<(u32, u32)>,
    /// How many names it has.
    pub links: Option<u32>,
    /// A number that all names of the file share and no other file has; only where it can have several.
    pub identity: Option<u64>,
    /// When its bytes were changed last.
    pub modified: Option<Time>,
    /// Major and minor number, of a device.
    pub device: Option<(u32, u32)>,
}

impl Attributes {
    /// Of a file of which no more is known.
    pub fn of(kind: NodeKind, size: u64) -> Attributes {
        Attributes {
            kind,
            size,
            mode: None,
            owner: None,
            links: None,
            identity: None,
            modified: None,
            device: None,
        }
    }
}

/// A moment, counted from the start of 1970 (UTC).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Whole seconds.
    pub seconds: i64,
    /// Nanoseconds behind them, less than a second.
    pub nanoseconds: u32,
}

impl Time {
    /// A whole second.
    pub(super) fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    /// A date of the Gregorian calendar in UTC; `None` for one that is none.
    pub(super) fn of_date(date: (i64, u32, u32), clock: (u32, u32, u32)) -> Option<Time> {
        let ((year, month, day), (hour, minute, second)) = (date, clock);
        let sound = (1..=12).contains(&month) && (1..=31).contains(&day);
        if !sound || hour > 23 || minute > 59 || second > 60 {
            return None;
        }
        // Years begin in March, so that the day of a leap year is their last.
        let year = if month <= 2 { year - 1 } else { year };
        let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
        let of_year = i64::from((153 * ((month + 9) % 12) + 2) / 5 + day - 1);
        let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
        Some(Time::at(days * 86_400 + i64::from(hour * 3600 + minute * 60 + second)))
    }
}

/// The extended attributes of a file, as the kernel names them (`user.comment`), with their values.
pub type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// What [`FileSystem::list`] reports of each entry: its name, and its number for the other methods. The
/// callback may end the list.
pub type Entry<'a> = dyn FnMut(&[u8], u64) -> ControlFlow<()> + 'a;

/// A layer with directories. Files are known by numbers that are the layer's own.
pub trait FileSystem: Debug + Send + Sync {
    /// What it says of itself.
    fn about(&self) -> &About;

    /// The number of the root directory.
    fn root(&self) -> u64;

    /// What a file is.
    ///
    /// # Errors
    /// The layer is damaged or uses what is not supported; the same for the other methods.
    fn stat(&self, node: u64) -> Result<Stat, LayerError>;

    /// What is known of a file beside its bytes.
    ///
    /// # Errors
    /// As [`FileSystem::stat`].
    fn attributes(&self, node: u64) -> Result<Attributes, LayerError> {
        let Stat { kind, size } = self.stat(node)?;
        Ok(Attributes::of(kind, size))
    }

    /// The extended attributes of a file; none where the format has none.
    ///
    /// # Errors
    /// As [`FileSystem::stat`].
    fn xattrs(&self, _node: u64) -> Result<Xattrs, LayerError> {
        Ok(Xattrs::new())
    }

    /// Reports each entry of a directory, in the order in which they are stored, without `.` and `..`.
    ///
    /// # Errors
    /// As [`FileSystem::stat`]; or the node is not a directory.
    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError>;

    /// Whether two names are the same to this file system.
    fn same_name(&self, one: &[u8], other: &[u8]) -> bool {
        one == other
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// As [`FileSystem::stat`]; or the node is not a symbolic link.
    fn read_link(&self, node: u64) -> Result<Vec<u8>, LayerError>;

    /// Where the bytes of a regular file are.
    ///
    /// # Errors
    /// As [`FileSystem::stat`]; or the file has no such place.
    fn lay_out(&self, node: u64) -> Result<Layout, LayerError>;

    /// Whether the bytes of a file may be written where they are, without the file system's knowing; why not.
    ///
    /// # Errors
    /// One sentence for people.
    fn writable(&self, node: u64) -> Result<(), String>;
}

/// The entry of a directory that has this name.
///
/// # Errors
/// As [`FileSystem::list`].
pub fn find(fs: &dyn FileSystem, dir: u64, name: &[u8]) -> Result<Option<u64>, LayerError> {
    let (mut exact, mut alike) = (None, None);
    fs.list(dir, &mut |found, node| {
        if found == name {
            exact = Some(node);
            return ControlFlow::Break(());
        }
        if alike.is_none() && fs.same_name(found, name) {
            alike = Some(node);
        }
        ControlFlow::Continue(())
    })?;
    Ok(exact.or(alike))
}

/// The target of a symbolic link whose bytes are laid out as a file's.
pub(super) fn link_target(image: &Image, size: u64, layout: Layout) -> Result<Vec<u8>, LayerError> {
    let mut target = vec![0; usize::try_from(size).unwrap_or(0)];
    image.compose(layout)?.read_at(&mut target, 0)?;
    Ok(target)
}

/// That a symbolic link is no longer than any kernel follows, asked before its bytes are looked for.
pub(super) fn link_is_short(size: u64) -> Result<(), LayerError> {
    if size > LINK_MAX {
        return corrupt(format!("a symbolic link of {size} bytes"));
    }
    Ok(())
}

/// A directory's length, when it is one that is read.
pub(super) fn directory_len(len: u64) -> Result<usize, LayerError> {
    let fits = usize::try_from(len).ok().filter(|_| len <= DIRECTORY_MAX);
    fits.ok_or_else(|| LayerError::Limit(format!("a directory of {len} bytes")))
}

/// Whether two names differ at most in the case of their letters.
pub(super) fn same_but_for_case(one: &[u8], other: &[u8]) -> bool {
    fn lower(text: &str) -> impl Iterator<Item = char> {
        text.chars().flat_map(char::to_lowercase)
    }
    one.eq_ignore_ascii_case(other)
        || match (str::from_utf8(one), str::from_utf8(other)) {
            (Ok(one), Ok(other)) => lower(one).eq(lower(other)),
            _ => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_counted() {
        let time = |date, clock| Time::of_date(date, clock).map(|time| time.seconds);
        assert_eq!(time((1970, 1, 1), (0, 0, 0)), Some(0));
        assert_eq!(time((2000, 2, 29), (12, 30, 5)), Some(951_827_405));
        assert_eq!(time((1969, 12, 31), (23, 59, 59)), Some(-1));
        assert_eq!(time((2038, 1, 19), (3, 14, 8)), Some(1 << 31));
        assert_eq!(time((2038, 13, 19), (3, 14, 8)), None);
        assert_eq!(time((2038, 0, 0), (0, 0, 0)), None);
    }
}

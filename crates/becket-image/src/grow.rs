//! Images that get room for what is written while they are written.
//! It knows no formats: the code that moves bytes asks for a place and writes there.

use std::fmt::Debug;
use std::io;

/// A unit that needs a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Which.
    pub unit: u64,
    /// All of it is about to be zeroed: it may read as zeroes at once.
    pub zeroed: bool,
}

/// What makes room in an image. Its units are parts of the image of the same length, counted from 0.
pub trait Grow: Debug + Send {
    /// Length of a unit in bytes, a power of two.
    fn unit(&self) -> u64;

    /// Reports each unit that already has its own place in file 0: its number, and the offset of its first
    /// byte.
    ///
    /// # Errors
    /// What says so cannot be read.
    fn placed(&mut self, tell: &mut dyn FnMut(u64, u64)) -> io::Result<()>;

    /// Whether nothing may be written in place yet, because the file must be changed before its first write.
    /// No unit is placed then: the first call of [`Grow::place`] makes the change, and [`Grow::placed`]
    /// reports all units afterwards.
    fn is_untouched(&self) -> bool {
        false
    }

    /// Gives each of these units a place of its own in file 0, with the bytes that it had. No byte of the
    /// image changes, except what is zeroed.
    /// The answer is valid at once, even if the process dies then. It is on the disk only after a sync of
    /// file 0.
    ///
    /// # Errors
    /// There is no room, or the files failed; units may have got a place all the same.
    fn place(&mut self, units: &[Wanted]) -> io::Result<Vec<u64>>;

    /// Whether a sync has failed: then data that any process wrote to file 0 before it may never reach the
    /// disk. Nothing is placed any more after that.
    fn has_lost(&self) -> bool;

    /// Gives back what is not used. Nothing is placed afterwards.
    ///
    /// # Errors
    /// The file failed: what is not used stays counted.
    fn close(&mut self) -> io::Result<()>;
}

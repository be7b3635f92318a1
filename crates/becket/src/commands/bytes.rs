//! Which bytes of an image are to be moved, in what pieces, and what can go wrong.
//! Never names what the image knows to be zeroes.

use becket_image::{Image, Place};
use std::{fs::File, io, os::fd::AsFd as _, thread};

/// Bytes that are read at once.
pub(super) const CHUNK: usize = 1 << 20;
/// Pieces with bytes begin and end at multiples of this, as GNU tar has them.
pub(super) const BLOCK: u64 = 512;

/// More threads find nothing to do: the disk or the memory is the limit.
const READERS_MAX: usize = 8;

/// How many threads read and decode.
pub(super) fn readers() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(READERS_MAX)
}

/// What failed.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The image could not be read.
    Read(io::Error),
    /// The other side could not be written.
    Write(io::Error),
}

/// Standard output without a buffer: the pieces are large, and `Stdout` looks for the ends of lines.
pub(super) fn stdout() -> io::Result<File> {
    Ok(io::stdout().as_fd().try_clone_to_owned()?.into())
}

/// Where an image has bytes that are stored, in whole blocks of [`BLOCK`] bytes.
pub(super) fn pieces(image: &Image) -> Vec<(u64, u64)> {
    let mut pieces: Vec<(u64, u64)> = Vec::new();
    for extent in image.map().extents().iter().filter(|extent| extent.place != Place::Zero) {
        let start = extent.start - extent.start % BLOCK;
        let end = extent.end().next_multiple_of(BLOCK).min(image.len());
        match pieces.last_mut().filter(|(_, last)| start <= *last) {
            Some((_, last)) => *last = end,
            None => pieces.push((start, end)),
        }
    }
    pieces
}

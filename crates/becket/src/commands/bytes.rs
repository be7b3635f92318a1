//! Moves the bytes of an image to a stream.
//! Never reads what the image knows to be zeroes.

use super::ahead::Ahead;
use becket_image::{Image, Place};
use std::{
    fs::File,
    io::{self, Write},
    os::fd::AsFd as _,
    sync::Arc,
};

/// Bytes that are read at once.
pub(super) const CHUNK: usize = 1 << 20;
/// Pieces with bytes begin and end at multiples of this, as GNU tar has them.
pub(super) const BLOCK: u64 = 512;
/// Zeroes for a stream.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

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

/// Writes all bytes of an image to a stream.
pub(super) fn stream(image: &Image, out: &mut impl Write) -> Result<(), Trouble> {
    let mut ahead = Ahead::default();
    let contents = ahead.plan(Arc::new(image.clone()), None);
    let mut written = 0;
    ahead.each(&contents, |at, bytes| {
        zeroes(out, at - written)?;
        written = at + bytes.len() as u64;
        out.write_all(bytes)
    })?;
    zeroes(out, image.len() - written).and_then(|()| out.flush()).map_err(Trouble::Write)
}

fn zeroes(out: &mut impl Write, mut count: u64) -> io::Result<()> {
    while count > 0 {
        let some = ZEROES.get(..usize::try_from(count).unwrap_or(usize::MAX)).unwrap_or(&ZEROES);
        out.write_all(some)?;
        count -= some.len() as u64;
    }
    Ok(())
}

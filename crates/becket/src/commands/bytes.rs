//! Moves the bytes of an image: to a stream, or to a file with holes.
//! Never reads what the image knows to be zeroes.

use crate::progress::moved;
use becket_image::{Image, Place, ReadAt as _};
use std::{
    fs::File,
    io::{self, Write},
    os::{fd::AsFd as _, unix::fs::FileExt as _},
};

/// Bytes that are read at once.
pub(super) const CHUNK: usize = 1 << 20;
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

/// Ranges of an image, each with whether it has bytes that are stored.
pub(super) fn ranges(image: &Image) -> impl Iterator<Item = (u64, u64, bool)> + '_ {
    let mut extents = image.map().extents().iter().peekable();
    std::iter::from_fn(move || {
        let first = extents.next()?;
        let stored = first.place != Place::Zero;
        let mut end = first.end();
        while let Some(more) = extents.next_if(|extent| (extent.place != Place::Zero) == stored) {
            end = more.end();
        }
        Some((first.start, end, stored))
    })
}

/// Writes all bytes of an image to a stream.
pub(super) fn stream(image: &Image, out: &mut impl Write) -> Result<(), Trouble> {
    let mut chunk = Vec::new();
    for (start, end, stored) in ranges(image) {
        if stored {
            each_chunk(image, (start, end), &mut chunk, |_, bytes| out.write_all(bytes))?;
            continue;
        }
        let mut left = end - start;
        while left > 0 {
            let some = ZEROES.get(..usize::try_from(left).unwrap_or(usize::MAX)).unwrap_or(&ZEROES);
            out.write_all(some).map_err(Trouble::Write)?;
            left -= some.len() as u64;
        }
    }
    out.flush().map_err(Trouble::Write)
}

/// Writes an image to an empty file, whose holes are the image's.
pub(super) fn fill(image: &Image, file: &File) -> Result<(), Trouble> {
    file.set_len(image.len()).map_err(Trouble::Write)?;
    let mut chunk = Vec::new();
    for (start, end, _) in ranges(image).filter(|(_, _, stored)| *stored) {
        each_chunk(image, (start, end), &mut chunk, |at, bytes| file.write_all_at(bytes, at))?;
    }
    Ok(())
}

/// Reads a range piece by piece, into memory that is kept for the next range.
pub(super) fn each_chunk(
    image: &Image,
    (start, end): (u64, u64),
    chunk: &mut Vec<u8>,
    mut take: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> Result<(), Trouble> {
    let mut at = start;
    while at < end {
        let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(CHUNK);
        if chunk.len() < len {
            chunk.resize(len, 0);
        }
        let bytes = chunk.get_mut(..len).unwrap_or_default();
        image.read_at(bytes, at).map_err(Trouble::Read)?;
        take(at, bytes).map_err(Trouble::Write)?;
        moved(len);
        at += len as u64;
    }
    Ok(())
}

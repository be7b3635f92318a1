//! Traces: which bytes of an object a start needed, in their order and when; written down behind the object's
//! table while it is read, and read again from a file that people keep.
//! A trace is a hint. One of another version, or a forged one, costs bytes and harms nothing.

use std::fs::File;
use std::io::{self, IoSlice, Read as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::io::{ReadWriteFlags, pwritev2};

/// Bytes of a note: a chunk, and when it was asked for in milliseconds since 1970.
const NOTE: usize = 16;
/// The longest file of a trace, and how much is read of notes, in bytes.
const LONGEST: u64 = 16 << 20;
/// How much of a trace is fetched in the order of the object, in bytes, and not in that of the trace: what is
/// beside each other then comes by one request.
const TOGETHER: u64 = 8 << 20;
/// The longest gap between two parts that come by one request, in bytes.
const GAP: u64 = 16 << 10;
/// The first line of such a file.
const HEAD: &str = "# becket trace 1";

/// Some bytes that a start needed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Need {
    /// Milliseconds after the first.
    pub at: u64,
    /// The first byte.
    pub offset: u64,
    /// How many.
    pub len: u64,
}

/// Notes behind a table that chunks are wanted. Several processes may do so at once.
pub(crate) fn note(table: &File, chunks: Range<u64>) -> io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    let note = |chunk: u64| [chunk.to_le_bytes(), now.to_le_bytes()].concat();
    let notes: Vec<u8> = chunks.flat_map(note).collect();
    let written = pwritev2(table, &[IoSlice::new(&notes)], 0, ReadWriteFlags::APPEND)?;
    if written == notes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Chunks that were noted behind a table of that length, each once, and when.
pub(crate) fn noted(table: &File, len: u64, chunks: u64) -> io::Result<Vec<(u64, u64)>> {
    let all = table.metadata()?.len().saturating_sub(len).min(LONGEST);
    let mut bytes = vec![0; usize::try_from(all).unwrap_or(0)];
    table.read_exact_at(&mut bytes, len)?;
    let (mut seen, mut notes) = (std::collections::HashSet::new(), Vec::new());
    for note in bytes.chunks_exact(NOTE) {
        let (chunk, at) = note.split_at(NOTE / 2);
        let number = |bytes: &[u8]| bytes.try_into().map_or(u64::MAX, u64::from_le_bytes);
        let chunk = number(chunk);
        if chunk < chunks && seen.insert(chunk) {
            notes.push((chunk, number(at)));
        }
    }
    Ok(notes)
}

/// A trace as a file for people and programs.
pub fn written(needs: &[Need]) -> String {
    let lines = needs.iter().map(|need| format!("{} {} {}\n", need.at, need.offset, need.len));
    std::iter::once(format!("{HEAD}: milliseconds, first byte, bytes\n")).chain(lines).collect()
}

/// The ranges of a file's trace, in its order.
///
/// # Errors
/// It cannot be read, or is not a trace.
pub fn read(path: &Path) -> io::Result<Vec<Range<u64>>> {
    let mut text = String::new();
    File::open(path)?.take(LONGEST + 1).read_to_string(&mut text)?;
    let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    if text.len() as u64 > LONGEST || !text.starts_with(HEAD) {
        return Err(bad("it is not a trace that becket has recorded"));
    }
    let mut ranges = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        let mut fields = line.split_ascii_whitespace().map(str::parse::<u64>);
        let (Some(Ok(_)), Some(Ok(offset)), Some(Ok(len)), None) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            return Err(bad(&format!("{line:?} is not a line of a trace")));
        };
        ranges.push(offset..offset.saturating_add(len));
    }
    Ok(ranges)
}

/// The chunks of ranges, each once and none behind the end, in runs of which each is worth a request: nearly
/// in their order.
pub(crate) fn in_chunks(ranges: &[Range<u64>], chunk: u64, size: u64) -> Vec<Range<u64>> {
    let (mut seen, mut order) = (std::collections::HashSet::new(), Vec::new());
    for range in ranges {
        let end = range.end.min(size);
        order.extend((range.start.min(end) / chunk..end.div_ceil(chunk)).filter(|at| seen.insert(*at)));
    }
    let mut found = Vec::<Range<u64>>::new();
    for together in order.chunks_mut(usize::try_from(TOGETHER / chunk).unwrap_or(1).max(1)) {
        together.sort_unstable();
        let near = |one: &u64, next: &u64| next - one - 1 <= GAP / chunk;
        for run in together.chunk_by(near) {
            found.extend(run.first().zip(run.last()).map(|(first, last)| *first..last + 1));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_come_back_in_their_order_and_each_chunk_once() {
        let table = tempfile::tempfile().unwrap();
        table.set_len(80).unwrap();
        note(&table, 5..7).unwrap();
        note(&table, 2..3).unwrap();
        note(&table, 6..8).unwrap();
        note(&table, 99..100).unwrap();
        let notes: Vec<u64> = noted(&table, 80, 10).unwrap().into_iter().map(|(chunk, _)| chunk).collect();
        assert_eq!(notes, [5, 6, 2, 7]);
        let mut first = [1; 80];
        table.read_exact_at(&mut first, 0).unwrap();
        assert_eq!(first, [0; 80], "the table is as it was");
    }

    #[test]
    fn what_is_beside_each_other_comes_by_one_request_and_what_is_needed_first_comes_first() {
        const CHUNK: u64 = 8 << 10;
        let chunks = |ranges: &[Range<u64>]| {
            let bytes: Vec<_> = ranges.iter().map(|run| run.start * CHUNK..run.end * CHUNK).collect();
            in_chunks(&bytes, CHUNK, 1 << 30)
        };
        assert_eq!(chunks(&[9..10, 4..5, 12..14, 4..6, 8..9]), std::slice::from_ref(&(4..14)));
        assert_eq!(chunks(&[20..21, 4..5, 7..9]), [4..9, 20..21], "two chunks between them");
        assert_eq!(chunks(&[20..21, 4..5, 8..9]), [4..5, 8..9, 20..21], "three are too many");
        let many = TOGETHER / CHUNK;
        assert_eq!(chunks(&[many..2 * many, 0..many]), [many..2 * many, 0..many]);
    }

    #[test]
    fn a_file_says_what_was_written_and_nothing_else_is_one() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("trace");
        let needs = [Need { at: 0, offset: 65_536, len: 131_072 }, Need { at: 12, offset: 0, len: 65_536 }];
        std::fs::write(&path, written(&needs)).unwrap();
        let ranges = read(&path).unwrap();
        assert_eq!(ranges, [65_536..196_608, 0..65_536]);
        assert_eq!(in_chunks(&ranges, 65_536, 150_000), std::slice::from_ref(&(0..3)));
        assert_eq!(
            in_chunks(&[5..6, 0..70_000, 1 << 40..u64::MAX], 65_536, 65_537),
            std::slice::from_ref(&(0..2))
        );
        let head = "# becket trace 1\n";
        for text in
            ["", "0 1 2\n", &format!("{head}0 1\n"), &format!("{head}0 1 x\n"), &format!("{head}1 2 3 4\n")]
        {
            std::fs::write(&path, text).unwrap();
            assert!(read(&path).is_err(), "{text:?}");
        }
        std::fs::write(&path, format!("{head}0 {} {}\n", u64::MAX, u64::MAX)).unwrap();
        assert_eq!(in_chunks(&read(&path).unwrap(), 65_536, 1 << 20), []);
    }
}

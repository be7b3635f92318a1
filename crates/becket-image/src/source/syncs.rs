//! What the writer of an image that grows syncs through: the image's file, opened once more.
//! It is never written to, and nothing else syncs through it.
//!
//! The kernel reports pages that it could not write back once for each open file description, to the first
//! sync or durable write through it. Requests of the device sync through the descriptions of the image's own
//! source, and could so take an error that the writer has to know of: it would then let a table refer to a
//! cluster that is not on the disk. A copy of a descriptor has the same description, so the file must be
//! opened once more, which the process that serves it cannot do.
//!
//! The description crosses to that process as a source behind the others, which no map speaks of, and which
//! counts as one that is only read, so that no flush syncs it. Nothing has to be said of it: builds that do
//! not know it take it for a source that nobody needs. No other source of an image is the same file as its
//! first.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::OFlags;

use super::Source;
use super::file::FileSource;
use super::file::facts::{Facts, open_quietly, proc_path};
use super::kind::SourceKind as _;

/// Opens the first file once more and puts it behind the other sources. It hears of what is lost from now on:
/// nothing may have been written for the device yet.
///
/// # Errors
/// It cannot be opened.
pub fn open(sources: &mut Vec<Source>) -> io::Result<()> {
    let Some(first) = sources.first().and_then(Source::file) else { return Ok(()) };
    let buffered = open_quietly(&proc_path(&first.buffered), OFlags::RDWR | OFlags::CLOEXEC)?;
    // A device goes past the page cache only where each source can.
    let direct = first.direct.as_ref().map(OwnedFd::try_clone).transpose()?;
    let facts = Facts { writable: false, nowait: false, ..first.facts.clone() };
    sources.push(FileSource::of(buffered, direct, facts).into());
    Ok(())
}

/// The file that [`open`] has put there; `None` where the process that opened the image did not know of it.
/// Its buffered descriptor is the one to sync through.
pub fn among(sources: &[Source]) -> Option<&FileSource> {
    let (first, others) = sources.split_first()?;
    let same = |file: &&FileSource| !file.facts.writable && file.identity() == first.identity();
    first.identity().and_then(|_| others.iter().filter_map(Source::file).find(same))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd};

    use rustix::fs::{SeekFrom, seek};

    use super::*;

    #[test]
    fn the_file_is_opened_once_more_and_found_again_among_others() {
        let files = [tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap()];
        let mut sources = Vec::new();
        open(&mut sources).unwrap();
        assert!(sources.is_empty() && among(&sources).is_none());
        for file in &files {
            file.as_file().set_len(1 << 20).unwrap();
            let opened = crate::open(file.path(), &crate::OpenOptions::default()).unwrap();
            sources.extend(opened.sources);
        }
        assert!(among(&sources).is_none());
        open(&mut sources).unwrap();
        let own = among(&sources).unwrap();
        assert_eq!(own.identity(), sources[0].identity());
        assert_eq!(own.direct.is_some(), sources[0].is_direct());
        assert!(!own.facts.writable && sources[2].file().is_some_and(|last| std::ptr::eq(last, own)));
        // Descriptors of one description have one position.
        let position = |fd: BorrowedFd<'_>| seek(fd, SeekFrom::Current(0)).unwrap();
        seek(&own.buffered, SeekFrom::Start(77)).unwrap();
        assert_eq!(position(own.buffered.try_clone().unwrap().as_fd()), 77);
        assert!(sources[0].descriptors().into_iter().all(|fd| position(fd) == 0));
    }
}

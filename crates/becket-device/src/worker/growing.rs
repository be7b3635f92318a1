//! What a worker does for an image that grows: it reads the tables, and makes the writer of them.
//! It opens nothing: what the writer syncs through has come along.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use becket_image::{Grow, Grower, Image, Source, syncs};
use becket_transport::aside::within;
use becket_transport::serve::Decoded;

use crate::contract::kept::Kept;
use crate::contract::wrong;

/// Longest that reading the tables of an image that grows may take. The supervisor gives up later
/// (`supervisor::process`), and on the worker with it.
const TABLES: Duration = Duration::from_secs(30);

/// Allocates room in a device's image, if that grows. Each worker asks anew: the one before may have made
/// some. What waits for the image's file is done on another thread: a file system that does not answer costs
/// this device alone its worker.
pub(super) fn grower(kept: &Kept, decoded: Option<&Decoded>) -> io::Result<Option<Box<dyn Grow>>> {
    if !kept.serve.backing.grows {
        return Ok(None);
    }
    let readers = kept.sources.iter().map(Source::reader).collect::<io::Result<_>>()?;
    let no_file = || wrong("an image that grows has no file");
    let first = kept.sources.first().and_then(Source::file).ok_or_else(no_file)?;
    let encoded = decoded.map(|decoded| decoded.encoded.clone()).unwrap_or_default();
    let old = Image::assembled(kept.serve.map.clone(), readers, encoded)
        .ok_or_else(|| wrong("a map speaks of what is not there"))?;
    let for_syncs = for_syncs(&kept.sources)?;
    let file = first.buffered.try_clone()?;
    match within(TABLES, move || Grower::open(file, for_syncs, old)) {
        Some(grower) => Ok(Some(Box::new(grower.map_err(io::Error::other)?))),
        None => {
            let seconds = TABLES.as_secs();
            let why =
                format!("its tables could not be read within {seconds} s: its file system may not answer");
            Err(io::Error::new(io::ErrorKind::TimedOut, why))
        }
    }
}

/// What the writer syncs through. A client of a build that did not know of a description for that alone
/// ([`syncs`]) has sent none: then it is that of direct I/O, whose errors durable writes may take.
fn for_syncs(sources: &[Source]) -> io::Result<Option<OwnedFd>> {
    let own = syncs::among(sources).map(|own| &own.buffered);
    let first = || sources.first().and_then(Source::file)?.direct.as_ref();
    own.or_else(first).map(OwnedFd::try_clone).transpose()
}

#[cfg(test)]
mod tests {
    use becket_image::OpenOptions;
    use rustix::fs::SeekFrom;

    use super::*;
    use crate::contract::spec;

    #[test]
    fn the_writer_of_an_image_syncs_through_what_the_device_does_not_use() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        temp.as_file().set_len(1 << 20).unwrap();
        let opened = || becket_image::open(temp.path(), &OpenOptions::default()).unwrap().sources;
        let mut sent = opened();
        // As the client sends it, and as a worker gets it.
        syncs::open(&mut sent).unwrap();
        let files = spec::facts_of(&sent);
        let fds: Vec<OwnedFd> = sent.into_iter().flat_map(Source::into_descriptors).collect();
        let sources = spec::all_sources(files, fds.into_iter()).unwrap();
        let own = for_syncs(&sources).unwrap().unwrap();
        // Descriptors of one description have one position.
        rustix::fs::seek(&own, SeekFrom::Start(77)).unwrap();
        let written = sources.iter().filter(|source| source.is_writable());
        for fd in written.flat_map(Source::descriptors) {
            assert_eq!(rustix::fs::seek(fd, SeekFrom::Current(0)).unwrap(), 0, "a ring writes through it");
        }
        // A client of an earlier build.
        drop(sources);
        let sources = opened();
        assert_eq!(for_syncs(&sources).unwrap().is_some(), sources[0].is_direct());
    }
}

//! An image on a server, connected to: what stands behind a URI, before anything is looked for in it.
//! Only URIs that the user gave or has allowed are connected to; no image's word alone ever is.
//!
//! A kind of source that has URIs is a line of [`is_remote`] and one of [`connect`].

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::geometry;
use crate::resolve::io;
use crate::source::link::{self, DialError, Endpoint, LinkSource, Server};
use crate::{Budget, Error, Identity, Image, Source};

/// Whether a path is a URI of a source that is not on this host.
pub fn is_remote(path: &Path) -> bool {
    link::is_link(path)
}

/// The URI of such a source as it is recorded, and the names inside the image.
pub(crate) fn split(path: &Path) -> (PathBuf, Vec<OsString>) {
    let (uri, inside) = link::split_inside(path.as_os_str());
    (uri.into(), inside)
}

/// An image that was connected to.
#[derive(Debug)]
pub(crate) struct Remote {
    /// The URI in the form that is recorded.
    pub(crate) uri: PathBuf,
    pub(crate) source: Source,
    /// Its bytes as they are stored.
    pub(crate) image: Image,
    /// Its logical block size in bytes.
    pub(crate) natural: u32,
    /// Why it can only be read.
    pub(crate) unwritable: Option<String>,
    pub(crate) warnings: Vec<String>,
}

impl Remote {
    /// In place of a file's.
    pub(crate) fn identity(&self) -> Identity {
        self.source.identity().unwrap_or(Identity { dev: link::NOWHERE, ino: 0 })
    }

    /// Refuses blocks that no device can have.
    pub(crate) fn fits_a_device(&self) -> Result<(), Error> {
        let (smallest, largest) = (self.natural, geometry::largest_block_size());
        if smallest > largest {
            let unfit = format!("the blocks of a device have at most {largest}");
            return Err(Error::LargeBlocks { path: self.uri.clone(), smallest, unfit });
        }
        Ok(())
    }
}

fn invalid(uri: &Path, why: String) -> Error {
    let source = DialError::Io(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
    Error::Link { path: uri.to_owned(), source }
}

pub(crate) fn endpoint(uri: &Path) -> Result<Endpoint, Error> {
    let text = uri.to_str().ok_or_else(|| invalid(uri, "the URI is not UTF-8".to_owned()))?;
    Endpoint::parse(text).map_err(|why| invalid(uri, format!("the URI cannot be used: {why}")))
}

/// `to_serve`: see [`LinkSource::open`].
pub(crate) fn connect(
    uri: &Path,
    read_only: bool,
    to_serve: bool,
    patience: Option<Duration>,
    budget: &Budget,
) -> Result<Remote, Error> {
    let endpoint = endpoint(uri)?;
    let refused = |source| Error::Link { path: uri.to_owned(), source };
    let source = LinkSource::open(&endpoint, read_only, to_serve, patience).map_err(refused)?;
    let (agreed, uri) = (*source.agreed(), PathBuf::from(endpoint.to_string()));
    if agreed.size == 0 {
        return Err(Error::Empty { path: uri });
    }
    let source = Source::from(source);
    let failed = |error| io(&uri, "its connection cannot be used", error);
    let natural = agreed.smallest.max(512);
    let image = Image::raw(source.reader().map_err(failed)?, agreed.size, natural).within(budget);
    let unwritable = (!read_only && !source.is_writable()).then(|| match &endpoint.server {
        Server::Rbd(rbd) if rbd.snapshot.is_some() => "a snapshot is only read".to_owned(),
        _ => "the server exports it read-only".to_owned(),
    });
    let mut warnings = Vec::new();
    if source.is_writable() && !agreed.has(becket_uapi::nbd::SEND_FLUSH) {
        warnings
            .push("the server knows no flush: when written bytes are durable is up to the server".to_owned());
    }
    Ok(Remote { uri, source, image, natural, unwritable, warnings })
}

/// The same for reading, of an image that another one names below itself.
pub(crate) fn connect_below(
    uri: &Path,
    to_serve: bool,
    patience: Option<Duration>,
    budget: &Budget,
) -> Result<Remote, Error> {
    let mut remote = connect(uri, true, to_serve, patience, budget)?;
    if let Source::Link(link) = &mut remote.source {
        link.lies_below();
    }
    if to_serve {
        remote.fits_a_device()?;
    }
    Ok(remote)
}

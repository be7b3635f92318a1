//! Images that are on no file system of this host: named by a URI, walked and opened like any other.
//! What follows `#` in a URI is the path inside the image. [`crate::connected`] connects.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use crate::connected::{Remote, connect, endpoint, split};
use crate::cow::{self, Base};
use crate::geometry::{self, Geometry};
use crate::layer::foreign;
use crate::opened::{Location, Opened};
use crate::options::{OpenOptions, Tail};
use crate::qcow2;
use crate::source::link::{self, DialError, Endpoint, LinkWriter};
use crate::text::shown;
use crate::through::{self, End, Walk};
use crate::{Budget, DirectIo, Error, Extent, Format, Identity, Image, LayerError, Map, Place, Source};

/// Whether an image that is recorded under a URI goes by the one that a user types: they name the same
/// export, by whatever ways it is reached, and of Ceph what the typed one does not say may be anything.
/// Nothing is connected to.
pub fn goes_by(recorded: &Path, typed: &Path) -> bool {
    let ((recorded, of_it), (typed, inside)) = (split(recorded), split(typed));
    let parsed = |uri: &Path| Endpoint::parse(uri.to_str()?).ok();
    let same = |recorded: Endpoint| parsed(&typed).is_some_and(|typed| recorded.goes_by(&typed));
    of_it == inside && parsed(&recorded).is_some_and(same)
}

/// Whether an image has bytes of what this URI names. Nothing is connected to.
pub fn holds(path: &Path, image: &Opened) -> bool {
    let named = locate(&split(path).0).host;
    image.sources.iter().any(|source| source.identity() == Some(named))
}

/// Connects to an export to write `len` bytes to it, as they are stored there. An image of Ceph is made where
/// it does not exist. `patience`: see [`OpenOptions::patience`].
///
/// # Errors
/// The URI names a path inside an image, or the server cannot be reached, or does not let the image be
/// written.
pub fn open_to_write(path: &Path, len: u64, patience: Option<Duration>) -> Result<LinkWriter, Error> {
    let (uri, inside) = split(path);
    if !inside.is_empty() {
        let kind = std::io::ErrorKind::ReadOnlyFilesystem;
        let why = std::io::Error::new(kind, "a part of an image on a server is only read");
        return Err(Error::Link { path: path.to_owned(), source: DialError::Io(why) });
    }
    let endpoint = endpoint(&uri)?;
    LinkWriter::connect(&endpoint, len, patience).map_err(|source| Error::Link { path: uri, source })
}

/// Checks that a device with blocks of `block_size` bytes asks the server, the image's source of that number,
/// only for multiples of `smallest` bytes; otherwise says what is in other units.
fn in_whole_blocks(image: &Image, number: usize, smallest: u32, block_size: u32) -> Result<(), String> {
    let unit = u64::from(smallest);
    let there = |map: &Map| -> Vec<Extent> {
        let is_there =
            |place: &Place| matches!(place, Place::Data { source, .. } if *source as usize == number);
        map.extents().iter().filter(|extent| is_there(&extent.place)).copied().collect()
    };
    let lies_on_blocks = |extent: &Extent| match extent.place {
        Place::Data { offset, .. } => (offset | extent.start | extent.len).is_multiple_of(unit),
        _ => true,
    };
    let data = there(image.map());
    if block_size < smallest && !data.is_empty() {
        return Err(format!("the blocks of the device have {block_size}"));
    }
    if !data.iter().all(lies_on_blocks) {
        return Err("the image does not lie on such blocks".to_owned());
    }
    // What is read of these is made longer within one extent.
    let fits = |below: &[Extent]| match below {
        [] => true,
        [extent] => lies_on_blocks(extent),
        _ => false,
    };
    if unit > 1 && !image.encoded().all(|layer| fits(&there(layer.below()))) {
        return Err("the compressed image does not lie on such blocks in one piece".to_owned());
    }
    Ok(())
}

/// The disk in what is stored: itself, or what a qcow2 holds, which is only read here; with the reason.
fn disk_in(image: &Image, uri: &Path, format: Format) -> Result<(Image, Option<String>), Error> {
    let of = |source| Error::Layer { image: shown(uri.as_os_str().as_bytes()), source };
    if !matches!(format, Format::Auto | Format::Qcow2 | Format::Vmdk) {
        return Ok((image.clone(), None));
    }
    let found = if format == Format::Vmdk { Ok(None) } else { qcow2::unpack_alone(image) };
    let found = found.or_else(|error| match format {
        // What becket calls damaged may be a format of its own.
        Format::Auto => foreign::refuse(image).and(Err(error)),
        _ => Err(error),
    });
    match found.map_err(of)? {
        Some(disk) => Ok((disk, Some("a qcow2 on a server is only read".to_owned()))),
        None if format == Format::Auto => Ok((image.clone(), None)),
        None => {
            let known = foreign::refuse(image).err();
            Err(of(known.unwrap_or_else(|| LayerError::IsNot(format.to_string()))))
        }
    }
}

/// See `open::look`.
pub(crate) fn look(
    path: &Path,
    format: Format,
    patience: Option<Duration>,
    budget: &Budget,
) -> Result<Walk, Error> {
    let (uri, inside) = split(path);
    let remote = connect(&uri, true, false, patience, budget)?;
    walk(&remote, &inside, format)
}

fn walk(remote: &Remote, inside: &[OsString], format: Format) -> Result<Walk, Error> {
    let (image, reason) = disk_in(&remote.image, &remote.uri, through::of_first(format, inside))?;
    let mut walk = through::walk(image, shown(remote.uri.as_os_str().as_bytes()), inside, format)?;
    walk.read_only = remote.unwritable.clone().or(reason).or(walk.read_only);
    walk.files = remote.source.identity().into_iter().collect();
    Ok(walk)
}

/// See `open::locate`. Nothing is connected to: two URIs are compared by what they say.
pub(crate) fn locate(path: &Path) -> Location {
    let (uri, inside) = split(path);
    let endpoint = uri.to_str().and_then(|uri| Endpoint::parse(uri).ok());
    let ino = endpoint
        .map_or(0, |endpoint| link::identity_of(&link::with_inside(Path::new(&endpoint.plainly()), &inside)));
    Location { host: Identity { dev: link::NOWHERE, ino }, snapshot: None, inside: Vec::new() }
}

/// See `open::open_partly`.
pub(crate) fn open(path: &Path, options: &OpenOptions, to_serve: bool) -> Result<Opened, Error> {
    let (uri, inside) = split(path);
    if options.direct_io == DirectIo::On {
        let reason = "it is on a server, not in a file of this host".to_owned();
        return Err(Error::DirectIo { path: path.to_owned(), reason });
    }
    let budget = options.budget();
    let asked_read_only = options.read_only || options.cow.is_some();
    let mut remote = connect(&uri, asked_read_only, to_serve, options.patience, &budget)?;
    if to_serve {
        remote.fits_a_device()?;
    }
    let mut warnings = std::mem::take(&mut remote.warnings);
    let walked = walk(&remote, &inside, options.format)?;
    let level = walked.last()?;
    let path = link::with_inside(&remote.uri, &inside);
    if walked.end != End::Image {
        return Err(Error::NotAnImage { path, what: "a directory" });
    }
    let mut read_only_reason = walked.read_only.clone().filter(|_| !asked_read_only);
    let mut read_only = asked_read_only || read_only_reason.is_some();
    let mut wanted = options.clone();
    if !read_only || options.cow.is_some() {
        wanted.tail = Tail::Cut;
    }
    let mut image = level.image.clone();
    let stored = image.stored().is_some();
    let part_of = |image: &Image, offset, len| {
        let slice = image.slice(offset, len);
        slice.map_err(|source| Error::Layer { image: level.path.clone(), source })
    };
    let (mut sources, mut overlay) = (Vec::new(), None);
    let mut identity = remote.source.identity();
    if let Some(file) = &options.cow {
        let (offset, len) = geometry::window(&path, image.len(), &wanted)?;
        let part =
            (wanted.offset != 0 || wanted.size_limit.is_some()).then_some((wanted.offset, wanted.size_limit));
        let whole = part.is_none() && inside.is_empty() && walked.levels.len() == 1;
        let plain = whole.then(|| image.stored().map_or("raw", |about| about.format));
        let image_part = part_of(&image, offset, len)?;
        let base = Base {
            image: image_part,
            links: Vec::new(),
            remote: Some(path.clone()),
            inside: Vec::new(),
            part,
            below: None,
            plain,
        };
        let stack = cow::lay_over(base, file, options, &mut warnings)?;
        image = stack.image;
        read_only = options.read_only || stack.read_only.is_some();
        read_only_reason = stack.read_only;
        for link in stack.links {
            identity = Some(link.identity());
            let mut source = link.into_source(!read_only, 0, options.direct_io)?;
            if let Source::File(file) = &mut source {
                file.facts.sparse |= !read_only;
            }
            sources.push(source);
        }
        overlay = Some(stack.overlay);
        (wanted.offset, wanted.size_limit) = (0, None);
    }
    let Geometry { offset, len, padding, block_size, partitions } =
        geometry::choose(&path, &image, remote.natural, &wanted, &mut warnings)?;
    let image = part_of(&image, offset, len)?;
    let image = image.padded(padding).map_err(|source| Error::Layer { image: level.path.clone(), source })?;
    // Parsers that go on without what cannot be read have not seen all of it.
    let failed = |spent| Error::Layer { image: level.path.clone(), source: LayerError::Spent(spent) };
    budget.check().map_err(failed)?;
    if let (true, Some(link)) = (to_serve, remote.source.link()) {
        let (smallest, number) = (link.agreed().smallest, sources.len());
        in_whole_blocks(&image, number, smallest, block_size).map_err(|unfit| Error::LargeBlocks {
            path: path.clone(),
            smallest,
            unfit,
        })?;
    }
    let grows = overlay.is_some() && !read_only;
    let nested = stored || overlay.is_some() || walked.levels.len() > 1;
    sources.push(remote.source);
    Ok(Opened {
        path,
        map: image.map().clone(),
        sources,
        outer: Vec::new(),
        encoded: image.encoded().cloned().collect(),
        grows,
        nested,
        read_only,
        read_only_reason,
        block_size,
        identity: identity.unwrap_or(Identity { dev: link::NOWHERE, ino: 0 }),
        partitions,
        overlay,
        range: None,
        below: None,
        warnings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_goes_by_what_was_typed_and_by_what_is_recorded() {
        let here = std::env::current_dir().unwrap();
        let socket = format!("nbd+unix:///?socket={}/nk.sock", here.display());
        for (recorded, typed) in [
            ("nbd://127.0.0.1:14420/", "nbd://127.0.0.1:14420"),
            ("nbd://host/disk", "nbd://host:10809/d%69sk"),
            ("nbds://host/x?tls-certificates=/pki", "nbds://host/x"),
            ("nbd://host/x#p1/etc", "nbd://host/x#/p1//etc"),
            (&socket, "nbd+unix:///?socket=nk.sock"),
            ("rbd:pool/image?conf=/etc/c.conf&id=me", "rbd:pool/image"),
            ("rbd:pool/image?conf=/etc/c.conf&id=me", "rbd:pool/image?id=me"),
            ("rbd:pool/image@snap", "rbd:pool/image@snap"),
        ] {
            for typed in [typed, recorded] {
                assert!(goes_by(Path::new(recorded), Path::new(typed)), "{recorded} {typed}");
            }
        }
        for (recorded, typed) in [
            ("nbd://host/x", "nbd://host/y"),
            ("nbd://host/x", "nbd://host:7/x"),
            ("nbd://host/x", "nbds://host/x"),
            ("nbd://host/x#p1", "nbd://host/x"),
            ("nbd://host/", "host"),
            ("rbd:pool/image?conf=/etc/c.conf", "rbd:pool/image?conf=/etc/d.conf"),
            ("rbd:pool/image", "rbd:pool/image?id=me"),
            ("rbd:pool/image@snap", "rbd:pool/image"),
            ("/images/nbd:/host", "nbd://host"),
        ] {
            assert!(!goes_by(Path::new(recorded), Path::new(typed)), "{recorded} {typed}");
        }
    }
}

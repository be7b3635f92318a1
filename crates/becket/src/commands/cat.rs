//! `becket cat PATH...`: files inside images, to standard output.
//! Never reads what the image knows to be zeroes.

use super::{
    ahead::Ahead,
    bytes::{self, Trouble},
    fetched,
    inside::{self, Inside, Named, Node, Thing},
};
use crate::{args, failure::Failure, progress::Moving, ui::Ui};
use becket_image::{Budget, Image, LayerError, NodeKind, zeroes};
use serde_json::json;
use std::{
    io::{ErrorKind, IsTerminal as _, Write},
    path::Path,
    sync::Arc,
};

pub(crate) fn run(ui: &Ui, args: &args::Cat) -> Result<u8, Failure> {
    let (mut status, mut printed, mut first) = (0, 0, None);
    // At a terminal the bytes themselves are seen.
    let _moving = (!std::io::stdout().is_terminal()).then(Moving::begin);
    for path in &args.paths {
        let options = &args.options;
        let found = fetched::all_of(path, options, "read")
            .and_then(|local| inside::find_in(local, path, options, "read"));
        let found = found.map_or_else(
            |failure| vec![Err(failure)],
            |(inside, all)| all.into_iter().map(|named| file(&inside, named)).collect(),
        );
        let host = inside::host_of(path);
        for image in found {
            let mut written = 0;
            let done = image.and_then(|(path, image)| {
                let done = stream(&image, &mut bytes::stdout()?, &mut written);
                done.map_err(|trouble| failure(&path, &host, trouble, written > 0))
            });
            printed += written;
            match done {
                Ok(()) => {}
                // Who wanted all of it must see that it is not.
                Err(failure) if failure.kind == crate::failure::BROKEN_PIPE => return Err(failure),
                Err(failure) => {
                    ui.failure(&failure);
                    status = failure.status;
                    first.get_or_insert(failure);
                }
            }
        }
    }
    // Behind the bytes of files a program would not find it.
    if let Some(failure) = first.filter(|_| ui.json && printed == 0) {
        // The status says it where that cannot be printed either.
        let _ = ui.value(&json!({ "error": failure.to_json() }));
    }
    Ok(status)
}

/// The bytes of what was found, with its path.
fn file(inside: &Inside<'_>, named: Named) -> Result<(String, Image), Failure> {
    let named = inside.followed(named)?;
    let image = match &named.thing {
        Thing::Image(walk) => walk.last().map(|level| level.image.clone()).map_err(|error| error.to_string()),
        Thing::Node(node) => {
            let kind = node.fs.stat(node.node).map_err(|source| inside.failure(&named, source))?.kind;
            match kind {
                NodeKind::File => Ok(contents(node).map_err(|source| inside.failure(&named, source))?),
                NodeKind::Directory => Err("it is a directory".to_owned()),
                NodeKind::Symlink => Err("it is a symbolic link".to_owned()),
                NodeKind::Other => Err("it is a device, FIFO or socket".to_owned()),
            }
        }
    };
    let unlimited = |image: Image| (named.path.clone(), image.within(&Budget::unlimited()));
    image.map(unlimited).map_err(|why| {
        let failure = Failure::new("not_a_file", format!("cannot read {}: {why}", named.path));
        match why.ends_with("directory") {
            true => failure.hint(format!("see what is in it: becket ls {}", named.path)),
            false => failure.hint(format!("see what it is: becket ls -l {}", named.path)),
        }
    })
}

/// The bytes of a regular file of a file system, as an image.
pub(super) fn contents(node: &Node) -> Result<Image, LayerError> {
    node.image.compose(node.fs.lay_out(node.node)?)
}

/// Why not all bytes of a path in the file `host` were printed; `some` says whether any were.
fn failure(path: &str, host: &str, trouble: Trouble, some: bool) -> Failure {
    let error = match trouble {
        Trouble::Read(error) => error,
        Trouble::Write(error) => return Failure::from(error),
    };
    let fetched = error.get_ref().and_then(|inner| inner.downcast_ref::<becket_fetch::Error>());
    let mut failure = match fetched {
        Some(error) => fetched::failure("read", Path::new(path), error),
        None => Failure::io(format!("cannot read {path}"), &error),
    };
    let damaged = || format!("what is compressed in {host} is damaged: use a sound copy of that file");
    let hints = [
        failure.hint.take().or_else(|| (error.kind() == ErrorKind::InvalidData).then(damaged)),
        some.then(|| "what was printed of it is incomplete".to_owned()),
    ];
    let hint = hints.into_iter().flatten().collect::<Vec<_>>().join("; ");
    if hint.is_empty() { failure } else { failure.hint(hint) }
}

/// Writes all bytes of an image to a stream; `written` says how far that came.
fn stream(image: &Image, out: &mut impl Write, written: &mut u64) -> Result<(), Trouble> {
    let mut ahead = Ahead::default();
    let contents = ahead.plan(Arc::new(image.clone()), None);
    ahead.each(&contents, |at, bytes| {
        zeroes::write(out, at - *written)?;
        *written = at + bytes.len() as u64;
        out.write_all(bytes)
    })?;
    zeroes::write(out, image.len() - *written).and_then(|()| out.flush()).map_err(Trouble::Write)?;
    *written = image.len();
    Ok(())
}

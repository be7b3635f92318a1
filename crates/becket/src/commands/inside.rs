//! What paths through images name: files and directories of file systems, or whole images; with patterns.
//! Never opens the file on the host twice for one path, and never follows a link that a pattern matched.

use super::{
    common,
    fetched::{self, Local},
    glob::Glob,
};
use crate::{args::LookOptions, failure::Failure};
use becket_image::{
    End, Error, FileSystem, Format, Identity, Image, LayerError, NodeKind, Split, Walk,
    budget::Held,
    layer::{Contents, detect, find},
    shown, split,
};
use std::{
    ffi::{OsStr, OsString},
    ops::ControlFlow,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::Path,
    sync::Arc,
};

/// Memory for a match, beside its name and path, and what takes it.
const ENTRY: u64 = 512;
const NAMES: &str = "the list of a directory";

/// A file of a file system.
#[derive(Debug, Clone)]
pub(super) struct Node {
    /// The image that holds the file system.
    pub(super) image: Image,
    pub(super) fs: Arc<dyn FileSystem>,
    pub(super) node: u64,
}

/// A directory of a file system.
pub(super) type Directory = (Arc<dyn FileSystem>, u64);
/// A name that a pattern matched, and the file that has it; a partition is none.
type Match = (Vec<u8>, Option<Node>);

/// What a path names.
#[derive(Debug)]
pub(super) enum Thing {
    /// A whole image, by the walk that ends in it.
    Image(Walk),
    /// A file, directory or anything else in a file system; of a symbolic link, the link.
    Node(Node),
}

/// A path, and what it names.
#[derive(Debug)]
pub(super) struct Named {
    /// Safe to show.
    pub(super) path: String,
    /// The last name of the path; `None` for `..` and the like.
    pub(super) name: Option<Vec<u8>>,
    pub(super) thing: Thing,
    names: Vec<OsString>,
    /// How the image that it names is to be understood.
    format: Format,
}

/// A file on the host, with what is asked of the paths that go on in it.
pub(super) struct Inside<'a> {
    verb: &'static str,
    path: &'a Path,
    /// Safe to show.
    host: String,
    /// The name of the file.
    name: Option<Vec<u8>>,
    root: Walk,
    asked: &'a LookOptions,
    held: Held,
    found: Vec<Named>,
    /// Why what a pattern led to could not be looked at: reported if nothing else is found.
    passed: Option<Error>,
}

/// Finds what a path names, and what its patterns match, in the order of their names.
pub(super) fn find_all<'a>(
    path: &'a Path,
    asked: &'a LookOptions,
    verb: &'static str,
) -> Result<(Inside<'a>, Vec<Named>), Failure> {
    find_in(fetched::local(path, asked, verb)?, path, asked, verb)
}

/// The same in what is on this host: nothing is fetched or decoded for it.
pub(super) fn find_in<'a>(
    local: Local<'a>,
    path: &'a Path,
    asked: &'a LookOptions,
    verb: &'static str,
) -> Result<(Inside<'a>, Vec<Named>), Failure> {
    let failed = |error| common::image_failure(verb, path, error);
    let Split { host, inside } = split(&local.path);
    let local = Local { path: host.into(), ..local };
    // `raw` is said of what the path names; see `LookOptions::format`.
    let format = if asked.format == Format::Raw && !inside.is_empty() { Format::Auto } else { asked.format };
    let root = common::look_at(&local, asked, format).map_err(failed)?;
    let budget = root.last().map_err(failed)?.image.budget().clone();
    let held = budget.hold(0, NAMES).map_err(|spent| failed(layer(path, spent.into())))?;
    let name = local.path.file_name().map(|name| name.as_bytes().to_vec());
    let host = host_of(path);
    let mut all = Inside { verb, path, host, name, root, asked, held, found: Vec::new(), passed: None };
    all.expand(Vec::new(), &inside, false).map_err(failed)?;
    let found = std::mem::take(&mut all.found);
    match all.passed.take() {
        Some(error) if found.is_empty() => Err(failed(error)),
        None if found.is_empty() => {
            Err(Failure::new("not_found", format!("cannot {verb} {}: no name matches", shown_path(path))))
        }
        _ => Ok((all, found)),
    }
}

/// The file of this host that a path enters, or the URL of one elsewhere; safe to show.
pub(super) fn host_of(path: &Path) -> String {
    match becket_fetch::is_remote(path.as_os_str()) {
        true => becket_fetch::named(path.as_os_str()).split('#').next().unwrap_or_default().to_owned(),
        false => shown_path(&split(path).host),
    }
}

fn layer(path: &Path, source: LayerError) -> Error {
    Error::Layer { image: shown_path(path), source }
}

fn shown_path(path: &Path) -> String {
    shown(path.as_os_str().as_bytes())
}

impl Inside<'_> {
    /// The files and devices of the host that are read.
    pub(super) fn files(&self) -> &[Identity] {
        &self.root.files
    }

    /// Finds what `rest` names behind `done`; `matched` says that a pattern was on the way.
    fn expand(&mut self, done: Vec<OsString>, rest: &[OsString], matched: bool) -> Result<(), Error> {
        let pattern = rest
            .iter()
            .enumerate()
            .find_map(|(index, name)| Glob::of(name.as_bytes()).map(|glob| (index, glob)));
        let Some((index, glob)) = pattern else {
            let names = [done, rest.to_vec()].concat();
            return match self.named(names) {
                Ok(named) => {
                    self.found.push(named);
                    Ok(())
                }
                Err(error) => self.pass(error, matched),
            };
        };
        let (before, behind) = rest.split_at(index);
        let dir = [done, before.to_vec()].concat();
        let behind = behind.get(1..).unwrap_or_default();
        let listed = self.list(&dir, &glob);
        let matches = match listed {
            Ok(matches) => matches,
            Err(error) => return self.pass(error, matched),
        };
        for (name, node) in matches {
            let names = [dir.clone(), vec![OsString::from_vec(name.clone())]].concat();
            match node {
                Some(node) if behind.is_empty() => {
                    let path = self.shown(&names);
                    let (name, thing, format) = (Some(name), Thing::Node(node), self.asked.format);
                    self.found.push(Named { path, name, thing, names, format });
                }
                _ => self.expand(names, behind, true)?,
            }
        }
        Ok(())
    }

    /// What a pattern matched need not lead on.
    fn pass(&mut self, error: Error, matched: bool) -> Result<(), Error> {
        let spent = matches!(error, Error::Layer { source: LayerError::Spent(_), .. });
        if !matched || spent {
            return Err(error);
        }
        // Where nothing can be, nothing is wrong: no name matches there.
        if !matches!(error, Error::Missing { .. } | Error::NoContainer { opens: None, .. }) {
            self.passed.get_or_insert(error);
        }
        Ok(())
    }

    fn shown(&self, names: &[OsString]) -> String {
        names.iter().fold(self.host.clone(), |path, name| format!("{path}/{}", shown(name.as_bytes())))
    }

    /// The format of what some names lead to: what was asked for is that of the file on the host.
    fn format(&self, names: &[OsString]) -> Format {
        if names.is_empty() { self.asked.format } else { Format::Auto }
    }

    fn walk(&self, names: &[OsString], format: Format) -> Result<Walk, Error> {
        // Named formats but `raw` were applied to the first image already.
        let first = if self.asked.format == Format::Raw { Format::Auto } else { self.asked.format };
        self.root.on(names, if format == Format::Raw { format } else { first })
    }

    /// What is matched in the directory, or partition table, that some names lead to.
    fn list(&mut self, dir: &[OsString], glob: &Glob) -> Result<Vec<Match>, Error> {
        let walk = self.walk(dir, self.format(dir))?;
        let path = self.shown(dir);
        let failed = |source| Error::Layer { image: path.clone(), source };
        let (contents, at) = directory_of(&walk, self.format(dir)).map_err(failed)?;
        let image = &walk.last()?.image;
        let mut matches = Vec::new();
        // Each match has the path twice: in one piece to be shown, and by its names.
        let entry = ENTRY + (2 * path.len() + size_of_val(dir)) as u64;
        if let Some((fs, dir)) = at {
            let mut spent = Ok(());
            let listed = fs.list(dir, &mut |name, node| {
                if glob.matches(name) {
                    spent = self.held.grow(entry + 3 * name.len() as u64, NAMES);
                    let node = Node { image: image.clone(), fs: Arc::clone(&fs), node };
                    matches.push((name.to_vec(), Some(node)));
                }
                if spent.is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            listed.and(spent.map_err(LayerError::from)).map_err(failed)?;
        }
        let partitions = contents.table.iter().flat_map(|table| &table.partitions);
        let names = partitions.map(|partition| format!("p{}", partition.number).into_bytes());
        matches.extend(names.filter(|name| glob.matches(name)).map(|name| (name, None)));
        matches.sort_by(|one, other| one.0.cmp(&other.0));
        Ok(matches)
    }

    /// What names without patterns lead to.
    fn named(&self, names: Vec<OsString>) -> Result<Named, Error> {
        let path = self.shown(&names);
        let raw = self.asked.format == Format::Raw;
        let format = if raw || names.is_empty() { self.asked.format } else { Format::Auto };
        let Some((last, parent)) = names.split_last().filter(|(last, _)| is_name(last)) else {
            let thing = match names.is_empty() {
                true => Thing::Image(self.walk(&names, self.format(&names))?),
                false => end_of(self.walk(&names, self.format(&names))?)?,
            };
            let name = if names.is_empty() { self.name.clone() } else { None };
            return Ok(Named { path, name, thing, names, format });
        };
        let name = Some(last.as_bytes().to_vec());
        // `by-label/NAME` is one step: where nothing is at its first part, the whole can be a partition.
        if let Ok(walk) = self.walk(parent, self.format(parent)) {
            let failed = |source| Error::Layer { image: self.shown(parent), source };
            let (_, at) = directory_of(&walk, self.format(parent)).map_err(failed)?;
            if let Some((fs, dir)) = at
                && let Some(node) = find(fs.as_ref(), dir, last.as_bytes()).map_err(failed)?
            {
                let thing = Thing::Node(Node { image: walk.last()?.image.clone(), fs, node });
                return Ok(Named { path, name, thing, names, format });
            }
        }
        // A partition; or nothing, and the walk says what is there instead.
        let thing = end_of(self.walk(&names, self.format(&names))?)?;
        Ok(Named { path, name, thing, names, format })
    }

    /// What a symbolic link leads to, in its own image; everything else is as it was found.
    pub(super) fn followed(&self, named: Named) -> Result<Named, Failure> {
        let failed = |error| common::image_failure(self.verb, self.path, error);
        let Thing::Node(Node { fs, node, .. }) = &named.thing else { return Ok(named) };
        let kind = fs.stat(*node).map_err(|source| failed(layer(self.path, source)))?.kind;
        if kind != NodeKind::Symlink {
            return Ok(named);
        }
        let walk = self.walk(&named.names, Format::Raw).map_err(failed)?;
        let thing = end_of(walk).map_err(failed)?;
        Ok(Named { thing, ..named })
    }

    /// What a path leads to, as `becket attach` would take it: a file that is an image is one.
    pub(super) fn opened(&self, named: Named, format: Format) -> Result<Named, Failure> {
        let failed = |error| common::image_failure(self.verb, self.path, error);
        let Thing::Node(Node { fs, node, .. }) = &named.thing else { return Ok(named) };
        let kind = fs.stat(*node).map_err(|source| failed(layer(self.path, source)))?.kind;
        if !matches!(kind, NodeKind::Symlink | NodeKind::File) {
            return Ok(named);
        }
        let format = if format == Format::Raw { format } else { Format::Auto };
        let thing = self.walk(&named.names, format).and_then(end_of).map_err(failed)?;
        Ok(Named { thing, ..named })
    }

    /// A failure to do what was asked for to something that was found.
    pub(super) fn failure(&self, named: &Named, source: LayerError) -> Failure {
        let error = Error::Layer { image: named.path.clone(), source };
        common::image_failure(self.verb, Path::new(OsStr::new(&named.path)), error)
    }
}

/// What a walk ended at.
fn end_of(walk: Walk) -> Result<Thing, Error> {
    let End::Directory(node) = walk.end else { return Ok(Thing::Image(walk)) };
    let level = walk.last()?;
    match &level.contents {
        Some(Contents { fs: Some(fs), .. }) => {
            let (image, fs) = (level.image.clone(), Arc::clone(fs));
            Ok(Thing::Node(Node { image, fs, node }))
        }
        _ => Ok(Thing::Image(walk)),
    }
}

/// What the image holds that a walk ended in, and the directory that it ended at.
pub(super) fn directory_of(walk: &Walk, format: Format) -> Result<(Contents, Option<Directory>), LayerError> {
    let level = walk.last().map_err(|error| LayerError::Corrupt(error.to_string()))?;
    match (&level.contents, walk.end) {
        (Some(Contents { fs: Some(fs), .. }), End::Directory(dir)) => {
            Ok((Contents::default(), Some((Arc::clone(fs), dir))))
        }
        _ => {
            let format = if walk.levels.len() == 1 { format } else { Format::Auto };
            let contents = detect(&level.image, format)?;
            let root = contents.fs.as_ref().map(|fs| (Arc::clone(fs), fs.root()));
            Ok((contents, root))
        }
    }
}

/// The format of a whole image that a path names: `raw` is said of the last, every other of the first.
pub(super) fn format_of(walk: &Walk, named: &Named) -> Format {
    if walk.levels.len() == 1 || named.format == Format::Raw { named.format } else { Format::Auto }
}

/// Whether it names an entry of a directory.
fn is_name(name: &OsStr) -> bool {
    name != "." && name != ".."
}

//! `becket cp PATH... PLACE`: files and directories out of images, to the host or into a tar archive.
//! Never attaches anything, and never writes what was not asked for.

use super::{
    bytes,
    cp_host::{self, Host, Keep},
    cp_tar::Archive,
    inside::{self, Inside, Named, Node, Thing},
    sink::{self, Count, Meta, Refusal, Sink},
    tree::{self, Tree},
};
use crate::{args, failure::Failure, progress::Moving, ui::Ui};
use becket_image::{
    Budget, Identity, NodeKind,
    budget::Held,
    layer::{Attributes, Xattrs},
    shown,
};
use serde::Serialize;
use std::{
    fs::{self, File},
    io::{self, BufWriter},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

/// What all sources share.
struct Job<'a> {
    ui: &'a Ui,
    args: &'a args::Cp,
    devices: bool,
    count: Count,
    errors: Errors,
}

/// What was not copied.
#[derive(Default)]
struct Errors {
    any: bool,
    /// For `--json`, each with its memory.
    kept: Vec<(serde_json::Value, Option<Held>)>,
}

/// Where a copy goes in the place for the copies.
#[derive(Clone)]
enum Place {
    /// Under its own name.
    Own,
    /// Under this name.
    As(Vec<u8>),
}

pub(crate) fn run(ui: &Ui, args: &args::Cp) -> Result<u8, Failure> {
    let root = rustix::process::geteuid().is_root();
    let (count, errors) = (Count::default(), Errors::default());
    let devices = args.tar.is_some() || root && args.preserve;
    let mut job = Job { ui, args, devices, count, errors };
    let moving = Moving::begin();
    match &args.tar {
        Some(file) => job.archive(file)?,
        None => job.directory(root)?,
    }
    drop(moving);
    job.report()
}

impl Job<'_> {
    fn archive(&mut self, file: &Path) -> Result<(), Failure> {
        let to_stdout = file == "-";
        if to_stdout && self.ui.json {
            return Err(Failure::usage("--json and --tar - both write to standard output"));
        }
        let failed = |error: io::Error| Failure::io(format!("cannot write {}", file.display()), &error);
        let (out, new) = if to_stdout { (bytes::stdout()?, None) } else { self.new_file(file)? };
        let mut archive = Archive::new(BufWriter::with_capacity(bytes::CHUNK, out));
        let copied = self.all(&self.args.paths, &Place::Own, &mut archive);
        let finished = copied.and_then(|()| {
            let (out, sources) = archive.finish().map_err(failed)?;
            let out = out.into_inner().map_err(|error| failed(error.into_error()))?;
            let Some(new) = &new else { return Ok(()) };
            // A crash leaves the old file or the whole new one.
            out.sync_all().map_err(failed)?;
            if new != file {
                let old = fs::symlink_metadata(file).ok();
                let old = old.map(|old| Identity { dev: old.dev(), ino: old.ino() });
                if old.is_some_and(|old| sources.contains(&old)) {
                    let why = format!("cannot write {}: it is copied from", file.display());
                    return Err(Failure::new("in_use", why));
                }
                fs::rename(new, file).map_err(failed)?;
            }
            File::open(parent(file)).and_then(|dir| dir.sync_all()).map_err(failed)
        });
        match finished {
            Err(failure) => {
                // What is not whole goes; the error at hand is reported, whatever this one says.
                let _ = new.map(fs::remove_file);
                Err(failure)
            }
            finished => finished,
        }
    }

    /// What an archive is written to: with `--force` also a FIFO or character device. A new file comes with
    /// the path that it has meanwhile, beside the file that it will replace.
    fn new_file(&self, path: &Path) -> Result<(File, Option<PathBuf>), Failure> {
        let failed = |error: io::Error| {
            let failure = Failure::io(format!("cannot write {}", path.display()), &error);
            match error.kind() {
                io::ErrorKind::AlreadyExists => failure.hint("--force replaces it"),
                _ => failure,
            }
        };
        let mut options = fs::OpenOptions::new();
        options.write(true);
        let mut new = path.to_owned();
        if self.args.force
            && let Ok(old) = fs::symlink_metadata(path)
        {
            // A link to a device is written through, every other is replaced.
            let kind = fs::metadata(path).map_or(old.file_type(), |led_to| led_to.file_type());
            if kind.is_fifo() || kind.is_char_device() {
                return Ok((options.open(path).map_err(failed)?, None));
            }
            if !old.is_file() && !old.is_symlink() {
                let why = format!("cannot write {}: it is not a file", path.display());
                return Err(Failure::new("not_a_file", why));
            }
            new.as_mut_os_string().push(format!(".{}.new", std::process::id()));
        }
        let file = options.create_new(true).mode(0o666).open(&new).map_err(failed)?;
        Ok((file, Some(new)))
    }

    fn directory(&mut self, root: bool) -> Result<(), Failure> {
        let Some((target, sources)) = self.args.paths.split_last().filter(|(_, rest)| !rest.is_empty())
        else {
            return Err(Failure::usage("there is no place for the copies")
                .hint("name a directory or file last: becket cp PATH... PLACE"));
        };
        let (dir, place) = match fs::metadata(target) {
            Ok(meta) if meta.is_dir() => (target.clone(), Place::Own),
            found => {
                let contents = sources.iter().any(|source| is_contents(source));
                if sources.len() > 1 || found.is_ok() && contents {
                    let why = "it is not a directory, and there is more than one thing to copy";
                    return Err(Failure::new("not_a_directory", format!("{}: {why}", target.display())));
                }
                match (contents, target.file_name()) {
                    (true, _) => {
                        let failed = |error| Failure::io(format!("cannot make {}", target.display()), &error);
                        fs::create_dir(target).map_err(failed)?;
                        (target.clone(), Place::Own)
                    }
                    (false, Some(name)) => (parent(target).to_owned(), Place::As(name.as_bytes().to_vec())),
                    (false, None) => (target.clone(), Place::Own),
                }
            }
        };
        let opened = cp_host::open_root(&dir);
        let opened = opened.map_err(|error| {
            let missing = error.kind() == io::ErrorKind::NotFound;
            let failure = Failure::io(format!("cannot open {}", dir.display()), &error);
            if missing { failure.hint(format!("make it first: mkdir -p {}", dir.display())) } else { failure }
        })?;
        let umask = cp_host::take_umask();
        let keep = Keep { all: self.args.preserve, root, umask, force: self.args.force };
        let mut host = Host::new(opened, shown(dir.as_os_str().as_bytes()), keep);
        let copied = self.all(sources, &place, &mut host);
        // What was copied before a failure gets its attributes, too.
        host.finish(&mut |failure| note(self.ui, &mut self.errors, &failure, None));
        copied
    }

    /// Copies all sources; fails if nothing more can be copied.
    fn all(&mut self, sources: &[PathBuf], place: &Place, sink: &mut dyn Sink) -> Result<(), Failure> {
        for source in sources {
            let (inside, found) = match inside::find_all(source, &self.args.options, "copy") {
                Ok(found) => found,
                Err(failure) => {
                    note(self.ui, &mut self.errors, &failure, None);
                    continue;
                }
            };
            if found.len() > 1 && matches!(place, Place::As(_)) {
                let why = "its patterns match more than one name, and the place for them is not a directory";
                return Err(Failure::new(
                    "not_a_directory",
                    format!("cannot copy {}: {why}", source.display()),
                ));
            }
            sink.spare(inside.files());
            for named in found {
                self.one(&inside, named, source, place, sink)?;
            }
        }
        Ok(())
    }

    fn one(
        &mut self,
        inside: &Inside<'_>,
        named: Named,
        source: &Path,
        place: &Place,
        sink: &mut dyn Sink,
    ) -> Result<(), Failure> {
        let path = match (place, &named.name) {
            _ if is_contents(source) => Vec::new(),
            (Place::As(name), _) => name.clone(),
            (Place::Own, Some(name)) if tree::is_name(name) => name.clone(),
            (Place::Own, _) => Vec::new(),
        };
        let shown = named.path.clone();
        let node = match self.node(inside, &named) {
            Ok(Some(node)) => node,
            Ok(None) => return self.image(inside, &named, &path, sink),
            Err(failure) => {
                note(self.ui, &mut self.errors, &failure, None);
                return Ok(());
            }
        };
        let is_dir = node.fs.stat(node.node).map(|stat| stat.kind == NodeKind::Directory);
        let refused = match is_dir {
            Err(source) => Some(inside.failure(&named, source)),
            Ok(true) if !self.args.recursive => {
                let failure = Failure::new("not_a_file", format!("cannot copy {shown}: it is a directory"));
                Some(failure.hint("copy it with all that is in it: becket cp -r"))
            }
            Ok(false) if path.is_empty() => {
                Some(Failure::new("not_a_directory", format!("cannot copy {shown}: it is not a directory")))
            }
            Ok(_) => None,
        };
        if let Some(failure) = refused {
            note(self.ui, &mut self.errors, &failure, None);
            return Ok(());
        }
        let (ui, errors) = (self.ui, &mut self.errors);
        let mut report = |failure: Failure, held: Held| note(ui, errors, &failure, Some(held));
        Tree::new(node, shown, sink, &mut self.count, self.devices, &mut report)
            .map_err(|source| inside.failure(&named, source))?
            .copy(path)
    }

    /// The file that is to be copied; nothing where it is an image as a whole, whose bytes are.
    fn node(&self, inside: &Inside<'_>, named: &Named) -> Result<Option<Node>, Failure> {
        let walk = match &named.thing {
            Thing::Node(node) => return Ok(Some(node.clone())),
            Thing::Image(_) if !self.args.recursive => return Ok(None),
            Thing::Image(walk) => walk,
        };
        let (_, root) = inside::directory_of(walk, inside::format_of(walk, named))
            .map_err(|source| inside.failure(named, source))?;
        let Some((fs, node)) = root else {
            let why = "it holds no file system that becket reads";
            let failure = Failure::new("not_a_directory", format!("cannot copy {}: {why}", named.path));
            return Err(failure.hint(format!("see what is in it: becket ls {}", named.path)));
        };
        let level = walk.last().map_err(|error| Failure::new("io", error.to_string()))?;
        Ok(Some(Node { image: level.image.clone(), fs, node }))
    }

    /// Copies the bytes of an image as a whole.
    fn image(
        &mut self,
        inside: &Inside<'_>,
        named: &Named,
        path: &[u8],
        sink: &mut dyn Sink,
    ) -> Result<(), Failure> {
        let Thing::Image(walk) = &named.thing else { return Ok(()) };
        let level = walk.last().map_err(|error| Failure::new("io", error.to_string()))?;
        let image = level.image.clone().within(&Budget::unlimited());
        let attributes = Attributes::of(NodeKind::File, image.len());
        let held = Budget::unlimited().hold(0, "").map_err(io::Error::from)?;
        let meta = Meta { attributes, xattrs: Xattrs::new(), held };
        if path.is_empty() {
            let failure = inside.failure(named, becket_image::LayerError::Unsupported("no name".to_owned()));
            note(self.ui, &mut self.errors, &failure, None);
            return Ok(());
        }
        match sink::whole(sink, path, meta, image.clone()) {
            Ok(()) => {
                self.count.files += 1;
                self.count.bytes += image.len();
            }
            Err(Refusal::Entry(failure)) => note(self.ui, &mut self.errors, &failure, None),
            Err(Refusal::All(failure)) => return Err(failure),
        }
        Ok(())
    }

    fn report(self) -> Result<u8, Failure> {
        let status = u8::from(self.errors.any);
        let skipped = self.count.skipped;
        if skipped > 0 {
            self.ui.note(format!(
                "{skipped} devices and sockets were left out (devices are copied as root with --preserve)"
            ));
        }
        if self.ui.json {
            #[derive(Serialize)]
            struct Copied {
                copied: Count,
                errors: Vec<serde_json::Value>,
            }
            let errors = self.errors.kept.into_iter().map(|(error, _)| error).collect();
            self.ui.document(&Copied { copied: self.count, errors })?;
        }
        Ok(status)
    }
}

/// Reports one thing that was not copied.
fn note(ui: &Ui, errors: &mut Errors, failure: &Failure, held: Option<Held>) {
    ui.failure(failure);
    errors.any = true;
    if ui.json {
        errors.kept.push((failure.to_json(), held));
    }
}

/// The directory that a path lies in.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether a path names what is in a directory: `PATH/.`.
fn is_contents(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(b"/.")
}

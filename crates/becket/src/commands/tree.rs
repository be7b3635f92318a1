//! Goes through a directory of an image and hands each entry to whatever takes it: a directory of the host or
//! an archive. Never hands over a name that could lead out of the directory that it is in.

use super::inside::Node;
use crate::failure::Failure;
use becket_image::{
    Budget, Identity, Image, LayerError, NodeKind,
    budget::Held,
    layer::{Attributes, Xattrs},
    shown,
};
use std::{
    collections::{HashMap, HashSet},
    ops::ControlFlow,
};

/// Memory for an entry, beside its names, and what takes it.
const ENTRY: u64 = 160;
/// Memory for the number of a directory.
const SEEN: u64 = 32;
const NAMES: &str = "the files to copy";
const REPORTS: &str = "what cannot be copied";
/// The most directories inside each other, so that paths are ones that the host can open.
const DEPTH_MAX: usize = 1000;
/// The length from which on no path can be opened.
const PATH_MAX: usize = 4096;
/// Memory for the report of an entry that was not copied, beside its words.
const REPORT: u64 = 1024;

/// What a file is and has, beside its bytes.
#[derive(Debug)]
pub(super) struct Meta {
    pub(super) attributes: Attributes,
    pub(super) xattrs: Xattrs,
    /// The memory of the extended attributes, for as long as they are kept.
    pub(super) held: Held,
}

/// What is copied.
pub(super) enum Item<'a> {
    Directory,
    File(&'a Image),
    /// A symbolic link, with its target.
    Symlink(Vec<u8>),
    /// Another name of the file that has this path already.
    Hard(&'a [u8]),
    /// A device or FIFO, by the type in its mode.
    Special,
}

/// Why an entry was not copied.
#[derive(Debug)]
pub(super) enum Refusal {
    /// Only this one: the others go on.
    Entry(Failure),
    /// No other can be copied, either.
    All(Failure),
}

/// What takes the copies. Paths have no `.`, `..` or empty name, and are relative.
pub(super) trait Sink {
    /// Names files of the host that are copied from: no copy replaces them.
    fn spare(&mut self, files: &[Identity]);

    /// Takes one entry; directories come before what is in them.
    fn take(&mut self, path: &[u8], meta: Meta, item: Item<'_>) -> Result<(), Refusal>;
}

/// How much was copied.
#[derive(Debug, Default, serde::Serialize)]
pub(super) struct Count {
    pub(super) files: u64,
    pub(super) directories: u64,
    pub(super) links: u64,
    pub(super) others: u64,
    /// Lengths of the files.
    pub(super) bytes: u64,
    /// Devices and sockets that were left out.
    pub(super) skipped: u64,
}

/// A copy of one file or directory with all that is in it.
pub(super) struct Tree<'a> {
    pub(super) sink: &'a mut dyn Sink,
    pub(super) count: &'a mut Count,
    /// Whether devices are copied.
    pub(super) devices: bool,
    /// Reports an entry that could not be copied, with the memory of the report for as long as it is kept.
    pub(super) report: &'a mut dyn FnMut(Failure, Held),
    node: Node,
    held: Held,
    /// The path in the image, safe to show.
    shown: String,
    /// Where the first name of each file with several is. What an image says of the others may differ: they
    /// are files of their own then.
    firsts: HashMap<u64, (Attributes, Vec<u8>)>,
    directories: HashSet<u64>,
}

/// One entry.
struct Entry {
    /// Where its copy is.
    path: Vec<u8>,
    /// Where it is in the image, safe to show.
    shown: String,
    node: u64,
}

/// A directory, with those of its entries that were not copied yet.
struct Open {
    path: Vec<u8>,
    shown: String,
    left: std::vec::IntoIter<(Vec<u8>, u64)>,
    _held: Held,
}

impl Open {
    /// One of its entries, if a file can have its name.
    fn entry(&self, name: &[u8], node: u64) -> Result<Entry, Refusal> {
        let shown = format!("{}/{}", self.shown, shown(name));
        let why = match is_name(name) {
            false => Some("its name is none that a file can have; it is left out"),
            true if self.path.len() + 1 + name.len() >= PATH_MAX => {
                Some("its path is too long; it is left out")
            }
            true => None,
        };
        if let Some(why) = why {
            return Err(Refusal::Entry(Failure::new("unsupported", format!("cannot copy {shown}: {why}"))));
        }
        let path = if self.path.is_empty() { name.to_vec() } else { [&self.path[..], b"/", name].concat() };
        Ok(Entry { path, shown, node })
    }
}

impl<'a> Tree<'a> {
    pub(super) fn new(
        node: Node,
        shown: String,
        sink: &'a mut dyn Sink,
        count: &'a mut Count,
        devices: bool,
        report: &'a mut dyn FnMut(Failure, Held),
    ) -> Result<Self, LayerError> {
        let held = node.image.budget().hold(0, NAMES)?;
        let (firsts, directories) = (HashMap::new(), HashSet::new());
        Ok(Self { sink, count, devices, report, node, held, shown, firsts, directories })
    }

    /// Copies it to `path`; a directory with an empty path is there already.
    pub(super) fn copy(mut self, path: Vec<u8>) -> Result<(), Failure> {
        let (node, shown) = (self.node.node, self.shown.clone());
        let mut open: Vec<Open> = Vec::new();
        let mut next = Some(Entry { path, shown, node });
        // What is in a directory comes before what follows it: tar sets its time when it is left.
        loop {
            if let Some(entry) = next.take() {
                match self.try_entry(&entry, open.len()) {
                    Ok(true) => match self.list(&entry) {
                        Ok(dir) => open.push(dir),
                        Err(wrong) => self.refused(&entry.shown, wrong)?,
                    },
                    Ok(false) => {}
                    Err(wrong) => self.refused(&entry.shown, wrong)?,
                }
            }
            let Some(dir) = open.last_mut() else { return Ok(()) };
            match dir.left.next() {
                None => drop(open.pop()),
                Some((name, node)) => match dir.entry(&name, node) {
                    Ok(entry) => next = Some(entry),
                    Err(refusal) => self.refused(&dir.shown, refusal.into())?,
                },
            }
        }
    }

    /// What is in a directory.
    fn list(&mut self, dir: &Entry) -> Result<Open, Wrong> {
        let budget = self.node.image.budget();
        let mut held =
            budget.hold((dir.path.len() + dir.shown.len()) as u64, NAMES).map_err(LayerError::from)?;
        let mut entries = Vec::new();
        let mut spent = Ok(());
        self.node.fs.list(dir.node, &mut |name, node| {
            spent = held.grow(ENTRY + name.len() as u64, NAMES);
            if spent.is_err() {
                return ControlFlow::Break(());
            }
            entries.push((name.to_vec(), node));
            ControlFlow::Continue(())
        })?;
        spent.map_err(LayerError::from)?;
        let (path, shown) = (dir.path.clone(), dir.shown.clone());
        Ok(Open { path, shown, left: entries.into_iter(), _held: held })
    }

    /// Copies one entry; whether it is a directory, whose entries come next.
    fn try_entry(&mut self, entry: &Entry, depth: usize) -> Result<bool, Wrong> {
        let Node { fs, image, .. } = &self.node;
        let attributes = fs.attributes(entry.node)?;
        let budget = image.budget().clone();
        let first = attributes.identity.and_then(|identity| self.firsts.get(&identity));
        if let Some((_, first)) = first.filter(|(first, _)| *first == attributes) {
            let held = budget.hold(0, NAMES).map_err(LayerError::from)?;
            let meta = Meta { attributes, xattrs: Xattrs::new(), held };
            budget.outside(|| self.sink.take(&entry.path, meta, Item::Hard(first)))?;
            self.count.links += 1;
            return Ok(false);
        }
        let xattrs = fs.xattrs(entry.node)?;
        let bytes: u64 = xattrs.iter().map(|(name, value)| ENTRY + (name.len() + value.len()) as u64).sum();
        let held = budget.hold(bytes, NAMES).map_err(LayerError::from)?;
        let mut meta = Meta { attributes, xattrs, held };
        match attributes.kind {
            NodeKind::Directory => {
                if depth > DEPTH_MAX {
                    return Err(LayerError::Limit(format!("more than {DEPTH_MAX} directories")).into());
                }
                self.held.grow(SEEN, NAMES).map_err(LayerError::from)?;
                // Its attributes are set last, by its path.
                meta.held.grow(ENTRY + entry.path.len() as u64, NAMES).map_err(LayerError::from)?;
                if !self.directories.insert(entry.node) {
                    return Err(LayerError::Corrupt("the directory has two places".to_owned()).into());
                }
                if !entry.path.is_empty() {
                    budget.outside(|| self.sink.take(&entry.path, meta, Item::Directory))?;
                    self.count.directories += 1;
                }
                return Ok(true);
            }
            NodeKind::File => {
                // Its bytes are no parsing: they are not counted.
                let contents = image.compose(fs.lay_out(entry.node)?)?.within(&Budget::unlimited());
                budget.outside(|| self.sink.take(&entry.path, meta, Item::File(&contents)))?;
                self.count.files += 1;
                self.count.bytes += contents.len();
            }
            NodeKind::Symlink => {
                let target = fs.read_link(entry.node)?;
                if target.is_empty() || target.contains(&0) {
                    return Err(
                        LayerError::Corrupt("an impossible target of a symbolic link".to_owned()).into()
                    );
                }
                budget.outside(|| self.sink.take(&entry.path, meta, Item::Symlink(target)))?;
                self.count.links += 1;
            }
            NodeKind::Other => {
                let device = match attributes.mode.map_or(0, |mode| mode & 0xf000) {
                    0x1000 => false,
                    0x2000 | 0x6000 => true,
                    _ => {
                        self.count.skipped += 1;
                        return Ok(false);
                    }
                };
                if device && !self.devices {
                    self.count.skipped += 1;
                    return Ok(false);
                }
                budget.outside(|| self.sink.take(&entry.path, meta, Item::Special))?;
                self.count.others += 1;
            }
        }
        if let Some(identity) = attributes.identity {
            self.held.grow(ENTRY + entry.path.len() as u64, NAMES).map_err(LayerError::from)?;
            self.firsts.insert(identity, (attributes, entry.path.clone()));
        }
        Ok(false)
    }

    /// Reports what is wrong with one entry; fails if no other can be copied.
    fn refused(&mut self, shown: &str, wrong: Wrong) -> Result<(), Failure> {
        let of_layer = |source| {
            let error = becket_image::Error::Layer { image: shown.to_owned(), source };
            super::common::image_failure("copy", shown.as_ref(), error)
        };
        let failure = match wrong {
            Wrong::Sink(Refusal::Entry(failure)) => failure,
            Wrong::Sink(Refusal::All(failure)) => return Err(failure),
            Wrong::Layer(source @ LayerError::Spent(_)) => return Err(of_layer(source)),
            Wrong::Layer(source) => of_layer(source),
        };
        let budget = self.node.image.budget();
        let held = budget
            .steps(1, REPORTS)
            .and_then(|()| budget.hold(REPORT + failure.message.len() as u64, REPORTS));
        (self.report)(failure, held.map_err(|spent| of_layer(spent.into()))?);
        Ok(())
    }
}

/// What can be wrong with an entry.
enum Wrong {
    Layer(LayerError),
    Sink(Refusal),
}

impl From<LayerError> for Wrong {
    fn from(error: LayerError) -> Self {
        Self::Layer(error)
    }
}

impl From<Refusal> for Wrong {
    fn from(refusal: Refusal) -> Self {
        Self::Sink(refusal)
    }
}

/// Whether a file on the host can have this name, in the directory that it is written to.
pub(super) fn is_name(name: &[u8]) -> bool {
    !name.is_empty() && name != b"." && name != b".." && !name.iter().any(|byte| matches!(byte, 0 | b'/'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use becket_image::budget::Limits;
    use becket_image::{
        FileSystem, Layout,
        layer::{About, Entry as Listed, Stat},
    };
    use std::sync::Arc;
    use std::time::Duration;

    /// So many directories in the root, each with a large extended attribute; this is before their names.
    #[derive(Debug)]
    struct Wide(u64, &'static str);

    impl FileSystem for Wide {
        fn about(&self) -> &About {
            unreachable!()
        }
        fn root(&self) -> u64 {
            0
        }
        fn stat(&self, _: u64) -> Result<Stat, LayerError> {
            Ok(Stat { kind: NodeKind::Directory, size: 0 })
        }
        fn xattrs(&self, _: u64) -> Result<Xattrs, LayerError> {
            Ok(vec![(b"user.large".to_vec(), vec![0; 64 << 10])])
        }
        fn list(&self, dir: u64, entry: &mut Listed<'_>) -> Result<(), LayerError> {
            let count = if dir == 0 { self.0 } else { 0 };
            let _ = (1..=count).try_for_each(|node: u64| entry(format!("{}{node}", self.1).as_bytes(), node));
            Ok(())
        }
        fn read_link(&self, _: u64) -> Result<Vec<u8>, LayerError> {
            unreachable!()
        }
        fn lay_out(&self, _: u64) -> Result<Layout, LayerError> {
            unreachable!()
        }
        fn writable(&self, _: u64) -> Result<(), String> {
            unreachable!()
        }
    }

    /// Keeps what is known of directories, as the host does until their end.
    #[derive(Default)]
    struct Keeping(Vec<Meta>);

    impl Sink for Keeping {
        fn spare(&mut self, _: &[Identity]) {}

        fn take(&mut self, _: &[u8], meta: Meta, _: Item<'_>) -> Result<(), Refusal> {
            self.0.push(meta);
            Ok(())
        }
    }

    fn copy(
        fs: Arc<dyn FileSystem>,
        sink: &mut dyn Sink,
        report: &mut dyn FnMut(Failure, Held),
    ) -> Result<(), Failure> {
        // An emulated machine may need longer than the usual limit.
        let limits = Limits { time: Duration::from_secs(600), ..Limits::default() };
        let image = Image::raw(Arc::new(Vec::new()), 0, 512).within(&Budget::new(limits));
        let node = Node { image, node: fs.root(), fs };
        let mut count = Count::default();
        Tree::new(node, "x.img".to_owned(), sink, &mut count, true, report).unwrap().copy(Vec::new())
    }

    #[test]
    fn what_is_kept_of_directories_has_a_bound() {
        let mut sink = Keeping::default();
        let ended = copy(Arc::new(Wide(10_000, "")), &mut sink, &mut |_, _| {});
        assert!(ended.is_err_and(|failure| failure.message.contains("MiB of memory")));
        assert!(sink.0.len() < 4096, "{} directories", sink.0.len());
    }

    #[test]
    fn reports_that_are_kept_have_a_bound() {
        let (mut sink, mut kept) = (Keeping::default(), Vec::new());
        let fs = Arc::new(Wide(400_000, "no/name"));
        let ended = copy(fs, &mut sink, &mut |failure, held| kept.push((failure, held)));
        assert!(ended.is_err_and(|failure| failure.message.contains("MiB of memory")));
        assert!(kept.len() < 300_000, "{} reports", kept.len());
    }

    #[test]
    fn a_path_is_one_that_can_be_opened() {
        let dir = |len| Open {
            path: vec![b'a'; len],
            shown: String::new(),
            left: Vec::new().into_iter(),
            _held: Budget::default().hold(0, NAMES).unwrap(),
        };
        assert!(dir(PATH_MAX - 3).entry(b"b", 1).is_ok());
        assert!(dir(PATH_MAX - 2).entry(b"b", 1).is_err());
    }

    /// Devices that say they are one file, two of them with the same number.
    #[derive(Debug)]
    struct Alike;

    impl FileSystem for Alike {
        fn about(&self) -> &About {
            unreachable!()
        }
        fn root(&self) -> u64 {
            0
        }
        fn stat(&self, _: u64) -> Result<Stat, LayerError> {
            unreachable!()
        }
        fn attributes(&self, node: u64) -> Result<Attributes, LayerError> {
            let kind = if node == 0 { NodeKind::Directory } else { NodeKind::Other };
            let device = (node > 0).then_some((1, u32::try_from(node / 2).unwrap_or(0)));
            Ok(Attributes { mode: Some(0x2000), identity: Some(7), device, ..Attributes::of(kind, 0) })
        }
        fn list(&self, _: u64, entry: &mut Listed<'_>) -> Result<(), LayerError> {
            let _ = (1..4).try_for_each(|node: u64| entry(node.to_string().as_bytes(), node));
            Ok(())
        }
        fn read_link(&self, _: u64) -> Result<Vec<u8>, LayerError> {
            unreachable!()
        }
        fn lay_out(&self, _: u64) -> Result<Layout, LayerError> {
            unreachable!()
        }
        fn writable(&self, _: u64) -> Result<(), String> {
            unreachable!()
        }
    }

    /// Keeps which entry is another name of which.
    #[derive(Default)]
    struct Names(Vec<(Vec<u8>, Option<Vec<u8>>)>);

    impl Sink for Names {
        fn spare(&mut self, _: &[Identity]) {}

        fn take(&mut self, path: &[u8], _: Meta, item: Item<'_>) -> Result<(), Refusal> {
            let first = if let Item::Hard(first) = item { Some(first.to_vec()) } else { None };
            self.0.push((path.to_vec(), first));
            Ok(())
        }
    }

    #[test]
    fn names_of_one_file_agree_on_all_of_it() {
        let mut names = Names::default();
        copy(Arc::new(Alike), &mut names, &mut |_, _| {}).unwrap();
        let name = |name: &[u8]| name.to_vec();
        assert_eq!(names.0, [(name(b"1"), None), (name(b"2"), None), (name(b"3"), Some(name(b"2")))]);
    }
}

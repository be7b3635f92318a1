//! Goes through a directory of an image and hands each entry to whatever takes it: a directory of the host or
//! an archive. Never hands over a name that could lead out of the directory that it is in.

use super::{
    ahead::{Ahead, Contents},
    cp_new::New,
    inside::Node,
    sink::{Count, File, Item, Meta, Refusal, Sink},
};
use crate::failure::Failure;
use becket_image::{
    Budget, LayerError, NodeKind,
    budget::Held,
    layer::{Attributes, Xattrs},
    shown,
};
use rustix::process::Resource;
use std::{
    collections::{HashMap, HashSet, VecDeque},
    ops::ControlFlow,
    sync::Arc,
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
/// The most entries that are found before the first of them is handed over, and their weight.
const FOUND_MAX: usize = 256;
const WEIGHT_MAX: u64 = 64 << 20;
/// Files that are open beside those that are copied: images, and directories on the way.
const OPEN: u64 = 48;
/// What a piece of a file weighs.
const PIECE: u64 = 4 << 10;
/// Memory for the report of an entry that was not copied, beside its words.
const REPORT: u64 = 1024;

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
    /// What the sink wants.
    in_order: bool,
    /// The directories on the way, the innermost last.
    open: Vec<Open>,
    /// What was found and not handed over: the bytes of its files are read meanwhile.
    found: VecDeque<Complete>,
    /// The most that may wait.
    most: usize,
    /// What that takes: see [`What::weight`].
    weight: u64,
    ahead: Ahead,
}

/// One entry.
struct Entry {
    /// Where its copy is.
    path: Vec<u8>,
    /// Where it is in the image, safe to show.
    shown: String,
    node: u64,
}

/// An entry with all that is known of it.
struct Complete {
    entry: Entry,
    meta: Meta,
    what: What,
}

/// What it is.
enum What {
    Directory,
    /// What was begun of it, and what it will hold.
    File(Contents, Option<New>),
    Symlink(Vec<u8>),
    /// Another name of a file, by its identity.
    Again(u64),
    Special,
}

impl What {
    /// Its bytes, and about what its pieces take.
    fn weight(&self) -> u64 {
        let Self::File(contents, _) = self else { return 0 };
        let pieces = contents.image.map().extents().len() as u64;
        // No more than is of use, so that the sum has no bound to care for.
        contents.image.len().min(WEIGHT_MAX) + pieces * PIECE
    }
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
        let (open, found, ahead) = (Vec::new(), VecDeque::new(), Ahead::default());
        Ok(Self {
            in_order: sink.in_order(),
            sink,
            count,
            devices,
            report,
            node,
            held,
            shown,
            firsts,
            directories,
            open,
            found,
            most: most_found(),
            weight: 0,
            ahead,
        })
    }

    /// Copies it to `path`; a directory with an empty path is there already.
    pub(super) fn copy(mut self, path: Vec<u8>) -> Result<(), Failure> {
        let (node, shown) = (self.node.node, self.shown.clone());
        let mut next = Some(Entry { path, shown, node });
        // What is in a directory comes before what follows it: tar sets its time when it is left.
        loop {
            if let Some(entry) = next.take() {
                self.enter(entry)?;
            }
            if self.found.len() > self.most || self.weight >= WEIGHT_MAX {
                self.hand_over(self.most / 2)?;
            }
            let Some(dir) = self.open.last_mut() else { break };
            match dir.left.next() {
                None => drop(self.open.pop()),
                Some((name, node)) => match dir.entry(&name, node) {
                    Ok(entry) => next = Some(entry),
                    Err(refusal) => {
                        let shown = dir.shown.clone();
                        self.refused(&shown, refusal.into())?;
                    }
                },
            }
        }
        self.hand_over(0)
    }

    /// Finds out what an entry is; if it is a directory, its entries come next.
    fn enter(&mut self, entry: Entry) -> Result<(), Failure> {
        let (meta, what) = match self.look_at(&entry) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(()),
            Err(wrong) => return self.refused(&entry.shown, wrong),
        };
        let waits = match &what {
            What::Directory if entry.path.is_empty() => true,
            What::File(..) | What::Again(_) => true,
            _ => self.in_order,
        };
        let shown = entry.shown.clone();
        let listed = if matches!(what, What::Directory) { Some(self.list(&entry)) } else { None };
        if waits {
            self.weight += what.weight();
            self.found.push_back(Complete { entry, meta, what });
        } else if !self.take(entry, meta, what)? {
            return Ok(());
        }
        match listed {
            Some(Ok(dir)) => self.open.push(dir),
            Some(Err(wrong)) => self.refused(&shown, wrong)?,
            None => {}
        }
        Ok(())
    }

    /// Hands over what was found first, until so many are left and they are not too heavy.
    fn hand_over(&mut self, left: usize) -> Result<(), Failure> {
        let budget = self.node.image.budget().clone();
        budget.outside(|| {
            while self.found.len() > left || self.found.len() > 1 && self.weight >= WEIGHT_MAX {
                self.hand_over_one()?;
            }
            Ok(())
        })
    }

    fn hand_over_one(&mut self) -> Result<(), Failure> {
        let Some(Complete { entry, meta, what }) = self.found.pop_front() else { return Ok(()) };
        self.weight -= what.weight();
        let again = matches!(what, What::Again(identity) if !self.firsts.contains_key(&identity));
        if !again {
            return self.take(entry, meta, what).map(drop);
        }
        // The first was refused: this one is. What was planned comes in order, so it is read by itself.
        let ahead = std::mem::take(&mut self.ahead);
        let taken = match self.look_at(&entry) {
            Ok(Some((meta, what))) => self.take(entry, meta, what).map(drop),
            Ok(None) => Ok(()),
            Err(wrong) => self.refused(&entry.shown, wrong),
        };
        self.ahead = ahead;
        taken
    }

    /// Hands over one entry; whether it was taken.
    fn take(&mut self, entry: Entry, meta: Meta, what: What) -> Result<bool, Failure> {
        let identity = meta.attributes.identity;
        let Err(refusal) = self.give(&entry.path, meta, what) else {
            self.node.image.budget().earn();
            return Ok(true);
        };
        // Its other names are copied as files of their own.
        if let Some(identity) = identity
            && self.firsts.get(&identity).is_some_and(|(_, first)| *first == entry.path)
        {
            self.firsts.remove(&identity);
        }
        self.refused(&entry.shown, refusal.into())?;
        Ok(false)
    }

    fn give(&mut self, path: &[u8], meta: Meta, what: What) -> Result<(), Refusal> {
        match what {
            What::Directory if path.is_empty() => {}
            What::Directory => {
                self.sink.take(path, meta, Item::Directory)?;
                self.count.directories += 1;
            }
            What::File(contents, new) => {
                let file = File { contents: &contents, ahead: &mut self.ahead, new };
                self.sink.file(path, meta, file)?;
                self.count.files += 1;
                self.count.bytes += contents.image.len();
            }
            What::Symlink(target) => {
                self.sink.take(path, meta, Item::Symlink(target))?;
                self.count.links += 1;
            }
            What::Again(identity) => {
                let first = self.firsts.get(&identity).map_or(&[][..], |(_, first)| first);
                self.sink.take(path, meta, Item::Hard(first))?;
                self.count.links += 1;
            }
            What::Special => {
                self.sink.take(path, meta, Item::Special)?;
                self.count.others += 1;
            }
        }
        Ok(())
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

    /// Finds out what an entry is; nothing if it is left out.
    fn look_at(&mut self, entry: &Entry) -> Result<Option<(Meta, What)>, Wrong> {
        let Node { fs, image, .. } = &self.node;
        let attributes = fs.attributes(entry.node)?;
        let budget = image.budget().clone();
        let known = attributes
            .identity
            .filter(|identity| self.firsts.get(identity).is_some_and(|(first, _)| *first == attributes));
        if let Some(identity) = known {
            let held = budget.hold(0, NAMES).map_err(LayerError::from)?;
            return Ok(Some((Meta { attributes, xattrs: Xattrs::new(), held }, What::Again(identity))));
        }
        let xattrs = fs.xattrs(entry.node)?;
        let bytes: u64 = xattrs.iter().map(|(name, value)| ENTRY + (name.len() + value.len()) as u64).sum();
        let held = budget.hold(bytes, NAMES).map_err(LayerError::from)?;
        let mut meta = Meta { attributes, xattrs, held };
        let what = match attributes.kind {
            NodeKind::Directory => {
                if self.open.len() > DEPTH_MAX {
                    return Err(LayerError::Limit(format!("more than {DEPTH_MAX} directories")).into());
                }
                self.held.grow(SEEN, NAMES).map_err(LayerError::from)?;
                // Its attributes are set last, by its path.
                meta.held.grow(ENTRY + entry.path.len() as u64, NAMES).map_err(LayerError::from)?;
                if !self.directories.insert(entry.node) {
                    return Err(LayerError::Corrupt("the directory has two places".to_owned()).into());
                }
                return Ok(Some((meta, What::Directory)));
            }
            NodeKind::File => {
                // Its bytes are not parsed: they are not counted.
                let contents = image.compose(fs.lay_out(entry.node)?)?.within(&Budget::unlimited());
                let new = self.sink.begin(&entry.path, &attributes)?;
                What::File(self.ahead.plan(Arc::new(contents), new.as_ref().and_then(New::file)), new)
            }
            NodeKind::Symlink => {
                let target = fs.read_link(entry.node)?;
                if target.is_empty() || target.contains(&0) {
                    let why = "an impossible target of a symbolic link";
                    return Err(LayerError::Corrupt(why.to_owned()).into());
                }
                What::Symlink(target)
            }
            NodeKind::Other => match attributes.mode.map_or(0, |mode| mode & 0xf000) {
                0x1000 => What::Special,
                0x2000 | 0x6000 if self.devices => What::Special,
                _ => {
                    self.count.skipped += 1;
                    return Ok(None);
                }
            },
        };
        if let Some(identity) = attributes.identity {
            self.held.grow(ENTRY + entry.path.len() as u64, NAMES).map_err(LayerError::from)?;
            self.firsts.insert(identity, (attributes, entry.path.clone()));
        }
        Ok(Some((meta, what)))
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

/// How many entries may wait: each may have a file and a directory open, and other things are, too.
fn most_found() -> usize {
    let open = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(open.saturating_sub(OPEN) / 2).unwrap_or(usize::MAX).min(FOUND_MAX)
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
        FileSystem, Identity, Image, Layout,
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
        fn file(&mut self, _: &[u8], _: Meta, _: File<'_>) -> Result<(), Refusal> {
            unreachable!()
        }
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

    /// Keeps which entry is another name of which, and refuses one.
    #[derive(Default)]
    struct Names(Vec<(Vec<u8>, Option<Vec<u8>>)>, &'static [u8]);

    impl Sink for Names {
        fn spare(&mut self, _: &[Identity]) {}
        fn file(&mut self, _: &[u8], _: Meta, _: File<'_>) -> Result<(), Refusal> {
            unreachable!()
        }
        fn take(&mut self, path: &[u8], _: Meta, item: Item<'_>) -> Result<(), Refusal> {
            if path == self.1 {
                return Err(Refusal::Entry(Failure::new("io", "refused")));
            }
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
        let (mut names, mut refused) = (Names(Vec::new(), b"2"), 0);
        copy(Arc::new(Alike), &mut names, &mut |_, _| refused += 1).unwrap();
        assert_eq!(names.0, [(name(b"1"), None), (name(b"3"), None)], "there is no first one");
        assert_eq!(refused, 1);
    }
}

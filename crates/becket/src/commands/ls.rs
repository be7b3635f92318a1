//! `becket ls PATH`: what is in a directory inside an image, or in a partition table.
//! Never attaches or changes anything.

use super::{
    common,
    inside::{self, Named, Node, Thing},
};
use crate::{
    args,
    failure::Failure,
    ui::{Ui, table},
    units::{format_date, format_size},
};
use becket_image::{
    FileSystem, Level, NodeKind,
    budget::Held,
    layer::{Attributes, Contents, LayerError, Stat, detect},
    shown,
};
use serde::{Serialize, Serializer};
use std::{collections::HashSet, ops::ControlFlow};

/// Memory for an entry, beside its words.
const ENTRY: u64 = 192;
/// What takes the memory, for people.
const NAMES: &str = "the list of a directory";
/// The kind of an entry that cannot be read.
const UNREADABLE: &str = "?";
/// The length from which on no path is followed.
const PATH_MAX: usize = 4096;

/// One line of the list.
#[derive(Debug, Clone, Serialize)]
struct Line {
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    name: String,
    /// A link's target, a partition's label, why an entry cannot be read.
    more: Option<String>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    long: Option<Long>,
}

/// What `--long` adds, where the layer has it.
#[derive(Debug, Clone, Serialize)]
struct Long {
    mode: Option<String>,
    links: Option<u32>,
    uid: Option<u32>,
    gid: Option<u32>,
    modified: Option<String>,
    major: Option<u32>,
    minor: Option<u32>,
}

/// What is listed together: a directory or an image, with its path.
struct Section {
    path: String,
    lines: Vec<Line>,
}

/// How directories are listed.
struct Lister {
    long: bool,
    recursive: bool,
    held: Held,
    sections: Vec<Section>,
    /// Directories that were listed: none is looked at in itself.
    seen: HashSet<u64>,
}

pub(crate) fn run(ui: &Ui, args: &args::Ls) -> Result<u8, Failure> {
    let path = &args.look.path;
    let (inside, found) = inside::find_all(path, &args.look.options, "list")?;
    let first = found.first();
    let budget = first.map(|named| match &named.thing {
        Thing::Image(walk) => walk.last().map(|level| level.image.budget().clone()),
        Thing::Node(node) => Ok(node.image.budget().clone()),
    });
    let budget = budget.transpose().map_err(|error| common::image_failure("list", path, error))?;
    let held = budget.unwrap_or_default().hold(0, NAMES);
    let held = held.map_err(|spent| {
        let error = becket_image::Error::Layer { image: path.display().to_string(), source: spent.into() };
        common::image_failure("list", path, error)
    })?;
    let mut lister = Lister {
        long: args.long,
        recursive: args.recursive,
        held,
        sections: vec![Section { path: String::new(), lines: Vec::new() }],
        seen: HashSet::new(),
    };
    let several = found.len() > 1;
    for named in found {
        // One path is followed like every other path; what a pattern matched is shown as it is.
        let node = match &named.thing {
            Thing::Node(node) if args.long => Some(node.clone()),
            _ => None,
        };
        let named = if several { named } else { inside.opened(named, args.look.options.format)? };
        lister.add(&named, node, several).map_err(|source| inside.failure(&named, source))?;
    }
    let sections = lister.sections;
    let unreadable = |section: &Section| section.lines.iter().any(|line| line.kind == UNREADABLE);
    let status = u8::from(sections.iter().any(unreadable));
    print(ui, args.long, sections)?;
    Ok(status)
}

#[derive(Serialize)]
struct Listed {
    entries: Entries,
}

/// All lines, and whether their names have the path before them. Paths are made as they are written: all of
/// them together take more memory than the image's budget has.
struct Entries(Vec<Section>, bool);

impl Serialize for Entries {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Entries(sections, headed) = self;
        serializer.collect_seq(sections.iter().flat_map(|Section { path, lines }| {
            lines.iter().map(move |line| match *headed && !path.is_empty() {
                true => Line { name: format!("{path}/{}", line.name), ..line.clone() },
                false => line.clone(),
            })
        }))
    }
}

fn print(ui: &Ui, long: bool, mut sections: Vec<Section>) -> Result<(), Failure> {
    // The first one has what is in no directory that was found.
    let plain = sections.iter().any(|section| section.path.is_empty() && !section.lines.is_empty());
    let headed = sections.len() > 2 || plain && sections.len() > 1;
    sections.retain(|section| !headed || !section.path.is_empty() || !section.lines.is_empty());
    for section in &mut sections {
        section.lines.sort_by(|one, other| one.name.cmp(&other.name));
    }
    if ui.json {
        return ui.document(&Listed { entries: Entries(sections, headed) });
    }
    let text = sections.iter().enumerate().flat_map(|(index, section)| {
        let gap = (headed && index > 0).then(String::new);
        let head = (headed && !section.path.is_empty()).then(|| format!("{}:", section.path));
        let lines = if long { long_lines(&section.lines) } else { short_lines(&section.lines) };
        gap.into_iter().chain(head).chain(lines)
    });
    ui.lines(text)
}

fn short_lines(lines: &[Line]) -> Vec<String> {
    let size = |line: &Line| match line.kind {
        "dir" | UNREADABLE => "-".to_owned(),
        _ => format_size(line.size),
    };
    let kinds = lines.iter().map(|line| line.kind.len()).max().unwrap_or(0);
    let sizes = lines.iter().map(|line| size(line).len()).max().unwrap_or(0);
    let short = |line: &Line| {
        let kind = line.kind;
        format!("{kind:kinds$}  {:>sizes$}  {}", size(line), named(line))
    };
    lines.iter().map(short).collect()
}

/// A name, with what is to be said of it.
fn named(line: &Line) -> String {
    let between = if line.kind == "link" { " -> " } else { "  " };
    line.more.as_ref().map_or_else(|| line.name.clone(), |more| format!("{}{between}{more}", line.name))
}

fn long_lines(lines: &[Line]) -> Vec<String> {
    let row = |line: &Line| {
        let long = line.long.as_ref();
        let number = |number: Option<u32>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
        let size = match long.and_then(|long| long.major.zip(long.minor)) {
            Some((major, minor)) => format!("{major}, {minor}"),
            None if line.kind == UNREADABLE => "-".to_owned(),
            None => line.size.to_string(),
        };
        vec![
            long.and_then(|long| long.mode.clone()).unwrap_or_else(|| line.kind.to_owned()),
            number(long.and_then(|long| long.links)),
            number(long.and_then(|long| long.uid)),
            number(long.and_then(|long| long.gid)),
            size,
            long.and_then(|long| long.modified.clone()).unwrap_or_else(|| "-".to_owned()),
            named(line),
        ]
    };
    let rows: Vec<_> = lines.iter().map(row).collect();
    table(&rows, &[1, 4]).lines().map(str::to_owned).collect()
}

impl Lister {
    /// Lists what a path names, which is this file if it holds nothing that could be listed; `entry` says
    /// that a file is shown by its path.
    fn add(&mut self, named: &Named, file: Option<Node>, entry: bool) -> Result<(), LayerError> {
        let path = named.path.clone();
        match &named.thing {
            Thing::Image(walk) => {
                let level = walk.last().map_err(|error| LayerError::Corrupt(error.to_string()))?;
                let (contents, dir) = inside::directory_of(walk, inside::format_of(walk, named))?;
                if let Some(Node { fs, node, .. }) = file.filter(|_| !contents.is_container()) {
                    let lines = vec![line(fs.as_ref(), path.clone(), node, self.long)?];
                    self.sections.push(Section { path, lines });
                    return Ok(());
                }
                match dir {
                    Some((fs, dir)) => self.tree(fs.as_ref(), dir, path)?,
                    None => self.sections.push(Section { path, lines: Vec::new() }),
                }
                let first = if self.recursive { 1 } else { self.sections.len() - 1 };
                let lines = root(level, &contents, &mut self.held)?;
                if let Some(section) = self.sections.get_mut(first) {
                    section.lines.extend(lines);
                }
            }
            Thing::Node(Node { fs, node, .. }) => match fs.stat(*node)?.kind {
                NodeKind::Directory => self.tree(fs.as_ref(), *node, path)?,
                _ => {
                    let name = if entry { path } else { shown(named.name.as_deref().unwrap_or_default()) };
                    let line = line(fs.as_ref(), name, *node, self.long)?;
                    if let Some(section) = self.sections.first_mut() {
                        section.lines.push(line);
                    }
                }
            },
        }
        Ok(())
    }

    /// Lists a directory, and those below it where that is asked for.
    fn tree(&mut self, fs: &dyn FileSystem, dir: u64, path: String) -> Result<(), LayerError> {
        self.seen.clear();
        self.seen.insert(dir);
        let longest = path.len() + PATH_MAX;
        let mut pending = vec![(path, dir)];
        while let Some((path, dir)) = pending.pop() {
            if path.len() >= longest {
                let error = LayerError::Limit(format!("a path of {} bytes", path.len()));
                self.sections.push(Section { path, lines: vec![unreadable(".".to_owned(), &error)] });
                continue;
            }
            let entries = match directory(fs, dir, &mut self.held, self.long) {
                // One that cannot be read hides no other; the first is what was asked for.
                Err(error) if self.seen.len() > 1 && !matches!(error, LayerError::Spent(_)) => {
                    let line = unreadable(".".to_owned(), &error);
                    self.sections.push(Section { path, lines: vec![line] });
                    continue;
                }
                entries => entries?,
            };
            if self.recursive {
                let mut below: Vec<_> = entries.iter().filter(|(_, line)| line.kind == "dir").collect();
                below.sort_by(|one, other| other.1.name.cmp(&one.1.name));
                for (node, line) in below {
                    self.held.grow(ENTRY + path.len() as u64, NAMES)?;
                    if self.seen.insert(*node) {
                        pending.push((format!("{path}/{}", line.name), *node));
                    }
                }
            }
            let lines = entries.into_iter().map(|(_, line)| line).collect();
            self.sections.push(Section { path, lines });
        }
        Ok(())
    }
}

/// What is in an image beside the files of its file system: its partitions, or nothing that is known.
fn root(level: &Level, contents: &Contents, held: &mut Held) -> Result<Vec<Line>, LayerError> {
    let mut lines = Vec::new();
    let partitions = contents.table.iter().flat_map(|table| &table.partitions);
    for partition in partitions {
        let inner = level.image.part(partition).ok();
        // What is in a partition is worth a word only where it can be read.
        let about = inner.and_then(|inner| detect(&inner, becket_image::Format::Auto).ok());
        let about = about.map(|contents| contents.about()).unwrap_or_default();
        let labels = [Some(about.format.to_owned()), about.label, partition.label.clone()];
        let words: Vec<String> = labels
            .into_iter()
            .flatten()
            .filter(|word| !word.is_empty())
            .map(|word| shown(word.as_bytes()))
            .collect();
        let words_of = words.iter().map(|word| word.len() as u64).sum::<u64>();
        held.grow(ENTRY + words_of, NAMES)?;
        lines.push(Line {
            long: None,
            kind: "part",
            size: partition.len,
            name: format!("p{}", partition.number),
            more: Some(words.join("  ")).filter(|words| !words.is_empty()),
        });
    }
    if !contents.is_container() {
        let (size, name) = (level.image.len(), level.path.clone());
        lines.push(Line { kind: "file", size, name, more: None, long: None });
    }
    Ok(lines)
}

/// The entries of a directory, with their numbers. One that cannot be read hides no other.
fn directory(
    fs: &dyn FileSystem,
    dir: u64,
    held: &mut Held,
    long: bool,
) -> Result<Vec<(u64, Line)>, LayerError> {
    let mut entries = Vec::new();
    let mut spent = Ok(());
    fs.list(dir, &mut |name, node| {
        spent = held.grow(ENTRY + name.len() as u64, NAMES);
        if spent.is_err() {
            return ControlFlow::Break(());
        }
        entries.push((name.to_vec(), node));
        ControlFlow::Continue(())
    })?;
    spent?;
    let mut lines = Vec::with_capacity(entries.len());
    for (name, node) in entries {
        let line = match line(fs, shown(&name), node, long) {
            Err(error @ LayerError::Spent(_)) => return Err(error),
            Err(error) => unreadable(shown(&name), &error),
            Ok(line) => line,
        };
        let words = line.name.len() + line.more.as_ref().map_or(0, String::len);
        held.grow(words as u64, NAMES)?;
        lines.push((node, line));
    }
    Ok(lines)
}

fn line(fs: &dyn FileSystem, name: String, node: u64, long: bool) -> Result<Line, LayerError> {
    let attributes = if long { Some(fs.attributes(node)?) } else { None };
    let stat = match &attributes {
        Some(Attributes { kind, size, .. }) => Stat { kind: *kind, size: *size },
        None => fs.stat(node)?,
    };
    let (kind, more) = match stat.kind {
        NodeKind::File => ("file", None),
        NodeKind::Directory => ("dir", None),
        NodeKind::Symlink => ("link", Some(shown(&fs.read_link(node)?))),
        NodeKind::Other => ("other", None),
    };
    Ok(Line { kind, size: stat.size, name, more, long: attributes.map(Long::of) })
}

fn unreadable(name: String, error: &LayerError) -> Line {
    Line { kind: UNREADABLE, size: 0, name, more: Some(error.to_string()), long: None }
}

impl Long {
    fn of(attributes: Attributes) -> Self {
        let Attributes { mode, owner, links, modified, device, .. } = attributes;
        Self {
            mode: mode.map(mode_text),
            links,
            uid: owner.map(|(uid, _)| uid),
            gid: owner.map(|(_, gid)| gid),
            modified: modified.map(|time| format_date(time.seconds)),
            major: device.map(|(major, _)| major),
            minor: device.map(|(_, minor)| minor),
        }
    }
}

/// Mode bits, as ls(1) shows them.
fn mode_text(mode: u16) -> String {
    let kind = match mode & 0xf000 {
        0x1000 => 'p',
        0x2000 => 'c',
        0x4000 => 'd',
        0x6000 => 'b',
        0xa000 => 'l',
        0xc000 => 's',
        _ => '-',
    };
    let triple = |shift: u32, special: u16, with: char, without: char| {
        let bits = mode >> shift;
        let execute = match (mode & special != 0, bits & 1 != 0) {
            (true, true) => with,
            (true, false) => without,
            (false, true) => 'x',
            (false, false) => '-',
        };
        [if bits & 4 == 0 { '-' } else { 'r' }, if bits & 2 == 0 { '-' } else { 'w' }, execute]
    };
    let all = [triple(6, 0o4000, 's', 'S'), triple(3, 0o2000, 's', 'S'), triple(0, 0o1000, 't', 'T')];
    std::iter::once(kind).chain(all.into_iter().flatten()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use becket_image::Budget;
    use becket_image::layer::{About, Entry};

    /// A directory with so many empty files, of which number 1 cannot be read.
    #[derive(Debug)]
    struct Flat(u64);

    impl FileSystem for Flat {
        fn about(&self) -> &About {
            unreachable!()
        }
        fn root(&self) -> u64 {
            0
        }
        fn stat(&self, node: u64) -> Result<Stat, LayerError> {
            match node {
                1 => Err(LayerError::Corrupt("no inode".to_owned())),
                _ => Ok(Stat { kind: NodeKind::File, size: 0 }),
            }
        }
        fn list(&self, _: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
            let _ = (0..self.0).try_for_each(|node| entry(node.to_string().as_bytes(), node));
            Ok(())
        }
        fn read_link(&self, _: u64) -> Result<Vec<u8>, LayerError> {
            unreachable!()
        }
        fn lay_out(&self, _: u64) -> Result<becket_image::Layout, LayerError> {
            unreachable!()
        }
        fn writable(&self, _: u64) -> Result<(), String> {
            unreachable!()
        }
    }

    #[test]
    fn an_entry_that_cannot_be_read_hides_no_other() {
        let mut held = Budget::default().hold(0, NAMES).unwrap();
        let lines = directory(&Flat(3), 0, &mut held, false).unwrap();
        let reported: Vec<_> = lines.iter().map(|(_, line)| (line.kind, line.name.as_str())).collect();
        assert_eq!(reported, [("file", "0"), (UNREADABLE, "1"), ("file", "2")]);
        assert!(lines[1].1.more.as_ref().is_some_and(|more| more.contains("no inode")));
    }

    #[test]
    fn modes_are_written_as_ls_does() {
        for (mode, text) in [
            (0o100_644, "-rw-r--r--"),
            (0o104_755, "-rwsr-xr-x"),
            (0o041_777, "drwxrwxrwt"),
            (0o2_640, "-rw-r-S---"),
        ] {
            assert_eq!(mode_text(mode), text);
        }
    }

    /// A directory in each directory, without end.
    #[derive(Debug)]
    struct Deep;

    impl FileSystem for Deep {
        fn about(&self) -> &About {
            unreachable!()
        }
        fn root(&self) -> u64 {
            0
        }
        fn stat(&self, _: u64) -> Result<Stat, LayerError> {
            Ok(Stat { kind: NodeKind::Directory, size: 0 })
        }
        fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
            let _ = entry(b"sub", dir + 1);
            Ok(())
        }
        fn read_link(&self, _: u64) -> Result<Vec<u8>, LayerError> {
            unreachable!()
        }
        fn lay_out(&self, _: u64) -> Result<becket_image::Layout, LayerError> {
            unreachable!()
        }
        fn writable(&self, _: u64) -> Result<(), String> {
            unreachable!()
        }
    }

    #[test]
    fn paths_have_an_end() {
        let held = Budget::default().hold(0, NAMES).unwrap();
        let (sections, seen) = (Vec::new(), HashSet::new());
        let mut lister = Lister { long: false, recursive: true, held, sections, seen };
        lister.tree(&Deep, 0, "x.img".to_owned()).unwrap();
        let last = lister.sections.last().unwrap();
        assert_eq!((lister.sections.len(), last.lines[0].kind), (PATH_MAX / 4 + 1, UNREADABLE));
        let value = serde_json::to_value(Entries(lister.sections, true)).unwrap();
        assert_eq!(
            (&value[0]["name"], &value[2]["name"]),
            (&"x.img/sub".into(), &"x.img/sub/sub/sub".into())
        );
    }

    #[test]
    fn a_list_has_an_end() {
        let mut held = Budget::default().hold(0, NAMES).unwrap();
        let endless = directory(&Flat(u64::MAX), 0, &mut held, true);
        assert!(matches!(endless, Err(LayerError::Spent(_))));
    }
}

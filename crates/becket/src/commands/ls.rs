//! `becket ls PATH`: what is in a directory inside an image, or in a partition table.
//! Never attaches or changes anything.

use super::common;
use crate::{args, failure::Failure, ui::Ui, units::format_size};
use becket_image::{
    End, FileSystem, Level, NodeKind,
    budget::Held,
    layer::{Contents, LayerError, detect},
    shown,
};
use serde::Serialize;
use std::ops::ControlFlow;

/// Memory for an entry, beside its words.
const ENTRY: u64 = 192;
/// What takes the memory, for people.
const NAMES: &str = "the list of a directory";
/// The kind of an entry that cannot be read.
const UNREADABLE: &str = "?";

/// One line of the list.
#[derive(Serialize)]
struct Line {
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    name: String,
    /// A link's target, a partition's label, why an entry cannot be read.
    more: Option<String>,
}

pub(crate) fn run(ui: &Ui, args: &args::Ls) -> Result<u8, Failure> {
    let walk = common::look(&args.look, "list")?;
    let level = walk.last().map_err(|error| common::image_failure("list", &args.look.path, error))?;
    let failed = |error: LayerError| {
        let error = becket_image::Error::Layer { image: level.path.clone(), source: error };
        common::image_failure("list", &args.look.path, error)
    };
    let mut held = level.image.budget().hold(0, NAMES).map_err(|spent| failed(spent.into()))?;
    let mut lines = match (&level.contents, walk.end) {
        (Some(Contents { fs: Some(fs), .. }), End::Directory(dir)) => {
            directory(fs.as_ref(), dir, &mut held).map_err(failed)?
        }
        _ => {
            let contents = detect(&level.image, args.look.format_of(walk.levels.len())).map_err(failed)?;
            root(level, &contents, &mut held).map_err(failed)?
        }
    };
    let status = u8::from(lines.iter().any(|line| line.kind == UNREADABLE));
    lines.sort_by(|one, other| one.name.cmp(&other.name));
    if ui.json {
        #[derive(Serialize)]
        struct Listed {
            entries: Vec<Line>,
        }
        ui.document(&Listed { entries: lines })?;
        return Ok(status);
    }
    let size = |line: &Line| match line.kind {
        "dir" | UNREADABLE => "-".to_owned(),
        _ => format_size(line.size),
    };
    let kinds = lines.iter().map(|line| line.kind.len()).max().unwrap_or(0);
    let sizes = lines.iter().map(|line| size(line).len()).max().unwrap_or(0);
    ui.lines(lines.iter().map(|line| {
        let Line { kind, name, more, .. } = line;
        let between = if *kind == "link" { " -> " } else { "  " };
        let (between, more) = more.as_ref().map_or(("", ""), |more| (between, more));
        format!("{kind:kinds$}  {:>sizes$}  {name}{between}{more}", size(line))
    }))?;
    Ok(status)
}

/// What is in an image as a whole: the files of its file system, and its partitions.
fn root(level: &Level, contents: &Contents, held: &mut Held) -> Result<Vec<Line>, LayerError> {
    let mut lines = match &contents.fs {
        Some(fs) => directory(fs.as_ref(), fs.root(), held)?,
        None => Vec::new(),
    };
    let partitions = contents.table.iter().flat_map(|table| &table.partitions);
    for partition in partitions {
        let inner = level.image.slice(partition.start, partition.len).ok();
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
        lines.push(Line {
            kind: "part",
            size: partition.len,
            name: format!("p{}", partition.number),
            more: Some(words.join("  ")).filter(|words| !words.is_empty()),
        });
    }
    if !contents.is_container() {
        lines.push(Line { kind: "file", size: level.image.len(), name: level.path.clone(), more: None });
    }
    Ok(lines)
}

/// The entries of a directory. One that cannot be read hides no other.
fn directory(fs: &dyn FileSystem, dir: u64, held: &mut Held) -> Result<Vec<Line>, LayerError> {
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
    let line = |name: &[u8], node: u64| {
        let stat = fs.stat(node)?;
        let (kind, more) = match stat.kind {
            NodeKind::File => ("file", None),
            NodeKind::Directory => ("dir", None),
            NodeKind::Symlink => ("link", Some(shown(&fs.read_link(node)?))),
            NodeKind::Other => ("other", None),
        };
        Ok(Line { kind, size: stat.size, name: shown(name), more })
    };
    let unreadable = |name: &[u8], error: LayerError| Line {
        kind: UNREADABLE,
        size: 0,
        name: shown(name),
        more: Some(error.to_string()),
    };
    let mut lines = Vec::with_capacity(entries.len());
    for (name, node) in entries {
        let line = match line(&name, node) {
            Err(error @ LayerError::Spent(_)) => return Err(error),
            Err(error) => unreadable(&name, error),
            Ok(line) => line,
        };
        let words = line.name.len() + line.more.as_ref().map_or(0, String::len);
        held.grow(words as u64, NAMES)?;
        lines.push(line);
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use becket_image::Budget;
    use becket_image::layer::{About, Entry, Stat};

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
        let lines = directory(&Flat(3), 0, &mut held).unwrap();
        let reported: Vec<_> = lines.iter().map(|line| (line.kind, line.name.as_str())).collect();
        assert_eq!(reported, [("file", "0"), (UNREADABLE, "1"), ("file", "2")]);
        assert!(lines[1].more.as_ref().is_some_and(|more| more.contains("no inode")));
    }

    #[test]
    fn a_list_has_an_end() {
        let mut held = Budget::default().hold(0, NAMES).unwrap();
        let endless = directory(&Flat(u64::MAX), 0, &mut held);
        assert!(matches!(endless, Err(LayerError::Spent(_))));
    }
}

//! `becket ls PATH`: what is in a directory inside an image, or in a partition table.
//! Never attaches or changes anything.

use super::common;
use crate::{
    args,
    failure::Failure,
    ui::{Ui, table},
    units::format_size,
};
use becket_image::{
    End, FileSystem, Level, NodeKind,
    layer::{Contents, LayerError, detect},
    shown,
};
use serde_json::{Value, json};
use std::ops::ControlFlow;

/// Entries of a directory that are listed; that there are more is told.
const ENTRIES_MAX: usize = 1_000_000;
/// The kind of an entry that cannot be read.
const UNREADABLE: &str = "?";

/// One line of the list.
struct Line {
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
    let mut lines = match (&level.contents, walk.end) {
        (Some(Contents { fs: Some(fs), .. }), End::Directory(dir)) => {
            directory(fs.as_ref(), dir).map_err(failed)?
        }
        _ => {
            let contents = detect(&level.image, args.look.format_of(walk.levels.len())).map_err(failed)?;
            root(level, &contents).map_err(failed)?
        }
    };
    let status = u8::from(lines.iter().any(|line| line.kind == UNREADABLE));
    if lines.len() > ENTRIES_MAX {
        lines.truncate(ENTRIES_MAX);
        ui.note(format!("only the first {ENTRIES_MAX} entries are listed"));
    }
    lines.sort_by(|one, other| one.name.cmp(&other.name));
    if ui.json {
        let entries: Vec<Value> = lines
            .iter()
            .map(|line| json!({ "type": line.kind, "size": line.size, "name": line.name, "more": line.more }))
            .collect();
        ui.value(&json!({ "entries": entries }))?;
        return Ok(status);
    }
    let rows: Vec<Vec<String>> = lines
        .into_iter()
        .map(|Line { kind, size, name, more }| {
            let name = match (kind, more) {
                ("link", Some(target)) => format!("{name} -> {target}"),
                (_, Some(more)) => format!("{name}  {more}"),
                (_, None) => name,
            };
            let size = if matches!(kind, "dir" | UNREADABLE) { "-".to_owned() } else { format_size(size) };
            vec![kind.to_owned(), size, name]
        })
        .collect();
    ui.line(table(&rows, &[1]).trim_end())?;
    Ok(status)
}

/// What is in an image as a whole: the files of its file system, and its partitions.
fn root(level: &Level, contents: &Contents) -> Result<Vec<Line>, LayerError> {
    let mut lines = match &contents.fs {
        Some(fs) => directory(fs.as_ref(), fs.root())?,
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

/// The entries of a directory: one more than [`ENTRIES_MAX`] where there are more. One that cannot be read hides no other.
fn directory(fs: &dyn FileSystem, dir: u64) -> Result<Vec<Line>, LayerError> {
    let mut entries = Vec::new();
    fs.list(dir, &mut |name, node| {
        entries.push((name.to_vec(), node));
        if entries.len() > ENTRIES_MAX { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
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
    Ok(entries
        .into_iter()
        .map(|(name, node)| line(&name, node).unwrap_or_else(|error| unreadable(&name, error)))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let lines = directory(&Flat(3), 0).unwrap();
        let told: Vec<_> = lines.iter().map(|line| (line.kind, line.name.as_str())).collect();
        assert_eq!(told, [("file", "0"), (UNREADABLE, "1"), ("file", "2")]);
        assert!(lines[1].more.as_ref().is_some_and(|more| more.contains("no inode")));
    }

    #[test]
    fn a_list_has_an_end() {
        assert_eq!(directory(&Flat(u64::MAX), 0).unwrap().len(), ENTRIES_MAX + 1);
    }
}

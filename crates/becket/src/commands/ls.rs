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

/// One line of the list.
struct Line {
    kind: &'static str,
    size: u64,
    name: String,
    /// A link's target, a partition's label.
    more: Option<String>,
}

pub(crate) fn run(ui: &Ui, args: &args::Ls) -> Result<u8, Failure> {
    let walk = common::look(&args.look.path, args.look.format, "list")?;
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
    lines.sort_by(|one, other| one.name.cmp(&other.name));
    if ui.json {
        let entries: Vec<Value> = lines
            .iter()
            .map(|line| json!({ "type": line.kind, "size": line.size, "name": line.name, "more": line.more }))
            .collect();
        ui.value(&json!({ "entries": entries }))?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = lines
        .into_iter()
        .map(|Line { kind, size, name, more }| {
            let name = match (kind, more) {
                ("link", Some(target)) => format!("{name} -> {target}"),
                (_, Some(more)) => format!("{name}  {more}"),
                (_, None) => name,
            };
            let size = if kind == "dir" { "-".to_owned() } else { format_size(size) };
            vec![kind.to_owned(), size, name]
        })
        .collect();
    ui.line(table(&rows, &[1]).trim_end())?;
    Ok(0)
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

fn directory(fs: &dyn FileSystem, dir: u64) -> Result<Vec<Line>, LayerError> {
    let mut entries = Vec::new();
    fs.list(dir, &mut |name, node| {
        entries.push((name.to_vec(), node));
        ControlFlow::Continue(())
    })?;
    let line = |(name, node): (Vec<u8>, u64)| {
        let stat = fs.stat(node)?;
        let (kind, more) = match stat.kind {
            NodeKind::File => ("file", None),
            NodeKind::Directory => ("dir", None),
            NodeKind::Symlink => ("link", Some(shown(&fs.read_link(node)?))),
            NodeKind::Other => ("other", None),
        };
        Ok(Line { kind, size: stat.size, name: shown(&name), more })
    };
    entries.into_iter().map(line).collect()
}

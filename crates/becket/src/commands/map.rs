//! `becket map IMAGE`: where its bytes are, as a table, JSON or a picture.
//! Never attaches or changes anything.

use super::{common, fetched, map_svg};
use crate::{
    args,
    failure::Failure,
    ui::{Ui, table},
    units::format_size,
};
use becket_image::{Encoded, End, Extent, Image, Level, Map, Place, Walk, encoded::Block, layer::detect};
use serde::{Serialize, Serializer, ser::SerializeMap as _};
use serde_json::{Value, json};

/// Extents that a table for people has; more are counted.
const ROWS_MAX: usize = 1000;

pub(crate) fn run(ui: &Ui, args: &args::Map) -> Result<u8, Failure> {
    let path = &args.look.path;
    let local = fetched::local(path, &args.look.options, "map")?;
    let walk = common::look_at(&local, &args.look.options, args.look.options.format)
        .map_err(|error| common::image_failure("map", path, error))?;
    // The bytes of such a file are not where its path leads.
    let decoded = local.decoded.first().map(|file| file.codec);
    let level = walk.last().map_err(|error| common::image_failure("map", path, error))?;
    if walk.end != End::Image {
        let error = becket_image::Error::NotAnImage { path: path.clone(), what: "a directory" };
        return Err(common::image_failure("map", path, error).hint("see what is in it: becket ls PATH"));
    }
    if let Some(file) = &args.svg {
        let bars: Vec<map_svg::Bar<'_>> =
            formats(&walk, &args.look).map(|(level, format)| map_svg::Bar { level, format }).collect();
        std::fs::write(file, map_svg::draw(&bars))
            .map_err(|error| Failure::io(format!("cannot write {}", file.display()), &error))?;
    }
    if ui.json {
        let levels: Vec<Value> =
            formats(&walk, &args.look).map(|(level, format)| summary(level, format)).collect();
        let image = &level.image;
        let layers: Vec<_> =
            image.encoded().map(|layer| LayerEntry { image, layer, decoded, each: args.blocks }).collect();
        ui.document(&Mapped {
            image: &level.path,
            size: image.len(),
            levels,
            extents: Extents { image, map: image.map(), decoded },
            layers,
        })?;
        return Ok(0);
    }
    if args.svg.is_some() {
        return Ok(0);
    }
    let extents = level.image.map().extents();
    let head = ["START", "LENGTH", "KIND", "IN", "AT"].map(str::to_owned).to_vec();
    let rows: Vec<Vec<String>> = std::iter::once(head)
        .chain(extents.iter().take(ROWS_MAX).map(|extent| row(&walk.levels, &level.image, decoded, extent)))
        .collect();
    ui.line(table(&rows, &[0, 1, 4]).trim_end())?;
    if extents.len() > ROWS_MAX {
        ui.note(format!("{} more; --json has them all", extents.len() - ROWS_MAX));
    }
    if args.blocks {
        print_blocks(ui, &walk.levels, &level.image)?;
    }
    Ok(0)
}

/// A table of the blocks of all layers.
fn print_blocks(ui: &Ui, levels: &[Level], image: &Image) -> Result<(), Failure> {
    let all: usize = image.encoded().map(|layer| layer.blocks().len()).sum();
    if all == 0 {
        ui.note("no part of it is compressed: there are no blocks");
        return Ok(());
    }
    let head = ["LAYER", "START", "LENGTH", "CODEC", "IN", "AT", "STORED"].map(str::to_owned).to_vec();
    let blocks = image.encoded().enumerate().flat_map(|(index, layer)| {
        layer.blocks().iter().map(move |block| block_row(levels, index, layer, block))
    });
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(blocks.take(ROWS_MAX)).collect();
    ui.line("")?;
    ui.line(table(&rows, &[0, 1, 2, 5, 6]).trim_end())?;
    if all > ROWS_MAX {
        ui.note(format!("{} more blocks; --blocks --json has them all", all - ROWS_MAX));
    }
    Ok(())
}

fn block_row(levels: &[Level], index: usize, layer: &Encoded, block: &Block) -> Vec<String> {
    let (place, at) = layer
        .below()
        .lookup(block.input)
        .map_or_else(|| ("-".to_owned(), "-".to_owned()), |extent| place(levels, &extent.place));
    let numbers = [index.to_string(), block.start.to_string(), block.len.to_string()];
    let stored = [layer.codec().to_string(), place, at, block.input_len.to_string()];
    numbers.into_iter().chain(stored).collect()
}

/// What kind of bytes an extent has, and for encoded ones how, like those of a file that was `decoded` as a
/// whole.
fn kind(image: &Image, decoded: Option<&str>, extent: &Extent) -> String {
    match extent.place {
        Place::Data { source: 0, .. } => decoded.unwrap_or("data").to_owned(),
        Place::Data { .. } => "data".to_owned(),
        Place::Zero => "zero".to_owned(),
        Place::Encoded { layer, .. } => {
            let layer = usize::try_from(layer).ok().and_then(|layer| image.encoded().nth(layer));
            layer.map_or_else(|| "encoded".to_owned(), |layer| layer.codec().to_string())
        }
    }
}

/// Where bytes lie, in words, and their first one's place there.
fn place(levels: &[Level], place: &Place) -> (String, String) {
    let host = levels.first().map(|level| level.path.clone()).unwrap_or_default();
    match place {
        Place::Data { source: 0, offset } => (host, offset.to_string()),
        Place::Data { source, offset } => (format!("backing file {source}"), offset.to_string()),
        Place::Zero => ("-".to_owned(), "-".to_owned()),
        Place::Encoded { layer, offset } => (format!("layer {layer}"), offset.to_string()),
    }
}

fn row(levels: &[Level], image: &Image, decoded: Option<&str>, extent: &Extent) -> Vec<String> {
    let (place, at) = place(levels, &extent.place);
    vec![extent.start.to_string(), format_size(extent.len), kind(image, decoded, extent), place, at]
}

/// A map as JSON. There may be a million extents and as many blocks: none of them is a value in memory.
#[derive(Serialize)]
struct Mapped<'a> {
    image: &'a str,
    size: u64,
    levels: Vec<Value>,
    extents: Extents<'a>,
    layers: Vec<LayerEntry<'a>>,
}

struct Extents<'a> {
    image: &'a Image,
    map: &'a Map,
    /// The codec of a file that was decoded as a whole.
    decoded: Option<&'a str>,
}

impl Serialize for Extents<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer
            .collect_seq(self.map.extents().iter().map(|extent| entry(self.image, self.decoded, extent)))
    }
}

/// A layer of compressed blocks: the method, the sizes before and after, where the blocks are stored, and
/// optionally each block.
struct LayerEntry<'a> {
    image: &'a Image,
    layer: &'a Encoded,
    decoded: Option<&'a str>,
    each: bool,
}

impl Serialize for LayerEntry<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let LayerEntry { image, layer, decoded, each } = *self;
        let blocks = layer.blocks();
        let mut entry = serializer.serialize_map(None)?;
        entry.serialize_entry("codec", &layer.codec().to_string())?;
        entry.serialize_entry("blocks", &blocks.len())?;
        entry.serialize_entry("len", &blocks.iter().map(|block| u64::from(block.len)).sum::<u64>())?;
        entry
            .serialize_entry("stored", &blocks.iter().map(|block| u64::from(block.input_len)).sum::<u64>())?;
        entry.serialize_entry("below", &Extents { image, map: layer.below(), decoded })?;
        if each {
            entry.serialize_entry("table", &Blocks(blocks))?;
        }
        entry.end()
    }
}

struct Blocks<'a>(&'a [Block]);

impl Serialize for Blocks<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(block_entry))
    }
}

/// `start` and `len` are the layer's bytes (an extent's `offset`), `input` and `input_len` those of the layer
/// below; the block yields `skip` bytes before the first of them.
fn block_entry(block: &Block) -> Value {
    json!({
        "start": block.start, "len": block.len, "input": block.input, "input_len": block.input_len, "skip": block.skip,
    })
}

fn entry(image: &Image, decoded: Option<&str>, extent: &Extent) -> Value {
    let mut entry = json!({ "start": extent.start, "len": extent.len, "kind": kind(image, decoded, extent) });
    match extent.place {
        Place::Data { source, offset } => {
            entry["file"] = json!(source);
            entry["offset"] = json!(offset);
        }
        Place::Zero => {}
        Place::Encoded { layer, offset } => {
            entry["layer"] = json!(layer);
            entry["offset"] = json!(offset);
        }
    }
    entry
}

fn summary(level: &Level, format: &str) -> Value {
    json!({
        "path": level.path,
        "size": level.image.len(),
        "format": format,
        "extents": level.image.map().extents().len(),
    })
}

/// The images on the way, and what each is. A format that was asked for is that of the first.
fn formats<'a>(walk: &'a Walk, look: &args::Look) -> impl Iterator<Item = (&'a Level, &'static str)> {
    walk.levels.iter().enumerate().map(|(index, level)| (level, format(level, look.format_of(index + 1))))
}

/// What an image on the way is; the last one has not been looked at yet.
fn format(level: &Level, format: becket_image::Format) -> &'static str {
    match &level.contents {
        Some(contents) => contents.about().format,
        // What is damaged can be mapped all the same.
        None => detect(&level.image, format).map_or("damaged", |contents| contents.about().format),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_is_that_of_the_first_image_only() {
        // An MBR with one partition, of zeroes.
        let mut bytes = vec![0; 1 << 20];
        bytes[450] = 0x83;
        bytes[454..462].copy_from_slice(&[8, 0, 0, 0, 0, 1, 0, 0]);
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.img");
        std::fs::write(&disk, bytes).unwrap();
        let look = args::Look {
            path: disk.join("p1"),
            options: args::LookOptions {
                format: becket_image::Format::Disk,
                backing_dirs: Vec::new(),
                store: args::OriginOptions::default(),
                limits: args::LimitOptions::default(),
            },
        };
        let local = fetched::local(&look.path, &look.options, "map").unwrap();
        let walk = common::look_at(&local, &look.options, look.options.format).unwrap();
        let reported: Vec<_> = formats(&walk, &look).map(|(_, format)| format).collect();
        assert_eq!(reported.len(), 2);
        assert_ne!(reported[0], "damaged");
        assert_eq!(reported[1], "raw");
    }
}

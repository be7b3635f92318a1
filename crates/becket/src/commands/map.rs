//! `becket map IMAGE`: where its bytes are, as a table, JSON or a picture.
//! Never attaches or changes anything.

use super::{common, map_svg};
use crate::{
    args,
    failure::Failure,
    ui::{Ui, table},
    units::format_size,
};
use becket_image::{End, Extent, Image, Level, Place, Walk, layer::detect};
use serde_json::{Value, json};

/// Extents that a table for people has; more are counted.
const ROWS_MAX: usize = 1000;

pub(crate) fn run(ui: &Ui, args: &args::Map) -> Result<u8, Failure> {
    let path = &args.look.path;
    let walk = common::look(&args.look, "map")?;
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
        ui.value(&json!({
            "image": level.path,
            "size": level.image.len(),
            "levels": levels,
            "extents": level.image.map().extents().iter().map(|extent| entry(&level.image, extent)).collect::<Vec<_>>(),
        }))?;
        return Ok(0);
    }
    if args.svg.is_some() {
        return Ok(0);
    }
    let extents = level.image.map().extents();
    let head = ["START", "LENGTH", "KIND", "IN", "AT"].map(str::to_owned).to_vec();
    let rows: Vec<Vec<String>> = std::iter::once(head)
        .chain(extents.iter().take(ROWS_MAX).map(|extent| row(&walk.levels, &level.image, extent)))
        .collect();
    ui.line(table(&rows, &[0, 1, 4]).trim_end())?;
    if extents.len() > ROWS_MAX {
        ui.note(format!("{} more; --json has them all", extents.len() - ROWS_MAX));
    }
    Ok(0)
}

/// What kind of bytes an extent has, and for encoded ones how.
fn kind(image: &Image, extent: &Extent) -> String {
    match extent.place {
        Place::Data { .. } => "data".to_owned(),
        Place::Zero => "zero".to_owned(),
        Place::Encoded { layer, .. } => {
            let layer = usize::try_from(layer).ok().and_then(|layer| image.encoded().nth(layer));
            layer.map_or_else(|| "encoded".to_owned(), |layer| layer.codec().to_string())
        }
    }
}

fn row(levels: &[Level], image: &Image, extent: &Extent) -> Vec<String> {
    let host = levels.first().map(|level| level.path.clone()).unwrap_or_default();
    let (place, at) = match extent.place {
        Place::Data { file: 0, offset } => (host, offset.to_string()),
        Place::Data { file, offset } => (format!("backing file {file}"), offset.to_string()),
        Place::Zero => ("-".to_owned(), "-".to_owned()),
        Place::Encoded { layer, offset } => (format!("layer {layer}"), offset.to_string()),
    };
    vec![extent.start.to_string(), format_size(extent.len), kind(image, extent), place, at]
}

fn entry(image: &Image, extent: &Extent) -> Value {
    let mut entry = json!({ "start": extent.start, "len": extent.len, "kind": kind(image, extent) });
    match extent.place {
        Place::Data { file, offset } => {
            entry["file"] = json!(file);
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
            format: becket_image::Format::Disk,
            backing_dirs: Vec::new(),
        };
        let walk = becket_image::look(&look.path, look.format, &[]).unwrap();
        let told: Vec<_> = formats(&walk, &look).map(|(_, format)| format).collect();
        assert_eq!(told.len(), 2);
        assert_ne!(told[0], "damaged");
        assert_eq!(told[1], "raw");
    }
}
